package operate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard/load"
)

// withMap gives the asked node a map of what the fake has.
func (f *fake) withMap() *fake {
	var rows []*fsm.Range
	for i := range f.ranges {
		rows = append(rows, &fsm.Range{Descriptor: f.ranges[i]})
	}
	f.known = (&fsm.Map{}).With(1, rows, f.nodes, keyspace.Descriptor{ConfIndex: 1, Replicas: f.group.Replicas})
	return f
}

// What has no quorum is known from who is heard alone, and names the nodes that it waits for.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(3).withMap()
		if o := f.admin().Outage(t.Context()); o.Any() {
			t.Errorf("all live: %+v", o)
		}
		f.dead[2] = true
		if o := f.admin().Outage(t.Context()); o.Any() {
			t.Errorf("one of three is silent: %+v", o)
		}
		f.dead[3] = true
		o := f.admin().Outage(t.Context())
		since := time.Now().Add(-12 * time.Second).UTC().Format(time.RFC3339)
		if got, want := o.What()+": "+o.Who(), "one range and the placement group: n2, n3 silent since "+since; got != want {
			t.Errorf("%q, want %q", got, want)
		}
		f.unheard = true
		o = f.admin().Outage(t.Context())
		if got, want := o.Who(), "n2, n3 not heard since this node has started"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

// Replicas in quarantine have no vote. Which there are is asked of the nodes that have the alarm for it, and of no others.
func TestOutageByQuarantine(t *testing.T) {
	f := newFake(3).withMap()
	alarms := &fsm.Alarms{}
	for _, n := range []keyspace.NodeID{2, 3} {
		alarms.All = append(alarms.All, fsm.Alarm{AlarmID: fsm.AlarmID{Type: fsm.AlarmCorrupt, Member: n}})
	}
	bad := func(m keyspace.ReplicaID) []Quarantined { return []Quarantined{{Range: 1, Replica: m}} }
	f.quarantined = map[keyspace.NodeID][]Quarantined{2: bad(2), 3: bad(3)}
	for _, tc := range []struct {
		what       string
		alarms     *fsm.Alarms
		dead, mute keyspace.NodeID
		want       string
		unsure     bool
	}{
		{"nobody is asked", nil, 0, 0, "", false},
		{"one of three", &fsm.Alarms{All: alarms.All[:1]}, 0, 0, "", false},
		{"one, and a silent node", &fsm.Alarms{All: alarms.All[:1]}, 3, 0, "one range: n3 silent since %s; replicas in quarantine on n2", false},
		{"two of three", alarms, 0, 0, "one range: replicas in quarantine on n2, n3", false},
		{"one does not answer", alarms, 0, 3, "", true},
		{"one is dead", alarms, 3, 0, "one range: n3 silent since %s; replicas in quarantine on n2", false},
		{"another alarm", &fsm.Alarms{All: []fsm.Alarm{{AlarmID: fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: 2}}, {AlarmID: fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: 3}}}}, 0, 0, "", false},
	} {
		synctest.Test(t, func(t *testing.T) {
			f.known.Alarms, f.dead, f.mute = tc.alarms, map[keyspace.NodeID]bool{tc.dead: true}, map[keyspace.NodeID]bool{tc.mute: true}
			o := f.admin().Outage(t.Context())
			want, got := tc.want, ""
			if strings.Contains(want, "%s") {
				want = fmt.Sprintf(want, time.Now().Add(-12*time.Second).UTC().Format(time.RFC3339))
			}
			if o.Any() {
				got = o.What() + ": " + o.Who()
			}
			if got != want || o.Unsure != tc.unsure || o.Any() && !strings.Contains(o.Next(), "skein doctor") {
				t.Errorf("%s: %q, want %q; %+v", tc.what, got, want, o)
			}
		})
	}
}

// How often a node has started again is what whoever has heard most of it says.
func TestSurveyCountsRestarts(t *testing.T) {
	f := newFake(3).withMap()
	f.reports = map[keyspace.NodeID]Report{1: {Restarts: map[keyspace.NodeID]int{3: 2}}, 2: {Restarts: map[keyspace.NodeID]int{3: 5, 1: 1}}}
	s, err := f.admin().Survey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []int64
	for _, n := range s.GetNodes() {
		got = append(got, n.GetRestarts())
	}
	if fmt.Sprint(got) != "[1 0 5]" {
		t.Error(got)
	}
}

// A command that needs a quorum is refused at once where nodes are silent for long, and else when it has failed. It names them
// either way.
func TestCommandsWithoutQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(4).withMap()
		f.dead[2], f.dead[3], f.dead[4] = true, true, true
		f.quorum, f.begin = kverror.Timeout, errors.New("call placement-request at node 2: no route")
		commands := map[string]func(context.Context, *Admin) error{
			"split": func(ctx context.Context, a *Admin) error { _, _, err := a.SplitRange(ctx, []byte("k")); return err },
			"move":  func(ctx context.Context, a *Admin) error { _, err := a.MoveRange(ctx, 1, "n1", "n1"); return err },
			"merge": func(ctx context.Context, a *Admin) error { _, err := a.MergeRange(ctx, 1); return err },
			"drain": func(ctx context.Context, a *Admin) error {
				_, err := a.ChangeNode(ctx, adminapi.Drain, "n2")
				return err
			},
			"factor":   func(ctx context.Context, a *Admin) error { _, err := a.SetReplication(ctx, 3, false); return err },
			"transfer": func(ctx context.Context, a *Admin) error { return a.TransferPlacement(ctx, "n1") },
		}
		for _, silentFor := range []time.Duration{12 * time.Second, time.Second} {
			f.silentFor = silentFor
			for what, run := range commands {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				begun := time.Now()
				err := run(ctx, f.admin())
				cancel()
				// Only what was not begun is refused.
				var r *adminapi.Refusal
				var x *adminapi.Explained
				if tried := errors.As(err, &x); tried == errors.As(err, &r) || tried != (silentFor < givenUpAfter || what == "factor" || what == "drain") {
					t.Errorf("%s, silent for %v: %T", what, silentFor, err)
				}
				if err == nil || !strings.HasPrefix(err.Error(), "no quorum for ") || !strings.Contains(err.Error(), "n2, n3, n4 silent since ") || !strings.Contains(err.Error(), "docs/RECOVERY.md") {
					t.Errorf("%s, silent for %v: %v", what, silentFor, err)
				}
				if took := time.Since(begun); silentFor > givenUpAfter && took > 0 && what != "factor" && what != "drain" {
					t.Errorf("%s took %v", what, took)
				}
			}
		}
		// What has nothing to do with a quorum stays.
		f.begin = nil
		err := error(kverror.New(kverror.BadRequest, "x"))
		f.admin().explain(&err, 1)
		if kverror.Of(err).Kind != kverror.BadRequest {
			t.Error(err)
		}
	})
}

// A range without a quorum is listed so, also where its last leader does not know it yet, and one whose replicas are in
// quarantine. The survey puts together what waits for the same nodes.
func TestRangesWithoutQuorumAreShown(t *testing.T) {
	f := newFake(3).withMap()
	list := func() *adminpb.Range {
		t.Helper()
		l, err := f.admin().Ranges(t.Context(), &adminpb.RangeListRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return l.GetRanges()[0]
	}
	f.dead[3] = true
	if r := list(); r.GetState() != "awake" || len(r.GetWaitsFor()) != 0 || r.GetLeader() != "n1" {
		t.Errorf("two of three: %v", r)
	}
	f.dead[2] = true
	f.quorum, f.group.Leader = kverror.Timeout, 1
	if r := list(); r.GetState() != adminapi.StateNoQuorum || fmt.Sprint(r.GetWaitsFor()) != "[n2 n3]" || r.GetLeader() != "" {
		t.Errorf("one of three: %v", r)
	}
	s, err := f.admin().Survey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if o := s.GetOutages(); len(o) != 2 || !o[0].GetPlacement() || o[1].GetRanges() != 1 || fmt.Sprint(o[1].GetIds(), o[1].GetWaitsFor()) != "[1] [n2 n3]" || !s.GetStale() || s.GetAsked() != "n1" {
		t.Errorf("%v", s)
	}
	for _, n := range s.GetNodes() {
		// Node 1 takes itself for the leader of the range and of placement still.
		if n.GetNode().GetLeaders() != 0 || n.GetNode().GetPlacementLeader() {
			t.Errorf("without a quorum it leads: %v", n)
		}
		if dead := n.GetNode().GetState() == "dead"; dead != (n.GetNode().GetName() != "n1") || n.GetError() != "" {
			t.Errorf("%v", n)
		}
	}
	f.dead, f.quorum = map[keyspace.NodeID]bool{}, nil
	bad := func(m keyspace.ReplicaID) []Quarantined { return []Quarantined{{Range: 1, Replica: m}} }
	f.quarantined = map[keyspace.NodeID][]Quarantined{2: bad(2), 3: bad(3)}
	if r := list(); r.GetState() != adminapi.StateNoQuorum || len(r.GetWaitsFor()) != 0 {
		t.Errorf("two in quarantine: %v", r)
	}
	if s, err := f.admin().Survey(t.Context()); err != nil || len(s.GetOutages()) != 1 || s.GetOutages()[0].GetQuarantined() != 2 {
		t.Errorf("%v, %v", s, err)
	}
}

// The survey says which range serves most, and who leads it. A range without a quorum serves nothing, whatever its last leader says.
func TestSurveyFindsTheHottestRange(t *testing.T) {
	f := newFake(3).withMap()
	f.rates = load.Rates{WritesPerSecond: 900, ReadsPerSecond: 100}
	s, err := f.admin().Survey(t.Context())
	if err != nil || s.GetRequestsPerSecond() != 1000 || s.GetHottestRange() != 1 || s.GetHottestLeader() != "n1" || s.GetHottestRequestsPerSecond() != 1000 {
		t.Errorf("%v, %v", s, err)
	}
	f.dead[2], f.dead[3] = true, true
	if s, err := f.admin().Survey(t.Context()); err != nil || s.GetRequestsPerSecond() != 0 || s.GetHottestRange() != 0 {
		t.Errorf("without a quorum: %v, %v", s, err)
	}
}

// Since when placement is paused is known where the one who has paused it has noted it.
func TestSurveySaysSinceWhenPaused(t *testing.T) {
	f := newFake(3).withMap()
	for value, want := range map[string]int64{"1800000000000": 1_800_000_000_000, "true": 0} {
		f.settings = []fsm.Setting{{Name: fsm.SettingPaused, Value: []byte(value)}}
		if s, err := f.admin().Survey(t.Context()); err != nil || !s.GetReplication().GetPaused() || s.GetReplication().GetPausedSinceUnixMs() != want {
			t.Errorf("%s: %v, %v", value, s, err)
		}
	}
}
