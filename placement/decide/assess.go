package decide

import (
	"errors"
)

// review finds out what the range needs and puts it into that queue.
func (c *Cluster) review(r *rng) { c.setNeed(r, c.assess(r)) }

// reviewWithLeft reviews the range and its left neighbour, at which a merge of both is
// noted.
func (c *Cluster) reviewWithLeft(r *rng) {
	c.review(r)
	if l := c.left(r); l != nil {
		c.review(l)
	}
}

// assess returns the most urgent need of the range, None where an operation is under way
// or nothing can be done.
func (c *Cluster) assess(r *rng) Reason {
	if r.op != nil {
		return None
	}
	t := c.count(r)
	switch {
	case t.spare < 0:
		return None // no change of its configuration can be committed
	case t.dead > 0 && t.spare == 0:
		return QuorumRisk
	case t.dead > 0:
		return Repair
	case t.joint:
		return Joint
	case t.learners > 0:
		return Learner
	case t.silent > 0 && !c.handsOver(r):
		return None // until it is heard again, or dead
	case c.leaves(r):
		return Drain
	case c.crowded(r):
		return Zones
	case t.voters != c.wanted(t.voters):
		return Factor
	}
	switch err := c.mergeable(r); {
	case err == nil:
		return Cold
	case r.mate != nil && r.mate == c.right(r) && !errors.Is(err, errMergeUneasy):
		r.part()
	}
	return None
}

// wanted returns how many voters a range with so many should have. More are added only
// where there are nodes for all of them, and never to an even number that would stay.
func (c *Cluster) wanted(voters int) int {
	want := c.settings.ReplicationFactor
	if want > voters && want > c.sum.live {
		return voters
	}
	return want
}

// leaves says whether the range's leader is on a node that is drained, or a replica on
// one that is decommissioned.
func (c *Cluster) leaves(r *rng) bool {
	for _, s := range r.seats {
		n := s.node
		if n.known && (n.State == Decommissioning || n.State == Draining && r.Leader == n.ID) {
			return true
		}
	}
	return false
}

// handsOver says whether the range's leader is on a node that is drained, and another one can
// lead. A transfer copies nothing and removes no replica, so it waits for nothing: the operator
// is about to stop the node.
func (c *Cluster) handsOver(r *rng) bool {
	n := c.nodes[r.Leader]
	return n != nil && n.live() && n.State == Draining && c.heir(r, n, nil) != nil
}

// crowded says whether a replica could move to a zone that would then have fewer of the
// range's replicas than its own has now.
func (c *Cluster) crowded(r *rng) bool {
	from, _ := c.crowd(r)
	return from != nil
}

// crowd returns the zone with the most replicas of the range and the number that it
// would be better to have, nil where none is better.
func (c *Cluster) crowd(r *rng) (*zone, int) {
	if len(c.zones) < 2 {
		return nil, 0
	}
	var most *zone
	many := 1
	for _, s := range r.seats {
		if k := r.inZone(s.node.zone, nil); k > many {
			most, many = s.node.zone, k
		}
	}
	if most == nil {
		return nil, 0
	}
	for _, z := range c.zones {
		if r.inZone(z, nil) <= many-2 && c.usable(z, r, nil) {
			return most, many
		}
	}
	return nil, 0
}
