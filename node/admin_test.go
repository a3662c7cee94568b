package node

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/api/adminpb"
)

// TestRangeFigures: list and show say the same of a range at every node: its live keys
// at once, and what it takes of the leader's disk once it is there.
func TestRangeFigures(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		const keys = 12
		for i := range keys {
			r.mustPut(r.nodes[0], fmt.Sprint("k", i), "a value of some length")
		}
		r.mustRemove(r.nodes[0], "k0")
		look := func(n *rigNode) (list, show *adminpb.Range) {
			l, err := admin{n.core}.Ranges(r.t.Context())
			if err != nil || len(l) != 1 {
				r.t.Fatalf("list at node %s: %v, %v", n.id, l, err)
			}
			s, err := admin{n.core}.ShowRange(r.t.Context(), 1)
			if err != nil {
				r.t.Fatalf("show at node %s: %v", n.id, err)
			}
			return l[0], s.GetRange()
		}
		want := func(onDisk bool) {
			r.t.Helper()
			for _, n := range r.nodes {
				list, show := look(n)
				for what, got := range map[string]*adminpb.Range{"list": list, "show": show} {
					if got.GetKeys() != keys-1 || got.GetBytes() > 0 != onDisk || got.GetLeader() == "" {
						r.t.Errorf("%s at node %s: %v, want %d keys, on disk %t", what, n.id, got, keys-1, onDisk)
					}
				}
				if list.GetBytes() != show.GetBytes() {
					r.t.Errorf("node %s: list says %d bytes, show says %d", n.id, list.GetBytes(), show.GetBytes())
				}
			}
		}
		want(false)
		for _, n := range r.nodes {
			if err := n.core.engine.Flush(r.t.Context()); err != nil {
				r.t.Fatal(err)
			}
		}
		want(true)
	})
}
