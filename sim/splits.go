package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// splitLoop cuts a range now and then until stop is closed.
func (n *nemesis) splitLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	rng := rand.New(rand.NewPCG(n.c.cfg.Seed, 3))
	wg.Go(func() {
		for range n.c.cfg.Splits {
			every := n.c.cfg.splitEvery()
			n.c.sleep(every + time.Duration(rng.Int64N(int64(2*every))))
			if rng.IntN(3) > 0 {
				n.c.sleep(n.c.intoBurst(rng))
			}
			select {
			case <-stop:
				return
			default:
			}
			key := fmt.Sprintf("%c", groups[rng.IntN(len(groups))])
			if n.c.cfg.SplitEvery > 0 || rng.IntN(3) == 0 {
				key += fmt.Sprint(rng.IntN(keysPerGroup))
			}
			n.split(n.c.machines[rng.IntN(len(n.c.machines))], []byte(key))
		}
	})
}

// split asks, through one node, each replica of the key's range to cut it there.
func (n *nemesis) split(m *machine, key []byte) {
	r := m.current()
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(r.ctx, 3*time.Second)
	defer cancel()
	ds, err := r.core.Placement().RangeMap(ctx)
	if err != nil {
		return
	}
	for _, d := range ds {
		if !d.Span.Contains(key) || string(d.Span.Start) == string(key) {
			continue
		}
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
