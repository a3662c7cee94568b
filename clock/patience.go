package clock

import (
	"context"
	"sync"
	"time"
)

// Patience is a context that ends at a deadline of its own, with its parent, or by
// End. Unlike the contexts of package context it registers nowhere and starts no timer
// while only [Await] waits for it. The path of a request only uses Await; two contexts of
// package context took a tenth of a node's CPU there. A call of Done, or a context derived
// from it, turns it into an ordinary context.
//
// Its deadline is a reading of package time's clock, as for every context.
type Patience struct {
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
	looker *time.Timer
}

// Timers keeps the timers of its Patiences for the next ones. The zero value is ready.
type Timers struct{ pool sync.Pool }

// Patience returns a context that ends with parent, and after d where d is above 0.
// Call End once nobody needs it; End does not wake goroutines that are in Await.
func (t *Timers) Patience(parent context.Context, d time.Duration) *Patience {
	p := &Patience{parent: parent, timers: t}
	if d > 0 {
		p.deadline = time.Now().Add(d)
	}
	if by, ok := parent.Deadline(); ok && (p.deadline.IsZero() || by.Before(p.deadline)) {
		p.deadline = by
	}
	return p
}

// Endable returns a context that ends after d if d is above 0, and whose End wakes all
// waiters.
func (t *Timers) Endable(d time.Duration) *Patience {
	p := t.Patience(context.Background(), d)
	p.endable = true
	return p
}

// While returns a context with the same parent and deadline, which is Canceled also
// when check, asked every so often while somebody waits for it, says no. It has an End
// of its own, and does not end with p's.
func (p *Patience) While(every time.Duration, check func() bool) *Patience {
	return &Patience{parent: p.parent, timers: p.timers, deadline: p.deadline, every: every, check: check}
}

// End ends the context for all who wait for it or for what was derived from it.
func (p *Patience) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	if p.wake != nil {
		close(p.wake)
	}
	if p.inner != nil {
		p.cancel()
	}
}

// Deadline implements context.Context.
func (p *Patience) Deadline() (time.Time, bool) { return p.deadline, !p.deadline.IsZero() }

// Done implements context.Context.
func (p *Patience) Done() <-chan struct{} { return p.ordinary().Done() }

// Err implements context.Context.
func (p *Patience) Err() error {
	p.mu.Lock()
	ended, inner := p.ended, p.inner
	p.mu.Unlock()
	switch {
	case inner != nil:
		return inner.Err()
	case ended:
		return context.Canceled
	}
	if err := p.parent.Err(); err != nil {
		return err
	}
	if !p.deadline.IsZero() && !time.Now().Before(p.deadline) {
		return context.DeadlineExceeded
	}
	return nil
}

// Value implements context.Context.
func (p *Patience) Value(key any) any {
	p.mu.Lock()
	inner := p.inner
	p.mu.Unlock()
	if inner != nil {
		// Package context finds its own context here, and needs no goroutine for those that
		// are derived from p.
		return inner.Value(key)
	}
	return p.parent.Value(key)
}

// ordinary returns the same as a context of package context.
func (p *Patience) ordinary() context.Context {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inner != nil {
		return p.inner
	}
	if p.deadline.IsZero() {
		p.inner, p.cancel = context.WithCancel(p.parent)
	} else {
		p.inner, p.cancel = context.WithDeadline(p.parent, p.deadline)
	}
	switch {
	case p.ended:
		p.cancel()
	case p.check != nil:
		p.looker = time.AfterFunc(p.every, p.lookAgain)
	}
	return p.inner
}

// lookAgain is what the timer of an ordinary one does.
func (p *Patience) lookAgain() {
	alive := p.check()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !alive:
		p.cancel()
	case p.inner.Err() == nil:
		p.looker.Reset(p.every)
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
	p, ok := ctx.(*Patience)
	if ok {
		// Who has made it an ordinary one has paid for it already.
		ok, ctx = p.patient()
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
		t := p.look()
		var looks bool
		select {
		case v = <-ch:
			p.timers.put(t)
			return v, nil
		case <-p.wake:
		case <-p.parent.Done():
		case <-t.C:
			looks = true
		}
		p.timers.put(t)
		if err = p.Err(); err == nil && looks && p.check != nil && !p.check() {
			p.End()
			err = context.Canceled
		}
	}
	return v, err
}

// AwaitSoon is Await for a channel that certainly delivers, or is closed, by itself and
// soon: of ctx only the parent's end is waited for, which costs less.
func AwaitSoon[T any](ctx context.Context, ch <-chan T) (v T, err error) {
	if p, ok := ctx.(*Patience); ok && !p.endable {
		ctx = p.parent
	}
	return Await(ctx, ch)
}

// patient reports whether p is still lazy, and returns its ordinary context if not. It
// prepares the channel by which End wakes waiters.
func (p *Patience) patient() (bool, context.Context) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inner != nil {
		return false, p.inner
	}
	if p.wake == nil && p.endable {
		p.wake = make(chan struct{})
		if p.ended {
			close(p.wake)
		}
	}
	return true, p
}

// look returns a timer for when a waiter looks around next.
func (p *Patience) look() *time.Timer {
	d := noLook
	if !p.deadline.IsZero() {
		d = time.Until(p.deadline)
	}
	if p.check != nil {
		d = min(d, p.every)
	}
	return p.timers.get(d)
}

// noLook is the wait of who has nothing to look for.
const noLook = 24 * time.Hour

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
