package node

import (
	"context"
	"sync"
	"testing"
	"time"
)

// A node that hears no quorum stops within a second, in the time of its own clock: what clients wait for
// does not come, and nobody takes over what it leads.
func TestANodeWithoutQuorumStopsPromptly(t *testing.T) {
	bubble(t, 3, borders(4), nil, func(r *rig) {
		r.publish(r.nodes...)
		r.spread(r.nodes[0], 4, "v")
		leader := r.nodes[0]
		for _, n := range r.nodes {
			if n.id == r.nodes[0].core.client.Leader() {
				leader = n
			}
		}
		if got := leader.core.patience(stopServingTimeout); got != stopServingTimeout {
			r.t.Errorf("with a quorum, a stop waits %v for clients", got)
		}
		for _, n := range r.nodes {
			if n != leader {
				r.crash(n)
			}
		}
		ctx, cancel := context.WithCancel(r.t.Context())
		defer cancel()
		var waiting sync.WaitGroup
		for i := range 4 {
			waiting.Go(func() { _, _ = leader.put(ctx, keyOf(i), "w") })
		}
		time.Sleep(3 * rigElection)
		if got := leader.core.patience(stopServingTimeout); got >= time.Second/2 {
			r.t.Errorf("without a quorum, a stop waits %v for clients", got)
		}
		began := time.Now()
		r.stop(leader)
		if took := time.Since(began); took >= time.Second {
			r.t.Errorf("it took %v", took)
		}
		cancel()
		waiting.Wait()
	})
}
