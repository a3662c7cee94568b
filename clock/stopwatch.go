package clock

import "time"

// Stopwatch measures how long something takes, for metrics and logs. Unlike a
// Clock it costs no system call, stands still while the machine is suspended, and does
// not follow a simulated node's clock; nothing that decides may ask it, but for when others have
// their turn.
type Stopwatch struct{ start time.Time }

// StartStopwatch returns a stopwatch that runs.
func StartStopwatch() Stopwatch { return Stopwatch{time.Now()} }

// Elapsed returns the time since the start.
func (s Stopwatch) Elapsed() time.Duration { return time.Since(s.start) }
