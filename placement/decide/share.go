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

// evenAfter says whether neither node is on the wrong side of its share when so many
// bytes have gone from one to the other.
func (c *Cluster) evenAfter(bytes float64, from, to *node) bool {
	one := c.oneRange()
	lowest := from.share() - band(from.share(), c.settings.Rest, one)
	highest := to.share() + band(to.share(), c.settings.Rest, one)
	return float64(from.bytes)-bytes >= lowest && float64(to.bytes)+bytes <= highest
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

// calm says whether the range may be touched for balance. Nothing is under way for it, it needs
// nothing more urgent, it is not half way to a merge, all of its voters live, and its leader is
// not about to hand it over by itself.
func (c *Cluster) calm(r *rng) bool {
	if r.op != nil || r.mate != nil || r.need != None && r.need < Cold || r.retryAt > c.now || c.isolated(r) {
		return false
	}
	t := c.count(r)
	return t.silent == 0 && !t.joint && t.learners == 0
}

func (c *Cluster) rested(at clock.Time) bool {
	return at == 0 || c.now.Sub(at) >= c.settings.CoolDown
}

// gathered says whether the range's lead is to go to the sequencer's node, or to stay there.
func (c *Cluster) gathered(r *rng) bool {
	to := c.nodes[c.gatherTo]
	if to == nil || !to.takes() || !r.votes(to) {
		return false
	}
	if r.Leader == to.ID {
		return r.Load >= gatherLeast/2
	}
	return r.Load >= gatherLeast
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

// ofShare says how full the node is by plan.
func ofShare(n *node) string {
	return fmt.Sprintf("%.0f %% of its share", 100*float64(n.bytes)/n.share())
}
