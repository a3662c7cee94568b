package clock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestVirtualFollowsTheBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := Virtual()
		start := c.Now()
		if start == 0 {
			t.Fatal("0 is never")
		}
		if err := Sleep(t.Context(), c, time.Hour); err != nil {
			t.Fatal(err)
		}
		if got := c.Now().Sub(start); got != time.Hour {
			t.Fatalf("slept %v, want 1h", got)
		}
		ctx, cancel := context.WithCancel(t.Context())
		fired := c.AfterFunc(time.Second, cancel)
		if err := Sleep(ctx, c, time.Hour); !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v, want canceled", err)
		}
		if fired.Stop() {
			t.Fatal("a timer that fired was stopped")
		}
	})
}

func TestSystemMovesForward(t *testing.T) {
	c := System()
	a := c.Now()
	if err := Sleep(t.Context(), c, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if d := c.Now().Sub(a); d < time.Millisecond {
		t.Fatalf("clock moved %v in at least 1ms", d)
	}
}

func TestWithTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := Virtual()
		start := c.Now()
		ctx, cancel := WithTimeout(t.Context(), c, time.Minute)
		defer cancel()
		<-ctx.Done()
		if took := c.Now().Sub(start); took != time.Minute || !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			t.Errorf("ended after %v by %v", took, context.Cause(ctx))
		}
		ctx, cancel = WithTimeout(t.Context(), c, time.Minute)
		cancel()
		if !errors.Is(context.Cause(ctx), context.Canceled) {
			t.Errorf("canceled, the cause is %v", context.Cause(ctx))
		}
	})
}

// Loops that began at different times look at the same times, a period apart, and not twice after a timer that
// was early or late.
func TestUntilNextBringsLoopsTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const period = 250 * time.Millisecond
		c := Virtual()
		for _, late := range []time.Duration{0, time.Nanosecond, 100 * time.Millisecond, 124 * time.Millisecond, 126 * time.Millisecond, 249 * time.Millisecond, period} {
			time.Sleep(late)
			d := UntilNext(c, period)
			if d < period/2 || d > 3*period/2 {
				t.Errorf("%v after a look the next one comes in %v", late, d)
			}
			time.Sleep(d - time.Nanosecond)
			if again := UntilNext(c, period); again != period+time.Nanosecond {
				t.Errorf("a nanosecond too early, the next look comes in %v", again)
			}
			time.Sleep(time.Nanosecond)
			if now := c.Now(); time.Duration(now)%period != 0 {
				t.Errorf("%v after a look the next one is at %d", late, now)
			}
			if again := UntilNext(c, period); again != period {
				t.Errorf("in time, the next look comes in %v", again)
			}
		}
	})
}
