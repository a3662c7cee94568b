package node

import (
	"context"
	"fmt"
	"testing"
	"time"

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
			l, err := admin{n.core}.Ranges(r.t.Context(), &adminpb.RangeListRequest{})
			if err != nil || len(l.GetRanges()) != 1 || l.GetStale() {
				r.t.Fatalf("list at node %s: %v, %v", n.id, l, err)
			}
			s, err := admin{n.core}.ShowRange(r.t.Context(), 1)
			if err != nil {
				r.t.Fatalf("show at node %s: %v", n.id, err)
			}
			return l.GetRanges()[0], s.GetRange()
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

// TestListsWithoutQuorum: the last of three nodes still says which nodes and ranges
// there are, and that it is an old answer, within a command's time.
func TestListsWithoutQuorum(t *testing.T) {
	const ranges = 2
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "v")
		for _, n := range r.nodes {
			l, err := admin{n.core}.Nodes(r.t.Context())
			if err != nil || len(l.GetNodes()) != 3 || l.GetStale() {
				r.t.Fatalf("with a quorum: %v, %v", l, err)
			}
		}
		r.crash(r.nodes[1:]...)
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		nodes, err := admin{r.nodes[0].core}.Nodes(ctx)
		if err != nil || len(nodes.GetNodes()) != 3 || !nodes.GetStale() {
			r.t.Fatalf("nodes without a quorum: %v, %v", nodes, err)
		}
		for i, n := range nodes.GetNodes() {
			if n.GetAlive() != (i == 0) {
				r.t.Errorf("node %s: alive %t", n.GetId(), n.GetAlive())
			}
		}
		ctx, cancel = context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		list, err := admin{r.nodes[0].core}.Ranges(ctx, &adminpb.RangeListRequest{})
		if err != nil || len(list.GetRanges()) != ranges || !list.GetStale() {
			r.t.Fatalf("ranges without a quorum: %v, %v", list, err)
		}
	})
}
