package simclock

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
)

func TestOffsetAndRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(time.Hour, 2)
		start := c.Now()
		if start < clock.Time(time.Hour) {
			t.Fatalf("starts at %d", start)
		}
		time.Sleep(time.Second)
		if got := c.Now().Sub(start); got != 2*time.Second {
			t.Fatalf("at double rate 1s took %v", got)
		}
		c.SetRate(0.5)
		at := c.Now()
		began := time.Now()
		if err := clock.Sleep(t.Context(), c, time.Second); err != nil {
			t.Fatal(err)
		}
		if got := time.Since(began); got != 2*time.Second {
			t.Fatalf("at half rate a sleep of 1s took %v", got)
		}
		if got := c.Now().Sub(at); got != time.Second {
			t.Fatalf("the clock showed %v for a sleep of 1s", got)
		}
	})
}

func TestPauseHoldsTimersWhileTheClockRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(0, 1)
		var fired, stopped atomic.Int32
		c.AfterFunc(time.Second, func() { fired.Add(1) })
		victim := c.AfterFunc(time.Second, func() { stopped.Add(1) })
		ch := c.NewTimer(time.Second)
		moved := c.AfterFunc(time.Second, func() { stopped.Add(1) })
		c.Pause()
		start := c.Now()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if fired.Load() != 0 {
			t.Fatal("a timer fired during the pause")
		}
		if got := c.Now().Sub(start); got != 5*time.Second {
			t.Fatalf("the clock moved %v in 5s of pause", got)
		}
		if !victim.Stop() {
			t.Fatal("a timer held back by the pause could not be stopped")
		}
		if !moved.Reset(time.Hour) {
			t.Fatal("a timer held back by the pause was not pending")
		}
		c.Resume()
		<-ch.C()
		synctest.Wait()
		if fired.Load() != 1 || stopped.Load() != 0 {
			t.Fatalf("after the pause: %d fired, %d stopped or moved ones fired", fired.Load(), stopped.Load())
		}
		moved.Stop()
	})
}

func TestResetDropsAStaleValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(0, 1)
		tm := c.NewTimer(time.Second)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		start := time.Now()
		tm.Reset(time.Minute)
		<-tm.C()
		if got := time.Since(start); got != time.Minute {
			t.Fatalf("reset timer fired after %v", got)
		}
	})
}
