package loadtest

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
)

// schedule says when the operations of a phase are due and when the phase is over. All
// clients of the phase draw from one schedule.
type schedule struct {
	start clock.Time
	// end is when the phase is over: for a phase by time, and in an open loop also for
	// one by count. It is 0 in a closed loop by count.
	end clock.Time
	// limit is the number of operations; math.MaxInt64 in a closed loop by time.
	limit int64
	// nanosEach is the time from one operation to the next; 0 in a closed loop.
	nanosEach float64

	drawn   atomic.Int64
	started atomic.Int64
}

// newSchedule makes the schedule of a phase that begins at start. One of d and total is
// set. Rate is per second, 0 for a closed loop.
func newSchedule(start clock.Time, d time.Duration, total int64, rate float64) *schedule {
	s := &schedule{start: start, limit: total}
	if total == 0 {
		s.end, s.limit = start.Add(d), math.MaxInt64
	}
	if rate > 0 {
		s.nanosEach = float64(time.Second) / rate
		if total == 0 {
			s.limit = int64(math.Ceil(float64(d) / s.nanosEach))
		} else {
			s.end = s.due(total)
		}
	}
	return s
}

// due returns when operation n of an open loop must be sent.
func (s *schedule) due(n int64) clock.Time { return s.start + clock.Time(float64(n)*s.nanosEach) }

// draw gives a client its next operation: number and the moment from which its latency
// counts. ok is false once there is none, or the phase is over: what an open loop could not
// send until then is not sent any more. A client that waits has drawn, so nothing is lost
// while one is free.
func (s *schedule) draw(now clock.Time) (n int64, due clock.Time, ok bool) {
	if s.end != 0 && now >= s.end {
		return 0, 0, false
	}
	n = s.drawn.Add(1) - 1
	if n >= s.limit {
		return 0, 0, false
	}
	s.started.Add(1)
	if s.nanosEach == 0 {
		return n, now, true
	}
	return n, s.due(n), true
}

// neverStarted returns the number of operations that were due and that nobody sent.
func (s *schedule) neverStarted() int64 {
	if s.nanosEach == 0 {
		return 0
	}
	return s.limit - s.started.Load()
}
