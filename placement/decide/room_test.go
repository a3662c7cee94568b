package decide

import (
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// TestRoomBehindFullDisks: nodes whose disks are full of other data are the emptiest of what is
// counted here. However many they are, they hide nobody who has room.
func TestRoomBehindFullDisks(t *testing.T) {
	const disk = 1 << 40
	set := Defaults()
	c := New(set, 1, 0)
	for id := keyspace.NodeID(1); id <= 4; id++ {
		c.PutNode(Node{ID: id, Capacity: disk})
	}
	for id := keyspace.NodeID(5); id <= 5+2*maxLook; id++ {
		c.PutNode(Node{ID: id, Capacity: disk, Used: disk})
	}
	of := func(nodes ...keyspace.NodeID) (d keyspace.Descriptor) {
		d.Generation, d.ConfIndex = 1, 1
		for _, n := range nodes {
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(n), Node: n})
		}
		return d
	}
	lost := of(1, 2, 3)
	lost.Range, lost.Span.End = 1, []byte("m")
	c.PutRange(Range{Descriptor: lost, Leader: 1, Bytes: 1 << 20})
	other := of(4) // so that it is not among the emptiest
	other.Range, other.Span.Start = 2, []byte("m")
	c.PutRange(Range{Descriptor: other, Leader: 4, Bytes: 64 << 20})
	c.PutNode(Node{ID: 3, Capacity: disk, Silent: true})
	ops := c.Decide(clock.Time(0).Add(set.NodeDeadAfter + time.Second)).Operations
	if len(ops) == 0 || ops[0].Range != 1 || ops[0].To != 4 {
		t.Errorf("%v; want the replica on node 3 rebuilt on node 4; %s", ops, c.Explain(1))
	}
}
