package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/sim/judge"
)

// splitLoop splits a range now and then until stop is closed.
func (n *nemesis) splitLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	every := n.c.cfg.splitEvery()
	n.beside(stop, wg, repeat{times: n.c.cfg.Splits, least: every, spread: 2 * every, stream: 3}, func(rng *rand.Rand) {
		key := fmt.Sprintf("%c", judge.Groups[rng.IntN(len(judge.Groups))])
		if n.c.cfg.SplitEvery > 0 || rng.IntN(3) == 0 {
			key += fmt.Sprint(rng.IntN(judge.KeysPerGroup))
		}
		n.ask(rng, func(ctx context.Context, r *run, ds []keyspace.Descriptor) { n.split(ctx, r, ds, []byte(key)) })
	})
}

// split asks, through one node, each replica of the key's range to split it there, or in the middle of the
// key's group where a range begins with the key already.
func (n *nemesis) split(ctx context.Context, r *run, ds []keyspace.Descriptor, key []byte) {
	for _, d := range ds {
		if !d.Span.Contains(key) {
			continue
		}
		if string(d.Span.Start) == string(key) {
			if len(key) > 1 {
				return
			}
			key = fmt.Append(key, judge.KeysPerGroup/2)
		}
		var err error
		for _, rep := range d.Replicas {
			if _, err = r.core.Ranges().Split(ctx, rep.Node, d.Range, d.Generation, key); err == nil {
				n.splits.Add(1)
				n.c.logf("nemesis: split range %s at %q", d.Range, key)
				return
			}
		}
		n.c.logf("nemesis: split range %s at %q: %v", d.Range, key, err)
	}
}
