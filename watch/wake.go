package watch

import (
	"context"
	"time"

	"github.com/skeindb/skein/clock"
)

// running is one time of having watchers.
type running struct {
	ctx    context.Context //nolint:containedctx // it is the goroutines', ended by cancel
	cancel context.CancelFunc
	// Each wakes one kind of goroutine.
	wakeLocate, wakeDescribe, wakeRead, wakeResume chan struct{}
}

// resumeLocked has what is due then done then: releases that rest, feeds that are opened
// again, leaders that are asked again.
func (h *Hub) resumeLocked(at clock.Time) {
	if h.resume == 0 || at < h.resume {
		h.resume = at
		kick(h.run.wakeResume)
	}
}

// resumeLeast bounds how often something is done that does not wait for a tick.
const resumeLeast = 100 * time.Microsecond

// tick is how often a hub with watchers looks for what is overdue.
const tick = 25 * time.Millisecond

func kick(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (s *Stream) signal() { kick(s.wake) }
