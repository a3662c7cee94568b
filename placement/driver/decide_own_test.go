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

// TestOwnNumber: the placement group has as many voters as it would have at the bootstrap of a
// cluster with the nodes that there are now: five from five nodes on, else three. It gets
// another number only after a while, and no even one for long.
func TestOwnNumber(t *testing.T) {
	draining, leaving := decide.Node{State: decide.Draining}, decide.Node{State: decide.Decommissioning}
	silent, isolated := decide.Node{Silent: true, SilentSince: 1}, decide.Node{Isolated: true}
	for _, tc := range []struct {
		what                  string
		voters, nodes, factor int
		zones                 []string
		are                   map[keyspace.NodeID]decide.Node
		add, remove           keyspace.NodeID
		atOnce                bool
	}{
		{what: "three of five nodes", voters: 3, nodes: 5, add: 4},
		{what: "the second step", voters: 4, nodes: 5, add: 5},
		{what: "three of four nodes", voters: 3, nodes: 4},
		{what: "five of nine nodes", voters: 5, nodes: 9},
		{what: "in zones", voters: 3, nodes: 5, zones: []string{"a", "b", "a", "b", "c"}, add: 5},
		{what: "five voters for a range, in a cluster of six", voters: 5, nodes: 6, factor: 5},
		{what: "seven voters for a range", voters: 5, nodes: 7, factor: 7, add: 6, atOnce: true},
		{what: "one of three nodes", voters: 1, nodes: 3, add: 2, atOnce: true},
		{what: "one of two nodes", voters: 1, nodes: 2},
		{what: "one of five nodes, one of them drained", voters: 1, nodes: 5, are: map[keyspace.NodeID]decide.Node{5: draining}, add: 2, atOnce: true},

		{what: "the fifth is silent: there would be four", voters: 3, nodes: 5, are: map[keyspace.NodeID]decide.Node{5: silent}},
		{what: "the fifth is isolated", voters: 3, nodes: 5, are: map[keyspace.NodeID]decide.Node{5: isolated}},
		{what: "the fifth is drained", voters: 3, nodes: 5, are: map[keyspace.NodeID]decide.Node{5: draining}},
		{what: "the fifth is decommissioned", voters: 3, nodes: 5, are: map[keyspace.NodeID]decide.Node{5: leaving}},
		{what: "a voter is silent: a repair may be due", voters: 3, nodes: 6, are: map[keyspace.NodeID]decide.Node{2: silent}},
		{what: "a voter is drained, and comes back", voters: 3, nodes: 5, are: map[keyspace.NodeID]decide.Node{2: draining}, add: 4},

		{what: "four of four nodes", voters: 4, nodes: 4, remove: 4},
		{what: "four of four nodes, one of them drained", voters: 4, nodes: 4, are: map[keyspace.NodeID]decide.Node{3: draining}, remove: 3},
		{what: "four of four nodes, one of them silent", voters: 4, nodes: 4, are: map[keyspace.NodeID]decide.Node{2: silent}, remove: 2},
		{what: "four of four nodes in zones", voters: 4, nodes: 4, zones: []string{"a", "b", "b", "c"}, remove: 3},
		{what: "four of five nodes, one of them silent", voters: 4, nodes: 5, are: map[keyspace.NodeID]decide.Node{5: silent}},
		{what: "two of two nodes", voters: 2, nodes: 2},
		{what: "six of six nodes", voters: 6, nodes: 6, remove: 6},
		{what: "six of seven nodes, which somebody has asked for", voters: 6, nodes: 7},
		{what: "seven of seven nodes, which somebody has asked for", voters: 7, nodes: 7},
	} {
		zones := make([]string, tc.nodes)
		copy(zones, tc.zones)
		d, own := ownOf(tc.voters, zones...)
		if tc.factor > 0 {
			d.settings.ReplicationFactor = tc.factor
		}
		for id, n := range tc.are {
			n.ID, n.Zone = id, d.nodes[id].Zone
			d.nodes[id] = n
		}
		d.members = tc.nodes
		for _, n := range d.nodes {
			if n.State == decide.Decommissioning {
				d.members--
			}
		}
		o, ok := d.ownOperation(own, 1)
		if ok != tc.atOnce {
			t.Errorf("%s: at once: %s, %t", tc.what, &o, ok)
		}
		o, ok = d.ownOperation(own, clock.Time(1).Add(d.settings.Patience-1))
		if ok != tc.atOnce {
			t.Errorf("%s: a moment too early: %s, %t", tc.what, &o, ok)
		}
		o, ok = d.ownOperation(own, clock.Time(1).Add(d.settings.Patience))
		want := fsm.Operation{Kind: fsm.OperationAdd, To: tc.add}
		if tc.remove != 0 {
			want = fsm.Operation{Kind: fsm.OperationRemove, From: tc.remove}
		}
		if ok != (tc.add+tc.remove != 0) || ok && (o.Kind != want.Kind || o.From != want.From || o.To != want.To || o.Reason != decide.Factor) {
			t.Errorf("%s: %s, %t; want %s", tc.what, &o, ok, &want)
		}
	}
}

// TestOwnNumberWaits: a node that comes and goes does not get a voter of the placement group.
func TestOwnNumberWaits(t *testing.T) {
	d, own := ownOf(3, "", "", "", "", "")
	d.members = 5
	now := clock.Time(1)
	for range 10 {
		for _, silent := range []bool{false, true} {
			n := d.nodes[5]
			n.Silent = silent
			d.nodes[5] = n
			if o, ok := d.ownOperation(own, now); ok {
				t.Fatalf("at %v: %s", now, &o)
			}
			now = now.Add(d.settings.Patience / 2)
		}
	}
	n := d.nodes[5]
	n.Silent = false
	d.nodes[5] = n
	for i := range 2 {
		if o, ok := d.ownOperation(own, now); ok != (i == 1) {
			t.Errorf("it has come to stay: %s, %t", &o, ok)
		}
		now = now.Add(d.settings.Patience)
	}
}
