package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// repeat says how often an action runs beside the faults: so many times, with gap
// between two, and up to spread longer. stream selects its random numbers.
type repeat struct {
	times         int
	least, spread time.Duration
	stream        uint64
}

// beside runs an action as often as the repeat says, while clients are busy, until stop
// is closed.
func (n *nemesis) beside(stop <-chan struct{}, wg *sync.WaitGroup, o repeat, do func(rng *rand.Rand)) {
	rng := rand.New(rand.NewPCG(n.c.cfg.Seed, o.stream))
	wg.Go(func() {
		for range o.times {
			n.c.sleep(o.least + time.Duration(rng.Int64N(int64(o.spread))))
			if rng.IntN(3) > 0 {
				n.c.sleep(n.c.intoBurst(rng))
			}
			if closed(stop) {
				return
			}
			do(rng)
		}
	})
}

// ask calls f for one node, if that is up, with the node's range map. The map is
// complete at any time.
func (n *nemesis) ask(rng *rand.Rand, f func(ctx context.Context, r *run, ds []keyspace.Descriptor)) {
	m := n.c.machines[rng.IntN(len(n.c.machines))]
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
	if err := covers(ds); err != nil {
		n.found("range map of node %s: %v", m.id(), err)
	}
	f(ctx, r, ds)
}

// broken says whether a violation was found; what follows a violation shows nothing
// new.
func (n *nemesis) broken() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.wrong) > 0
}

// found records a violation.
func (n *nemesis) found(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wrong = append(n.wrong, fmt.Sprintf(format, args...))
	n.c.logf(format, args...)
}
