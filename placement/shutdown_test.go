package placement

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
)

// TestRollingStopLeavesNoGap stops and starts one node after the other, the
// sequencer among them.
func TestRollingStopLeavesNoGap(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 4, 3, quiet)
		r.startAll()
		want := keyspace.Revision(2)
		for round := range 6 {
			n := r.nodes[round%3]
			if round%2 == 0 {
				n = r.leader()
			}
			if err := n.service.Shutdown(t.Context()); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			n.stop()
			for _, o := range r.nodes {
				if !o.up() {
					continue
				}
				if a := o.sequence(1); a.Err != nil || a.First != want {
					t.Fatalf("round %d: node %s: %+v, want %d", round, o.id, a, want)
				}
				want++
			}
			n.start()
			time.Sleep(2 * time.Second)
		}
		r.stopAllAtOnce()
	})
}

// TestStopBesideAllocations stops the leader again and again while all nodes allocate, its own
// one until it stops. Its ceiling is lowered beside batches that are on their way. No revision
// is allocated twice, none lies below one that was known before, and none is skipped.
func TestStopBesideAllocations(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 7, 3, quiet)
		r.startAll()
		var h history
		var load sync.WaitGroup
		stop := make(chan struct{})
		for i := range r.nodes {
			rng := rand.New(rand.NewPCG(7, uint64(i)))
			load.Go(func() { r.loadLoop(&h, rng, i, stop) })
		}
		for range 8 {
			n := r.leader()
			time.Sleep(time.Duration(r.rng.IntN(100)) * time.Millisecond)
			n.current.Store(nil)
			if err := n.service.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
			if n.service.replica().Status().IsLeader {
				t.Errorf("node %s leads after its shutdown", n.id)
			}
			time.Sleep(100 * time.Millisecond) // its own batches are answered by the next leader
			n.stop()
			time.Sleep(100 * time.Millisecond)
			n.start()
			time.Sleep(2 * time.Second)
		}
		close(stop)
		load.Wait()
		used, last := h.check(t)
		if h.errors > 0 || int(last)-1 != used {
			t.Errorf("%d errors, %d revisions up to %d", h.errors, used, last)
		}
		r.stopAllAtOnce()
	})
}

// TestStoppingNodeComesToLead: a follower that is past its shutdown is made the leader. It
// allocates nothing and leaves the ceiling low, and no revision is skipped behind it.
func TestStoppingNodeComesToLead(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 9, 3, quiet)
		r.startAll()
		n := r.leader()
		f, other := r.nodes[0], r.nodes[1]
		for f == n || other == n || f == other {
			f, other = other, r.nodes[2]
			if f == n {
				f = r.nodes[0]
			}
		}
		if a := other.sequence(3); a.Err != nil || a.First != 2 {
			t.Fatalf("%+v, want revision 2", a)
		}
		if err := f.service.Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := n.service.TransferLeader(t.Context(), f.id); err != nil {
			t.Fatal(err)
		}
		answer := make(chan keyspace.SequenceAnswer, 1)
		go func() { answer <- other.sequence(1) }()
		time.Sleep(100 * time.Millisecond)
		select {
		case a := <-answer:
			t.Fatalf("%+v while a stopping node leads", a)
		default:
		}
		f.stop()
		if a := <-answer; a.Err != nil || a.First != 5 {
			t.Errorf("%+v, want revision 5", a)
		}
		r.stopAllAtOnce()
	})
}

// TestShutdownIsFinal: a transfer that fails beside a shutdown does not resume the allocations.
func TestShutdownIsFinal(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 8, 1, quiet)
		r.startAll()
		n := r.leader()
		for want := keyspace.Revision(2); want < 5; want++ {
			if a := n.sequence(1); a.Err != nil || a.First != want {
				t.Fatalf("%+v, want %d", a, want)
			}
			n.service.sequencer.Resume()
		}
		if err := n.service.Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.service.sequencer.Resume()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if g, err := n.service.sequencer.Begin(1, sequencer.Batch{Boot: 1, Number: 1, Items: []sequencer.Item{{Range: 1, Count: 1}}}).Wait(ctx); err == nil {
			t.Errorf("a batch got %+v after the shutdown", g)
		}
		n.stop()
		n.start()
		if a := n.sequence(1); a.Err != nil || a.First != 5 {
			t.Errorf("%+v, want revision 5", a)
		}
		n.stop()
	})
}

// stopPlan is one order in which the nodes of a cluster get their signals: when each
// gets it, and for how long it closes its pipelines then.
type stopPlan struct {
	signal, close []time.Duration
}

// stopPlans returns orders that are hard, by the leader's place in them, and then as many
// random ones as asked for.
func stopPlans(nodes, leader, random int, rng *rand.Rand) []stopPlan {
	const ms = time.Millisecond
	var plans []stopPlan
	add := func(leads, others, step, closing time.Duration) {
		p := stopPlan{signal: make([]time.Duration, nodes), close: make([]time.Duration, nodes)}
		for i := range nodes {
			p.signal[i], p.close[i] = others+time.Duration(i)*step, closing
		}
		p.signal[leader] = leads
		plans = append(plans, p)
	}
	add(0, 0, 0, 0)              // all at once
	add(0, 0, 0, 200*ms)         // all at once, with something to close
	add(0, 3*ms, ms, 0)          // the leader just before the others
	add(0, 20*ms, 0, 0)          // while it hands over
	add(0, 1500*ms, 300*ms, 0)   // after it is known to be gone
	add(1500*ms, 0, 500*ms, 0)   // the leader last
	add(300*ms, 0, 2*ms, 100*ms) // the leader soon after the others
	for range random {
		p := stopPlan{}
		spread := []time.Duration{ms, 20 * ms, 300 * ms, 3 * time.Second}[rng.IntN(4)]
		for range nodes {
			p.signal = append(p.signal, time.Duration(rng.Int64N(int64(spread))))
			p.close = append(p.close, time.Duration(rng.Int64N(int64(300*ms))))
		}
		plans = append(plans, p)
	}
	return plans
}

// TestStopOfAll is trap 67 in many orders: all nodes of a cluster get their signals within some
// seconds, while all allocate. Each is gone soon, and the next start continues above the last
// revision. It skips at most what a crash may skip; one node alone skips nothing.
func TestStopOfAll(t *testing.T) {
	for _, nodes := range []int{1, 3, 5} {
		for leader := range nodes {
			t.Run(fmt.Sprintf("%d nodes, node %d leads", nodes, leader+1), func(t *testing.T) {
				if nodes > 3 && testing.Short() {
					t.Skip("three nodes have all hard orders")
				}
				virtually(t, func(t *testing.T) { stopsOfAll(t, nodes, leader) })
			})
		}
	}
}

func stopsOfAll(t *testing.T, nodes, leader int) {
	t.Helper()
	r := newRig(t, uint64(10*nodes+leader), nodes, quiet)
	var h history
	random := 12
	if testing.Short() {
		random = 2
	}
	plans := stopPlans(nodes, leader, random, r.rng)
	for i := range plans {
		r.startAll()
		r.leadBy(r.nodes[leader])
		time.Sleep(time.Second)
		r.stopBy(&plans[i], &h)
	}
	used, last := h.check(t)
	skipped := int(last) - 1 - used
	t.Logf("%d of %d revisions were skipped in %d stops", skipped, last, len(plans))
	if nodes == 1 && skipped > 0 || skipped > len(plans)*nodes*sequencer.CeilingBlock {
		t.Errorf("%d revisions were skipped in %d stops", skipped, len(plans))
	}
}

// leadBy makes the node the leader.
func (r *rig) leadBy(to *rigNode) {
	for range 100 {
		if to.service.machine.leaderState().Ready {
			return
		}
		_ = r.leader().client.TransferLeader(context.Background(), to.id) // the next turn sees
		time.Sleep(100 * time.Millisecond)
	}
	r.t.Fatalf("node %s does not take the lead", to.id)
}

// stopBy stops all nodes as planned, each of which allocates until its pipelines are closed.
func (r *rig) stopBy(p *stopPlan, h *history) {
	var wg sync.WaitGroup
	for i, n := range r.nodes {
		rng := rand.New(rand.NewPCG(r.rng.Uint64(), uint64(i)))
		wg.Go(func() {
			closing := make(chan struct{})
			var load sync.WaitGroup
			load.Go(func() {
				for {
					done := make(chan struct{})
					h.ask(n.client, rng, func() { close(done) })
					<-done
					select {
					case <-closing:
						return
					case <-time.After(5 * time.Millisecond):
					}
				}
			})
			time.Sleep(p.signal[i] + p.close[i])
			close(closing)
			// A range gives up a batch that finds no sequencer when it closes.
			closed := make(chan struct{})
			go func() { defer close(closed); load.Wait() }()
			select {
			case <-closed:
			case <-time.After(time.Second):
			}
			begin := time.Now()
			if err := n.service.Shutdown(context.Background()); err != nil {
				r.t.Logf("plan %+v: node %s: %v", *p, n.id, err)
			}
			if took := time.Since(begin); took > ShutdownTimeout+100*time.Millisecond {
				r.t.Errorf("plan %+v: the shutdown of node %s took %v", *p, n.id, took)
			}
			n.stop()
			<-closed
		})
	}
	wg.Wait()
}
