package decide

import (
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// TestUnfitWords: each node that cannot take the lead is named with what helps with it.
func TestUnfitWords(t *testing.T) {
	of := func(id keyspace.NodeID, n Node) *node {
		n.ID = id
		return &node{Node: n, known: true}
	}
	nodes := map[keyspace.NodeID]*node{
		2: of(2, Node{Silent: true}), 3: of(3, Node{Silent: true, State: Draining}), 4: of(4, Node{State: Draining}),
		5: of(5, Node{State: Decommissioning, Isolated: true}), 6: of(6, Node{Isolated: true}), 7: of(7, Node{Silent: true}),
	}
	why, do := unfitWords(nodes)
	if want := ": node 2, node 7 is silent; node 3 is silent, and drained or decommissioned; node 4 is drained too; node 5 is decommissioned; node 6 hears hardly any other node"; why != want {
		t.Errorf("%q, want %q", why, want)
	}
	if want := "bring node 2, node 7 back, or bring node 3 back and undrain or recommission it, or undrain node 4 first, or recommission node 5 first, or let node 6 hear the others first"; do != want {
		t.Errorf("%q, want %q", do, want)
	}
	if why, do = unfitWords(nil); why != "" || do != "add a node" {
		t.Errorf("%q, %q", why, do)
	}
}
