package simulate

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
	"github.com/skeindb/skein/placement/decide"
)

// TestStories runs clusters of some dozen nodes through what happens to clusters.
//
//	cluster nodes=3 ranges=64 bytes=64MiB load=10 [zones=1] [capacity=1TiB] [voters=3]
//	        [seed=1] [mixed] [scattered]
//	settings [factor=5] [min-ranges=1] …
//	join zone=a [count=1] [capacity=1TiB]
//	fail nodes=(1,2) | zone=a         heal nodes=(1,2) | zone=a
//	isolated nodes=(1,2) | zone=a       heard nodes=(1,2) | zone=a
//	deaf nodes=(1,2) | zone=a         isolated, and no copy gets there
//	quarantine nodes=(1,2) every=3    their replicas of every third range, beginning with another one for each
//	node id=1 state=draining
//	grow range=1 bytes=300MiB         load range=1 rate=5000 shape=divides
//	hot width=4 rate=2000 every=10m for=1h
//	gather to=1                       the sequencer's node has little to do; 0: it has much
//	mark                              begins a new report, whose minimum is for what is to come
//	run for=10m | limit=2h [quiet=11m] [trace=5]
//	balance                           prints how equal the nodes are
//	can-drain node=1                  can-decommission node=1
//	explain range=1
func TestStories(t *testing.T) {
	all := clock.StartStopwatch()
	datadriven.Walk(t, *stories, func(t *testing.T, path string) {
		if testing.Short() && strings.HasSuffix(path, "join-large") {
			t.Skip("ten thousand ranges")
		}
		one := clock.StartStopwatch()
		s := &story{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
		t.Logf("%.1f s", one.Elapsed().Seconds())
	})
	t.Logf("%.1f s in all, %.1f s of them on a core; %s at most", all.Elapsed().Seconds(), cpu(t).Seconds(), memory())
}

// stories is testdata/large for make placement-sim: the same with thousands of nodes.
var stories = flag.String("stories", "testdata/stories", "the folder of stories to run")

// cpu returns the time that the process has had a core; beside others it waits for one.
func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// memory returns the most that the process has ever had, where the system tells it.
func memory() string {
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return "unknown memory"
}

// story is a world that commands happen to.
type story struct {
	w        *World
	settings decide.Settings
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	if d.Cmd == "cluster" {
		return s.cluster(t, d)
	}
	switch d.Cmd {
	case "settings":
		s.set(t, d)
	case "join":
		for range number(t, d, "count", 1) {
			s.w.Join(text(d, "zone", "a"), number(t, d, "capacity", 1<<40))
		}
	case "fail":
		s.w.Fail(s.nodes(t, d)...)
	case "heal":
		s.w.Heal(s.nodes(t, d)...)
	case "isolated", "heard":
		s.w.Isolate(d.Cmd == "isolated", s.nodes(t, d)...)
	case "deaf":
		s.w.Deafen(s.nodes(t, d)...)
	case "quarantine":
		return s.quarantine(t, d)
	case "node":
		states := map[string]decide.NodeState{}
		for st := decide.Serving; st <= decide.Decommissioning; st++ {
			states[st.String()] = st
		}
		s.w.Set(keyspace.NodeID(number(t, d, "id", 0)), states[text(d, "state", "")])
	case "grow":
		s.w.Grow(keyspace.RangeID(number(t, d, "range", 0)), number(t, d, "bytes", 0))
	case "load":
		shapes := map[string]divide.Shape{"divides": divide.Divides, "hot-key": divide.HotKey, "tail": divide.Tail, "spans": divide.Spans}
		s.w.SetLoad(keyspace.RangeID(number(t, d, "range", 0)), number(t, d, "rate", 0), shapes[text(d, "shape", "divides")])
	case "hot":
		return s.hot(t, d)
	case "gather":
		s.w.Cluster().Gather(keyspace.NodeID(number(t, d, "to", 0)))
	case "mark":
		s.w.Mark()
		s.w.Plan()
	case "run":
		return s.let(t, d)
	case "balance":
		return s.w.Balance().String()
	case "can-drain":
		return answer(s.w.Cluster().CanDrain(keyspace.NodeID(number(t, d, "node", 0))))
	case "can-decommission":
		return answer(s.w.Cluster().CanDecommission(keyspace.NodeID(number(t, d, "node", 0))))
	case "explain":
		return s.w.Cluster().Explain(keyspace.RangeID(number(t, d, "range", 0))) + "\n"
	default:
		t.Fatalf("no command %q", d.Cmd)
	}
	return ""
}

func answer(err error) string {
	if err != nil {
		return err.Error() + "\n"
	}
	return "yes\n"
}

func (s *story) cluster(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	s.settings = decide.Defaults()
	s.change(t, d)
	s.w = New(Config{
		Nodes: int(number(t, d, "nodes", 3)), Zones: int(number(t, d, "zones", 1)),
		Ranges: int(number(t, d, "ranges", 1)),
		Bytes:  number(t, d, "bytes", 64<<20), Load: number(t, d, "load", 10),
		Mixed: d.HasArg("mixed"), Scattered: d.HasArg("scattered"),
		Voters: int(number(t, d, "voters", 0)), Capacity: number(t, d, "capacity", 1<<40),
		CopyRate: 64 << 20, Settings: s.settings, Seed: uint64(number(t, d, "seed", 1)),
	})
	return ""
}

func (s *story) change(t *testing.T, d *datadriven.TestData) {
	t.Helper()
	s.settings.ReplicationFactor = int(number(t, d, "factor", int64(s.settings.ReplicationFactor)))
	s.settings.MinRanges = int(number(t, d, "min-ranges", int64(s.settings.MinRanges)))
}

func (s *story) set(t *testing.T, d *datadriven.TestData) {
	t.Helper()
	s.change(t, d)
	s.w.SetSettings(s.settings)
}

// quarantine puts replicas of the nodes in quarantine, of different ranges for each node.
func (s *story) quarantine(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	every, done := int(number(t, d, "every", 1)), 0
	for at, on := range s.nodes(t, d) {
		for i := range s.w.ranges {
			if i%every == at && s.w.Quarantine(keyspace.RangeID(i+1), on) {
				done++
			}
		}
	}
	return fmt.Sprintf("%d replicas are in quarantine\n", done)
}

// hot lets a hot spot move, and prints how far it was spread.
func (s *story) hot(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var most []float64
	out := s.traced(t, d, func() {
		most = s.w.MoveHotSpot(HotSpot{
			Width: int(number(t, d, "width", 1)), Load: number(t, d, "rate", 0),
			Every: duration(t, d, "every", time.Minute), For: duration(t, d, "for", time.Hour),
		})
	})
	out += "at the end of each stay the most load of a node is, in % of the mean:"
	for _, m := range most {
		out += fmt.Sprintf(" %.0f", 100*m)
	}
	return out + "\n" + s.w.Report.String()
}

// let lets time pass, and prints some operations and the report.
func (s *story) let(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	out := s.traced(t, d, func() {
		if d.HasArg("for") {
			s.w.Run(duration(t, d, "for", 0))
		} else if !s.w.RunQuiet(duration(t, d, "quiet", 11*time.Minute), duration(t, d, "limit", 6*time.Hour)) {
			t.Errorf("%s: it does not come to rest", d.Pos)
		}
	})
	return out + s.w.Report.String()
}

// traced prints the first operations and splits of what happens.
func (s *story) traced(t *testing.T, d *datadriven.TestData, happen func()) string {
	t.Helper()
	var b strings.Builder
	left := number(t, d, "trace", 0)
	s.w.Trace = func(at clock.Time, what, why string) {
		if left > 0 {
			left--
			fmt.Fprintf(&b, "%v %s (%s)\n", time.Duration(at), what, why)
		}
	}
	happen()
	return b.String()
}

func (s *story) nodes(t *testing.T, d *datadriven.TestData) []keyspace.NodeID {
	t.Helper()
	if d.HasArg("zone") {
		return s.w.InZone(text(d, "zone", ""))
	}
	var out []keyspace.NodeID
	for i := range d.CmdArgs {
		if d.CmdArgs[i].Key == "nodes" {
			for _, v := range d.CmdArgs[i].Vals {
				out = append(out, keyspace.NodeID(parse(t, v)))
			}
		}
	}
	return out
}

func text(d *datadriven.TestData, name, other string) string {
	for i := range d.CmdArgs {
		if d.CmdArgs[i].Key == name {
			return d.CmdArgs[i].Vals[0]
		}
	}
	return other
}

func duration(t *testing.T, d *datadriven.TestData, name string, other time.Duration) time.Duration {
	t.Helper()
	v, err := time.ParseDuration(text(d, name, other.String()))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// number reads a number, of bytes with a unit behind it.
func number(t *testing.T, d *datadriven.TestData, name string, other int64) int64 {
	t.Helper()
	if s := text(d, name, ""); s != "" {
		return parse(t, s)
	}
	return other
}

func parse(t *testing.T, s string) int64 {
	t.Helper()
	factor := int64(1)
	for unit, by := range map[string]int64{"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40} {
		if rest, ok := strings.CutSuffix(s, unit); ok {
			s, factor = rest, by
		}
	}
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v * factor
}
