package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/sim/judge"
)

// mergeEvery is the least time between two merges, and half of the most.
const mergeEvery = 600 * time.Millisecond

// splitPause lies between two splits of awaitMerge: longer than MergeAfter.
const splitPause = 2 * time.Second

// mergeLoop has ranges absorb their neighbours now and then until stop is closed.
func (n *nemesis) mergeLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	n.beside(stop, wg, repeat{times: n.c.cfg.Merges, least: mergeEvery, spread: mergeEvery, stream: 6}, func(rng *rand.Rand) {
		n.ask(rng, func(ctx context.Context, r *run, ds []keyspace.Descriptor) { n.merge(ctx, r, ds, rng) })
	})
}

func hasRange(ds []keyspace.Descriptor, id keyspace.RangeID) bool {
	return slices.ContainsFunc(ds, func(d keyspace.Descriptor) bool { return d.Range == id })
}

// merge asks placement, through one node, to let a range absorb its right neighbour.
func (n *nemesis) merge(ctx context.Context, r *run, ds []keyspace.Descriptor, rng *rand.Rand) {
	if len(ds) < 2 {
		return
	}
	left := ds[rng.IntN(len(ds)-1)]
	op, err := r.core.Placement().BeginOperation(ctx, fsm.Operation{Range: left.Range, Kind: fsm.OperationMerge, Why: "the simulator"})
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

// awaitMerge lets the clients go on for a while until ranges have merged by themselves.
// Each new leader of placement restarts the count of how long ranges were small and
// cold. Ranges are split meanwhile, because the rest may be too large to merge.
func (n *nemesis) awaitMerge() {
	rng := rand.New(rand.NewPCG(n.c.cfg.Seed, 9))
	for end := n.c.elapsed() + mergedWithin; n.c.cfg.MergeAfter > 0 && n.c.elapsed() < end && n.c.countMerges() == 0; n.c.sleep(splitPause) {
		key := fmt.Appendf(nil, "%c%d", judge.Groups[rng.IntN(len(judge.Groups))], rng.IntN(judge.KeysPerGroup))
		n.ask(rng, func(ctx context.Context, r *run, ds []keyspace.Descriptor) { n.split(ctx, r, ds, key) })
	}
}
