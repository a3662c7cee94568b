package decide

import (
	"fmt"
	"time"
)

// balanceLoad takes load from the nodes that have had too much of it for a while.
func (c *Cluster) balanceLoad() {
	for _, n := range ends(c.byLoad, maxUneven, false) {
		load := float64(n.load)
		if load <= c.restLoad() {
			n.hot = false
			return // those behind it have less
		}
		if n.ID == c.gatherTo {
			n.hot = false
			continue // it has little to do
		}
		// Changing load is no lasting load: it counts from the moment it stays.
		if change := load - n.hotLoad; !n.hot && load > c.highLoad() ||
			n.hot && max(change, -change) > c.settings.LoadRest*n.hotLoad {
			n.hot, n.hotAt, n.hotLoad = true, c.now, load
		}
		if n.hot && c.now.Sub(n.hotAt) >= c.settings.Patience && n.retryAt[Load] <= c.now {
			c.coolNode(n)
		}
	}
}

// maxPatience bounds how many times Patience a load must last before ranges are moved
// that have little of it.
const maxPatience = 20

// lasts says whether the node has had too much load for long enough to move this range. Below a
// quarter of a node's load, the time grows as the range's part falls. Only lasting load is worth
// many small moves.
func (c *Cluster) lasts(n *node, r *rng) bool {
	times := min(max(c.loadAt(0)/float64(4*r.Load), 1), maxPatience)
	return c.now.Sub(n.hotAt) >= time.Duration(times*float64(c.settings.Patience))
}

// coolNode gives the lead of a range to another of its voters. If all of those have much to do
// themselves, it moves a replica with its lead to a node that has little.
func (c *Cluster) coolNode(n *node) {
	excess := float64(n.load) - c.restLoad()
	least := excess / maxSampled
	hottest := n.hottest(func(*rng) bool { return true })
	if hottest != nil && float64(hottest.Load) > c.restLoad() {
		// One range alone is too much for a node. Moving the ranges beside it would help
		// little, and they would come back once the range has cooled.
		least = excess / 4
	}
	var best *rng
	var heir *node
	gain := least
	for r := range c.some(n) {
		if r.Leader != n.ID || float64(r.Load) < least || r.Load == 0 || !c.rested(r.ledAt) || !c.lasts(n, r) || !c.calm(r) ||
			c.gathered(r) {
			continue
		}
		to := c.coolest(r, n)
		if to == nil {
			continue
		}
		// Of those that are enough the smallest is best.
		if g := c.relief(r, n, to); g > gain || g == gain && best != nil && r.Load < best.Load {
			best, heir, gain = r, to, g
		}
	}
	why := fmt.Sprintf("node %s has %d puts and reads a second, %.0f is the mean", n.ID, n.load,
		float64(c.sum.load)/float64(max(1, c.sum.live)))
	switch {
	case best != nil:
		if n.tasks < c.settings.NodeTasks && c.underWay < c.settings.MaxOperations {
			n.hotLoad -= float64(best.Load)
			c.transfer(best, n, heir, Load, fmt.Sprintf("%s: %d of them go to node %s", why, best.Load, heir.ID))
		}
	default:
		// One that was moved here not long ago may be as hot as those that are not tied.
		r := n.hottest(func(r *rng) bool { return c.rested(r.movedAt) && c.lasts(n, r) && c.calm(r) && !c.gathered(r) })
		if r == nil || !c.moveLoad(r, n, why) {
			n.retryAt[Load] = c.now.Add(c.settings.Patience)
		}
	}
}

// hottest returns the range with the most load that the node leads, of those that may be.
func (n *node) hottest(may func(*rng) bool) *rng {
	var best *rng
	for _, r := range n.replicas {
		if r.Leader == n.ID && r.plannedLeader() == n.ID && r.Load > 0 && (best == nil || r.Load > best.Load) && may(r) {
			best = r
		}
	}
	return best
}

// coolest returns the voter of the range, besides the node, with the least load.
func (c *Cluster) coolest(r *rng, n *node) *node {
	var best *node
	for _, s := range r.seats {
		o := s.node
		if o == n || !o.takes() || !r.votes(o) {
			continue
		}
		if best == nil || o.load < best.load || o.load == best.load && o.ID < best.ID {
			best = o
		}
	}
	return best
}

// relief returns by how much the higher load of two nodes falls when one gives a range's load
// to the other, as far as it is too high. It returns 0 if that is not worth it.
func (c *Cluster) relief(r *rng, from, to *node) float64 {
	before := float64(from.load)
	after := max(float64(from.load-r.Load), float64(to.load+r.Load), c.restLoad())
	if float64(to.load+r.Load) > c.restLoad() && before-after < max(before*c.settings.LoadRest, float64(c.settings.MinLoad)) {
		return 0
	}
	return before - after
}

// moveLoad moves a replica of the range, and the lead with it, to the node with the least load
// whose share of bytes allows it. The replica is the leader's own, or the one in that node's
// zone.
func (c *Cluster) moveLoad(r *rng, from *node, why string) bool {
	for _, to := range ends(c.byLoad, maxLook, true) {
		giver := from
		if from.zone != to.zone {
			giver = r.follower(to.zone, from)
		}
		if giver == nil || !to.in.receiver || !c.settings.bearsBalance(to.balanceIn, to.receivingBytes) ||
			!c.evenAfter(float64(c.cost(r)), giver, to) || c.relief(r, from, to) == 0 || c.canMoveLead(r, giver, to) != free {
			continue
		}
		from.hotLoad -= float64(r.Load)
		c.emit(r, Operation{
			Kind: MoveReplica, From: giver.ID, To: to.ID, Lead: to.ID, Source: r.Leader, Reason: Load,
			Why: fmt.Sprintf("%s: %d of them go to node %s", why, r.Load, to.ID),
		})
		return true
	}
	return false
}

// follower returns the node of the zone with a voter of the range that does not lead;
// where there is none, the leader's.
func (r *rng) follower(z *zone, lead *node) *node {
	for _, s := range r.seats {
		if s.node.zone == z && s.node != lead && r.votes(s.node) {
			return s.node
		}
	}
	return lead
}

// canMoveLead is canMove for a move that takes the lead along, to a node whose load has
// been looked at.
func (c *Cluster) canMoveLead(r *rng, from, to *node) hold {
	h := c.canMove(r, from, to)
	if h == holdLead {
		return free // that is about another heir
	}
	return h
}

// transfer decides that another voter leads, for balance.
func (c *Cluster) transfer(r *rng, from, to *node, reason Reason, why string) {
	c.emit(r, Operation{
		Kind: TransferLeader, From: from.ID, Lead: to.ID, Source: from.ID, Reason: reason, Why: why,
	})
}

// balanceLeaders makes the numbers of leaders more equal.
func (c *Cluster) balanceLeaders() {
	if c.sum.live == 0 {
		return
	}
	mean := float64(c.sum.leaders) / float64(c.sum.live)
	for _, n := range ends(c.byLeaders, maxUneven, true) {
		miss := mean - float64(n.leaders)
		if miss <= 0 || !c.off(&n.uneven, miss, mean, 1) {
			break
		}
		c.repeat(n, func() bool { return c.takeLead(n, mean) })
	}
	for _, n := range ends(c.byLeaders, maxUneven, false) {
		miss := float64(n.leaders) - mean
		if miss <= 0 || !c.off(&n.uneven, miss, mean, 1) {
			break
		}
		c.repeat(n, func() bool { return c.giveLead(n, mean) })
	}
}

// repeat moves several leaders of one node in a round, as long as it is uneven. A node
// that is only restarted is back before its leaders are spread over the others.
func (c *Cluster) repeat(n *node, once func() bool) {
	if n.retryAt[Leaders] > c.now || c.now.Sub(n.uneven.since) < c.settings.Patience {
		return
	}
	for i := range c.settings.NodeTasks {
		if c.underWay >= c.settings.MaxOperations {
			return
		}
		if !once() {
			if i == 0 {
				n.retryAt[Leaders] = c.now.Add(c.settings.Patience)
			}
			return
		}
	}
}

// leadOff says whether so many leaders are still outside of the rest.
func (c *Cluster) leadOff(miss, mean float64) bool { return miss > band(mean, c.settings.Rest, 1) }

// takeLead gives the node the lead of a range, from the node with the most leaders of
// those that it shares ranges with.
func (c *Cluster) takeLead(n *node, mean float64) bool {
	if !c.leadOff(mean-float64(n.leaders), mean) {
		return false
	}
	lowest := mean - band(mean, c.settings.Rest, 1)
	var best *rng
	var from *node
	for r := range c.some(n) {
		o := c.nodes[r.Leader]
		if o == nil || o == n || o.leaders-1 < n.leaders+1 || float64(o.leaders-1) < lowest ||
			best != nil && o.leaders <= from.leaders || !c.canLead(r, o, n) {
			continue
		}
		best, from = r, o
	}
	if best == nil {
		return false
	}
	c.transfer(best, from, n, Leaders, fmt.Sprintf("node %s leads %d ranges, %.1f is the mean, and node %s leads %d",
		n.ID, n.leaders, mean, from.ID, from.leaders))
	return true
}

// giveLead gives the lead of one of the node's ranges to the voter that has the fewest.
func (c *Cluster) giveLead(n *node, mean float64) bool {
	if !c.leadOff(float64(n.leaders)-mean, mean) {
		return false
	}
	var best *rng
	var to *node
	for r := range c.some(n) {
		if r.Leader != n.ID {
			continue
		}
		for _, s := range r.seats {
			o := s.node
			if o == n || n.leaders-1 < o.leaders+1 || best != nil && o.leaders >= to.leaders || !c.canLead(r, n, o) {
				continue
			}
			best, to = r, o
		}
	}
	if best == nil {
		return false
	}
	c.transfer(best, n, to, Leaders, fmt.Sprintf("node %s leads %d ranges, %.1f is the mean, and node %s leads %d",
		n.ID, n.leaders, mean, to.ID, to.leaders))
	return true
}

// canLead says whether the lead may go from one node to the other just to even out the numbers.
// It may not if that gives the other node so much load that it would lose some again.
func (c *Cluster) canLead(r *rng, from, to *node) bool {
	return to.takes() && r.votes(to) && c.rested(r.ledAt) && from.live() && from.tasks < c.settings.NodeTasks &&
		float64(to.load+r.Load) <= c.restLoad() && c.calm(r) && !c.gathered(r)
}
