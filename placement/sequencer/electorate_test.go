package sequencer

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// TestElectorate: of a joint configuration each half must agree.
func TestElectorate(t *testing.T) {
	e := electorateOf([]keyspace.Replica{
		{Node: 1}, {Node: 2}, {Node: 3, Role: keyspace.RoleVoterOutgoing}, {Node: 4, Role: keyspace.RoleVoterIncoming}, {Node: 5, Role: keyspace.RoleLearner},
	})
	for _, c := range []struct {
		nodes []keyspace.NodeID
		want  bool
	}{
		{[]keyspace.NodeID{1, 2}, true},
		{[]keyspace.NodeID{1, 3}, false},
		{[]keyspace.NodeID{1, 4}, false},
		{[]keyspace.NodeID{1, 3, 4}, true},
		{[]keyspace.NodeID{1, 5}, false},
		{nil, false},
	} {
		if got := e.agree(c.nodes); got != c.want {
			t.Errorf("%v agree: %t", c.nodes, got)
		}
	}
	if got := fmt.Sprint(e.all()); got != "[1 2 3 4]" {
		t.Errorf("who votes: %s", got)
	}
	if e := electorateOf([]keyspace.Replica{{Node: 1}, {Node: 2}, {Node: 3}}); e.agree([]keyspace.NodeID{3}) || !e.agree([]keyspace.NodeID{3, 1}) || e[1] != nil {
		t.Errorf("%v", e)
	}
}
