package watch

import (
	"context"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
)

// running is one period with watchers.
type running struct {
	ctx    context.Context //nolint:containedctx // it is the goroutines', ended by cancel
	cancel context.CancelFunc
	// Each wakes one kind of goroutine.
	wakeLocate, wakeDescribe, wakeRead, wakeResume wake.Signal
}

// resumeLocked schedules what is due at a time: a release after a pause, a feed to open again, a
// leader to ask again.
func (h *Hub) resumeLocked(at clock.Time) {
	if h.resume == 0 || at < h.resume {
		h.resume = at
		h.run.wakeResume.Set()
	}
}

// resumeLeast bounds how often resumes works.
const resumeLeast = 100 * time.Microsecond

// tick is how often a hub with watchers looks for overdue allocations.
const tick = 25 * time.Millisecond

func (s *Stream) signal() { s.wake.Set() }
