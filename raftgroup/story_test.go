package raftgroup

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/confentry"
)

// TestStories runs the stories in testdata/stories. Commands:
//
//	conf                       set a configuration: lines "ID role"
//	change                     apply a change: lines "add|promote|demote|remove ID";
//	                           without lines: leave the joint configuration
//	answers tick= drift=       compute the lease of replica 1: lines "ID sent promise",
//	                           times in milliseconds
//	floor lag=                 how far a log may go: lines "index bytes" as appended
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		var rs []keyspace.Replica
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "conf":
				rs = parseReplicas(t, d.Input)
				return describeConf(rs)
			case "change":
				rs = storyChange(t, d, rs)
				return describeConf(rs)
			case "answers":
				return storyAnswers(t, d, rs)
			case "floor":
				return storyFloor(t, d)
			}
			t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
			return ""
		})
	})
}

var roleNames = []string{"voter", "learner", "incoming", "outgoing", "demoting"}

func parseReplicas(t *testing.T, s string) (rs []keyspace.Replica) {
	t.Helper()
	for line := range strings.Lines(s) {
		var id int
		var role string
		if _, err := fmt.Sscan(line, &id, &role); err != nil {
			t.Fatal(err)
		}
		rs = append(rs, keyspace.Replica{
			ID: keyspace.ReplicaID(id), Node: keyspace.NodeID(id), Role: keyspace.Role(slices.Index(roleNames, role)),
		})
	}
	return rs
}

func describeConf(rs []keyspace.Replica) string {
	var s strings.Builder
	for _, r := range rs {
		fmt.Fprintf(&s, "%d %s\n", r.ID, roleNames[r.Role])
	}
	cs, c := confStateOf(rs), configurationOf(rs, 0)
	fmt.Fprintf(&s, "voters %v outgoing %v learners %v next %v joint %v sole %v\n",
		cs.Voters, cs.VotersOutgoing, cs.Learners, cs.LearnersNext, c.joint, c.soleVoter(1))
	return s.String()
}

func storyChange(t *testing.T, d *datadriven.TestData, rs []keyspace.Replica) []keyspace.Replica {
	t.Helper()
	types := map[string]confentry.Type{"add": AddLearner, "promote": Promote, "demote": Demote, "remove": RemoveReplica}
	var changes []ConfChange
	for line := range strings.Lines(d.Input) {
		var what string
		var id int
		if _, err := fmt.Sscan(line, &what, &id); err != nil {
			t.Fatal(err)
		}
		changes = append(changes, ConfChange{types[what], keyspace.ReplicaID(id), keyspace.NodeID(id)})
	}
	e := &pb.Entry{Type: pb.EntryConfChangeV2.Enum()}
	if len(changes) > 0 {
		_, data, err := pb.MarshalConfChange(encodeConf(1, changes, nil))
		if err != nil {
			t.Fatal(err)
		}
		e.Data = data
	}
	c, err := decodeConfEntry(e)
	if err != nil {
		t.Fatal(err)
	}
	return c.Apply(rs)
}

func storyAnswers(t *testing.T, d *datadriven.TestData, rs []keyspace.Replica) string {
	t.Helper()
	var tick int
	var drift string
	d.ScanArgs(t, "tick", &tick)
	d.ScanArgs(t, "drift", &drift)
	cfg := Config{TickInterval: time.Duration(tick) * time.Millisecond, ElectionTimeout: time.Second}
	if _, err := fmt.Sscan(drift, &cfg.MaxClockDrift); err != nil {
		t.Fatal(err)
	}
	g := &Group{h: &Host{cfg: cfg, m: NewMetrics(nil)}, w: &worker{now: clock.Time(time.Hour)}, self: 1, term: 7, isLeader: true}
	g.conf = configurationOf(rs, 0)
	g.lease.ready = true
	for line := range strings.Lines(d.Input) {
		var id, sent, promise int
		if _, err := fmt.Sscan(line, &id, &sent, &promise); err != nil {
			t.Fatal(err)
		}
		hb := &pb.Message{}
		(&Group{w: &worker{now: clock.Time(time.Duration(sent) * time.Millisecond)}}).stampHeartbeat(hb)
		g.onHeartbeatResp(&message{
			from: keyspace.ReplicaID(id), term: 7, promise: time.Duration(promise) * time.Millisecond,
			raft: &pb.Message{Context: hb.Context},
		})
	}
	g.lease.dirty = true
	g.publishLease()
	_, until, ok := g.Lease()
	switch {
	case !ok:
		return "no lease\n"
	case until > clock.Time(time.Hour):
		return "for ever\n"
	}
	return fmt.Sprintf("until %dms\n", time.Duration(until)/time.Millisecond)
}

func storyFloor(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var lag int64
	d.ScanArgs(t, "lag", &lag)
	var ts truncState
	for line := range strings.Lines(d.Input) {
		var index uint64
		var size int
		if _, err := fmt.Sscan(line, &index, &size); err != nil {
			t.Fatal(err)
		}
		ts.appended([]*pb.Entry{{Index: &index, Data: make([]byte, size-entryOverheadBytes)}}, lag)
	}
	return fmt.Sprintf("floor %d of %d bytes, %d marks\n", ts.floor(lag), ts.bytes, len(ts.marks))
}
