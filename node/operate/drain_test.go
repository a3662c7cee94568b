package operate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard"
)

// TestWhoIsTakenForALeaderIsNotDown: a silent node counts as the leader that others take it for,
// until one of them says that it leads itself.
func TestWhoIsTakenForALeaderIsNotDown(t *testing.T) {
	at := func(leader, self keyspace.NodeID) []shard.Summary {
		return []shard.Summary{{Descriptor: keyspace.Descriptor{Range: 7}, LeaderNode: leader, IsLeader: leader == self}}
	}
	for _, tc := range []struct {
		what       string
		heard      bool
		two, three keyspace.NodeID // whom they take for the leader of the range
		leads      int
		unsure     bool
		leaderless bool
	}{
		{what: "it is down", two: 0, three: 3},
		{what: "it is heard, and another leads", heard: true, two: 1, three: 3, unsure: true},
		{what: "it is heard, and nobody knows of a leader", heard: true, unsure: true},
		{what: "another hears it", two: 0, three: 1, leads: 1, unsure: true},
		{what: "one has not heard yet who leads now", two: 1, three: 3},
		{what: "it is down, and has no successor yet", leaderless: true},
	} {
		v := viewOf(3)
		delete(v.lists, 1)
		v.lists[2], v.lists[3] = at(tc.two, 2), at(tc.three, 3)
		v.heard = map[keyspace.NodeID]bool{1: tc.heard}
		v.settle([]keyspace.Descriptor{{Range: 7, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2}, {ID: 3, Node: 3}}}})
		if leads := len(v.ledBy(1)); leads != tc.leads || v.unsure(1) != tc.unsure || v.row(&v.nodes[0]).GetLeaders() != int64(tc.leads) {
			t.Errorf("%s: it leads %d, unsure %t", tc.what, leads, v.unsure(1))
		}
		if err := v.mayDrain(&v.nodes[0], 0); (err != nil) != (tc.unsure || tc.leaderless) {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}

// TestPlacementWaitsForWhomItsLeaderMisses: what is said to be waited for goes by what the leader of
// placement hears, whoever else hears more.
func TestPlacementWaitsForWhomItsLeaderMisses(t *testing.T) {
	v := viewOf(3)
	v.heard = map[keyspace.NodeID]bool{2: true, 3: true}
	v.placement.Leader = 1
	if v.silent(1) || v.silent(2) || v.silent(3) {
		t.Error("somebody is silent where all are heard")
	}
	v.reports = map[keyspace.NodeID]Report{1: {Hears: []keyspace.NodeID{2}}}
	if v.silent(1) || v.silent(2) || !v.silent(3) {
		t.Error("the leader of placement misses node 3 alone")
	}
}

// TestIsolatedNodesTakeNothingOfPlacement: neither its leadership nor a replica of it.
func TestIsolatedNodesTakeNothingOfPlacement(t *testing.T) {
	v := &clusterView{byName: map[keyspace.NodeID]string{2: "n2", 3: "n3"}, lists: map[keyspace.NodeID][]shard.Summary{}, placement: placement.Status{Leader: 1}}
	for id := keyspace.NodeID(1); id <= 4; id++ {
		v.nodes = append(v.nodes, fsm.Node{ID: id, Name: "n" + id.String(), State: fsm.NodeServing})
		v.lists[id] = nil
		if id < 4 {
			v.placement.Replicas = append(v.placement.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id})
		}
	}
	for _, tc := range []struct {
		isolated            []keyspace.NodeID
		drain, decommission string
	}{
		{isolated: []keyspace.NodeID{2}},
		{isolated: []keyspace.NodeID{2, 3}, drain: "nobody else can lead the placement group: n2, n3"},
		{isolated: []keyspace.NodeID{4}, decommission: "no other node serves that could take it"},
	} {
		v.isolated = map[keyspace.NodeID]bool{}
		for _, id := range tc.isolated {
			v.isolated[id] = true
		}
		for _, of := range []struct {
			err  error
			want string
		}{{v.mayDrain(&v.nodes[0], 0), tc.drain}, {v.mayDecommission(&v.nodes[0], 0), tc.decommission}} {
			if got := fmt.Sprint(of.err); (of.err != nil) != (of.want != "") || !strings.Contains(got, of.want) {
				t.Errorf("beside isolated %v: %v, want %q", tc.isolated, of.err, of.want)
			}
		}
	}
}

// TestNobodyLeavesWhileThePlacementGroupIsUnknown: what the node is to it may be what keeps it.
func TestNobodyLeavesWhileThePlacementGroupIsUnknown(t *testing.T) {
	v := viewOf(4)
	v.placement = placement.Status{}
	for what, err := range map[string]error{"drained": v.mayDrain(&v.nodes[0], 0), "decommissioned": v.mayDecommission(&v.nodes[0], 0)} {
		if want := "n1 cannot be " + what + ": who holds the placement group is not known"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestNobodyLeavesWhileKeysAreMissing: a range that nobody has told whole may be what keeps it.
func TestNobodyLeavesWhileKeysAreMissing(t *testing.T) {
	v := viewOf(5)
	v.settle([]keyspace.Descriptor{rangeOf(1, 1, "", "-"), rangeOf(9, 2, "m", "-")})
	if len(v.missing) != 1 {
		t.Fatalf("missing are %v", v.missing)
	}
	for what, err := range map[string]error{"drained": v.mayDrain(&v.nodes[0], 0), "decommissioned": v.mayDecommission(&v.nodes[0], 0)} {
		if want := "n1 cannot be " + what + ": who holds some of the keys is not known now"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// viewOf is that of so many nodes, which all answer and hold the placement group.
func viewOf(nodes keyspace.NodeID) *clusterView {
	v := &clusterView{byName: map[keyspace.NodeID]string{}, lists: map[keyspace.NodeID][]shard.Summary{}}
	for id := keyspace.NodeID(1); id <= nodes; id++ {
		name := "n" + id.String()
		v.nodes, v.lists[id], v.byName[id] = append(v.nodes, fsm.Node{ID: id, Name: name, State: fsm.NodeServing}), nil, name
		v.placement.Replicas = append(v.placement.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id, Role: keyspace.RoleVoter})
	}
	return v
}

// TestWhatTakesNodesBack: a refusal names what helps with each node that is away. To undrain
// one that is silent does not.
func TestWhatTakesNodesBack(t *testing.T) {
	for _, tc := range []struct {
		two, three fsm.NodeState
		silent     keyspace.NodeID
		want       string
	}{
		{two: fsm.NodeDraining, three: fsm.NodeDecommissioned, want: "take n2 back first (skein node undrain n2), or take n3 back first (skein node recommission n3)"},
		{two: fsm.NodeDraining, three: fsm.NodeServing, silent: 3, want: "bring n3 back, which does not answer, or take n2 back first (skein node undrain n2)"},
		{two: fsm.NodeDraining, three: fsm.NodeDraining, silent: 3, want: "bring n3 back, which does not answer, and take it back (skein node undrain n3), or take n2 back first (skein node undrain n2)"},
	} {
		v := viewOf(5)
		v.nodes[1].State, v.nodes[2].State = tc.two, tc.three
		delete(v.lists, tc.silent)
		var r *adminapi.Refusal
		if err := v.mayDrain(&v.nodes[0], 0); !errors.As(err, &r) || r.NextStep != tc.want {
			t.Errorf("%v, want %q", err, tc.want)
		}
		group := v.placement.Replicas
		v.placement.Replicas = []keyspace.Replica{group[0], group[3], group[4]}
		// Of five replicas the silent one alone stops nothing.
		v.settle([]keyspace.Descriptor{{Range: 9, Generation: 1, Replicas: group}})
		r = nil
		if err := v.mayDrain(&v.nodes[0], 0); !errors.As(err, &r) || !strings.HasSuffix(r.Reason, "beside n2, n3 there is no quorum of range 9") || r.NextStep != tc.want {
			t.Errorf("of a range: %v, want %q", err, tc.want)
		}
	}
}

// TestPlacementHasRoomForWhoIsDecommissioned: each voter of the placement group that is to go
// needs another node, but those above the least.
func TestPlacementHasRoomForWhoIsDecommissioned(t *testing.T) {
	for _, tc := range []struct {
		what     string
		nodes    keyspace.NodeID
		voters   int
		from, to keyspace.NodeID // of the group's operation under way
		leave    keyspace.NodeID // beside node 1
		room     bool
	}{
		{what: "one is free", nodes: 4, voters: 3, room: true},
		{what: "none is free", nodes: 3, voters: 3},
		{what: "the free one is for another that goes", nodes: 4, voters: 3, leave: 2},
		{what: "two are free", nodes: 5, voters: 3, leave: 2, room: true},
		{what: "two were free, and one of them is being filled for the other", nodes: 5, voters: 3, leave: 2, from: 2, to: 4, room: true},
		{what: "one more than the least", nodes: 4, voters: 4, room: true},
		{what: "one more than the least, and two go", nodes: 4, voters: 4, leave: 2},
		{what: "one that serves gives its vote up, and can take another", nodes: 4, voters: 4, from: 2, room: true},
		{what: "the free one is being filled for one that goes", nodes: 4, voters: 3, leave: 2, from: 2, to: 4},
		{what: "it goes already", nodes: 4, voters: 3, from: 1, to: 4, room: true},
		{what: "one more is being made", nodes: 4, voters: 3, to: 4, room: true},
	} {
		v := &clusterView{lists: map[keyspace.NodeID][]shard.Summary{}, byName: map[keyspace.NodeID]string{}}
		for id := keyspace.NodeID(1); id <= tc.nodes; id++ {
			n := fsm.Node{ID: id, Name: "n" + id.String(), State: fsm.NodeServing}
			if id == tc.leave {
				n.State = fsm.NodeDecommissioned
			}
			v.nodes, v.lists[id] = append(v.nodes, n), nil
			m := keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id, Role: keyspace.RoleVoter}
			if id == tc.to {
				m.Role = keyspace.RoleLearner
			}
			if int(id) <= tc.voters || id == tc.to {
				v.placement.Replicas = append(v.placement.Replicas, m)
			}
		}
		if o := (fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationMove, From: tc.from, To: tc.to}); tc.from+tc.to > 0 {
			if tc.from == 0 {
				o.Kind = fsm.OperationAdd
			}
			if tc.to == 0 {
				o.Kind = fsm.OperationRemove
			}
			v.operations = map[keyspace.RangeID]fsm.Operation{fsm.OwnGroup: o}
		}
		err := v.mayDecommission(&v.nodes[0], 0)
		if tc.room != (err == nil) || err != nil && !strings.Contains(err.Error(), "no other node serves that could take it") {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}

// TestPlan: of each state, where each change leads or what is to be done instead.
func TestPlan(t *testing.T) {
	for _, tc := range []struct {
		state                                              fsm.NodeState
		drain, undrain, decommission, recommission, remove string
	}{
		{fsm.NodeUnstarted, "start it", "start it", "start it", "start it", "removed"},
		{fsm.NodeUnstartedLearner, "start it", "start it", "start it", "start it", "removed"},
		{fsm.NodeLearner, "stop it as it is", "etcdctl member promote", "decommissioned", "etcdctl member promote", "skein node decommission"},
		{fsm.NodeServing, "draining", "serving", "decommissioned", "serving", "skein node decommission"},
		{fsm.NodeDraining, "draining", "serving", "decommissioned", "skein node undrain", "skein node decommission"},
		{fsm.NodeDecommissioned, "skein node recommission", "skein node recommission", "decommissioned", "serving", "removed"},
	} {
		for change, want := range map[adminapi.NodeChange]string{
			adminapi.Drain: tc.drain, adminapi.Undrain: tc.undrain, adminapi.Decommission: tc.decommission,
			adminapi.Recommission: tc.recommission, adminapi.Remove: tc.remove,
		} {
			to, err := plan(change, &fsm.Node{ID: 9, Name: "n9", State: tc.state})
			got := to.String()
			var r *adminapi.Refusal
			if errors.As(err, &r) {
				got = r.NextStep
			}
			if !strings.Contains(got, want) {
				t.Errorf("%s a node that is %s: %s, want %s", change, tc.state, got, want)
			}
		}
	}
}

func TestStopsWithout(t *testing.T) {
	group := func(nodes ...keyspace.NodeID) (g []keyspace.Replica) {
		for _, n := range nodes {
			g = append(g, keyspace.Replica{ID: keyspace.ReplicaID(n), Node: n})
		}
		return g
	}
	learner := append(group(1, 2, 3), keyspace.Replica{ID: 4, Node: 4, Role: keyspace.RoleLearner})
	for _, tc := range []struct {
		group []keyspace.Replica
		node  keyspace.NodeID
		away  []keyspace.NodeID
		want  bool
	}{
		{group: nil, node: 1},
		{group: group(1), node: 1, want: true},
		{group: group(1), node: 2},
		{group: group(1, 2), node: 1, want: true},
		{group: group(1, 2, 3), node: 1},
		{group: group(1, 2, 3), node: 1, away: []keyspace.NodeID{2}, want: true},
		{group: group(1, 2, 3), node: 4, away: []keyspace.NodeID{2, 3}},
		{group: group(1, 2, 3), node: 0, away: []keyspace.NodeID{2}},
		{group: group(1, 2, 3), node: 0, away: []keyspace.NodeID{2, 3}, want: true},
		{group: group(1, 2, 3, 4, 5), node: 5, away: []keyspace.NodeID{1}},
		{group: learner, node: 1},
		{group: learner, node: 4, away: []keyspace.NodeID{1, 2}},
	} {
		away := func(n keyspace.NodeID) bool { return slices.Contains(tc.away, n) }
		if got := stopsWithout(tc.group, tc.node, away); got != tc.want {
			t.Errorf("%v without %s and %v: %t", tc.group, tc.node, tc.away, got)
		}
	}
}
