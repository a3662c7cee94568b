package decide

import (
	"errors"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// tally is what the replicas of a range come to.
type tally struct {
	voters   int // of the configuration that will be, when a joint one is left
	dead     int // voters on nodes that count as lost
	silent   int // replicas on nodes that are not heard, the dead ones included
	learners int
	joint    bool
	// spare is how many more voters may be lost before the range stops; below 0 it has
	// stopped.
	spare int
}

// count returns the tally of the range as it is, whatever is under way.
func (c *Cluster) count(r *rng) tally {
	var t tally
	var was, wasLive, is, isLive int // old and new half of a joint configuration
	for _, rep := range r.Descriptor.Replicas {
		n := c.nodes[rep.Node]
		live := n != nil && n.live()
		if !live {
			t.silent++
		}
		old, voter := false, false
		switch rep.Role {
		case keyspace.RoleVoter:
			old, voter = true, true
		case keyspace.RoleVoterIncoming:
			voter, t.joint = true, true
		case keyspace.RoleVoterOutgoing, keyspace.RoleVoterDemoting:
			old, t.joint = true, true
		case keyspace.RoleLearner:
			t.learners++
		}
		was, wasLive = tell(was, wasLive, old, live)
		is, isLive = tell(is, isLive, voter, live)
		if voter && (n == nil || n.dead) {
			t.dead++
		}
	}
	t.voters = is
	t.spare = min(isLive-quorum(is), wasLive-quorum(was))
	return t
}

func tell(all, live int, counts, lives bool) (int, int) {
	if counts {
		all++
		if lives {
			live++
		}
	}
	return all, live
}

// quorum returns how many of n voters decide.
func quorum(n int) int { return n/2 + 1 }

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
// lead. That copies nothing and takes nobody from the range, so it waits for nothing: whoever
// drains a node is about to stop it.
func (c *Cluster) handsOver(r *rng) bool {
	n := c.nodes[r.Leader]
	return n != nil && n.live() && n.State == Draining && c.heir(r, n, nil) != nil
}

// inZone counts the voters by plan in the zone, except on one node.
func (r *rng) inZone(z *zone, except *node) int {
	k := 0
	for _, s := range r.seats {
		if s.node.zone == z && s.node != except && r.plannedOn(s.node.ID) {
			k++
		}
	}
	return k
}

// usable says whether the zone has a live node, but for some, that has no replica of r and room
// for one. The emptiest come first, so that few are looked at.
func (c *Cluster) usable(z *zone, r *rng, but []keyspace.NodeID) bool {
	found, looked := false, 0
	z.roomy.Ascend(func(n *node) bool {
		looked++
		found = !slices.Contains(but, n.ID) && r.seatOf(n.ID) == nil && c.fits(n, c.cost(r))
		return !found && looked < maxLook
	})
	return found
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
