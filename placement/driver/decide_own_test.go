package driver

import (
	"testing"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// ownOf is a decider whose placement group has a voter on each of the first nodes. Each node is
// in the zone that is given for it.
func ownOf(voters int, zones ...string) (*decider, *keyspace.Descriptor) {
	d := &decider{
		s:        &Driver{o: Options{Self: 1}},
		settings: decide.Defaults(), nodes: map[keyspace.NodeID]decide.Node{}, lost: map[keyspace.NodeID]bool{}, ownTried: map[keyspace.NodeID]int{},
	}
	own := &keyspace.Descriptor{ConfIndex: 1}
	for i, zone := range zones {
		id := keyspace.NodeID(i + 1)
		d.nodes[id] = decide.Node{ID: id, Zone: zone}
		if i < voters {
			own.Replicas = append(own.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id})
		}
	}
	return d, own
}

// TestOwnZones: what leaves a zone is in no count of it. Else a replica that is to be had in the
// place of the only one of a zone might go to a zone that has one already.
func TestOwnZones(t *testing.T) {
	for _, tc := range []struct {
		what  string
		zones []string
		leave keyspace.NodeID
		lost  bool
		want  keyspace.NodeID
	}{
		{what: "a node beside it, and one in another's zone", zones: []string{"a", "b", "c", "b", "a"}, leave: 1, want: 5},
		{what: "the same where it is lost", zones: []string{"a", "b", "c", "b", "a"}, leave: 1, lost: true, want: 5},
		{what: "nobody else in its zone", zones: []string{"a", "b", "c", "b", "c"}, leave: 1, want: 4},
		{what: "a zone without any", zones: []string{"a", "b", "c", "b", "d"}, leave: 1, want: 5},
		{what: "no zones", zones: []string{"", "", "", "", ""}, leave: 1, want: 4},
	} {
		d, own := ownOf(3, tc.zones...)
		n := d.nodes[tc.leave]
		if tc.lost {
			n.Silent, d.lost[tc.leave] = true, true
		} else {
			n.State = decide.Decommissioning
		}
		d.nodes[tc.leave] = n
		if o, ok := d.ownOperation(own, 1); !ok || o.Kind != fsm.OperationMove || o.From != tc.leave || o.To != tc.want {
			t.Errorf("%s: %s, %t; want node %s", tc.what, &o, ok, tc.want)
		}
	}
}

// TestOwnLeavesFirst: whoever is to be gone in any case does not wait behind one that has nowhere to go.
func TestOwnLeavesFirst(t *testing.T) {
	for _, lost := range []bool{false, true} {
		d, own := ownOf(3, "", "", "")
		for id := keyspace.NodeID(2); id <= 3; id++ {
			d.nodes[id] = decide.Node{ID: id, State: decide.Decommissioning, Leaves: id == 3, Silent: lost}
			d.lost[id] = lost
		}
		if o, ok := d.ownOperation(own, 1); !ok || o.Kind != fsm.OperationRemove || o.From != 3 {
			t.Errorf("lost %t: %s, %t; want node 3 removed", lost, &o, ok)
		}
	}
}

// TestOwnFallbackIsForgotten: isolated nodes have their turns by id for one repair, since copies to
// them may not come. Once one has come the next repair goes by zones again.
func TestOwnFallbackIsForgotten(t *testing.T) {
	d, own := ownOf(3, "a", "b", "c", "a", "b", "c")
	for id := keyspace.NodeID(4); id <= 6; id++ {
		n := d.nodes[id]
		n.Isolated = true
		d.nodes[id] = n
	}
	repair := func(from, want keyspace.NodeID) {
		t.Helper()
		n := d.nodes[from]
		n.Silent, d.lost[from] = true, true
		d.nodes[from] = n
		o, ok := d.ownOperation(own, 1)
		if !ok || o.From != from || o.To != want {
			t.Errorf("%s, %t; want from node %s to node %s", &o, ok, from, want)
		}
		d.ownTried[o.To]++
		d.ownFallback = o.To
	}
	repair(1, 4)
	repair(1, 5) // nothing came to the first
	own.Replicas[0].Node = 5
	d.forgetTried(own)
	repair(2, 4) // as node 6 it is in the zone of none of the others; by turns that one would be next
}

// TestOwnSpread: voters of the placement group that share a zone move to a zone with fewer of
// them, after a while. The leader's voter moves last, and none moves again to a node that never
// got its copy.
func TestOwnSpread(t *testing.T) {
	for _, tc := range []struct {
		what     string
		zones    []string
		voters   int
		silent   keyspace.NodeID
		tried    keyspace.NodeID
		from, to keyspace.NodeID
	}{
		{what: "two in a zone, and a third zone", zones: []string{"a", "a", "b", "c"}, voters: 3, from: 2, to: 4},
		{what: "the second of two nodes is in a zone with fewer", zones: []string{"a", "a", "b", "b", "c"}, voters: 3, from: 2, to: 5},
		{what: "no third zone", zones: []string{"a", "a", "b", "b"}, voters: 3},
		{what: "all in one zone", zones: []string{"", "", "", ""}, voters: 3},
		{what: "three of five in a zone", zones: []string{"a", "a", "a", "b", "b", "c"}, voters: 5, from: 2, to: 6},
		{what: "spread as well as can be", zones: []string{"a", "a", "b", "b", "c", "c"}, voters: 5},
		{what: "one is silent", zones: []string{"a", "a", "b", "c"}, voters: 3, silent: 3},
		{what: "it was tried", zones: []string{"a", "a", "b", "c"}, voters: 3, tried: 4},
	} {
		d, own := ownOf(tc.voters, tc.zones...)
		if tc.silent != 0 {
			n := d.nodes[tc.silent]
			n.Silent = true
			d.nodes[tc.silent] = n
		}
		d.ownTried[tc.tried]++
		if o, ok := d.ownOperation(own, 1); ok {
			t.Errorf("%s: at once: %s", tc.what, &o)
		}
		later := clock.Time(1).Add(d.settings.Patience)
		o, ok := d.ownOperation(own, later)
		if ok != (tc.to != 0) || ok && (o.Kind != fsm.OperationMove || o.From != tc.from || o.To != tc.to) {
			t.Errorf("%s: %s, %t; want from node %s to node %s", tc.what, &o, ok, tc.from, tc.to)
		}
	}
}
