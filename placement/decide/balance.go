package decide

import (
	"fmt"
	"slices"

	"github.com/google/btree"
)

// balance decides what makes nodes more equal. Bytes wait for repairs: those need the
// copies that nodes can bear, and go to the emptiest nodes anyway.
func (c *Cluster) balance() {
	if c.repairs == 0 {
		for _, z := range c.zones {
			for _, n := range ends(z.receivers, maxUneven, true) {
				if !c.takeBytes(n) {
					break
				}
			}
			for _, n := range ends(z.fill, maxUneven, false) {
				if !c.giveBytes(n) {
					break
				}
			}
		}
	}
	c.gatherLeaders()
	c.balanceLoad()
	c.balanceLeaders()
}

// takeBytes moves a replica to the node if that is emptier than it should be. It returns false
// if neither this node nor any fuller one needs a replica.
func (c *Cluster) takeBytes(n *node) bool {
	share := n.share()
	if miss := share - float64(n.bytes); miss <= 0 || !c.off(&n.far, miss, share, c.oneRange()) {
		return false
	}
	if !c.settings.bearsBalance(n.balanceIn, n.receivingBytes) || n.retryAt[Bytes] > c.now || !n.in.receiver {
		return true
	}
	partners := c.partners(n, func(z *zone) *btree.BTreeG[*node] { return z.fill }, false)
	c.try(n, partners, func(other *node) (*rng, hold) { return c.pick(other, n) }, func(other *node, r *rng) {
		c.moveBytes(r, other, n, fmt.Sprintf("node %s has %s", n.ID, ofShare(n)))
	})
	return true
}

// giveBytes moves a replica from the node, if that is fuller than it should be.
func (c *Cluster) giveBytes(n *node) bool {
	share := n.share()
	if miss := float64(n.bytes) - share; miss <= 0 || !c.off(&n.far, miss, share, c.oneRange()) {
		return false
	}
	if n.retryAt[Bytes] > c.now {
		return true
	}
	partners := c.partners(n, func(z *zone) *btree.BTreeG[*node] { return z.receivers }, true)
	c.try(n, partners, func(other *node) (*rng, hold) { return c.pick(n, other) }, func(other *node, r *rng) {
		c.moveBytes(r, n, other, fmt.Sprintf("node %s has %s", n.ID, ofShare(n)))
	})
	return true
}

// try goes through the partners until one is found with which something can be done. If no
// partner is busy and there is just nothing to move, the node rests.
func (c *Cluster) try(n *node, partners []*node, find func(*node) (*rng, hold), do func(*node, *rng)) {
	busy := false
	for _, other := range partners {
		r, h := find(other)
		if h == free {
			do(other, r)
			return
		}
		busy = busy || h == holdBusy
	}
	if !busy {
		n.retryAt[Bytes] = c.now.Add(c.settings.Patience)
	}
}

// partners returns the nodes at one end of the orders of all zones, the best first.
func (c *Cluster) partners(n *node, order func(*zone) *btree.BTreeG[*node], up bool) []*node {
	var out []*node
	for _, z := range c.zones {
		most := 1
		if z == n.zone {
			most = maxPartners
		}
		out = append(out, ends(order(z), most, up)...)
	}
	out = slices.DeleteFunc(out, func(o *node) bool { return o == n || o.share() == 0 })
	slices.SortStableFunc(out, func(a, b *node) int {
		order := compare(float64(a.bytes)/a.share(), float64(b.bytes)/b.share())
		if order == 0 {
			order = compare(a.ID, b.ID)
		}
		if !up {
			return -order
		}
		return order
	})
	return out
}

// pick returns the range whose replica is best moved from one node to the other. It is the
// largest one that leaves neither node on the wrong side of its share, nor the giver with less
// than the taker. A range that the giver does not lead comes first.
func (c *Cluster) pick(from, to *node) (*rng, hold) {
	var best *rng
	busy := false
	for r := range c.some(from) {
		b := float64(c.cost(r))
		crossed := (float64(from.bytes)-b)/from.share() < (float64(to.bytes)+b)/to.share()
		if crossed || !c.evenAfter(b, from, to) || !c.better(r, best, from) {
			continue
		}
		switch c.canMove(r, from, to) {
		case free:
			best = r
		case holdBusy:
			busy = true
		default:
		}
	}
	switch {
	case best != nil:
		return best, free
	case busy:
		return nil, holdBusy
	}
	return nil, holdTargets
}

// better says whether the range is rather moved from the node than the best so far.
func (c *Cluster) better(r, best *rng, from *node) bool {
	if best == nil {
		return true
	}
	if leads, led := r.Leader == from.ID, best.Leader == from.ID; leads != led {
		return led
	}
	return r.Bytes > best.Bytes
}

// moveBytes decides the move.
func (c *Cluster) moveBytes(r *rng, from, to *node, why string) {
	op := Operation{
		Kind: MoveReplica, From: from.ID, To: to.ID, Source: r.Leader, Reason: Bytes,
		Why: fmt.Sprintf("%s: %d MiB go from node %s (%s) to node %s", why, r.Bytes>>20, from.ID, ofShare(from), to.ID),
	}
	if r.Leader == from.ID {
		op.Lead = c.heir(r, from, to).ID
	}
	c.emit(r, op)
}
