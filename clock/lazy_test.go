package clock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// eachForm tells a story of a LazyDeadline in three forms: nobody has asked for Done, somebody has
// before it ends, and it is the parent of another context.
func eachForm(t *testing.T, story func(t *testing.T, form func(*LazyDeadline) context.Context)) {
	forms := map[string]func(*LazyDeadline) context.Context{
		"lazy":     func(l *LazyDeadline) context.Context { return l },
		"ordinary": func(l *LazyDeadline) context.Context { l.Done(); return l },
		"derived": func(l *LazyDeadline) context.Context {
			ctx, cancel := context.WithCancel(l)
			t.Cleanup(cancel)
			return ctx
		},
	}
	for name, form := range forms {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { story(t, form) })
		})
	}
}

func TestLazyDeadlineEndsAtItsDeadline(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*LazyDeadline) context.Context) {
		var timers Timers
		start := time.Now()
		for range 3 { // the second uses the timer of the first
			l := timers.LazyDeadline(t.Context(), time.Minute)
			ctx := form(l)
			if by, ok := ctx.Deadline(); !ok || time.Until(by) != time.Minute {
				t.Fatalf("deadline %v %t", by, ok)
			}
			if ctx.Err() != nil {
				t.Fatal(ctx.Err())
			}
			_, err := Await(ctx, make(chan int))
			if took := time.Since(start); took != time.Minute || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(ctx.Err(), err) {
				t.Fatalf("ended after %v by %v; Err is %v", took, err, ctx.Err())
			}
			l.End()
			start = time.Now()
		}
	})
}

func TestLazyDeadlineEndsWithTheSoonerDeadline(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*LazyDeadline) context.Context) {
		parent, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var timers Timers
		l := timers.LazyDeadline(parent, time.Minute)
		defer l.End()
		start := time.Now()
		_, err := Await(form(l), make(chan int))
		if took := time.Since(start); took != time.Second || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("ended after %v by %v", took, err)
		}
	})
}

func TestLazyDeadlineEndsWithItsParent(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*LazyDeadline) context.Context) {
		parent, cancel := context.WithCancel(t.Context())
		defer cancel()
		var timers Timers
		l := timers.LazyDeadline(parent, time.Minute)
		defer l.End()
		endsAfterASecond(form(l), t, cancel)
		for _, await := range []func(context.Context, <-chan int) (int, error){Await[int], AwaitSoon[int]} {
			if _, err := await(l, make(chan int)); !errors.Is(err, context.Canceled) {
				t.Fatalf("a later wait ended by %v", err)
			}
		}
	})
}

func TestEndableEndsByEnd(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*LazyDeadline) context.Context) {
		var timers Timers
		l := timers.Endable(time.Minute)
		endsAfterASecond(form(l), t, func() { l.End(); l.End() })
	})
}

// endsAfterASecond waits in two places at once for the end that end brings.
func endsAfterASecond(ctx context.Context, t *testing.T, end func()) {
	t.Helper()
	time.AfterFunc(time.Second, end)
	start := time.Now()
	other := make(chan error, 1)
	go func() {
		_, err := AwaitSoon(ctx, make(chan int))
		other <- err
	}()
	_, err := Await(ctx, make(chan int))
	if took := time.Since(start); took != time.Second || !errors.Is(err, context.Canceled) || !errors.Is(ctx.Err(), err) {
		t.Fatalf("ended after %v by %v; Err is %v", took, err, ctx.Err())
	}
	if err := <-other; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := Await(ctx, make(chan int)); !errors.Is(err, context.Canceled) {
		t.Fatalf("a second wait ended by %v", err)
	}
}

func TestLazyDeadlineWithoutDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var timers Timers
		l := timers.Endable(0)
		if by, ok := l.Deadline(); ok {
			t.Fatalf("deadline %v", by)
		}
		time.AfterFunc(time.Hour, l.End)
		if _, err := Await(l, make(chan int)); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		l.Done()
		if !errors.Is(l.Err(), context.Canceled) {
			t.Fatal("ended before it became ordinary, it is not ended")
		}
	})
}

func TestAwaitReturnsWhatCame(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*LazyDeadline) context.Context) {
		var timers Timers
		l := timers.LazyDeadline(t.Context(), time.Minute)
		ctx := form(l)
		ch := make(chan int, 1)
		ch <- 1
		if v, err := Await(ctx, ch); v != 1 || err != nil {
			t.Fatal(v, err)
		}
		time.AfterFunc(time.Second, func() { ch <- 2 })
		if v, err := Await(ctx, ch); v != 2 || err != nil {
			t.Fatal(v, err)
		}
		l.End()
		ch <- 3
		if v, err := Await(ctx, ch); v != 3 || err != nil {
			t.Fatalf("%d %v: what is there goes before the end", v, err)
		}
		close(ch)
		if v, err := Await(ctx, ch); v != 0 || err != nil {
			t.Fatal(v, err)
		}
	})
}

func TestWhileEndsWhenTheCheckFails(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*LazyDeadline) context.Context) {
		var timers Timers
		l := timers.LazyDeadline(t.Context(), time.Minute)
		defer l.End()
		var looks atomic.Int64
		w := l.While(time.Second, func() bool { return looks.Add(1) < 3 })
		defer w.End()
		start := time.Now()
		_, err := Await(form(w), make(chan int))
		if took := time.Since(start); took != 3*time.Second || !errors.Is(err, context.Canceled) {
			t.Fatalf("ended after %v by %v", took, err)
		}
		if l.Err() != nil {
			t.Fatal("the one it was made of has ended too")
		}
	})
}

func TestWhileEndsAtTheDeadline(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*LazyDeadline) context.Context) {
		var timers Timers
		l := timers.LazyDeadline(t.Context(), 2500*time.Millisecond)
		defer l.End()
		var looks atomic.Int64
		w := l.While(time.Second, func() bool { looks.Add(1); return true })
		defer w.End()
		start := time.Now()
		_, err := Await(form(w), make(chan int))
		if took := time.Since(start); took != 2500*time.Millisecond || looks.Load() != 2 || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("ended after %v and %d looks by %v", took, looks.Load(), err)
		}
	})
}

func TestLazyDeadlineHasItsParentsValues(t *testing.T) {
	type key struct{}
	var timers Timers
	l := timers.LazyDeadline(context.WithValue(t.Context(), key{}, 7), time.Minute)
	defer l.End()
	for range 2 {
		if l.Value(key{}) != 7 {
			t.Fatal(l.Value(key{}))
		}
		l.Done()
	}
}

func BenchmarkAwait(b *testing.B) {
	parent, cancel := context.WithCancel(b.Context())
	defer cancel()
	ch, kick := make(chan int), make(chan int)
	go func() {
		for range kick {
			ch <- 1
		}
	}()
	defer close(kick)
	var timers Timers
	b.Run("lazy", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			l := timers.LazyDeadline(parent, time.Minute)
			kick <- 1
			_, _ = Await(l, ch)
			l.End()
		}
	})
	b.Run("context", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			ctx, cancel := context.WithTimeout(parent, time.Minute)
			kick <- 1
			_, _ = Await(ctx, ch)
			cancel()
		}
	})
}
