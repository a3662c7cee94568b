package sim

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// SystemMove moves the placement group's replicas. It goes on all the time if
// Config.SystemMoves says so, and is no failure.
const SystemMove Fault = "move of placement"

// systemMoveEvery is the least time between two moves of the placement group, and half
// of the most.
const systemMoveEvery = 500 * time.Millisecond

// systemMoveLoop moves replicas of the placement group, and its leader, now and then
// until stop is closed.
func (n *nemesis) systemMoveLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	n.beside(stop, wg, repeat{times: n.c.cfg.SystemMoves, least: systemMoveEvery, spread: systemMoveEvery, stream: 6}, func(rng *rand.Rand) {
		n.ask(rng, func(ctx context.Context, r *run, _ []keyspace.Descriptor) { n.systemMove(ctx, r, rng) })
	})
}

// systemMove asks placement, through one node, to move one of its own replicas, the
// leader's in half of the cases, or to hand over.
func (n *nemesis) systemMove(ctx context.Context, r *run, rng *rand.Rand) {
	client := r.core.Placement()
	pm, err := client.Map(ctx)
	if err != nil {
		return
	}
	own := pm.PlacementGroup()
	from := own.Replicas[rng.IntN(len(own.Replicas))].Node
	if l := client.Leader(); l != 0 && rng.IntN(2) == 0 {
		from = l
	}
	if rng.IntN(5) == 0 {
		err = client.TransferLeader(ctx, from)
		n.c.logf("nemesis: placement must be led by node %s: %v", from, err)
		return
	}
	to := n.elsewhere(rng, &own, from)
	op, err := client.BeginOperation(ctx, fsm.Operation{
		Range: fsm.OwnGroup, Kind: fsm.OperationMove, From: from, To: to, Why: "the simulator",
	})
	n.c.logf("nemesis: placement from node %s to node %s: operation %d, %v", from, to, op.ID, err)
	if err == nil {
		n.systemMoves.Add(1)
	}
}

// samePlacement says whether the placement group has all its voters, every node knows
// them, their replicas are equal, and nobody else holds anything of it.
func samePlacement(ctx context.Context, c *cluster) error {
	if c.cfg.SystemMoves == 0 {
		return nil
	}
	ops, err := c.standing()[0].current().core.Placement().Operations(ctx)
	if err != nil || len(ops) > 0 {
		return errors.Join(fmt.Errorf("%d operations are under way: %v", len(ops), ops), err)
	}
	var want keyspace.Descriptor
	var first *placementState
	for i, m := range c.standing() {
		pm, err := m.current().core.Placement().Map(ctx)
		if err != nil {
			return fmt.Errorf("map of node %s: %w", m.id(), err)
		}
		own := pm.PlacementGroup()
		if i == 0 {
			want = own
		}
		if own.ConfIndex != want.ConfIndex || len(own.Replicas) != fsm.PlacementVotersFor(c.cfg.Nodes) {
			return fmt.Errorf("node %s has the placement group as %+v, and node %s as %+v", m.id(), own, c.standing()[0].id(), want)
		}
	}
	for _, m := range c.standing() {
		st, err := readPlacement(m.current().core.Store())
		if err != nil {
			return fmt.Errorf("placement group on node %s: %w", m.id(), err)
		}
		_, member := want.ReplicaOn(m.id())
		switch {
		case !member && !st.empty():
			return fmt.Errorf("node %s holds %w of the placement group: %+v", m.id(), errOrphan, st)
		case member && first == nil:
			first = &st
		case member && st.at.Index != first.at.Index:
			return fmt.Errorf("node %s has applied placement's entries up to %d, another one up to %d", m.id(), st.at.Index, first.at.Index)
		case member && st.hash != first.hash:
			return fmt.Errorf("the placement group at index %d: node %s has the hash %016x and another one %016x: %w", st.at.Index, m.id(), st.hash, first.hash, errNever)
		}
	}
	return nil
}

// placementState is the placement group's data in a node's store.
type placementState struct {
	at      engine.Applied
	records int
	hash    uint64
}

func (s *placementState) empty() bool { return s.at.Index == 0 && s.records == 0 }

// readPlacement reads the group's applied record and its records at one index.
func readPlacement(r engine.Reader) (st placementState, err error) {
	before, _, err := engine.ReadApplied(r, keyspace.PlacementGroup)
	if err != nil {
		return st, err
	}
	span := engine.GroupLocalSpan(keyspace.PlacementGroup)
	it, err := r.NewIter(engine.IterOptions{Lower: span.Lower, Upper: span.Upper})
	if err != nil {
		return st, err
	}
	sum := fnv.New64a()
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err != nil {
			return st, errors.Join(err, it.Close())
		}
		_, _ = sum.Write(slices.Concat(it.Key(), value))
		st.records++
	}
	if err := errors.Join(it.Error(), it.Close()); err != nil {
		return st, err
	}
	if st.at, _, err = engine.ReadApplied(r, keyspace.PlacementGroup); err == nil && st.at.Index != before.Index {
		err = fmt.Errorf("applies: %d, then %d", before.Index, st.at.Index)
	}
	st.hash = sum.Sum64()
	return st, err
}
