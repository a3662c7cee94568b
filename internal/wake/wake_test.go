package wake

import (
	"testing"
	"testing/synctest"
)

// Wake-ups become one until it is taken; one that comes afterwards is not lost.
func TestSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, seen := New(), 0
		go func() {
			for range s {
				seen++
			}
		}()
		for want := 1; want <= 3; want++ {
			s.Set()
			synctest.Wait()
			if seen != want {
				t.Errorf("woken %d times, want %d", seen, want)
			}
		}
		close(s)
	})
	s := New()
	s.Set()
	s.Set()
	<-s
	select {
	case <-s:
		t.Error("two wake-ups did not become one")
	default:
	}
	Signal(nil).Set()
}
