package background

import (
	"runtime"
	"sync"
	"testing"
)

// niceHere is the nice value of the calling thread.
func niceHere(t *testing.T) int {
	t.Helper()
	n, err := nice()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Work runs with low priority, and nothing else does: not who waits for it, and not
// goroutines that begin later.
func TestRunLowersItsOwnThread(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	usual := niceHere(t)
	got := usual
	Run(func() { got = niceHere(t) })
	if want := min(niceMax, usual+lowerBy); got != want || got == usual && usual < niceMax {
		t.Errorf("background work has nice value %d, want %d", got, want)
	}
	if now := niceHere(t); now != usual {
		t.Errorf("who waited for it has nice value %d, had %d", now, usual)
	}
	for range 100 {
		after := make(chan int)
		go func() { after <- niceHere(t) }()
		if n := <-after; n != usual {
			t.Fatalf("a goroutine that began later has nice value %d, want %d", n, usual)
		}
	}
}

// While work runs there are more places for goroutines, however many pieces there are, and
// as many as before when the last one is over.
func TestPlaces(t *testing.T) {
	usual := runtime.GOMAXPROCS(0)
	var wg sync.WaitGroup
	release := make(chan struct{})
	for range 3 {
		begun := make(chan struct{})
		wg.Go(func() {
			Run(func() {
				close(begun)
				<-release
			})
		})
		<-begun
		if got := runtime.GOMAXPROCS(0); got != usual+morePlaces {
			t.Errorf("%d places while work runs, want %d", got, usual+morePlaces)
		}
	}
	close(release)
	wg.Wait()
	if got := runtime.GOMAXPROCS(0); got != usual {
		t.Errorf("%d places afterwards, want %d", got, usual)
	}
}
