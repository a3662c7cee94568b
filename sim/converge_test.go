package sim

import (
	"context"
	"errors"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard"
)

// replicasAt are replicas by node. Each hash is that of the applied index, but for the
// node whose data are spoiled; late applies one more entry just before its hash is taken.
type replicasAt struct {
	desc          keyspace.Descriptor
	applied       map[keyspace.NodeID]uint64
	late, spoiled keyspace.NodeID
}

func (r *replicasAt) Show(_ context.Context, n keyspace.NodeID, _ keyspace.RangeID) (*shard.Status, error) {
	return &shard.Status{Node: n, Descriptor: r.desc, Applied: raftgroup.Position{Index: r.applied[n], Term: 5}, Hash: "same"}, nil
}

func (r *replicasAt) HashAt(_ context.Context, n keyspace.NodeID, _ keyspace.RangeID, _, _ keyspace.Revision) (uint64, error) {
	if n == r.late {
		r.applied[n]++
		r.late = 0
	}
	if n == r.spoiled {
		return 0xbad, nil
	}
	return r.applied[n], nil
}

// A replica that applies while it is hashed is looked at again; one with other data at
// the same index never becomes equal.
func TestSameReplicas(t *testing.T) {
	d := keyspace.Descriptor{Range: 1, Generation: 1}
	for n := keyspace.NodeID(1); n <= 3; n++ {
		d.Replicas = append(d.Replicas, keyspace.Replica{Node: n, ID: keyspace.ReplicaID(n)})
	}
	at := func(a, b, c uint64) *replicasAt {
		return &replicasAt{desc: d, applied: map[keyspace.NodeID]uint64{1: a, 2: b, 3: c}}
	}
	check := func(what string, r *replicasAt, want, never bool) {
		t.Helper()
		err := sameReplicas(t.Context(), r, &d)
		if (err == nil) != want || errors.Is(err, errNever) != never {
			t.Errorf("%s: %v", what, err)
		}
	}
	check("equal", at(7, 7, 7), true, false)
	check("one behind", at(7, 6, 7), false, false)
	for n := keyspace.NodeID(1); n <= 3; n++ {
		r := at(7, 7, 7)
		r.late = n
		check("one applies", r, false, false)
		r = at(7, 7, 7)
		r.spoiled = n
		check("other data", r, false, true)
	}
}
