package simulate

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
	"github.com/skeindb/skein/placement/decide"
)

// randomWorld returns a small cluster drawn at random, with its replicas anywhere.
func randomWorld(random *rand.Rand) *World {
	settings := decide.Defaults()
	settings.ReplicationFactor = 1 + 2*random.IntN(3)
	nodes := settings.ReplicationFactor + 1 + random.IntN(8)
	settings.MinRanges = 1 + random.IntN(20)
	settings.NodeCopies = 1 + random.IntN(3)
	return New(Config{
		Nodes: nodes, Zones: 1 + random.IntN(5), Ranges: 1 + random.IntN(60),
		Bytes: 1 << (18 + random.IntN(10)), Load: 1 + random.Int64N(500), Mixed: random.IntN(2) == 0,
		Scattered: random.IntN(4) > 0, Capacity: 1 << 40, CopyRate: 64 << 20,
		Settings: settings, Seed: random.Uint64(),
	})
}

// disturb does something to the cluster.
func disturb(w *World, random *rand.Rand) {
	id := keyspace.NodeID(1 + random.IntN(len(w.nodes)))
	g := w.ranges[random.IntN(len(w.ranges))]
	switch random.IntN(12) {
	case 0, 1:
		w.Fail(id)
	case 2:
		w.Heal(id)
	case 3:
		if w.cluster.CanDrain(id) == nil {
			w.Set(id, decide.Draining)
		}
	case 4:
		if w.cluster.CanDecommission(id) == nil {
			w.Set(id, decide.Decommissioning)
		}
	case 5:
		w.Set(id, decide.Serving)
	case 6:
		w.Join(ZoneName(random.IntN(5)), 1<<40)
	case 7:
		if g != nil {
			w.Grow(g.d.Range, random.Int64N(400<<20))
		}
	case 8, 9:
		w.Isolate(random.IntN(2) == 0, id)
	case 10:
		if g != nil {
			w.SetLoad(g.d.Range, random.Int64N(6000), divide.Shape(random.IntN(int(divide.Spans)+1)))
		}
	case 11:
		if g != nil {
			w.Quarantine(g.d.Range, g.d.Replicas[random.IntN(len(g.d.Replicas))].Node)
		}
	}
}

// TestRandomClusters disturbs random clusters. No operation may ever break a rule. Left alone,
// the clusters come to rest, and then checkRest holds.
func TestRandomClusters(t *testing.T) {
	seeds := uint64(24)
	if testing.Short() {
		seeds = 8
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 3))
			w := randomWorld(random)
			for range 20 {
				disturb(w, random)
				w.Run(time.Duration(random.IntN(400)) * time.Second)
			}
			for _, n := range w.nodes {
				if !n.up {
					w.Heal(n.ID)
				}
				w.Isolate(false, n.ID)
			}
			violations := w.Report.Violations
			w.Mark()
			if !w.RunQuiet(2*time.Hour, 24*time.Hour) {
				t.Errorf("%v: no rest; pending %v\n%v", w, w.cluster.Pending(), &w.Report)
			}
			if violations = append(violations, w.Report.Violations...); len(violations) > 0 {
				t.Errorf("not allowed: %q", violations)
			}
			// A replica may have to make room twice where zones and bytes are both far off.
			if w.Report.MovesUndone*20 > w.Report.Moves {
				t.Errorf("thrashing:\n%v", &w.Report)
			}
			checkRest(t, w)
		})
	}
}

// checkRest checks what holds in a cluster at rest all of whose nodes live.
func checkRest(t *testing.T, w *World) {
	t.Helper()
	serving := 0
	for _, n := range w.nodes {
		if n.State == decide.Serving {
			serving++
		}
	}
	for _, g := range w.ranges {
		if g == nil {
			continue
		}
		if k := len(w.voters(g)); k != len(g.d.Replicas) || k != w.settings.ReplicationFactor && serving >= w.settings.ReplicationFactor {
			t.Errorf("range %s has %d voters among replicas %v, %d nodes serve", g.d.Range, k, g.d.Replicas, serving)
		}
		for _, r := range g.d.Replicas {
			if w.closed[r.ID] {
				t.Errorf("range %s has a replica in quarantine on node %s", g.d.Range, r.Node)
			}
			if n := w.node(r.Node); n.State == decide.Decommissioning && serving >= w.settings.ReplicationFactor {
				t.Errorf("range %s has a replica on node %s, which is decommissioned", g.d.Range, n.ID)
			}
			better := &decide.Operation{From: r.Node, To: r.Node}
			if w.betterPlace(g, better, w.sharing(g.d.Replicas, 0, 0)) {
				t.Errorf("range %s has replicas %v that share a zone without need", g.d.Range, g.d.Replicas)
			}
		}
		if n := w.node(g.leader); n.State != decide.Serving && w.cluster.CanDrain(n.ID) == nil {
			t.Errorf("range %s is led by node %s, which is %s", g.d.Range, n.ID, n.State)
		}
		if g.bytes > w.settings.RangeMaxBytes {
			t.Errorf("range %s has %d bytes", g.d.Range, g.bytes)
		}
	}
}

// TestSameSeedSameDecisions runs a disturbed cluster twice.
func TestSameSeedSameDecisions(t *testing.T) {
	run := func() (ops []string) {
		random := rand.New(rand.NewPCG(7, 3))
		w := randomWorld(random)
		w.Trace = func(at clock.Time, what, why string) {
			ops = append(ops, fmt.Sprintf("%v %s %s", at, what, why))
		}
		for range 20 {
			disturb(w, random)
			w.Run(time.Duration(random.IntN(400)) * time.Second)
		}
		return ops
	}
	one, two := run(), run()
	if len(one) < 20 || len(one) != len(two) {
		t.Fatalf("%d and %d operations", len(one), len(two))
	}
	for i := range one {
		if one[i] != two[i] {
			t.Fatalf("operation %d: %s\nand then: %s", i, one[i], two[i])
		}
	}
}
