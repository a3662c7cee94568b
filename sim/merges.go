package sim

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// mergeEvery is the least time between two merges, and a half of the most.
const mergeEvery = 600 * time.Millisecond

// mergeLoop has ranges absorb their neighbours now and then until stop is closed.
func (n *nemesis) mergeLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	rng := rand.New(rand.NewPCG(n.c.cfg.Seed, 6))
	wg.Go(func() {
		for range n.c.cfg.Merges {
			n.c.sleep(mergeEvery + time.Duration(rng.Int64N(int64(mergeEvery))))
			if rng.IntN(3) > 0 {
				n.c.sleep(n.c.intoBurst(rng))
			}
			select {
			case <-stop:
				return
			default:
			}
			n.merge(rng, n.c.machines[rng.IntN(len(n.c.machines))])
		}
	})
}

func hasRange(ds []keyspace.Descriptor, id keyspace.RangeID) bool {
	return slices.ContainsFunc(ds, func(d keyspace.Descriptor) bool { return d.Range == id })
}

// merge asks placement, through one node, to let a range absorb its right neighbour.
func (n *nemesis) merge(rng *rand.Rand, m *machine) {
	r := m.current()
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(r.ctx, 3*time.Second)
	defer cancel()
	ds, err := r.core.Placement().RangeMap(ctx)
	if err != nil || len(ds) < 2 {
		return
	}
	left := ds[rng.IntN(len(ds)-1)]
	op, err := r.core.Placement().BeginOperation(ctx, placement.Operation{Range: left.Range, Kind: placement.OperationMerge, Why: "the simulator"})
	n.c.logf("nemesis: range %s absorbs its neighbour: operation %d, %v", left.Range, op.ID, err)
	if err != nil {
		return
	}
	for range 40 {
		n.c.sleep(100 * time.Millisecond)
		if now, err := r.core.Placement().RangeMap(ctx); err == nil && !hasRange(now, op.Right) {
			n.merges.Add(1)
			n.c.logf("nemesis: range %s has absorbed range %s", left.Range, op.Right)
			return
		}
	}
}
