//go:build planted

package lease

import "github.com/skeindb/skein/internal/plant"

// planted is what a Keeper keeps for the bugs of package plant.
type planted struct{ last *term }

// plantDeadlines gives leases the deadlines of the node's term before.
func (k *Keeper) plantDeadlines(t *term) {
	last := k.planted.last
	k.planted.last = t
	if last == nil || !plant.Is(plant.LeaseCountedOn) {
		return
	}
	for id, e := range t.leases {
		if old := last.leases[id]; old != nil && old.ref == e.ref && old.phase == live && e.phase == live {
			e.deadline = old.deadline
			t.expiry.Set(id, e.deadline)
		}
	}
}
