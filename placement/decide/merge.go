package decide

import (
	"fmt"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// merge brings the range and its right neighbour together, one step at a time: the
// smaller one's replicas to the nodes of the larger one, then the lead, then both in one.
// From the first step on neither is merged with anybody else, so that no replica follows
// one neighbour and then the other.
func (c *Cluster) merge(r *rng) (Operation, hold) {
	o := c.right(r)
	if err := c.mergeable(r); err != nil || o.retryAt > c.now {
		return Operation{}, holdLater
	}
	if r.mate == nil && !aligned(r, o) && (c.cheaper(r, o) || !c.settled(r) || !c.settled(o)) {
		return Operation{}, holdLater
	}
	small, large := r, o
	if small.Bytes > large.Bytes {
		small, large = large, small
	}
	why := fmt.Sprintf("ranges %s and %s are small and cold, %d MiB together", r.Descriptor.Range, o.Descriptor.Range, (r.Bytes+o.Bytes)>>20)
	op, h := c.align(small, large, why)
	if h == free && op.Kind != Merge {
		// It is decided for the small one, which need not be the one in the queue.
		op.Reason = Cold
		c.emit(small, op)
		r.mate, o.mate = o, r
		return Operation{}, holdBusy
	}
	if h == free && c.nodes[op.Source].merging >= c.settings.NodeMerges {
		return Operation{}, holdBusy
	}
	if h == free {
		op.Other = o.Descriptor.Range
		op.Requires.Live = []keyspace.NodeID{r.Leader}
	}
	return op, h
}

// align returns the next step that brings small to the nodes of large, and a merge if no step
// is left.
func (c *Cluster) align(small, large *rng, why string) (Operation, hold) {
	for _, is := range small.Descriptor.Replicas {
		if large.votesOn(is.Node) {
			continue
		}
		source, h := c.sender(small)
		if h != free {
			return Operation{}, h
		}
		from := c.nodes[is.Node]
		to, h := c.beside(small, large, from)
		if h != free {
			return Operation{}, h
		}
		op := Operation{
			Kind: MoveReplica, From: from.ID, To: to.ID, Source: source.ID,
			Why: why + ": first their replicas come together",
		}
		if small.Leader == from.ID {
			op.Lead = c.heir(small, from, to).ID
		}
		return op, free
	}
	n, h := c.worker(small)
	if h != free {
		return Operation{}, h
	}
	if len(small.Descriptor.Replicas) != len(large.Descriptor.Replicas) {
		return Operation{}, holdLater
	}
	if small.Leader != large.Leader {
		if l := c.nodes[large.Leader]; l == nil || !l.takes() {
			return Operation{}, holdLeader
		}
		return Operation{
			Kind: TransferLeader, From: n.ID, Lead: large.Leader, Source: n.ID,
			Why: why + ": first they get one leader",
		}, free
	}
	return Operation{Kind: Merge, Source: n.ID, Why: why}, free
}

// beside returns a node of large that can take a replica of small and has none. The replica
// must not crowd a zone more than before, nor be one that balance would move away again.
func (c *Cluster) beside(small, large *rng, from *node) (*node, hold) {
	h := holdZone
	for _, s := range large.seats {
		n := s.node
		crowds := small.inZone(n.zone, from) >= small.inZone(from.zone, nil) && !mutation.Is(mutation.ZonesIgnored)
		if small.seatOf(n.ID) != nil || !n.takes() || crowds {
			continue
		}
		if c.settings.bears(n.receiving, n.receivingBytes) && c.fits(n, c.cost(small)) && c.evenAfter(float64(c.cost(small)), from, n) {
			return n, free
		}
		h = holdTargets
	}
	return nil, h
}
