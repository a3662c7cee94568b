package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// moveEvery is the least time between two moves, and a half of the most.
const moveEvery = 700 * time.Millisecond

// moveLoop moves replicas and leaders of ranges now and then until stop is closed.
func (n *nemesis) moveLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	rng := rand.New(rand.NewPCG(n.c.cfg.Seed, 5))
	wg.Go(func() {
		for range n.c.cfg.Moves {
			n.c.sleep(moveEvery + time.Duration(rng.Int64N(int64(moveEvery))))
			if rng.IntN(3) > 0 {
				n.c.sleep(n.c.intoBurst(rng))
			}
			select {
			case <-stop:
				return
			default:
			}
			n.move(rng, n.c.machines[rng.IntN(len(n.c.machines))])
		}
	})
}

// move asks placement, through one node, to put a replica of a range somewhere else, or
// a range's leader to hand over.
func (n *nemesis) move(rng *rand.Rand, m *machine) {
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
	d := ds[rng.IntN(len(ds))]
	from := d.Replicas[rng.IntN(len(d.Replicas))].Node
	if rng.IntN(4) == 0 {
		for _, rep := range d.Replicas {
			if err = r.core.Ranges().TransferTo(ctx, rep.Node, d.Range, from); err == nil {
				n.c.logf("nemesis: range %s is led by node %s", d.Range, from)
				return
			}
		}
		return
	}
	var to keyspace.NodeID
	for _, i := range rng.Perm(len(n.c.machines)) {
		if _, has := d.ReplicaOn(n.c.machines[i].id); !has {
			to = n.c.machines[i].id
		}
	}
	op, err := r.core.Placement().BeginOperation(ctx, placement.Operation{
		Range: d.Range, Kind: placement.OperationMove, From: from, To: to, Why: "the simulator",
	})
	n.c.logf("nemesis: range %s from node %s to node %s: operation %d, %v", d.Range, from, to, op.ID, err)
	if err == nil {
		n.moves.Add(1)
	}
}

// settled says whether no operation is left, each range has as many voters as it is to
// have, and no node holds a replica that the map does not give it.
func settled(ctx context.Context, c *cluster, ds []keyspace.Descriptor) error {
	if c.cfg.Moves == 0 && c.cfg.Merges == 0 && c.cfg.Lose == 0 {
		return nil
	}
	var r *run
	for _, m := range c.standing() {
		r = m.current()
	}
	ops, err := r.core.Placement().Operations(ctx)
	if err != nil || len(ops) > 0 {
		return errors.Join(fmt.Errorf("%d operations are under way: %v", len(ops), ops), err)
	}
	members := map[keyspace.RangeID]keyspace.Descriptor{}
	for _, d := range ds {
		members[d.Range] = d
		if len(d.Replicas) != 3 {
			return fmt.Errorf("range %s has the replicas %v", d.Range, d.Replicas)
		}
	}
	for _, m := range c.standing() {
		held, err := r.core.Ranges().List(ctx, m.id)
		if err != nil {
			return fmt.Errorf("replicas of node %s: %w", m.id, err)
		}
		for i := range held {
			d := members[held[i].Descriptor.Range]
			if _, member := d.ReplicaOn(m.id); !member {
				return fmt.Errorf("node %s holds an orphan of %+v", m.id, held[i].Descriptor)
			}
		}
	}
	return nil
}
