//go:build planted

package lease

import "github.com/skeindb/skein/internal/mutation"

// mutationState is what a Timer keeps for the bugs of package mutation.
type mutationState struct{ last *term }

// mutateDeadlines gives leases the deadlines of the node's term before.
func (tm *Timer) mutateDeadlines(t *term) {
	last := tm.mutated.last
	tm.mutated.last = t
	if last == nil || !mutation.Is(mutation.LeaseCountedOn) {
		return
	}
	for id, e := range t.leases {
		if old := last.leases[id]; old != nil && old.ref == e.ref && old.phase == live && e.phase == live {
			e.deadline = old.deadline
			t.expiry.Set(id, e.deadline)
		}
	}
}
