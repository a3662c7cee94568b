package clock

import "time"

// Stopwatch measures how long something takes, for metrics and logs. Unlike a Clock it
// costs no system call, stands still while the machine is suspended, and does not follow a
// simulated node's clock. No decision may depend on it, except when to yield to others or to
// give up waiting.
type Stopwatch struct{ start time.Time }

// StartStopwatch returns a stopwatch that runs.
func StartStopwatch() Stopwatch { return Stopwatch{time.Now()} }

// Elapsed returns the time since the start.
func (s Stopwatch) Elapsed() time.Duration { return time.Since(s.start) }

// After returns how long after u the stopwatch was started.
func (s Stopwatch) After(u Stopwatch) time.Duration { return s.start.Sub(u.start) }
