package decide

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// repair replaces a voter that is on a dead node or in quarantine, or ends it where there are more
// than wanted. A joint configuration is left first: raft takes no other change before.
//
// A replica in quarantine is replaced on its own node if no other one can have it, or only one whose
// zone has more of the range. It ends, and then the range lacks a voter. That costs no quorum. The replica
// counts as lost: without it the range bears as many losses as before, or one more.
func (c *Cluster) repair(r *rng) (Operation, hold) {
	t := c.count(r)
	if t.joint {
		return c.leaveJoint(r)
	}
	if left := c.closedLearner(r); left != nil {
		return c.dropLearner(r, left) // it may have the only place
	}
	var lost *node
	for _, is := range r.Descriptor.Replicas {
		n := c.nodes[is.Node]
		if is.Role == keyspace.RoleVoter && (n.dead || r.closed(is.ID)) && (lost == nil || n.Leaves && !lost.Leaves) {
			lost = n
		}
	}
	risk := fmt.Sprintf("node %s is lost, %d of %d voters live", lost.ID, t.voters-t.dead, t.voters)
	gone := Requirement{Silent: []keyspace.NodeID{lost.ID}}
	bad, closed := r.closedOn(lost)
	if closed {
		// It stays so until it is replaced, whatever becomes of its node.
		risk = fmt.Sprintf("the replica on node %s is in quarantine (%s), %d of %d voters live", lost.ID, bad.Reason, t.voters-t.dead, t.voters)
		gone = Requirement{}
	}
	if t.voters > c.settings.ReplicationFactor {
		n, h := c.worker(r)
		return Operation{
			Kind: RemoveReplica, From: lost.ID, Source: idOf(n), Requires: gone,
			Why: risk + " and that many are not wanted",
		}, h
	}
	source, h := c.sender(r)
	if h != free {
		return Operation{}, h
	}
	to, h := c.resume(r, lost)
	if closed && (h == holdNodes || h == free && lost.takes() && r.inZone(to.zone, lost) > r.inZone(lost.zone, lost)) {
		return c.remove(r, lost, risk+": it is rebuilt in its place", gone)
	}
	if h == holdNodes && lost.Leaves && c.everywhere(r) {
		gone.Leaving = []keyspace.NodeID{lost.ID}
		return c.remove(r, lost, risk+" and every node that serves has a replica", gone)
	}
	why := ""
	if h == holdNodes && t.spare == 0 {
		if to = c.fallback(r, lost); to != nil {
			gone.Heard, why, h = []keyspace.NodeID{to.ID}, ", which hears hardly any other node: no other one can take it", free
		}
	}
	if h != free {
		return Operation{}, h
	}
	return Operation{
		Kind: MoveReplica, From: lost.ID, To: to.ID, Source: source.ID, Requires: gone,
		Why: risk + ": its replica is rebuilt on " + c.where(to) + why,
	}, free
}

// fallback returns the isolated node that is to get the replica on from, nil where there is none.
// The next loss would stop the range, and no other node can take the replica.
//
// The node may not hear the leader, and then never gets its copy. The repair is given up, and
// tried again after Patience with any of the isolated nodes: the learner that was left behind
// says that the best one was tried. A node that gets the copy has a full vote while it hears
// the leader, and it keeps what it stored for when it hears the others again. The dead voter
// that it replaces has neither. It hands over leadership by itself, so that it does not lead
// for long costs nothing. If the range can lose one more replica, or a better node is only
// busy, waiting costs less than a place that may have to be left again.
func (c *Cluster) fallback(r *rng, from *node) *node {
	var best *node
	var all []*node
	tried := false
	for _, n := range c.alone {
		is, has := r.Descriptor.ReplicaOn(n.ID)
		if !n.live() || n.State != Serving || has && (is.Role != keyspace.RoleLearner || r.closed(is.ID)) ||
			!c.settings.bears(n.receiving, n.receivingBytes) || !has && !c.fits(n, c.cost(r)) {
			continue
		}
		all, tried = append(all, n), tried || has
		if best == nil || cmp.Or(cmp.Compare(r.inZone(n.zone, from), r.inZone(best.zone, from)), cmp.Compare(n.in.fill, best.in.fill)) < 0 {
			best = n
		}
	}
	if tried {
		return all[c.random.IntN(len(all))]
	}
	return best
}

// Stranded says whether the node has been isolated for so long that a repair need not wait for it
// where a better node is there. A node that was isolated for less may recover in a moment.
func (c *Cluster) Stranded(id keyspace.NodeID) bool {
	n := c.nodes[id]
	return n != nil && n.Isolated && c.now.Sub(n.IsolatedSince) >= c.settings.AbandonAfter
}

// leaveFallbacks returns the repairs to abandon: their copies go to isolated nodes, and may never
// arrive, and a node that is not isolated can take the replica now. A repair never goes from one
// isolated node to another, and the new one takes a node that was not available before, so nothing
// oscillates. A repair whose copy has arrived goes on: it is about to be a voter, and whoever
// executes the other repairs promotes before giving up.
func (c *Cluster) leaveFallbacks() []Abandon {
	var out []Abandon
	given := map[*node]int{}
	bytes := map[*node]int64{}
	for _, n := range c.alone {
		if n.receiving == 0 || !c.Stranded(n.ID) {
			continue
		}
		for _, r := range n.replicas {
			op := r.op
			if op == nil || op.To != n.ID || op.Range != r.Descriptor.Range || op.Reason != QuorumRisk && op.Reason != Repair || r.votes(n) {
				continue
			}
			to, h := c.resume(r, c.nodes[op.From])
			// No more than it can take at once: the others' copies may come meanwhile.
			if h == free && c.settings.bears(to.receiving+given[to], to.receivingBytes+bytes[to]) && c.fits(to, c.cost(r)+bytes[to]) {
				given[to]++
				bytes[to] += c.cost(r)
				out = append(out, Abandon{op.Range, fmt.Sprintf("%s: node %s hears hardly any other, and %s can take it", op, n.ID, c.where(to))})
			}
		}
	}
	slices.SortFunc(out, func(a, b Abandon) int { return compare(a.Range, b.Range) })
	return out
}

func idOf(n *node) keyspace.NodeID {
	if n == nil {
		return 0
	}
	return n.ID
}

// resume returns the node of a learner that was left behind at a place where a replica may go,
// and otherwise a new place. It saves a second copy.
func (c *Cluster) resume(r *rng, from *node) (*node, hold) {
	to, h := c.elsewhere(r, from)
	var left *node
	for _, is := range r.Descriptor.Replicas {
		n := c.nodes[is.Node]
		if is.Role != keyspace.RoleLearner || r.closed(is.ID) || !n.takes() || !c.settings.bears(n.receiving, n.receivingBytes) {
			continue
		}
		// The learner itself is in the count of its zone.
		if (left == nil || slices.Index(r.vain, n.ID) < slices.Index(r.vain, left.ID)) && (to == nil || r.inZone(n.zone, from)-1 <= r.inZone(to.zone, from)) {
			left = n
		}
	}
	if left != nil && (!slices.Contains(r.vain, left.ID) || h == holdNodes) {
		return left, free
	}
	return to, h
}

func (c *Cluster) leaveJoint(r *rng) (Operation, hold) {
	n, h := c.worker(r)
	return Operation{
		Kind: LeaveJoint, Source: idOf(n),
		Why: "a change of its replicas was left half done, in a joint configuration",
	}, h
}

// learner ends a learner that nobody promotes, or makes it the voter that is missing.
func (c *Cluster) learner(r *rng) (Operation, hold) {
	t := c.count(r)
	if left := c.closedLearner(r); left != nil {
		return c.dropLearner(r, left)
	}
	var left *node
	for _, is := range r.Descriptor.Replicas {
		if is.Role == keyspace.RoleLearner {
			left = c.nodes[is.Node]
			break
		}
	}
	// A node that no copy reached is not taken again while another node can have the replica.
	_, other := c.choose(r, nil)
	if t.voters < c.wanted(t.voters) && left.takes() && (!slices.Contains(r.vain, left.ID) || other == holdNodes) {
		source, h := c.sender(r)
		return Operation{
			Kind: AddReplica, To: left.ID, Source: idOf(source),
			Why: fmt.Sprintf("%s has a learner and the range %d of %d voters", c.where(left), t.voters, c.settings.ReplicationFactor),
		}, h
	}
	return c.dropLearner(r, left)
}

// dropLearner ends a learner.
func (c *Cluster) dropLearner(r *rng, left *node) (Operation, hold) {
	n, h := c.worker(r)
	return Operation{
		Kind: RemoveReplica, From: left.ID, Source: idOf(n), Reason: Learner,
		Why: fmt.Sprintf("a copy to %s was given up", c.where(left)),
	}, h
}

// closedLearner returns the node of a learner in quarantine, nil if there is none.
func (c *Cluster) closedLearner(r *rng) *node {
	for _, is := range r.Descriptor.Replicas {
		if is.Role == keyspace.RoleLearner && r.closed(is.ID) {
			return c.nodes[is.Node]
		}
	}
	return nil
}

// drain moves the lead off a node that is drained, and replicas off one that is
// decommissioned.
func (c *Cluster) drain(r *rng) (Operation, hold) {
	if c.handsOver(r) {
		return c.handOver(r)
	}
	var n *node
	for _, s := range r.seats {
		// A leaving replica may go without a replacement: waiting for one would keep the node.
		if s.node.State == Decommissioning && (n == nil || s.node.Leaves && !n.Leaves) {
			n = s.node
		}
	}
	if n != nil {
		req := Requirement{Leaving: []keyspace.NodeID{n.ID}}
		why := fmt.Sprintf("node %s is decommissioned", n.ID)
		if c.count(r).voters > c.settings.ReplicationFactor {
			op, h := c.remove(r, n, why, req)
			if h != holdLead {
				return op, h
			}
			// It leads, and those that stay are drained: whoever comes in its place takes the lead.
		}
		op, h := c.move(r, n, why, req)
		if h == holdNodes && n.Leaves && c.everywhere(r) {
			return c.remove(r, n, why+", and every node that serves has a replica", req)
		}
		return op, h
	}
	if _, h := c.worker(r); h != free {
		return Operation{}, h
	}
	return Operation{}, holdLead
}

// handOver moves the lead off a node that is drained, as handsOver says that it can be.
func (c *Cluster) handOver(r *rng) (Operation, hold) {
	from, h := c.worker(r)
	if h != free {
		return Operation{}, h
	}
	to := c.heir(r, from, nil)
	return Operation{
		Kind: TransferLeader, From: from.ID, Lead: to.ID, Source: from.ID, Reason: Drain,
		Requires: Requirement{Leaving: []keyspace.NodeID{from.ID}},
		Why:      fmt.Sprintf("node %s is drained; %s has the fewest leaders", from.ID, c.where(to)),
	}, free
}

// move replaces the replica on from by one where choose says.
func (c *Cluster) move(r *rng, from *node, why string, req Requirement) (Operation, hold) {
	source, h := c.sender(r)
	if h != free {
		return Operation{}, h
	}
	to, h := c.elsewhere(r, from)
	if h == free && r.need == Zones {
		// A zone that has more of them would be no better.
		if best, hb := c.choose(r, from); hb != free || r.inZone(best.zone, from) < r.inZone(to.zone, from) {
			to, h = best, hb
		}
	}
	if h != free {
		return Operation{}, h
	}
	op := Operation{
		Kind: MoveReplica, From: from.ID, To: to.ID, Source: source.ID, Requires: req,
		Why: why + ": its replica goes to " + c.where(to),
	}
	if r.Leader == from.ID {
		op.Lead = c.heir(r, from, to).ID
	}
	return op, free
}

// remove ends the replica on from.
func (c *Cluster) remove(r *rng, from *node, why string, req Requirement) (Operation, hold) {
	n, h := c.worker(r)
	if h != free {
		return Operation{}, h
	}
	op := Operation{Kind: RemoveReplica, From: from.ID, Source: n.ID, Why: why, Requires: req}
	if r.Leader == from.ID {
		heir := c.heir(r, from, nil)
		if heir == nil {
			return Operation{}, holdLead
		}
		op.Lead = heir.ID
	}
	return op, free
}

// everywhere says whether every node that serves and is not lost has a replica of the range,
// and one of them votes. Otherwise some node is there, or will be, to take another replica
// over.
func (c *Cluster) everywhere(r *rng) bool {
	votes := false
	for _, n := range c.nodes {
		switch {
		case !n.known || n.State != Serving || n.dead:
		case r.seatOf(n.ID) == nil:
			return false
		default:
			votes = votes || n.takes() && r.votes(n)
		}
	}
	return votes
}

// spread moves a replica out of the zone that has the most of the range.
func (c *Cluster) spread(r *rng) (Operation, hold) {
	z, many := c.crowd(r)
	if z == nil {
		return Operation{}, holdZone
	}
	return c.move(r, c.surplus(r, z), fmt.Sprintf("zone %q has %d replicas of the range", z.name, many), Requirement{})
}

// surplus returns the node of the zone (or of all where it is nil) whose replica is best
// missed: not the leader's, and then the fullest one.
func (c *Cluster) surplus(r *rng, z *zone) *node {
	return c.fullest(r, func(n *node) bool { return z == nil || n.zone == z })
}

// fullest is surplus of the nodes that may be taken, nil where none may.
func (c *Cluster) fullest(r *rng, may func(*node) bool) *node {
	var worst *node
	for _, s := range r.seats {
		n := s.node
		if !may(n) || !r.votes(n) {
			continue
		}
		if worst == nil || worst.ID == r.Leader || n.ID != r.Leader && n.in.fill > worst.in.fill {
			worst = n
		}
	}
	return worst
}

// superfluous is surplus of a range that has more voters than it is to have. Drained nodes may
// be stopped at any time. So if the replicas on other nodes are no more than the future quorum,
// one on a drained node goes, whatever its zone.
func (c *Cluster) superfluous(r *rng, z *zone) *node {
	stay := 0
	for _, s := range r.seats {
		if r.votes(s.node) && s.node.takes() {
			stay++
		}
	}
	if stay > quorum(c.settings.ReplicationFactor) {
		return c.surplus(r, z)
	}
	return c.fullest(r, func(n *node) bool { return !n.takes() })
}

// factor adds or ends a voter, so that there are as many as the replication factor says.
func (c *Cluster) factor(r *rng) (Operation, hold) {
	t := c.count(r)
	why := fmt.Sprintf("the range has %d voters and the replication factor is %d", t.voters, c.settings.ReplicationFactor)
	if t.voters > c.settings.ReplicationFactor {
		var most *zone
		many := 0
		for _, s := range r.seats {
			if k := r.inZone(s.node.zone, nil); k > many {
				most, many = s.node.zone, k
			}
		}
		if many == 1 {
			most = nil
		}
		return c.remove(r, c.superfluous(r, most), why, Requirement{})
	}
	source, h := c.sender(r)
	if h != free {
		return Operation{}, h
	}
	to, h := c.elsewhere(r, nil)
	if h != free {
		return Operation{}, h
	}
	return Operation{
		Kind: AddReplica, To: to.ID, Source: source.ID,
		Why: why + ": one is added on " + c.where(to),
	}, free
}
