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
		if o := f.admin().Outage(t.Context(), &Seen{}); o.Any() {
			t.Errorf("all live: %+v", o)
		}
		f.dead[2] = true
		if o := f.admin().Outage(t.Context(), &Seen{}); o.Any() {
			t.Errorf("one of three is silent: %+v", o)
		}
		f.dead[3] = true
		o := f.admin().Outage(t.Context(), &Seen{})
		since := time.Now().Add(-12 * time.Second).UTC().Format(time.RFC3339)
		if got, want := o.What()+": "+o.Who(), "one range and the placement group: n2, n3 silent since "+since; got != want {
			t.Errorf("%q, want %q", got, want)
		}
		f.unheard = true
		o = f.admin().Outage(t.Context(), &Seen{})
		if got, want := o.Who(), "n2, n3 not heard since this node has started"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

// inQuarantine gives the nodes of an outage by quarantine their replicas of range 1, and returns their alarms.
func (f *fake) inQuarantine(nodes ...keyspace.NodeID) *fsm.Alarms {
	alarms := &fsm.Alarms{}
	f.quarantined = map[keyspace.NodeID][]Quarantined{}
	for _, n := range nodes {
		alarms.All = append(alarms.All, fsm.Alarm{AlarmID: fsm.AlarmID{Type: fsm.AlarmCorrupt, Member: n}})
		f.quarantined[n] = []Quarantined{{Range: 1, Replica: keyspace.ReplicaID(n)}}
	}
	return alarms
}

// Replicas in quarantine have no vote. A node knows its own. Which there are else is asked of the nodes that have the alarm for it and
// may cost a quorum, and of no others.
func TestOutageByQuarantine(t *testing.T) {
	full := &fsm.Alarms{All: []fsm.Alarm{{AlarmID: fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: 2}}, {AlarmID: fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: 3}}}}
	first := func(a *fsm.Alarms) *fsm.Alarms { return &fsm.Alarms{All: a.All[:1]} }
	all := func(a *fsm.Alarms) *fsm.Alarms { return a }
	none := func(*fsm.Alarms) *fsm.Alarms { return nil }
	for _, tc := range []struct {
		what       string
		closed     []keyspace.NodeID
		recorded   func(*fsm.Alarms) *fsm.Alarms
		dead, mute keyspace.NodeID
		want       string
		unsure     bool
		asked      int64
	}{
		{"nobody is asked", []keyspace.NodeID{2, 3}, none, 0, 0, "", false, 0},
		{"one of three", []keyspace.NodeID{2, 3}, first, 0, 0, "", false, 0},
		{"one of three, which would not answer", []keyspace.NodeID{2, 3}, first, 0, 2, "", false, 0},
		{"one, and a silent node", []keyspace.NodeID{2, 3}, first, 3, 0, "one range: n3 silent since %s; replicas in quarantine on n2", false, 1},
		{"two of three", []keyspace.NodeID{2, 3}, all, 0, 0, "one range: replicas in quarantine on n2, n3", false, 2},
		{"one does not answer", []keyspace.NodeID{2, 3}, all, 0, 3, "", true, 2},
		{"one is dead", []keyspace.NodeID{2, 3}, all, 3, 0, "one range: n3 silent since %s; replicas in quarantine on n2", false, 1},
		{"another alarm", []keyspace.NodeID{2, 3}, func(*fsm.Alarms) *fsm.Alarms { return full }, 0, 0, "", false, 0},
		{"its own, which nobody has recorded", []keyspace.NodeID{1}, none, 3, 0, "one range: n3 silent since %s; replicas in quarantine on n1", false, 0},
		{"its own, and another one", []keyspace.NodeID{2, 1}, first, 0, 0, "one range: replicas in quarantine on n1, n2", false, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFake(3).withMap()
			f.known.Alarms = tc.recorded(f.inQuarantine(tc.closed...))
			f.dead, f.mute = map[keyspace.NodeID]bool{tc.dead: true}, map[keyspace.NodeID]bool{tc.mute: true}
			o := f.admin().Outage(t.Context(), &Seen{})
			want, got := tc.want, ""
			if strings.Contains(want, "%s") {
				want = fmt.Sprintf(want, time.Now().Add(-12*time.Second).UTC().Format(time.RFC3339))
			}
			if o.Any() {
				got = o.What() + ": " + o.Who()
			}
			if got != want || o.Unsure != tc.unsure || f.asked.Load() != tc.asked || o.Any() && !strings.Contains(o.Next(), "skein doctor") {
				t.Errorf("%s: %q, want %q; %+v, %d were asked", tc.what, got, want, o, f.asked.Load())
			}
		})
	}
}

// A replica in quarantine counts until its range has another one in its place, whoever ends the alarm and whoever answers. Nodes are
// asked seldom.
func TestQuarantineIsRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(3).withMap()
		a, alarms, seen := f.admin(), f.inQuarantine(2, 3), &Seen{}
		const looks = 60
		watch := func(what string, ranges int, asked int64, unsure bool) {
			t.Helper()
			f.asked.Store(0)
			for range looks {
				if o := a.Outage(t.Context(), seen); o.Ranges != ranges || o.Unsure != unsure {
					t.Fatalf("%s: %+v", what, o)
				}
				time.Sleep(time.Second)
			}
			if got := f.asked.Load(); got != asked {
				t.Errorf("%s: %d questions, want %d", what, got, asked)
			}
		}
		f.known.Alarms = alarms
		watch("two of three", 1, 2*looks/10, false)
		f.known.Alarms = nil
		watch("a client has ended the alarms", 1, 0, false)
		f.known.Alarms, f.mute = alarms, map[keyspace.NodeID]bool{2: true, 3: true}
		watch("nobody answers", 1, 2*looks/10, true)
		f.mute = nil
		// One of them is rebuilt: its node has still the alarm, and asked it says no more.
		f.ranges[0].Generation++
		f.ranges[0].Replicas[2].ID = 9
		f.withMap().known.Alarms = alarms
		f.quarantined[3] = nil
		watch("one is rebuilt", 0, 2*looks/10, false)
		f.known.Alarms = nil
		watch("all is over", 0, 0, false)
	})
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
		f.admin().explain(t.Context(), &err, 1)
		if kverror.Of(err).Kind != kverror.BadRequest {
			t.Error(err)
		}
	})
}

// A command on a range whose replicas are in quarantine is refused at once, or explained. That of the placement group goes on.
func TestCommandsOnAQuarantinedRange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(3).withMap()
		f.known.Alarms = f.inQuarantine(2, 3)
		a, begun := f.admin(), time.Now()
		const want = "no quorum for range 1: replicas in quarantine on n2, n3"
		for what, err := range map[string]error{
			"split":    func() error { _, _, err := a.SplitRange(t.Context(), []byte("k")); return err }(),
			"transfer": a.TransferLeader(t.Context(), 1, "n1"),
		} {
			var r *adminapi.Refusal
			if !errors.As(err, &r) || r.Reason != want || !strings.Contains(r.NextStep, "skein doctor") || r.Later || time.Since(begun) > 0 {
				t.Errorf("%s, after %v: %v", what, time.Since(begun), err)
			}
		}
		err := error(kverror.Timeout)
		a.explain(t.Context(), &err, 1)
		var x *adminapi.Explained
		if !errors.As(err, &x) || x.Reason != want {
			t.Errorf("explained: %v", err)
		}
		if err := a.needs(t.Context(), fsm.OwnGroup); err != nil {
			t.Error(err)
		}
		f.dead[2] = true
		var r *adminapi.Refusal
		if err := a.needs(t.Context(), 1); !errors.As(err, &r) || !r.Later || !strings.Contains(r.Reason, "n2 silent since ") || !strings.HasSuffix(r.Reason, "; replicas in quarantine on n3") {
			t.Errorf("a silent node and one in quarantine: %v", err)
		}
		f.dead[2], f.quarantined[2] = false, nil // the alarm is late
		if err := a.needs(t.Context(), 1); err != nil {
			t.Errorf("one in quarantine: %v", err)
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
