package decide

import (
	"slices"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

func staysVoter(role keyspace.Role) bool {
	return role == keyspace.RoleVoter || role == keyspace.RoleVoterIncoming
}

// tally is what the replicas of a range come to.
type tally struct {
	voters   int // of the configuration that will be, when a joint one is left
	dead     int // voters on nodes that count as lost, or in quarantine
	silent   int // replicas on nodes that are not heard, the dead ones and those in quarantine included
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
		closed := r.closed(rep.ID)
		live := n != nil && n.live() && !closed
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
		if voter && (n == nil || n.dead || closed) {
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

// maxLook bounds how many nodes are looked at from the end of an order.
const maxLook = 32

// heir returns the node that should lead the range, once from does not: of its live
// voters, and to if it is not nil, the one with the fewest leaders.
func (c *Cluster) heir(r *rng, from, to *node) *node {
	var best *node
	for _, s := range r.seats {
		n := s.node
		if n == from || !n.takes() || !r.votes(n) {
			continue
		}
		if best == nil || n.leaders < best.leaders || n.leaders == best.leaders && n.ID < best.ID {
			best = n
		}
	}
	if to != nil && (best == nil || to.leaders < best.leaders) {
		best = to
	}
	return best
}

// votes says whether the range has a voter on the node that stays one, and is not in quarantine.
func (r *rng) votes(n *node) bool {
	is, ok := r.Descriptor.ReplicaOn(n.ID)
	return ok && staysVoter(is.Role) && !r.closed(is.ID)
}

// closed says whether the replica is in quarantine.
func (r *rng) closed(id keyspace.ReplicaID) bool {
	return slices.ContainsFunc(r.Quarantined, func(q Quarantined) bool { return q.Replica == id }) && !mutation.Is(mutation.QuarantinedCounts)
}

// closedOn returns the range's replica on the node if that is in quarantine.
func (r *rng) closedOn(n *node) (Quarantined, bool) {
	is, ok := r.Descriptor.ReplicaOn(n.ID)
	i := slices.IndexFunc(r.Quarantined, func(q Quarantined) bool { return q.Replica == is.ID })
	if !ok || i < 0 {
		return Quarantined{}, false
	}
	return r.Quarantined[i], true
}

func (r *rng) votesOn(id keyspace.NodeID) bool {
	is, ok := r.Descriptor.ReplicaOn(id)
	return ok && staysVoter(is.Role)
}

// isolated says whether the range is led by a node that hands it over, if it can.
func (c *Cluster) isolated(r *rng) bool {
	n := c.nodes[r.Leader]
	return n != nil && n.Isolated
}
