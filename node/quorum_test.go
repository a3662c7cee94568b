package node

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/shard"
)

// An outage is one line when it has lasted for a look, and one when it is over, however long it is. A node that has just
// started misses nobody. Leaders that change are one line in some looks, however many they are.
func TestWatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		out, moves := operate.Outage{}, shard.Moves{}
		o := &watcher{
			log: zap.New(core), clock: clock.Virtual(), begun: clock.Virtual().Now(), ranges: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "x"}, nil),
			look:  func() operate.Outage { return out },
			moves: func() shard.Moves { m := moves; moves = shard.Moves{}; return m },
		}
		steps := func(n int) {
			for range n {
				time.Sleep(time.Second)
				o.step()
			}
		}
		gone := operate.Outage{Ranges: 3, Placement: true, Silent: []operate.Silent{{ID: 2, Name: "n2", Since: 1000}, {ID: 3, Name: "n3", Since: 2000}}}
		out = gone
		steps(4)
		if logs.Len() != 0 || testutil.CollectAndCount(o.ranges) != 0 {
			t.Errorf("at the start: %v, %d values", logs.All(), testutil.CollectAndCount(o.ranges))
		}
		out = operate.Outage{}
		steps(10)
		out = gone
		steps(1)
		out = operate.Outage{}
		steps(10)
		if logs.Len() != 0 {
			t.Errorf("a moment without a quorum: %v", logs.All())
		}
		out = gone
		steps(100)
		if got := testutil.ToFloat64(o.ranges); got != 3 {
			t.Errorf("the metric says %v", got)
		}
		out = operate.Outage{}
		steps(10)
		want := "[error no quorum for 3 ranges and the placement group: n2, n3 silent since 1970-01-01T00:00:02Z; info all ranges and the placement group have a quorum again; ]"
		if got := lines(logs.TakeAll()); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
		if got := testutil.ToFloat64(o.ranges); got != 0 {
			t.Errorf("the metric says %v behind it", got)
		}
		// What an outage grows by is told once it has lasted for a look, and each node once.
		two, three := operate.Silent{ID: 2, Name: "n2", Since: 1000}, operate.Silent{ID: 3, Name: "n3", Since: 2000}
		out = operate.Outage{Ranges: 2, Silent: []operate.Silent{two}}
		steps(10)
		grown := operate.Outage{Ranges: 5, Placement: true, Silent: []operate.Silent{two, three}}
		for range 20 { // it comes and goes
			out = grown
			steps(1)
			out = operate.Outage{Ranges: 2, Silent: []operate.Silent{two}}
			steps(1)
		}
		if got := lines(logs.TakeAll()); got != "[error no quorum for 2 ranges: n2 silent since 1970-01-01T00:00:01Z; ]" {
			t.Error(got)
		}
		for range 20 {
			out = grown
			steps(2)
			out = operate.Outage{Ranges: 2, Silent: []operate.Silent{two}}
			steps(2)
		}
		if got := lines(logs.TakeAll()); got != "[error no quorum for 5 ranges and the placement group: n2, n3 silent since 1970-01-01T00:00:02Z; ]" {
			t.Error(got)
		}
		out = operate.Outage{Ranges: 3, Silent: []operate.Silent{two}, Closed: []operate.Silent{{ID: 4, Name: "n4"}}}
		steps(5)
		if got := lines(logs.TakeAll()); got != "[error no quorum for 3 ranges: n2 silent since 1970-01-01T00:00:01Z; replicas in quarantine on n4; ]" {
			t.Error(got)
		}
		// Nothing is over while a node that may know more does not answer.
		out = operate.Outage{Unsure: true}
		steps(10)
		if got := testutil.ToFloat64(o.ranges); got != 3 || logs.Len() != 0 {
			t.Errorf("unsure: %v, %v", got, logs.All())
		}
		// What is sure is counted meanwhile, also when it is less.
		out = operate.Outage{Ranges: 2, Silent: []operate.Silent{two}, Unsure: true}
		steps(10)
		if got := testutil.ToFloat64(o.ranges); got != 2 || logs.Len() != 0 {
			t.Errorf("unsure, and less: %v, %v", got, logs.All())
		}
		out = operate.Outage{}
		steps(10)
		if got := lines(logs.TakeAll()); got != "[info all ranges and the placement group have a quorum again; ]" {
			t.Error(got)
		}
		// An outage that a look does not see has not lasted, even if that look was not sure.
		for range 20 {
			out = operate.Outage{Ranges: 2, Silent: []operate.Silent{two}, Unsure: true}
			steps(1)
			out = operate.Outage{Unsure: true}
			steps(1)
		}
		out = operate.Outage{}
		steps(2)
		if logs.Len() != 0 {
			t.Errorf("moments without a quorum: %v", logs.All())
		}
		for range 100 {
			moves.Gained.Count++
			steps(1)
		}
		if n := logs.Len(); n != 100/leadersEvery {
			t.Errorf("%d lines about leaders", n)
		}
	})
}

func lines(all []observer.LoggedEntry) string {
	var b strings.Builder
	for _, e := range all {
		fmt.Fprintf(&b, "%s %s; ", e.Level, e.Message)
	}
	return "[" + b.String() + "]"
}

// The log names nodes beside their ids, in fields and in errors, and keeps levels and the lines of With.
func TestNamesInTheLog(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	names := &nodeNames{}
	log := withNames(zap.New(core), names)
	const long = keyspace.NodeID(0x8e9e05c52164694d)
	names.nodes = map[keyspace.NodeID]nodeName{long: {name: "n1"}, 2: {name: "n2"}}
	names.texts = replacer(names.nodes)
	log = log.With(zap.Stringer("node", long))
	log.Debug("not logged")
	log.Info("x", zap.Stringer("peer", keyspace.NodeID(2)), zap.Stringer("other", keyspace.NodeID(7)), zap.Error(fmt.Errorf("call node %s: 2 replicas", long)))
	log.Info("y", zap.Error((*adminapi.Refusal)(nil)))
	all := logs.All()
	if len(all) != 2 {
		t.Fatalf("%v", all)
	}
	want := map[string]any{"node": "n1 (8e9e05c52164694d)", "peer": "n2 (2)", "other": "7", "error": "call node n1 (8e9e05c52164694d): 2 replicas"}
	if got := all[0].ContextMap(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v\nwant %v", got, want)
	}
	if _, ok := log.Core().(namingCore); !ok || log.Core().Enabled(zapcore.DebugLevel) {
		t.Errorf("%T", log.Core())
	}
}

// A cluster of three loses one node, and then a second one: the survey, the lists, the log and the metric say what has no
// quorum and for whom it waits; commands are refused by names, and all is well again when the nodes are back.
func TestLostQuorumIsSeen(t *testing.T) {
	logged := map[keyspace.NodeID]*observer.ObservedLogs{}
	metrics := map[keyspace.NodeID]*prometheus.Registry{}
	bubble(t, 3, borders(4), func(o *Options) {
		core, logs := observer.New(zap.InfoLevel)
		logged[o.Self], metrics[o.Self] = logs, prometheus.NewRegistry()
		o.Logger, o.Registry, o.Name = zap.New(core), metrics[o.Self], fmt.Sprintf("n%d", o.Self)
	}, func(r *rig) {
		r.spread(r.nodes[0], 4, "v")
		one := r.nodes[0]
		survey := func() *adminpb.SurveyResponse {
			r.t.Helper()
			ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
			defer cancel()
			s, err := one.core.Admin().Survey(ctx)
			if err != nil {
				r.t.Fatal(err)
			}
			return s
		}
		gauge := func() float64 { return stoppedRanges(r.t, metrics[1]) }
		time.Sleep(10 * time.Second)
		if s := survey(); s.GetStale() || len(s.GetOutages()) > 0 || s.GetRanges() != 4 || s.GetLeaderless() > 0 || !adminapi.Healthy(adminapi.Diagnose(quiet(s), nil)) {
			r.t.Errorf("all live: %v", s)
		}
		r.crash(r.nodes[2])
		time.Sleep(10 * time.Second)
		if s := survey(); s.GetStale() || len(s.GetOutages()) > 0 || adminapi.Healthy(adminapi.Diagnose(quiet(s), nil)) || gauge() != 0 {
			r.t.Errorf("one is dead: %v, gauge %v", s, gauge())
		}
		r.crash(r.nodes[1])
		time.Sleep(10 * time.Second)
		if s := survey(); !s.GetStale() || len(s.GetOutages()) != 2 || s.GetOutages()[1].GetRanges() != 4 || fmt.Sprint(s.GetOutages()[0].GetWaitsFor()) != "[n2 n3]" || gauge() != 4 {
			r.t.Errorf("two are dead: %v, gauge %v", s, gauge())
		}
		l, err := one.core.Admin().Ranges(r.t.Context(), &adminpb.RangeListRequest{})
		if err != nil || l.GetRanges()[0].GetState() != adminapi.StateNoQuorum || l.GetRanges()[0].GetLeader() != "" {
			r.t.Errorf("%v, %v", l, err)
		}
		begun := time.Now()
		_, _, err = one.core.Admin().SplitRange(r.t.Context(), []byte("k0000/y"))
		if err == nil || !strings.HasPrefix(err.Error(), "no quorum for range ") || !strings.Contains(err.Error(), "n2, n3 silent since ") || time.Since(begun) > time.Second {
			r.t.Errorf("a split, after %v: %v", time.Since(begun), err)
		}
		time.Sleep(time.Minute)
		told := logged[1].FilterLevelExact(zap.ErrorLevel)
		if told.Len() != 1 || !strings.HasPrefix(told.All()[0].Message, "no quorum for 4 ranges and the placement group: n2, n3 silent since ") {
			r.t.Errorf("logged: %s", lines(told.All()))
		}
		r.start(r.nodes[1], r.nodes[2])
		r.wait(30*time.Second, "a quorum is back", func() bool { return gauge() == 0 })
		r.mustPut(one, "k0000/z", "v")
		time.Sleep(5 * time.Second)
		if n := logged[1].FilterMessage("all ranges and the placement group have a quorum again").Len(); n != 1 {
			r.t.Errorf("%d lines that it is back", n)
		}
		if n := logged[1].FilterMessageSnippet("leaders of ranges have changed").Len(); n == 0 {
			r.t.Error("no line about leaders")
		}
	})
}

// stoppedRanges is what a node counts without a quorum, -1 if it does not say.
func stoppedRanges(t *testing.T, of *prometheus.Registry) float64 {
	t.Helper()
	all, err := of.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == "skein_ranges_without_quorum" {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	return -1
}

// quiet leaves out what the nodes of a rig are by nature: they have addresses that are none.
func quiet(s *adminpb.SurveyResponse) *adminpb.SurveyResponse {
	for _, n := range s.GetNodes() {
		n.Node.PeerUrls, n.Node.ClientUrls = nil, nil
	}
	return s
}
