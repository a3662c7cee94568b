package clock

import (
	"context"
	"sync"
	"time"
)

// LazyDeadline is a context that ends at a deadline of its own, with its parent, or by
// End. Unlike the contexts of package context it registers nowhere, and starts no timer
// before somebody has to wait. [Await] takes a timer that others have used. The path of a
// request only uses Await; two contexts of package context took a tenth of a node's CPU there.
// A call of Done, or a context derived from it, turns it into an ordinary context.
//
// Its deadline is a reading of package time's clock, as for every context.
type LazyDeadline struct {
	parent   context.Context
	timers   *Timers
	deadline time.Time // zero for none
	endable  bool
	// check is asked every so often while somebody waits; where it says no the wait ends.
	every time.Duration
	check func() bool

	mu sync.Mutex
	// Guarded by mu. ended is set by End, which closes wake, made by the first waiter.
	// The rest is made by the first Done.
	ended  bool
	wake   chan struct{}
	inner  context.Context
	cancel context.CancelFunc
	poller *time.Timer
}

// Timers keeps the timers of its LazyDeadlines for the next ones. The zero value is ready.
type Timers struct{ pool sync.Pool }

// LazyDeadline returns a context that ends with parent, and after d where d is above 0.
// Call End once nobody needs it; End does not wake goroutines that are in Await.
func (t *Timers) LazyDeadline(parent context.Context, d time.Duration) *LazyDeadline {
	l := &LazyDeadline{parent: parent, timers: t}
	if d > 0 {
		l.deadline = time.Now().Add(d)
	}
	if by, ok := parent.Deadline(); ok && (l.deadline.IsZero() || by.Before(l.deadline)) {
		l.deadline = by
	}
	return l
}

// Endable returns a context that ends after d if d is above 0, and whose End wakes all
// waiters.
func (t *Timers) Endable(d time.Duration) *LazyDeadline {
	l := t.LazyDeadline(context.Background(), d)
	l.endable = true
	return l
}

// While returns a context with the same parent and deadline, which is Canceled also
// when check, asked every so often while somebody waits for it, says no. It has an End
// of its own, and does not end with l's.
func (l *LazyDeadline) While(every time.Duration, check func() bool) *LazyDeadline {
	return &LazyDeadline{parent: l.parent, timers: l.timers, deadline: l.deadline, every: every, check: check}
}

// End ends the context for all who wait for it or for what was derived from it.
func (l *LazyDeadline) End() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	l.ended = true
	if l.wake != nil {
		close(l.wake)
	}
	if l.inner != nil {
		l.cancel()
	}
}

// Deadline implements context.Context.
func (l *LazyDeadline) Deadline() (time.Time, bool) { return l.deadline, !l.deadline.IsZero() }

// Done implements context.Context.
func (l *LazyDeadline) Done() <-chan struct{} { return l.ordinary().Done() }

// Err implements context.Context.
func (l *LazyDeadline) Err() error {
	l.mu.Lock()
	ended, inner := l.ended, l.inner
	l.mu.Unlock()
	switch {
	case inner != nil:
		return inner.Err()
	case ended:
		return context.Canceled
	}
	if err := l.parent.Err(); err != nil {
		return err
	}
	if !l.deadline.IsZero() && !time.Now().Before(l.deadline) {
		return context.DeadlineExceeded
	}
	return nil
}

// Value implements context.Context.
func (l *LazyDeadline) Value(key any) any {
	l.mu.Lock()
	inner := l.inner
	l.mu.Unlock()
	if inner != nil {
		// Package context finds its own context here, and needs no goroutine for those that
		// are derived from l.
		return inner.Value(key)
	}
	return l.parent.Value(key)
}

// ordinary returns the same as a context of package context.
func (l *LazyDeadline) ordinary() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inner != nil {
		return l.inner
	}
	if l.deadline.IsZero() {
		l.inner, l.cancel = context.WithCancel(l.parent)
	} else {
		l.inner, l.cancel = context.WithDeadline(l.parent, l.deadline)
	}
	switch {
	case l.ended:
		l.cancel()
	case l.check != nil:
		l.poller = time.AfterFunc(l.every, l.poll)
	}
	return l.inner
}

// poll is what the timer of an ordinary one does.
func (l *LazyDeadline) poll() {
	alive := l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !alive:
		l.cancel()
	case l.inner.Err() == nil:
		l.poller.Reset(l.every)
	}
}

// Await returns what ch delivers, or the zero value where ch is closed. Where ctx ends
// first it returns the context's error.
func Await[T any](ctx context.Context, ch <-chan T) (v T, err error) {
	select {
	case v = <-ch:
		return v, nil
	default:
	}
	l, ok := ctx.(*LazyDeadline)
	if ok {
		// Who has made it an ordinary one has paid for it already.
		ok, ctx = l.lazy()
	}
	if !ok {
		select {
		case v = <-ch:
			return v, nil
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
	for err == nil {
		t := l.timer()
		var looks bool
		select {
		case v = <-ch:
			l.timers.put(t)
			return v, nil
		case <-l.wake:
		case <-l.parent.Done():
		case <-t.C:
			looks = true
		}
		l.timers.put(t)
		if err = l.Err(); err == nil && looks && l.check != nil && !l.check() {
			l.End()
			err = context.Canceled
		}
	}
	return v, err
}

// AwaitSoon is Await for a channel that certainly delivers, or is closed, by itself and
// soon: of ctx only the parent's end is waited for, which costs less.
func AwaitSoon[T any](ctx context.Context, ch <-chan T) (v T, err error) {
	if l, ok := ctx.(*LazyDeadline); ok && !l.endable {
		ctx = l.parent
	}
	return Await(ctx, ch)
}

// lazy reports whether l is still lazy, and returns its ordinary context if not. It
// prepares the channel by which End wakes waiters.
func (l *LazyDeadline) lazy() (bool, context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inner != nil {
		return false, l.inner
	}
	if l.wake == nil && l.endable {
		l.wake = make(chan struct{})
		if l.ended {
			close(l.wake)
		}
	}
	return true, l
}

// timer returns a timer for when a waiter looks around next.
func (l *LazyDeadline) timer() *time.Timer {
	d := noPoll
	if !l.deadline.IsZero() {
		d = time.Until(l.deadline)
	}
	if l.check != nil {
		d = min(d, l.every)
	}
	return l.timers.get(d)
}

// noPoll is the wait of who has nothing to look for.
const noPoll = 24 * time.Hour

func (t *Timers) get(d time.Duration) *time.Timer {
	if timer, ok := t.pool.Get().(*time.Timer); ok {
		timer.Reset(d)
		return timer
	}
	return time.NewTimer(d)
}

// put takes back a timer, whose channel holds nothing once it is stopped.
func (t *Timers) put(timer *time.Timer) {
	timer.Stop()
	t.pool.Put(timer)
}
