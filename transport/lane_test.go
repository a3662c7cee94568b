package transport

import "testing"

// TestCompany: a lane whose frames come alone stops waiting for others, tries again now
// and then, and waits for them again as soon as there are some.
func TestCompany(t *testing.T) {
	var c company
	waits := func(n, frames int) (waited int) {
		for range n {
			w := c.expected()
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
		t.Error("company was not noticed")
	}
	if got := waits(aloneMax, 2); got != aloneMax {
		t.Errorf("waited %d times of %d with company", got, aloneMax)
	}
}
