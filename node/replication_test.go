package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/placement/decide"
)

// replicate sets the factor and waits until all ranges have it.
func (k *operator) replicate(factor int) *adminpb.PlacementSetReplicationResponse {
	k.r.t.Helper()
	plan, err := k.a.SetReplication(k.r.t.Context(), factor, false)
	if err != nil {
		k.r.t.Fatalf("replication %d: %v", factor, err)
	}
	k.r.settle(time.Minute, fmt.Sprintf("%d voters", factor), factor, k.r.nodes...)
	return plan
}

// cannotReplicate demands a refusal that says why, and what to do.
func (k *operator) cannotReplicate(factor int, reason, next string) {
	k.r.t.Helper()
	_, err := k.a.SetReplication(k.r.t.Context(), factor, false)
	r := (*adminapi.Refusal)(nil)
	if !errors.As(err, &r) || !strings.Contains(r.Reason, reason) || !strings.Contains(r.NextStep, next) {
		k.r.t.Errorf("replication %d: %v, want %q and %q", factor, err, reason, next)
	}
}

// shows demands what is said of the factor and of the ranges that have it not.
func (k *operator) shows(factor, fewer, more int64) {
	k.r.t.Helper()
	p, err := k.a.PlacementGroup(k.r.t.Context())
	if err != nil {
		k.r.t.Fatal(err)
	}
	if g := p.GetReplication(); g.GetFactor() != factor || g.GetFewer() != fewer || g.GetMore() != more {
		k.r.t.Errorf("replication is said to be %v, want %d with %d fewer and %d more", g, factor, fewer, more)
	}
}

// writers put to each range's key without a pause until the test says so; none of the puts
// may fail.
func (r *rig) writers(ranges int) (stop func() map[string]string) {
	ctx, cancel := context.WithCancel(r.t.Context())
	var wait sync.WaitGroup
	var mu sync.Mutex
	last := map[string]string{}
	for i := range ranges {
		wait.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				value := fmt.Sprint("w", n)
				asked, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
				_, err := r.nodes[i%len(r.nodes)].put(asked, keyOf(i), value)
				done()
				mu.Lock()
				if last[keyOf(i)] = value; err != nil {
					r.t.Errorf("put %s: %v", keyOf(i), err)
				}
				mu.Unlock()
				time.Sleep(fewer(20*time.Millisecond, 100*time.Millisecond))
			}
		})
	}
	return func() map[string]string {
		cancel()
		wait.Wait()
		return last
	}
}

// The replication factor goes from three to five and back under writes, of which none fails
// and none is lost. The command says before what the change means, and meanwhile how far it
// is. Each of its operations carries the reason.
func TestSetReplication(t *testing.T) {
	const ranges = 4
	bubble(t, 5, borders(ranges), deadSoon, func(r *rig) {
		k := r.operator(r.nodes[2])
		r.spread(r.nodes[0], ranges, "1")
		stop := r.writers(ranges)
		k.shows(3, 0, 0)
		plan, err := k.a.SetReplication(r.t.Context(), 5, true)
		if err != nil || plan.GetBefore() != 3 || plan.GetAfter() != 5 || plan.GetAdded() != 2*ranges || plan.GetRemoved() != 0 {
			t.Errorf("five voters mean %v, %v", plan, err)
		}
		k.shows(3, 0, 0) // it was asked for nothing yet
		reasons := map[decide.Reason]bool{}
		if _, err := k.a.SetReplication(r.t.Context(), 5, false); err != nil {
			t.Fatal(err)
		}
		r.wait(10*time.Second, "an operation begins", func() bool {
			ops, err := r.nodes[1].core.client.Operations(r.t.Context())
			for i := range ops {
				reasons[ops[i].Reason] = true
			}
			return err == nil && len(ops) > 0
		})
		r.settle(time.Minute, "five voters", 5, r.nodes...)
		k.shows(5, 0, 0)
		if plan := k.replicate(3); plan.GetBefore() != 5 || plan.GetAdded() != 0 || plan.GetRemoved() != 2*ranges {
			t.Errorf("three voters mean %v", plan)
		}
		k.shows(3, 0, 0)
		for key, value := range stop() {
			r.mustGet(r.nodes[4], key, value)
		}
		r.caughtUp(10 * time.Second)
		if len(reasons) != 1 || !reasons[decide.Factor] {
			t.Errorf("the operations were for %v", reasons)
		}
		counts := make([]int, len(r.nodes))
		for i, n := range r.nodes {
			counts[i] = len(n.summaries())
		}
		if slices.Max(counts) > slices.Min(counts)+2 {
			t.Errorf("the nodes hold %v replicas", counts)
		}
	})
}

// A change that could not be completed is refused with advice before anything changes.
func TestReplicationRefused(t *testing.T) {
	bubble(t, 5, borders(2), deadSoon, func(r *rig) {
		k := r.operator(r.nodes[0])
		r.spread(r.nodes[0], 2, "1")
		k.cannotReplicate(4, "1, 3, 5 or 7", "even")
		k.cannotReplicate(0, "1, 3, 5 or 7", "give one")
		k.cannotReplicate(-3, "1, 3, 5 or 7", "give one")
		k.cannotReplicate(7, "5 take replicas", "add 2")
		if err := k.a.Pause(r.t.Context(), true); err != nil {
			t.Fatal(err)
		}
		k.cannotReplicate(5, "paused", "resume")
		if err := k.a.Pause(r.t.Context(), false); err != nil {
			t.Fatal(err)
		}
		k.does(adminapi.Drain, "n5")
		k.cannotReplicate(5, "4 take replicas", "take back node n5")
		k.does(adminapi.Undrain, "n5")
		r.crash(r.nodes[4])
		r.wait(10*time.Second, "the node is silent", func() bool { return !r.nodes[0].core.alive(r.nodes[4].id) })
		k.cannotReplicate(5, "4 take replicas", "bring back node n5")
		k.shows(3, 0, 0)
		r.start(r.nodes[4])
	})
}

// A placement group gets as many voters as ranges are to have. It never gets fewer by that number.
func TestPlacementGroupFollowsReplication(t *testing.T) {
	bubble(t, 7, borders(2), deadSoon, func(r *rig) {
		k := r.operator(r.nodes[0])
		r.spread(r.nodes[0], 2, "1")
		if n := r.placementVoters(r.nodes[0]); n != 5 {
			r.t.Fatalf("of a replication of three the placement group has %d voters", n)
		}
		k.replicate(7)
		r.wait(time.Minute, "seven voters of the placement group", func() bool { return r.placementVoters(r.nodes[0]) == 7 })
		k.replicate(3)
		time.Sleep(fewer(time.Minute, 40*time.Second))
		if n := r.placementVoters(r.nodes[0]); n != 7 {
			r.t.Errorf("back at a replication of three the placement group has %d voters", n)
		}
		r.mustPut(r.nodes[3], keyOf(0), "2")
		r.mustGet(r.nodes[4], keyOf(0), "2")
	})
}
