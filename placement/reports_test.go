package placement

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/sim/simbus"
)

// gauge is what a node in a rig measures.
type gauge struct {
	mu sync.Mutex
	// led, guarded by mu, are the ranges that the node leads.
	led map[keyspace.RangeID]driver.Measure
	// quarantined, guarded by mu, are its replicas in quarantine.
	quarantined []driver.Quarantined
	// noSpace and corrupt, guarded by mu, are its alarms.
	noSpace, corrupt bool
}

// gaugeOf returns the node's gauge, which outlives its runs.
func (r *rig) gaugeOf(n keyspace.NodeID) *gauge {
	if r.gauges == nil {
		r.gauges = map[keyspace.NodeID]*gauge{}
	}
	if r.gauges[n] == nil {
		r.gauges[n] = &gauge{led: map[keyspace.RangeID]driver.Measure{}}
	}
	return r.gauges[n]
}

func (g *gauge) Led() []driver.Measure {
	g.mu.Lock()
	defer g.mu.Unlock()
	var l []driver.Measure
	for _, m := range g.led {
		l = append(l, m)
	}
	return l
}

func (g *gauge) Disk() (capacity, used int64) { return 1 << 40, 1 << 30 }

// Full implements driver.Measurer.
func (g *gauge) Full() bool { return false }

func (g *gauge) Quarantined() []driver.Quarantined {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.quarantined)
}

// Alarms implements driver.Measurer.
func (g *gauge) Alarms() (noSpace, corrupt bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.noSpace, g.corrupt
}

func (g *gauge) alarms(noSpace, corrupt bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.noSpace, g.corrupt = noSpace, corrupt
}

func (g *gauge) quarantine(qs []driver.Quarantined) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.quarantined = qs
}

func (g *gauge) set(id keyspace.RangeID, m driver.Measure) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m.Range = id; m.Term == 0 {
		delete(g.led, id)
		return
	}
	g.led[id] = m
}

// The leader of placement soon knows the reports of all nodes, whatever is lost, whoever led
// before, and whichever node has restarted.
func TestReportsReachEveryLeader(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 41, 4, simbus.Faults{
			Delay: quiet.Delay, Loss: 0.02, Duplicate: 0.05, Reorder: 0.1, ReorderBy: 5 * time.Millisecond, Break: 0.001,
		})
		gauges := map[keyspace.NodeID]*gauge{}
		for _, n := range r.nodes {
			gauges[n.id] = &gauge{led: map[keyspace.RangeID]driver.Measure{}}
		}
		r.measurer = func(n keyspace.NodeID) driver.Measurer { return gauges[n] }
		r.startAll()
		rng := rand.New(rand.NewPCG(41, 1))
		leader := map[keyspace.RangeID]keyspace.NodeID{}
		term, rounds := uint64(1), 30
		if testing.Short() {
			rounds = 10
		}
		for round := range rounds {
			for range 3000 {
				id, to := keyspace.RangeID(1+rng.IntN(6000)), keyspace.NodeID(1+rng.IntN(4))
				term++
				gauges[leader[id]].drop(id)
				gauges[to].set(id, driver.Measure{Term: term, Bytes: int64(rng.IntN(1 << 30)), Load: int64(rng.IntN(5000))})
				leader[id] = to
			}
			closed := map[keyspace.RangeID][]decide.Quarantined{}
			for _, n := range r.nodes {
				var qs []driver.Quarantined
				for i := range keyspace.RangeID(rng.IntN(3) * 3000) {
					q := driver.Quarantined{Range: i + 1, Replica: keyspace.ReplicaID(1 + rng.IntN(9)), Reason: strings.Repeat("bad table ", 40)}
					qs = append(qs, q)
					closed[q.Range] = append(closed[q.Range], decide.Quarantined{Replica: q.Replica, Reason: q.Reason[:driver.MaxReasonBytes]})
				}
				gauges[n.id].quarantine(qs)
			}
			switch n := r.leader(); round % 5 {
			case 1:
				n.crash()
				time.Sleep(3 * time.Second)
				n.start()
			case 2:
				o := r.nodes[n.id%4]
				o.crash()
				o.start()
			case 3:
				_ = n.client.TransferLeader(t.Context(), r.nodes[rng.IntN(3)].id)
			}
			time.Sleep(25 * time.Second)
			h := r.leader().service.listening()
			for id, n := range leader {
				by, c := h.Leader(id)
				m := gauges[n].led[id]
				if by != n || c.Term != m.Term || m.Differs(&c, r.leader().service.driver.Steps()) {
					t.Fatalf("round %d: range %s, led by node %s with %+v: the leader knows %+v of node %s", round, id, n, m, c, by)
				}
			}
			for id := range keyspace.RangeID(6001) {
				if got := h.Quarantined(id); !slices.Equal(got, closed[id]) {
					t.Fatalf("round %d: of range %s the leader knows in quarantine %v, want %v", round, id, got, closed[id])
				}
			}
			for _, n := range r.nodes {
				got := decide.Node{ID: n.id}
				if complete := h.Told(&got); got.Capacity != 1<<40 || got.Used != 1<<30 || !complete {
					t.Fatalf("round %d: of node %s the leader knows %+v, %t", round, n.id, got, complete)
				}
			}
		}
	})
}

// Whoever leads placement next hears soon from the nodes without a replica of it too, to which raft
// says nothing: it decides nothing before. How soon is a matter of how the one before has gone.
func TestNextLeaderHearsAllNodesSoon(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 42, 8, quiet)
		gauges := map[keyspace.NodeID]*gauge{}
		for _, n := range r.nodes {
			gauges[n.id] = &gauge{led: map[keyspace.RangeID]driver.Measure{1: {Range: 1, Term: uint64(n.id)}}}
		}
		r.measurer = func(n keyspace.NodeID) driver.Measurer { return gauges[n] }
		r.startAll()
		rounds, calm := 8, time.Minute
		if testing.Short() {
			rounds, calm = 4, 15*time.Second
		}
		for round := range rounds {
			time.Sleep(calm + time.Duration(round)*1100*time.Millisecond)
			old, limit := r.leader(), 200*time.Millisecond
			if round%2 == 0 {
				to := r.nodes[old.id%5]
				if err := r.nodes[7].client.TransferLeader(t.Context(), to.id); err != nil {
					t.Fatal(err)
				}
			} else {
				limit = 4 * time.Second // until a session without a sign of life is given up
				old.crash()
			}
			next := r.leader()
			for next == old {
				time.Sleep(time.Millisecond)
				next = r.leader()
			}
			began := time.Now()
			complete := func() (silent []keyspace.NodeID) {
				for _, n := range r.nodes {
					if n.up() && !next.service.listening().Told(&decide.Node{ID: n.id}) {
						silent = append(silent, n.id)
					}
				}
				return silent
			}
			for silent := complete(); len(silent) > 0; silent = complete() {
				if time.Since(began) > limit {
					t.Errorf("round %d: after %v node %s has not heard from nodes %v", round, limit, next.id, silent)
					break
				}
				time.Sleep(time.Millisecond)
			}
			t.Logf("round %d: %v", round, time.Since(began))
			if !old.up() {
				old.start()
			}
		}
	})
}

// drop takes a range away from a node, if it is one.
func (g *gauge) drop(id keyspace.RangeID) {
	if g != nil {
		g.set(id, driver.Measure{})
	}
}

// listening is what the leadership of the node has heard.
func (s *Service) listening() *driver.Tracker {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tracker
}
