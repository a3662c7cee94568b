package operate

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// TestVotersOfPlacementByHand: an operator adds and removes voters of the placement group. A change
// that placement would undo, or that puts the group at risk, is refused. The refusal says what to
// do instead.
func TestVotersOfPlacementByHand(t *testing.T) {
	const none = ""
	drained := func(f *fake, ids ...keyspace.NodeID) {
		for _, id := range ids {
			f.nodes[id-1].State = fsm.NodeDraining
		}
	}
	dead := func(f *fake, ids ...keyspace.NodeID) {
		for _, id := range ids {
			f.dead[id] = true
		}
	}
	for _, tc := range []struct {
		what          string
		nodes, voters int
		change        func(f *fake)
		add, remove   string
		refused, next string // parts of the refusal; no reason means none
	}{
		{what: "a step to five", nodes: 5, voters: 3, add: "n4"},
		{what: "by its id", nodes: 5, voters: 3, add: "4"},
		{what: "two of two", nodes: 2, voters: 1, add: "n2"},
		{what: "a step to seven", nodes: 7, voters: 5, add: "n7"},
		{what: "the seventh", nodes: 7, voters: 6, add: "n7"},
		{what: "an unknown node", nodes: 5, voters: 3, add: "n9", refused: "n9", next: "skein node list"},
		{what: "a node that has one", nodes: 5, voters: 3, add: "n2", refused: "node n2 holds a voter of the placement group already", next: "skein placement show"},
		{what: "a node that is drained", nodes: 5, voters: 3, change: func(f *fake) { drained(f, 4) }, add: "n4", refused: "node n4 is draining", next: "undrain"},
		{what: "a node that does not answer", nodes: 5, voters: 3, change: func(f *fake) { dead(f, 4) }, add: "n4", refused: "node n4 does not answer", next: "start it"},
		{what: "a learner of etcd's clients", nodes: 5, voters: 3, change: func(f *fake) { f.nodes[3].State = fsm.NodeLearner }, add: "n4", refused: "node n4 is learner", next: "promote"},
		{what: "a member that has not started", nodes: 5, voters: 3, change: func(f *fake) { f.nodes[3].State = fsm.NodeUnstarted }, add: "n4", refused: "node n4 is unstarted", next: "start it"},
		{what: "a removed node", nodes: 5, voters: 3, change: func(f *fake) { f.nodes[3].State = fsm.NodeRemoved }, add: "n4", refused: "n4", next: "skein node list"},
		{what: "an eighth", nodes: 9, voters: 7, add: "n8", refused: "7 voters, which is the most", next: "skein placement move"},
		{what: "an even number on all nodes", nodes: 4, voters: 3, add: "n4", refused: "4 voters on 4 nodes survive no more losses than 3", next: "add a node"},
		{what: "the same of six", nodes: 6, voters: 5, add: "n6", refused: "6 voters on 6 nodes survive no more losses than 5", next: "add a node"},
		{what: "without a quorum", nodes: 5, voters: 3, change: func(f *fake) { f.quorum = kverror.NoLeader }, add: "n4", refused: "no leader", next: none},

		{what: "back to five", nodes: 7, voters: 6, remove: "n2"},
		{what: "one that is drained", nodes: 7, voters: 6, change: func(f *fake) { drained(f, 2) }, remove: "n2"},
		{what: "one that does not answer", nodes: 7, voters: 6, change: func(f *fake) { dead(f, 2) }, remove: "n2"},
		{what: "remove from an unknown node", nodes: 7, voters: 6, remove: "n9", refused: "n9", next: "skein node list"},
		{what: "remove where there is none", nodes: 7, voters: 6, remove: "n7", refused: "node n7 holds no voter of the placement group", next: "skein placement show"},
		{what: "fewer than the rule has", nodes: 5, voters: 5, remove: "n2", refused: "in a cluster of 5 nodes has 5: placement would add one again", next: "skein placement move --from n2"},
		{what: "the same of three", nodes: 3, voters: 3, remove: "n2", refused: "in a cluster of 3 nodes has 3: placement would add one again", next: "skein placement move --from n2"},
		{what: "the same where one node is drained", nodes: 5, voters: 5, change: func(f *fake) { drained(f, 5) }, remove: "n2", refused: "in a cluster of 5 nodes has 5: placement would add one again", next: "skein placement move --from n2"},
		{what: "fewer than a range has", nodes: 7, voters: 7, change: func(f *fake) { f.settings = []fsm.Setting{{Name: fsm.SettingReplication, Value: []byte("7")}} }, remove: "n2", refused: "ranges are to have 7: placement would add one again", next: "set-replication"},
		{what: "no quorum would be left", nodes: 7, voters: 6, change: func(f *fake) { dead(f, 3, 4, 5) }, remove: "n2", refused: "n3, n4, n5 do not answer", next: "bring those back"},
		{what: "another change is under way", nodes: 7, voters: 6, change: func(f *fake) {
			f.begin = kverror.New(kverror.BadRequest, "the placement group has operation 12 under way: move from node 1 to node 7")
		}, remove: "n2", refused: "operation 12 under way", next: "skein placement operations"},
	} {
		f := newFake(keyspace.NodeID(tc.nodes))
		f.group.Replicas = f.group.Replicas[:tc.voters]
		if tc.change != nil {
			tc.change(f)
		}
		_, err := f.admin().MovePlacement(context.Background(), tc.remove, tc.add)
		if tc.refused == none {
			want := fsm.Operation{Kind: fsm.OperationAdd, To: 4}
			if tc.remove != none {
				want = fsm.Operation{Kind: fsm.OperationRemove, From: 2}
			}
			if want.To != 0 {
				want.To = keyspace.NodeID(tc.add[len(tc.add)-1] - '0')
			}
			if err != nil || len(f.begun) != 1 || f.begun[0].Kind != want.Kind || f.begun[0].From != want.From || f.begun[0].To != want.To || f.begun[0].Range != fsm.OwnGroup {
				t.Errorf("%s: %v, begun %v, want %s", tc.what, err, f.begun, &want)
			}
			continue
		}
		var r *adminapi.Refusal
		switch ok := errors.As(err, &r); {
		case err == nil || len(f.begun) > 0:
			t.Errorf("%s: %v, begun %v", tc.what, err, f.begun)
		case !strings.Contains(err.Error(), tc.refused):
			t.Errorf("%s: %v, want %q", tc.what, err, tc.refused)
		case tc.next != none && (!ok || !strings.Contains(r.NextStep, tc.next)):
			t.Errorf("%s: %v, want %q as the next step", tc.what, err, tc.next)
		}
	}
}
