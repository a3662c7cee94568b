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
