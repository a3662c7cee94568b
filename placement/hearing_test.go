package placement

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/sim/simbus"
)

// What is lost of a report is noticed: the node is asked for everything. What comes twice
// or late changes nothing.
func TestReportsHaveNoHoles(t *testing.T) {
	h := newHearing()
	led := func(id keyspace.RangeID, term uint64) Measure { return Measure{Range: id, Term: term, Bytes: 100} }
	part := func(boot keyspace.BootID, number uint64, whole, more bool, ms ...Measure) *nodePart {
		return &nodePart{Boot: boot, Number: number, Whole: whole, More: more, Led: ms}
	}
	expect := func(what string, from keyspace.NodeID, p *nodePart, anew bool, leaders string) {
		t.Helper()
		if got := h.report(from, p); got != anew {
			t.Errorf("%s: anew %t, want %t", what, got, anew)
		}
		got := ""
		for id := range keyspace.RangeID(5) {
			got += fmt.Sprint(uint64(h.of(id + 1).leader))
		}
		if got != leaders {
			t.Errorf("%s: the ranges 1 to 5 are led by %s, want %s", what, got, leaders)
		}
	}
	complete := func(n keyspace.NodeID) bool { _, _, c := h.node(n); return c }
	expect("changes to who knows nothing", 1, part(7, 4, false, false, led(1, 5)), true, "00000")
	expect("the beginning of everything", 1, part(7, 6, true, true, led(1, 5)), false, "10000")
	if complete(1) {
		t.Error("half of everything is all")
	}
	expect("the end of everything", 1, part(7, 7, false, false, led(2, 5)), false, "11000")
	if !complete(1) {
		t.Error("everything is not all")
	}
	expect("a change", 1, part(7, 8, false, false, led(3, 9)), false, "11100")
	expect("the same again", 1, part(7, 8, false, false, led(3, 9)), false, "11100")
	expect("one is missing", 1, part(7, 10, false, false, led(4, 9)), true, "11100")
	expect("the beginning, late", 1, part(7, 6, true, true, led(5, 5)), false, "11100")
	expect("another node, of a later term", 2, part(3, 1, true, false, led(1, 6), led(3, 8)), false, "21100")
	expect("not any more", 1, part(7, 9, false, false, Measure{Range: 1}, Measure{Range: 2}), false, "20100")
	expect("after a restart", 1, part(8, 1, false, false), true, "20100")
	expect("everything, and nothing is led", 1, part(8, 2, true, false), false, "20000")
	expect("the same term after a word of the range itself", 2, part(3, 2, false, false, led(4, 2)), false, "20020")
	h.saw(4, 1)
	expect("its own word in the same term", 1, part(8, 3, false, false, led(4, 2)), false, "20010")
	h.saw(5, 2)
	expect("who is found to lead may tell of it in a moment", 2, part(3, 3, false, false), false, "20012")
	for range bareSurveys {
		h.keep(func(keyspace.RangeID) bool { return true })
	}
	expect("who does not", 2, part(3, 4, false, false), true, "20012")
	expect("tells everything", 2, part(3, 5, true, false, led(1, 6), led(5, 3)), false, "20012")
	h.claims[5] = claim{} // as it was
	for range claimSurveys {
		h.keep(func(id keyspace.RangeID) bool { return id == 4 })
	}
	expect("the map may have the others in a moment", 2, part(3, 6, false, false), false, "20010")
	h.keep(func(id keyspace.RangeID) bool { return id == 4 })
	if len(h.claims) != 1 || len(h.take()) != 1 || len(h.take()) != 0 {
		t.Errorf("kept %v", h.claims)
	}
}

// gauge is what a node in a rig measures.
type gauge struct {
	mu sync.Mutex
	// led, guarded by mu, are the ranges that the node leads.
	led map[keyspace.RangeID]Measure
}

func (g *gauge) Led() []Measure {
	g.mu.Lock()
	defer g.mu.Unlock()
	var l []Measure
	for _, m := range g.led {
		l = append(l, m)
	}
	return l
}

func (g *gauge) Disk() (capacity, used int64) { return 1 << 40, 1 << 30 }

func (g *gauge) set(id keyspace.RangeID, m Measure) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m.Range = id; m.Term == 0 {
		delete(g.led, id)
		return
	}
	g.led[id] = m
}

// Whoever leads placement soon knows what all nodes say of themselves, whatever is lost,
// whoever led before, and whichever node has restarted.
func TestReportsReachEveryLeader(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 41, 4, simbus.Faults{
			Delay: quiet.Delay, Loss: 0.02, Duplicate: 0.05, Reorder: 0.1, ReorderBy: 5 * time.Millisecond, Break: 0.001,
		})
		gauges := map[keyspace.NodeID]*gauge{}
		for _, n := range r.nodes {
			gauges[n.id] = &gauge{led: map[keyspace.RangeID]Measure{}}
		}
		r.measurer = func(n keyspace.NodeID) Measurer { return gauges[n] }
		r.startAll()
		rng := rand.New(rand.NewPCG(41, 1))
		leader := map[keyspace.RangeID]keyspace.NodeID{}
		term := uint64(1)
		for round := range 30 {
			for range 3000 {
				id, to := keyspace.RangeID(1+rng.IntN(6000)), keyspace.NodeID(1+rng.IntN(4))
				term++
				gauges[leader[id]].drop(id)
				gauges[to].set(id, Measure{Term: term, Bytes: int64(rng.IntN(1 << 30)), Load: int64(rng.IntN(5000))})
				leader[id] = to
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
				c, m := h.of(id), gauges[n].led[id]
				if c.leader != n || c.Term != m.Term || m.differs(&c.Measure, r.leader().service.steps()) {
					t.Fatalf("round %d: range %s, led by node %s with %+v: the leader knows %+v", round, id, n, m, c)
				}
			}
			for _, n := range r.nodes {
				if capacity, used, complete := h.node(n.id); capacity != 1<<40 || used != 1<<30 || !complete {
					t.Fatalf("round %d: of node %s the leader knows %d, %d, %t", round, n.id, capacity, used, complete)
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
			gauges[n.id] = &gauge{led: map[keyspace.RangeID]Measure{1: {Range: 1, Term: uint64(n.id)}}}
		}
		r.measurer = func(n keyspace.NodeID) Measurer { return gauges[n] }
		r.startAll()
		rounds := 8
		if testing.Short() {
			rounds = 4
		}
		for round := range rounds {
			time.Sleep(time.Minute + time.Duration(round)*1100*time.Millisecond)
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
					if _, _, complete := next.service.listening().node(n.id); n.up() && !complete {
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
		g.set(id, Measure{})
	}
}

// listening is what the leadership of the node has heard.
func (s *Service) listening() *hearing {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hearing
}
