package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard"
)

// moveEvery is the least time between two moves, and half of the most.
const moveEvery = 700 * time.Millisecond

// moveLoop moves replicas and leaders of ranges now and then until stop is closed.
func (n *nemesis) moveLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	n.beside(stop, wg, repeat{times: n.c.cfg.Moves, least: moveEvery, spread: moveEvery, stream: 5}, func(rng *rand.Rand) {
		n.ask(rng, func(ctx context.Context, r *run, ds []keyspace.Descriptor) { n.move(ctx, r, ds, rng) })
	})
}

// move asks placement, through one node, to move a replica of a range, or asks a
// range's leader to hand over.
func (n *nemesis) move(ctx context.Context, r *run, ds []keyspace.Descriptor, rng *rand.Rand) {
	d := ds[rng.IntN(len(ds))]
	from := d.Replicas[rng.IntN(len(d.Replicas))].Node
	if rng.IntN(4) == 0 {
		for _, rep := range d.Replicas {
			if err := r.core.Ranges().TransferTo(ctx, rep.Node, d.Range, from); err == nil {
				n.c.logf("nemesis: range %s is led by node %s", d.Range, from)
				return
			}
		}
		return
	}
	to := n.elsewhere(rng, &d, from)
	op, err := r.core.Placement().BeginOperation(ctx, fsm.Operation{
		Range: d.Range, Kind: fsm.OperationMove, From: from, To: to, Why: "the simulator",
	})
	n.c.logf("nemesis: range %s from node %s to node %s: operation %d, %v", d.Range, from, to, op.ID, err)
	if err == nil {
		n.moves.Add(1)
	}
}

// elsewhere chooses a node without a replica of the range, of the same zone as a
// replica if there are zones; 0 if there is none.
func (n *nemesis) elsewhere(rng *rand.Rand, d *keyspace.Descriptor, from keyspace.NodeID) (to keyspace.NodeID) {
	ms := n.c.members()
	for _, i := range rng.Perm(len(ms)) {
		if _, has := d.ReplicaOn(ms[i].id()); !has && (ms[i].zone == "" || ms[i].zone == n.c.machine(from).zone) {
			to = ms[i].id()
		}
	}
	return to
}

// settled says whether no operation is left, each range has all its voters, and no node
// holds a replica that the map does not give it.
func settled(ctx context.Context, c *cluster, ds []keyspace.Descriptor) error {
	var r *run
	for _, m := range c.standing() {
		r = m.current()
	}
	ops, err := r.core.Placement().Operations(ctx)
	if err != nil || len(ops) > 0 {
		return errors.Join(fmt.Errorf("%d operations are under way: %v", len(ops), ops), err)
	}
	for _, d := range ds {
		if len(d.Replicas) != 3 {
			return fmt.Errorf("range %s has the replicas %v", d.Range, d.Replicas)
		}
		if err := c.inZones(&d); err != nil {
			return err
		}
	}
	for _, m := range c.standing() {
		held, err := r.core.Ranges().List(ctx, m.id())
		if err != nil {
			return fmt.Errorf("replicas of node %s: %w", m.id(), err)
		}
		if err := orphans(m.id(), held, ds); err != nil {
			return err
		}
	}
	return nil
}

// orphans says whether a node holds a replica of a range that the map does not have, or
// that the map gives to others.
func orphans(id keyspace.NodeID, held []shard.Summary, ds []keyspace.Descriptor) error {
	for i := range held {
		h := &held[i].Descriptor
		at := slices.IndexFunc(ds, func(d keyspace.Descriptor) bool { return d.Range == h.Range })
		if at >= 0 {
			if _, member := ds[at].ReplicaOn(id); member {
				continue
			}
		}
		return fmt.Errorf("node %s holds %w of %+v", id, errOrphan, *h)
	}
	return nil
}
