package node

import (
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// TestNodeNames: a certificate's name is that of the peer's own row, or, before the row has one, of
// no other row.
func TestNodeNames(t *testing.T) {
	var n nodeNames
	if n.fit(1, "n1") {
		t.Error("a node without a row has a name")
	}
	n.set([]fsm.Node{
		{ID: 1, Name: "n1", State: fsm.NodeServing},
		{ID: 2, Name: "n2", State: fsm.NodeRemoved},
		{ID: 3},
		{ID: 4, Name: "n2", State: fsm.NodeServing},
		{ID: 5, Name: "old", State: fsm.NodeRemoved},
	})
	for _, c := range []struct {
		id   keyspace.NodeID
		name string
		want bool
	}{
		{1, "n1", true},
		{1, "n2", false},
		{1, "new", false},
		{2, "n2", true},   // it comes to be told that it was removed
		{3, "n1", false},  // a new member must not pose as one that is there
		{3, "n2", false},  // nor as the successor of one that was removed
		{3, "new", true},  // it has not announced itself yet
		{3, "old", true},  // it may replace the node that was removed
		{9, "new", false}, // no row
	} {
		if got := n.fit(c.id, c.name); got != c.want {
			t.Errorf("node %d, name %s: %t", c.id, c.name, got)
		}
	}
	n.set([]fsm.Node{{ID: 3, Name: "n3"}})
	if n.fit(3, "new") || !n.fit(3, "n3") || n.fit(1, "n1") {
		t.Error("an old table counts")
	}
}
