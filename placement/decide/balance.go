package decide

import (
	"fmt"
	"slices"

	"github.com/google/btree"

	"github.com/skeindb/skein/clock"
)

const (
	// maxUneven bounds the nodes at one end of an order that a round does something for.
	maxUneven = 128
	// maxPartners bounds the nodes of its own zone, and of each other one, that a node
	// gives to or takes from.
	maxPartners = 4
	// maxSampled bounds the replicas of a node that are looked at to find one to move.
	maxSampled = 64
)

// shares finds out how full the nodes of each zone should be. Bytes are shared by
// capacity, but no zone can hold more replicas of a range than an even spread puts there:
// what is beyond that goes to the other zones.
func (c *Cluster) shares() {
	var open []*zone
	weight := int64(0)
	for _, z := range c.zones {
		z.target = 0
		if z.weight > 0 {
			open = append(open, z)
			weight += z.weight
		}
	}
	if len(open) == 0 {
		return
	}
	factor := max(1, c.settings.ReplicationFactor)
	each := (factor + len(open) - 1) / len(open)
	most := float64(c.sum.bytes) * float64(each) / float64(factor)
	left := float64(c.sum.bytes)
	for len(open) > 0 {
		full := slices.IndexFunc(open, func(z *zone) bool {
			return left*float64(z.weight)/float64(weight) > most
		})
		if full < 0 {
			for _, z := range open {
				z.target = left / float64(weight)
			}
			return
		}
		z := open[full]
		z.target = most / float64(z.weight)
		left -= most
		weight -= z.weight
		open = slices.Delete(open, full, full+1)
	}
}

// share returns the bytes that the node should have.
func (n *node) share() float64 { return n.zone.target * float64(n.weight()) }

// oneRange is what a replica counts on the average.
func (c *Cluster) oneRange() float64 {
	if c.sum.count == 0 {
		return 0
	}
	return float64(c.sum.bytes) / float64(c.sum.count)
}

// band returns by how much so large a share may be missed: part of it, or one.
func band(share, part, one float64) float64 { return max(share*part, one) }

// An outside is whether a node is outside of a band, or has been and is not yet inside of
// the rest, and since when.
type outside struct {
	is    bool
	since clock.Time
}

// off notes that a value misses its share by so much, and says whether that is to be
// mended.
func (c *Cluster) off(o *outside, miss, share, one float64) bool {
	switch {
	case miss > band(share, c.settings.Band, one) && !o.is:
		*o = outside{true, c.now}
	case miss <= band(share, c.settings.Rest, one):
		o.is = false
	}
	return o.is
}

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
	c.balanceLoad()
	c.balanceLeaders()
}

// ends returns the first nodes of an order from below or above.
func ends(order *btree.BTreeG[*node], most int, up bool) []*node {
	var out []*node
	visit := func(n *node) bool {
		out = append(out, n)
		return len(out) < most
	}
	if up {
		order.Ascend(visit)
	} else {
		order.Descend(visit)
	}
	return out
}

// takeBytes moves a replica to the node, if that is emptier than it should be; false
// says that neither it nor those that are fuller need any.
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

// try goes through the partners until one is found with which something can be done.
// Where nothing holds it up but that there is nothing to move, the node rests.
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

// pick returns the range whose replica is best moved from one node to the other: the
// largest that leaves neither on the wrong side of its share, nor the giver with less
// than the taker; one that the giver does not lead where there is one.
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

// evenAfter says whether neither node is on the wrong side of its share when so many
// bytes have gone from one to the other.
func (c *Cluster) evenAfter(bytes float64, from, to *node) bool {
	one := c.oneRange()
	lowest := from.share() - band(from.share(), c.settings.Rest, one)
	highest := to.share() + band(to.share(), c.settings.Rest, one)
	return float64(from.bytes)-bytes >= lowest && float64(to.bytes)+bytes <= highest
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

// some yields a bounded sample of the ranges with a replica on the node: a piece of its
// list from a place drawn at random.
func (c *Cluster) some(n *node) func(func(*rng) bool) {
	return func(yield func(*rng) bool) {
		all := n.replicas
		if len(all) == 0 {
			return
		}
		at := c.random.IntN(len(all))
		for i := range min(maxSampled, len(all)) {
			if !yield(all[(at+i)%len(all)]) {
				return
			}
		}
	}
}

// calm says whether the range may be touched for balance: nothing is under way, nothing
// more urgent is needed, it is not half way to be merged, all of its voters live, and its
// leader is not about to hand it over by itself.
func (c *Cluster) calm(r *rng) bool {
	if r.op != nil || r.mate != nil || r.need != None && r.need < Cold || r.retryAt > c.now || c.isolated(r) {
		return false
	}
	t := c.count(r)
	return t.silent == 0 && !t.joint && t.learners == 0
}

// isolated says whether the range is led by a node that hands it over, if it can.
func (c *Cluster) isolated(r *rng) bool {
	n := c.nodes[r.Leader]
	return n != nil && n.Isolated
}

func (c *Cluster) rested(at clock.Time) bool {
	return at == 0 || c.now.Sub(at) >= c.settings.CoolDown
}

// canMove says whether the range's replica may be moved for balance. It is free of what
// bytes and load of the two nodes say.
func (c *Cluster) canMove(r *rng, from, to *node) hold {
	switch {
	case r.seatOf(to.ID) != nil || !c.rested(r.movedAt) || !c.calm(r) || !c.fits(to, c.cost(r)):
		return holdTargets
	case r.left == to.ID && !c.settled(r):
		return holdTargets // another range goes there, and this one not to and fro
	case r.inZone(to.zone, from) >= r.inZone(from.zone, nil):
		return holdZone
	}
	lead, h := c.sender(r)
	switch {
	case h != free:
		return h
	case !c.settings.bearsBalance(lead.balanceOut, lead.sendingBytes):
		return holdBusy
	}
	if r.Leader == from.ID {
		if heir := c.heir(r, from, to); float64(heir.load+r.Load) > c.restLoad() {
			return holdLead
		}
	}
	return free
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

// ofShare says how full the node is by plan.
func ofShare(n *node) string {
	return fmt.Sprintf("%.0f %% of its share", 100*float64(n.bytes)/n.share())
}
