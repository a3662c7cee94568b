// Package wake has the one wake-up signal of the tree. It tells a goroutine that may be busy that
// there is work, without waiting for the goroutine and without counting the wake-ups.
package wake

// Signal wakes one goroutine. Wake-ups that come before the goroutine takes one become a
// single one, so the goroutine looks for all its work after each. It receives from the
// channel itself, also in a select. A nil Signal wakes nobody.
type Signal chan struct{}

// New returns a Signal that is not set.
func New() Signal { return make(Signal, 1) }

// Set wakes the goroutine, now or when it looks next. It never blocks.
func (s Signal) Set() {
	select {
	case s <- struct{}{}:
	default:
	}
}
