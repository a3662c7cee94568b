package auth

import (
	"fmt"
	"testing"
)

// TestRecentIsBounded: however many ids are noted, so many are remembered: those noted last.
func TestRecentIsBounded(t *testing.T) {
	const limit = 1000
	u := newRecent[int](testTTL, limit)
	id := func(i int) (id recentID) {
		copy(id[:], fmt.Sprint(i))
		return id
	}
	now := testTime
	note := func(i int) { u.note(id(i), now, func(int) int { return i }) }
	lately := func(i int) bool {
		v, ok := u.get(id(i), now)
		return ok && v == i
	}
	for i := range 10 * limit {
		note(i)
		if n := u.len(); n > limit {
			t.Fatalf("%d uses are remembered after %d tokens, at most %d", n, i, limit)
		}
		for _, last := range []int{i, max(0, i-limit/2)} {
			if !lately(last) {
				t.Fatalf("the use of token %d is forgotten at token %d", last, i)
			}
		}
	}
	// One that is used again and again stays, among others of which each is used once.
	for i := range 10 * limit {
		note(-1)
		note(i)
		if u.len() > limit || !lately(-1) {
			t.Fatalf("at token %d: %d are remembered, that in use: %t", i, u.len(), lately(-1))
		}
	}
	// What has expired goes with the second use after it.
	for range 2 {
		now = now.Add(testTTL + 1)
		if lately(-1) {
			t.Error("a use counts after the TTL")
		}
		note(-1)
	}
	if u.len() != 2 {
		t.Errorf("%d uses are remembered, of one token", u.len())
	}
}
