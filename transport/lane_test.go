package transport

import "testing"

// TestLinger: a lane whose frames come alone stops lingering, retries now and then, and
// lingers again as soon as batches grow.
func TestLinger(t *testing.T) {
	var c linger
	waits := func(n, frames int) (waited int) {
		for range n {
			w := c.due()
			if w {
				waited++
			}
			c.note(frames, w)
		}
		return waited
	}
	if got := waits(aloneMax, 1); got != aloneMax {
		t.Errorf("waited %d times before it knew", got)
	}
	if got := waits(10*aloneRetry, 1); got != 10 {
		t.Errorf("waited %d times in vain, want 10", got)
	}
	if got := waits(1, 2); got > 1 || c.alone != 0 {
		t.Error("linger was not noticed")
	}
	if got := waits(aloneMax, 2); got != aloneMax {
		t.Errorf("waited %d times of %d with linger", got, aloneMax)
	}
}
