// Package clock is the only source of time in Skein. Each node has one Clock;
// the simulator gives each of its nodes one that runs at its own offset and rate
// and can be paused. Every other package is forbidden to call time.Now,
// time.Since, time.Sleep, time.After and the timer constructors of package time.
package clock

import (
	"context"
	"time"
)

// Time is a reading of a node's monotonic clock: nanoseconds since a moment that
// means nothing. Readings of two nodes, or of two boots of a machine, cannot be
// compared. The clock runs on while the process is stopped or the machine
// suspended, but not while a hypervisor has paused a virtual machine. 0 stands for
// "never": no clock returns it.
type Time int64

// Add returns t+d.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// Sub returns the duration t-u.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t - u) }

// Clock is a node's time. All methods may be called from many goroutines.
type Clock interface {
	// Now reads the monotonic clock.
	Now() Time
	// Wall reads the wall clock. It is for people (logs, certificates, load
	// reports); nothing that must be right depends on it. A jump ahead is a hint that
	// the machine was paused.
	Wall() time.Time
	// AfterFunc calls f in a goroutine of its own once d has passed.
	AfterFunc(d time.Duration, f func()) Timer
	// NewTimer returns a timer whose channel gets one value once d has passed.
	NewTimer(d time.Duration) Timer
}

// Timer is a timer of a Clock. It behaves as time.Timer does since Go 1.23: after
// Stop or Reset no stale value is received from C.
type Timer interface {
	// C is the channel of a timer made by NewTimer, and nil for AfterFunc's.
	C() <-chan time.Time
	// Stop keeps the timer from firing. It says whether it was in time.
	Stop() bool
	// Reset starts the timer anew. It says whether it had been running.
	Reset(d time.Duration) bool
}

// WithTimeout is context.WithTimeout on c. When d has passed the context is Canceled,
// with DeadlineExceeded as its cause.
func WithTimeout(ctx context.Context, c Clock, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	t := c.AfterFunc(d, func() { cancel(context.DeadlineExceeded) })
	return ctx, func() {
		t.Stop()
		cancel(context.Canceled)
	}
}

// Sleep waits until d has passed on c or ctx is done, whose error it returns then.
func Sleep(ctx context.Context, c Clock, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := c.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// UntilNext is how long it is until a multiple of a period on c, from half a period to one and a half. Those who
// look at something again and again wait this long in place of the period, so that they wake the process together.
func UntilNext(c Clock, period time.Duration) time.Duration {
	d := period - time.Duration(c.Now())%period
	if d < period/2 {
		d += period // this look was late, or its timer a little early
	}
	return d
}
