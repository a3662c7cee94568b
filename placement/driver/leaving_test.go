package driver

import (
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// TestEmptied: a node that leaves is emptied when it has no replica and none comes to it. The
// view has no range map: nobody may walk it for this, since it has a million ranges.
func TestEmptied(t *testing.T) {
	replicas := func(nodes ...keyspace.NodeID) (rs []keyspace.Replica) {
		for _, n := range nodes {
			rs = append(rs, keyspace.Replica{ID: keyspace.ReplicaID(n), Node: n})
		}
		return rs
	}
	const (
		serves, stays, hasReplica, isOwn, isTarget, learns, empty keyspace.NodeID = 1, 2, 3, 4, 5, 6, 7
	)
	var nodes []fsm.Node
	d := &decider{c: decide.New(decide.Defaults(), 1, 0)}
	for id := serves; id <= empty; id++ {
		n := fsm.Node{ID: id, State: fsm.NodeDecommissioned, Leaves: id != stays}
		if id == serves {
			n.State, n.Leaves = fsm.NodeServing, false
		}
		nodes = append(nodes, n)
		d.c.PutNode(decidedNode(&n))
	}
	viewOf := func(own []keyspace.Replica, ops ...fsm.Operation) *fsm.View {
		m := (&fsm.Map{}).With(1, nil, nodes, keyspace.Descriptor{ConfIndex: 1, Replicas: own})
		return (&fsm.View{Map: *m}).WithOperations(ops)
	}
	v := viewOf(replicas(serves, isOwn), fsm.Operation{ID: 9, Range: 2, Kind: fsm.OperationMove, From: serves, To: isTarget})
	g := decide.Range{Descriptor: keyspace.Descriptor{Range: 1, Generation: 1, ConfIndex: 1, Replicas: replicas(serves, hasReplica)}}
	g.Descriptor.Replicas = append(g.Descriptor.Replicas, keyspace.Replica{ID: 8, Node: learns, Role: keyspace.RoleLearner})
	d.c.PutRange(g)
	want := func(what string, ids ...keyspace.NodeID) {
		t.Helper()
		is := map[keyspace.NodeID]bool{}
		for _, id := range d.emptied(v) {
			is[id] = true
		}
		for _, id := range ids {
			if !is[id] {
				t.Errorf("%s: node %s is emptied", what, id)
			}
		}
		if len(is) != len(ids) {
			t.Errorf("%s: emptied are %v, want %v", what, is, ids)
		}
	}
	want("at first", empty)
	v = viewOf(replicas(serves, isOwn))
	want("without the operation", isTarget, empty)
	g.Descriptor.ConfIndex, g.Descriptor.Replicas = 2, replicas(serves)
	d.c.PutRange(g)
	want("without their replicas", hasReplica, isTarget, learns, empty)
	v = viewOf(replicas(serves))
	want("without the placement group", hasReplica, isOwn, isTarget, learns, empty)
}
