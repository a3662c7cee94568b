package operate

import (
	"errors"
	"maps"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// TestNodesThatGetNoReplicas: each is listed with why, by placement show and by the survey. Where ranges are to have more voters than
// nodes take, the refusal names them too.
func TestNodesThatGetNoReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(9)
		f.known = (&fsm.Map{}).With(1, nil, f.nodes, keyspace.Descriptor{ConfIndex: 1, Replicas: f.group.Replicas})
		f.ranges[0].Replicas = f.ranges[0].Replicas[:3]
		f.nodes[2].State, f.nodes[3].State, f.nodes[4].State = fsm.NodeDraining, fsm.NodeDecommissioned, fsm.NodeLearner
		f.dead[6], f.aside = true, map[keyspace.NodeID]bool{9: true}
		f.reports = map[keyspace.NodeID]Report{
			1: {Capacity: 1000, Used: 900}, 2: {Isolated: true}, 7: {Capacity: 1000, Used: 931}, 8: {NoMemory: true},
		}
		want := map[string]string{
			"n2": isolatedText, "n3": "it is drained", "n4": "it is decommissioned", "n5": "its state is learner", "n6": "it is silent",
			"n7": "its disk is 93.1 % full, and above 90 % it gets none", "n8": "it has no memory for more (--memory-budget-bytes)",
			"n9": "it is silent",
		}
		f.wantDeclining(t, want)
	})
}

// wantDeclining compares which nodes get no replicas and why.
func (f *fake) wantDeclining(t *testing.T, want map[string]string) {
	t.Helper()
	group, err := f.admin().PlacementGroup(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	survey, err := f.admin().Survey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for what, r := range map[string]*adminpb.Replication{"placement show": group.GetReplication(), "survey": survey.GetReplication()} {
		got := map[string]string{}
		for _, d := range r.GetDeclining() {
			got[d.GetNode()] = d.GetWhy()
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
}

// TestAllNodesAreIsolated: placement gives them replicas then, as nothing would be rebuilt otherwise.
func TestAllNodesAreIsolated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(5)
		f.known = (&fsm.Map{}).With(1, nil, f.nodes, keyspace.Descriptor{ConfIndex: 1, Replicas: f.group.Replicas})
		f.reports = map[keyspace.NodeID]Report{}
		for id := keyspace.NodeID(1); id <= 5; id++ {
			f.reports[id] = Report{Isolated: true}
		}
		f.wantDeclining(t, map[string]string{})
		delete(f.reports, 1)
		f.wantDeclining(t, map[string]string{
			"n2": isolatedText, "n3": isolatedText, "n4": isolatedText, "n5": isolatedText,
		})
	})
}

const isolatedText = "it hears hardly any other node, and gets some only where a range has no other way"

// TestFullNodesAreNamedByARefusal: of disk and of memory, where each range could have more voters but for them.
func TestFullNodesAreNamedByARefusal(t *testing.T) {
	f := newFake(5)
	f.ranges[0].Replicas = f.ranges[0].Replicas[:3]
	f.reports = map[keyspace.NodeID]Report{4: {Capacity: 1000, Used: 950}, 5: {NoMemory: true}}
	_, err := f.admin().SetReplication(t.Context(), 5, true)
	var r *adminapi.Refusal
	if !errors.As(err, &r) || !strings.Contains(r.Reason, "node n4 has too full a disk; node n5 has no memory for more replicas") || !strings.Contains(r.NextStep, "--memory-budget-bytes on node n5") {
		t.Errorf("%v", err)
	}
}
