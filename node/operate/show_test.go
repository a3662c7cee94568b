package operate

import (
	"strings"
	"testing"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard"
)

// TestWhoLeadsWhatIsShown: a range is shown by the word of its newest leader, and one that has
// not what another replica has, or the map, is none.
func TestWhoLeadsWhatIsShown(t *testing.T) {
	says := func(node keyspace.NodeID, conf, term uint64, serving bool) shown {
		return shown{state: &shard.Status{Node: node, Serving: serving, Raft: raftgroup.Status{Term: term}, Descriptor: keyspace.Descriptor{Range: 1, ConfIndex: conf}}}
	}
	silent := shown{err: kverror.NoLeader}
	for _, tc := range []struct {
		what   string
		mapped uint64
		all    []shown
		conf   uint64
		leader keyspace.NodeID
	}{
		{"the map is late", 10, []shown{says(1, 20, 5, true), says(2, 10, 5, false), silent}, 20, 1},
		{"the leader was replaced and has not heard of it", 10, []shown{says(1, 10, 5, true), says(2, 20, 6, false), silent}, 20, 0},
		{"the map knows of it", 20, []shown{says(1, 10, 5, true), silent}, 20, 0},
		{"two say that they lead", 20, []shown{says(1, 20, 5, true), says(2, 20, 6, true)}, 20, 2},
		{"nobody answers", 10, []shown{silent}, 10, 0},
	} {
		d := newest(keyspace.Descriptor{Range: 1, ConfIndex: tc.mapped}, tc.all)
		leader := keyspace.NodeID(0)
		if st := leading(&d, tc.all); st != nil {
			leader = st.Node
		}
		if d.ConfIndex != tc.conf || leader != tc.leader {
			t.Errorf("%s: led by %s as of %d, want %s as of %d", tc.what, leader, d.ConfIndex, tc.leader, tc.conf)
		}
	}
}

// TestWhoIsShown: show lists the replicas of the range that it shows, each with its own answer.
// It says of a replica that was not asked that it was not.
func TestWhoIsShown(t *testing.T) {
	held := func(ids ...keyspace.ReplicaID) keyspace.Descriptor {
		d := keyspace.Descriptor{Range: 1, ConfIndex: uint64(len(ids))}
		for _, id := range ids {
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: id, Node: keyspace.NodeID(id % 10), Role: keyspace.RoleVoter})
		}
		return d
	}
	var all []shown
	was := held(1, 2, 13)
	for _, m := range was.Replicas {
		m.Role = keyspace.RoleLearner // since then it votes
		all = append(all, shown{of: m, state: &shard.Status{Node: m.Node}})
	}
	now := held(2, 13, 4, 3) // the one on node 3 is another one
	for i, s := range saidBy(&now, all) {
		asked := i < 2
		if s.of != now.Replicas[i] || (s.state != nil) != asked || (s.err == nil) != asked || asked && s.state.Node != s.of.Node {
			t.Errorf("replica %d is shown as %+v", i, s)
		}
	}
}

// What becomes of a replica in quarantine stands beside it. It is repaired, or it is left alone since its
// range has no quorum. A node that its range cannot do without meanwhile is not drained.
func TestReplicasInQuarantineAreShown(t *testing.T) {
	f := newFake(3)
	bad := func(m keyspace.ReplicaID) []Quarantined {
		return []Quarantined{{Range: 1, Replica: m, Reason: "corruption in 000007.sst", Since: 1000}}
	}
	show := func(name string) *adminpb.NodeShowResponse {
		t.Helper()
		s, err := f.admin().ShowNode(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, tc := range []struct {
		what        string
		quarantined map[keyspace.NodeID][]Quarantined
		settings    []fsm.Setting
		outlook     string
	}{
		{"one of three", map[keyspace.NodeID][]Quarantined{3: bad(3)}, nil, "needed: quorum-risk; nothing holds it up"},
		{"two of three", map[keyspace.NodeID][]Quarantined{2: bad(2), 3: bad(3)}, nil, "it has lost its quorum: 2 of its replicas are silent, all of them in quarantine; only serializable reads at the others are answered yet"},
		{"removed already", map[keyspace.NodeID][]Quarantined{3: bad(9)}, nil, "it is no member of the range any more, and is about to be removed"},
		{"paused", map[keyspace.NodeID][]Quarantined{3: bad(3)}, []fsm.Setting{{Name: fsm.SettingPaused, Value: []byte("true")}}, "placement is paused: skein placement resume has it rebuilt"},
	} {
		f.quarantined, f.settings = tc.quarantined, tc.settings
		q := show("3").GetQuarantined()
		if len(q) != 1 || q[0].GetOutlook() != tc.outlook || q[0].GetReason() != "corruption in 000007.sst" || q[0].GetSinceUnixMs() != 1000 {
			t.Errorf("%s: %v", tc.what, q)
		}
		if s := show("1"); len(s.GetQuarantined()) > 0 {
			t.Errorf("%s: node 1 shows %v", tc.what, s.GetQuarantined())
		}
	}
	f.quarantined, f.settings = map[keyspace.NodeID][]Quarantined{3: bad(3)}, nil
	if r := show("2").GetDrain(); !strings.Contains(r.GetReason(), "without it there is no quorum of one range (1)") {
		t.Errorf("node 2 may be drained: %v", r)
	}
	l, err := f.admin().Ranges(t.Context(), &adminpb.RangeListRequest{})
	if err != nil || l.GetRanges()[0].GetMembers()[2].GetQuarantine() == "" || l.GetRanges()[0].GetMembers()[1].GetQuarantine() != "" {
		t.Errorf("the list of ranges: %v, %v", l, err)
	}
}
