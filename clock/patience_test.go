package clock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// eachForm tells a story of a Patience in three forms: nobody has asked for Done, somebody has
// before it ends, and it is the parent of another context.
func eachForm(t *testing.T, story func(t *testing.T, form func(*Patience) context.Context)) {
	forms := map[string]func(*Patience) context.Context{
		"patient":  func(p *Patience) context.Context { return p },
		"ordinary": func(p *Patience) context.Context { p.Done(); return p },
		"derived": func(p *Patience) context.Context {
			ctx, cancel := context.WithCancel(p)
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

func TestPatienceEndsAtItsDeadline(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*Patience) context.Context) {
		var timers Timers
		start := time.Now()
		for range 3 { // the second uses the timer of the first
			p := timers.Patience(t.Context(), time.Minute)
			ctx := form(p)
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
			p.End()
			start = time.Now()
		}
	})
}

func TestPatienceEndsWithTheSoonerDeadline(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*Patience) context.Context) {
		parent, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var timers Timers
		p := timers.Patience(parent, time.Minute)
		defer p.End()
		start := time.Now()
		_, err := Await(form(p), make(chan int))
		if took := time.Since(start); took != time.Second || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("ended after %v by %v", took, err)
		}
	})
}

func TestPatienceEndsWithItsParent(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*Patience) context.Context) {
		parent, cancel := context.WithCancel(t.Context())
		defer cancel()
		var timers Timers
		p := timers.Patience(parent, time.Minute)
		defer p.End()
		endsAfterASecond(form(p), t, cancel)
		for _, await := range []func(context.Context, <-chan int) (int, error){Await[int], AwaitSoon[int]} {
			if _, err := await(p, make(chan int)); !errors.Is(err, context.Canceled) {
				t.Fatalf("a later wait ended by %v", err)
			}
		}
	})
}

func TestEndableEndsByEnd(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*Patience) context.Context) {
		var timers Timers
		p := timers.Endable(time.Minute)
		endsAfterASecond(form(p), t, func() { p.End(); p.End() })
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

func TestPatienceWithoutDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var timers Timers
		p := timers.Endable(0)
		if by, ok := p.Deadline(); ok {
			t.Fatalf("deadline %v", by)
		}
		time.AfterFunc(time.Hour, p.End)
		if _, err := Await(p, make(chan int)); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		p.Done()
		if !errors.Is(p.Err(), context.Canceled) {
			t.Fatal("ended before it became ordinary, it is not ended")
		}
	})
}

func TestAwaitReturnsWhatCame(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*Patience) context.Context) {
		var timers Timers
		p := timers.Patience(t.Context(), time.Minute)
		ctx := form(p)
		ch := make(chan int, 1)
		ch <- 1
		if v, err := Await(ctx, ch); v != 1 || err != nil {
			t.Fatal(v, err)
		}
		time.AfterFunc(time.Second, func() { ch <- 2 })
		if v, err := Await(ctx, ch); v != 2 || err != nil {
			t.Fatal(v, err)
		}
		p.End()
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
	eachForm(t, func(t *testing.T, form func(*Patience) context.Context) {
		var timers Timers
		p := timers.Patience(t.Context(), time.Minute)
		defer p.End()
		var looks atomic.Int64
		w := p.While(time.Second, func() bool { return looks.Add(1) < 3 })
		defer w.End()
		start := time.Now()
		_, err := Await(form(w), make(chan int))
		if took := time.Since(start); took != 3*time.Second || !errors.Is(err, context.Canceled) {
			t.Fatalf("ended after %v by %v", took, err)
		}
		if p.Err() != nil {
			t.Fatal("the one it was made of has ended too")
		}
	})
}

func TestWhileEndsAtTheDeadline(t *testing.T) {
	eachForm(t, func(t *testing.T, form func(*Patience) context.Context) {
		var timers Timers
		p := timers.Patience(t.Context(), 2500*time.Millisecond)
		defer p.End()
		var looks atomic.Int64
		w := p.While(time.Second, func() bool { looks.Add(1); return true })
		defer w.End()
		start := time.Now()
		_, err := Await(form(w), make(chan int))
		if took := time.Since(start); took != 2500*time.Millisecond || looks.Load() != 2 || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("ended after %v and %d looks by %v", took, looks.Load(), err)
		}
	})
}

func TestPatienceHasItsParentsValues(t *testing.T) {
	type key struct{}
	var timers Timers
	p := timers.Patience(context.WithValue(t.Context(), key{}, 7), time.Minute)
	defer p.End()
	for range 2 {
		if p.Value(key{}) != 7 {
			t.Fatal(p.Value(key{}))
		}
		p.Done()
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
	b.Run("patience", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p := timers.Patience(parent, time.Minute)
			kick <- 1
			_, _ = Await(p, ch)
			p.End()
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
