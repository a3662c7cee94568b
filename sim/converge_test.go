package sim

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard"
)

// replicasAt are replicas by node. Each hash fits the applied index, except on the node
// with spoiled data. late applies one more entry just before its hash is taken.
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

// A replica that applies an entry while it is hashed is checked again. A replica with
// other data at the same index never becomes equal.
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

// A map that omits a part of the keyspace, or has it twice, is found.
func TestCovers(t *testing.T) {
	spans := func(borders ...string) (ds []keyspace.Descriptor) {
		for i := 0; i < len(borders); i += 2 {
			ds = append(ds, keyspace.Descriptor{Range: keyspace.RangeID(i/2 + 1), Span: keyspace.Span{Start: []byte(borders[i]), End: []byte(borders[i+1])}})
		}
		return ds
	}
	for _, tc := range []struct {
		ds   []keyspace.Descriptor
		want string
	}{
		{spans("", "j", "j", "s", "s", ""), ""},
		{spans("", ""), ""},
		{nil, "nothing covers"},
		{spans("", "j", "k", ""), "begins at"},
		{spans("", "s", "j", "s", "s", ""), "begins at"},
		{spans("c", ""), "begins at"},
		{spans("", "j", "j", "s"), "nothing covers what comes from"},
		{spans("", "", "", "j"), "has no end"},
		{append(spans("", "j"), keyspace.Descriptor{Range: 1, Span: keyspace.Span{Start: []byte("j")}}), "there twice"},
	} {
		err := covers(tc.ds)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, want %q", tc.ds, err, tc.want)
		}
	}
}

// A replica on a node without a place in the map is found, and one of a range that no
// longer exists.
func TestOrphans(t *testing.T) {
	d := keyspace.Descriptor{Range: 1, Generation: 1, Replicas: []keyspace.Replica{{Node: 1, ID: 1}, {Node: 2, ID: 2}}}
	absorbed := keyspace.Descriptor{Range: 2, Replicas: d.Replicas}
	for _, tc := range []struct {
		node keyspace.NodeID
		held []keyspace.Descriptor
		bad  bool
	}{
		{1, nil, false},
		{1, []keyspace.Descriptor{d}, false},
		{3, []keyspace.Descriptor{d}, true},
		{1, []keyspace.Descriptor{d, absorbed}, true},
	} {
		var held []shard.Summary
		for _, h := range tc.held {
			held = append(held, shard.Summary{Descriptor: h})
		}
		if err := orphans(tc.node, held, []keyspace.Descriptor{d}); (err != nil) != tc.bad || tc.bad && !errors.Is(err, errOrphan) {
			t.Errorf("node %d with %+v: %v", tc.node, tc.held, err)
		}
	}
}

func TestCoversFindsHolesAndOverlaps(t *testing.T) {
	d := func(id int, start, end string) keyspace.Descriptor {
		return keyspace.Descriptor{Range: keyspace.RangeID(id), Span: keyspace.Span{Start: []byte(start), End: []byte(end)}}
	}
	for _, c := range []struct {
		ds   []keyspace.Descriptor
		want string
	}{
		{[]keyspace.Descriptor{d(1, "", "g"), d(2, "g", "")}, ""},
		{[]keyspace.Descriptor{d(1, "", "g"), d(2, "h", "")}, "begins at"},
		{[]keyspace.Descriptor{d(1, "", "g"), d(2, "f", "")}, "begins at"},
		{[]keyspace.Descriptor{d(1, "", "g"), d(1, "g", "")}, "twice"},
		{[]keyspace.Descriptor{d(1, "", "g"), d(2, "g", "k")}, "from \"k\" on"},
		{[]keyspace.Descriptor{d(1, "", ""), d(2, "", "")}, "not the last"},
		{nil, "nothing covers"},
	} {
		err := covers(c.ds)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%v: %v, want %q", c.ds, err, c.want)
		}
	}
}
