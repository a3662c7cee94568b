// Package simclock gives each node of a simulation its own clock, made from the fake
// time of a testing/synctest bubble. A clock has an offset and a drifting rate. A pause
// holds back its timers while the clock runs on, as in a stopped process. In a suspension
// the clock stands still too, as in a virtual machine that is paused.
package simclock

import (
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// Clock is a simulated node's clock. It implements clock.Clock.
type Clock struct {
	mu sync.Mutex
	// The clock read base when the bubble's time was at; since then it has run at
	// rate. All guarded by mu.
	base clock.Time
	at   time.Time
	rate float64
	wall time.Duration
	// held are the timers that became due during a pause, in order. paused says whether
	// there is a pause.
	held   []func()
	paused bool
	// still says that the clock stands still, at base.
	still bool
}

// New returns a clock that now shows offset and runs at rate (1 is the bubble's own;
// 1.01 gains 1 %). It must be called inside a bubble.
func New(offset time.Duration, rate float64) *Clock {
	return &Clock{base: clock.Time(offset) + 1, at: time.Now(), rate: rate}
}

// Now reads the clock. It runs on during a pause, and not during a suspension.
func (c *Clock) Now() clock.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nowLocked()
}

func (c *Clock) nowLocked() clock.Time {
	if c.still {
		return c.base
	}
	return c.base.Add(time.Duration(float64(time.Since(c.at)) * c.rate))
}

// SetRate changes how fast the clock runs, from now on. Running timers keep the moment
// at which they were to fire.
func (c *Clock) SetRate(rate float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.base, c.at, c.rate = c.nowLocked(), time.Now(), rate
}

// StepWall moves the wall clock, but not the monotonic one.
func (c *Clock) StepWall(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall += d
}

// Wall reads the wall clock.
func (c *Clock) Wall() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.wall)
}

// Pause holds back all timers until Resume, as if the process were stopped. Running
// goroutines go on: the caller pauses the bus too.
func (c *Clock) Pause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = true
}

// Suspend is Pause with the clock standing still. The wall clock runs on: somebody has set it
// by the time that the machine goes on. StepWall undoes that.
func (c *Clock) Suspend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.base, c.at, c.still, c.paused = c.nowLocked(), time.Now(), true, true
}

// Resume ends a pause or a suspension. It fires the timers that were held back, in the order of
// their moments.
func (c *Clock) Resume() {
	c.mu.Lock()
	if c.still {
		c.at, c.still = time.Now(), false
	}
	held := c.held
	c.held, c.paused = nil, false
	c.mu.Unlock()
	for _, due := range held {
		due()
	}
}

// AfterFunc implements clock.Clock.
func (c *Clock) AfterFunc(d time.Duration, f func()) clock.Timer {
	t := &timer{c: c, fire: f}
	t.start(d)
	return t
}

// NewTimer implements clock.Clock.
func (c *Clock) NewTimer(d time.Duration) clock.Timer {
	ch := make(chan time.Time, 1)
	t := &timer{c: c, ch: ch, fire: func() {
		select {
		case ch <- time.Now():
		default:
		}
	}}
	t.start(d)
	return t
}

// timer counts its starts, so that an expiry of an earlier one (already on its way
// when Stop or Reset came) is known and does nothing.
type timer struct {
	c    *Clock
	ch   chan time.Time
	fire func()

	mu      sync.Mutex
	run     uint64
	pending bool
	under   *time.Timer
}

func (t *timer) C() <-chan time.Time { return t.ch }

func (t *timer) start(d time.Duration) {
	t.c.mu.Lock()
	rate := t.c.rate
	t.c.mu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.startLocked(time.Duration(float64(max(d, 0)) / rate))
}

func (t *timer) startLocked(d time.Duration) {
	t.run++
	run := t.run
	t.pending = true
	t.under = time.AfterFunc(d, func() { t.due(run) })
}

// due is called at the timer's moment: it fires the timer, or leaves it with the clock
// during a pause.
func (t *timer) due(run uint64) {
	t.c.mu.Lock()
	if t.c.paused {
		t.c.held = append(t.c.held, func() { t.due(run) })
		t.c.mu.Unlock()
		return
	}
	t.c.mu.Unlock()
	t.mu.Lock()
	fires := t.pending && t.run == run
	if fires {
		t.pending = false
	}
	t.mu.Unlock()
	if !fires {
		return
	}
	if t.ch != nil {
		t.fire()
		return
	}
	go t.fire()
}

func (t *timer) Stop() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stopLocked()
}

func (t *timer) stopLocked() bool {
	was := t.pending
	t.pending = false
	t.under.Stop()
	if t.ch != nil {
		select {
		case <-t.ch:
		default:
		}
	}
	return was
}

func (t *timer) Reset(d time.Duration) bool {
	t.mu.Lock()
	was := t.stopLocked()
	t.mu.Unlock()
	t.start(d)
	return was
}
