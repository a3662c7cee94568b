package placement

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// unwilling is a placement group of which nobody takes the leadership.
type unwilling struct {
	Group
	mu sync.Mutex
	// Guarded by mu: whether a target can be found, and whether it takes the leadership.
	can, takes bool
	// looks and tries count the calls.
	looks, tries int
}

func (g *unwilling) CanTransfer(ctx context.Context, to keyspace.ReplicaID) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.looks++; !g.can {
		return errors.New("nobody follows the log")
	}
	return g.Group.CanTransfer(ctx, to)
}

func (g *unwilling) Transfer(ctx context.Context, to keyspace.ReplicaID) error {
	g.mu.Lock()
	g.tries++
	takes := g.takes
	g.mu.Unlock()
	if !takes {
		return errors.New("it does not answer")
	}
	return g.Group.Transfer(ctx, to)
}

// A drained node that leads placement looks for a successor before it ends the allocations. If
// that fails, it tries ever more rarely.
func TestHandOverWaitsForATarget(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 73, 3, "h")
		time.Sleep(20 * time.Second)
		n := w.leader()
		s := n.service
		g := &unwilling{}
		s.mu.Lock()
		g.Group, s.group = s.group, g
		s.mu.Unlock()
		if err := n.client.SetNodeState(t.Context(), n.id, fsm.NodeServing, fsm.NodeDraining); err != nil {
			t.Fatal(err)
		}
		set := func(can, takes bool) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.can, g.takes = can, takes
		}
		seen := func() (looks, tries int) {
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.looks, g.tries
		}
		time.Sleep(5 * time.Minute)
		if looks, tries := seen(); tries > 0 || looks == 0 {
			t.Errorf("without a target: looked %d times, tried %d times", looks, tries)
		}
		set(true, false)
		time.Sleep(5 * time.Minute)
		if _, tries := seen(); tries == 0 || tries > 10 {
			t.Errorf("it was tried %d times in 5 minutes", tries)
		}
		set(true, true)
		w.await(2*time.Minute, "another node leads", func() error {
			if w.leader().id == n.id {
				return errors.New("it leads yet")
			}
			return nil
		})
	})
}

// TestSequencerFollowsTheLoad: placement's leadership goes to the node that asks for most revisions, and stays there.
// It does not while decisions are paused, or if all ask for as many.
func TestSequencerFollowsTheLoad(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 79, 3, "h")
		time.Sleep(40 * time.Second)
		first := w.leader()
		other := w.nodes[int(first.id)%3] // the next one
		load := func(during time.Duration, by ...*rigNode) {
			for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
				for _, n := range by {
					n.client.Sequence(keyspace.SequenceRequest{Range: 1, Generation: 1, Count: 1}, func(keyspace.SequenceAnswer) {})
				}
			}
		}
		load(2*time.Minute, w.nodes...)
		if now := w.leader(); now != first {
			t.Errorf("node %s leads while all ask for as much, and node %s has led", now.id, first.id)
		}
		if err := first.client.SetPaused(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		load(2*time.Minute, other)
		if now := w.leader(); now != first {
			t.Errorf("node %s leads although decisions are paused, and node %s has led", now.id, first.id)
		}
		if err := first.client.SetPaused(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		load(2*time.Minute, other)
		if now := w.leader(); now != other {
			t.Errorf("node %s leads, and node %s asks for everything", now.id, other.id)
		}
		load(5*time.Minute, other)
		if now := w.leader(); now != other {
			t.Errorf("node %s leads, and node %s asks for everything", now.id, other.id)
		}
	})
}

// TestTransferShowsWhoLeads: once it is acknowledged, whoever has a replica names the new leader, as etcd does.
func TestTransferShowsWhoLeads(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 1, 4, quiet)
		r.startAll()
		for range 10 {
			leader := r.leader()
			next, asked := r.nodes[leader.id%3], r.nodes[(leader.id+1)%3]
			if err := asked.client.TransferLeader(t.Context(), next.id); err != nil {
				t.Fatal(err)
			}
			if a, n := asked.client.Leader(), next.client.Leader(); a != next.id || n != next.id {
				t.Errorf("node %s names %s, and the next leader, %s, names %s", asked.id, a, next.id, n)
			}
		}
		r.stopAllAtOnce()
	})
}
