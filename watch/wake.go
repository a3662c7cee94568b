package watch

import (
	"context"
	"time"

	"github.com/skeindb/skein/clock"
)

// running is one period with watchers.
type running struct {
	ctx    context.Context //nolint:containedctx // it is the goroutines', ended by cancel
	cancel context.CancelFunc
	// Each wakes one kind of goroutine.
	wakeLocate, wakeDescribe, wakeRead, wakeResume chan struct{}
}

// resumeLocked schedules what is due at a time: a release after a pause, a feed to open again, a
// leader to ask again.
func (h *Hub) resumeLocked(at clock.Time) {
	if h.resume == 0 || at < h.resume {
		h.resume = at
		kick(h.run.wakeResume)
	}
}

// resumeLeast bounds how often resumes works.
const resumeLeast = 100 * time.Microsecond

// tick is how often a hub with watchers looks for overdue allocations.
const tick = 25 * time.Millisecond

func kick(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (s *Stream) signal() { kick(s.wake) }
