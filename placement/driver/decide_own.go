package driver

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// OwnLeast is how many voters the placement group keeps if no other node can replace one that
// goes. A node that leaves in any case goes all the same.
const OwnLeast = 3

// decideOwn decides about the placement group itself. Its replicas leave lost and
// decommissioned nodes, and its leader leaves a drained one. It has as many voters as the number
// of nodes asks for, and spreads them over zones. It is one step at a time, and nothing for balance: who leads it
// costs more than what it holds. If there is nothing to do, its leadership follows the load (followLoad).
func (d *decider) decideOwn(ctx context.Context, v *fsm.View) {
	own := v.PlacementGroup()
	if d.settings.Paused || own.ConfIndex == 0 || fsm.Joint(&own) {
		return
	}
	all := v.Operations()
	busy := slices.IndexFunc(all, func(o fsm.Operation) bool { return o.Range == fsm.OwnGroup })
	leaving := keyspace.NodeID(0)
	if busy >= 0 {
		leaving = all[busy].From
		d.leaveOwnSilent(&all[busy])
		d.leaveOwnFallback(&own, &all[busy])
	}
	if d.nodes[d.s.o.Self].State != decide.Draining {
		d.handOverAt, d.handOverPause = 0, 0
	} else if d.handOver(ctx, &own, leaving) {
		return // whoever leads then goes on with what is under way
	}
	if busy >= 0 {
		return
	}
	d.forgetTried(&own)
	o, ok := d.ownOperation(&own, d.s.o.Clock.Now())
	if !ok {
		d.followLoad(ctx, &own, len(all) > 0)
		return
	}
	ctx, cancel := clock.WithTimeout(ctx, d.s.o.Clock, OperationStep)
	defer cancel()
	d.s.o.Metrics.Decisions.WithLabelValues(o.Reason.String(), o.Kind.String()).Inc()
	res := d.s.o.Group.Propose(ctx, d.term, fsm.BeginOperation{ConfIndex: own.ConfIndex, Operation: o})
	d.s.o.Logger.Info("decided about the placement group", zap.Stringer("what", &o), zap.String("why", o.Why), zap.Error(res.Err))
	if res.Err == nil {
		if o.To != 0 {
			d.ownTried[o.To]++
		}
		if d.nodes[o.To].Isolated {
			d.ownFallback = o.To
		}
		d.s.kick.Set()
	}
}

// forgetTried begins anew, once a copy of the group has come, with who is tried for the next one.
func (d *decider) forgetTried(own *keyspace.Descriptor) {
	if slices.ContainsFunc(own.Replicas, func(m keyspace.Replica) bool { return m.Role == keyspace.RoleVoter && d.ownTried[m.Node] > 0 }) {
		clear(d.ownTried)
		d.ownFallback = 0
	}
}

// leaveOwnSilent has an operation on the group given up that waits for a node that is silent: as
// with ranges.
func (d *decider) leaveOwnSilent(o *fsm.Operation) {
	if n := d.nodes[o.To]; n.Silent && d.s.o.Clock.Now().Sub(n.SilentSince) >= d.settings.AbandonAfter {
		d.operator.abandon(fsm.OwnGroup, o.ID, fmt.Sprintf("node %s is silent", o.To))
	}
}

// leaveOwnFallback abandons a repair of the group that waits for a copy to an isolated node, if a
// better node is available, as for ranges.
func (d *decider) leaveOwnFallback(own *keyspace.Descriptor, o *fsm.Operation) {
	is, has := own.ReplicaOn(o.To)
	if o.Reason != decide.Repair || o.To == 0 || has && is.Role == keyspace.RoleVoter || !d.c.Stranded(o.To) {
		return
	}
	if to := d.ownTarget(own, o.From, false); to != 0 {
		d.operator.abandon(fsm.OwnGroup, o.ID, fmt.Sprintf("node %s hears hardly any other, and node %s can take it", o.To, to))
	}
}

// ownOperation returns what is to be done for the group's replicas, if anything.
func (d *decider) ownOperation(own *keyspace.Descriptor, now clock.Time) (fsm.Operation, bool) {
	o := fsm.Operation{Range: fsm.OwnGroup}
	voters := 0
	for _, m := range own.Replicas {
		if m.Role != keyspace.RoleVoter {
			return o, false // a learner is being filled, or tidied away
		}
		voters++
		n, known := d.nodes[m.Node]
		// As with ranges, who leaves goes before one that would keep it waiting.
		first := o.From == 0 || n.Leaves && !d.nodes[o.From].Leaves
		switch {
		case d.lost[m.Node] && (first || o.Reason != decide.Repair):
			o.From, o.Reason, o.Why = m.Node, decide.Repair, fmt.Sprintf("node %s is lost", m.Node)
		case first && o.Reason != decide.Repair && (!known || n.State == decide.Decommissioning):
			o.From, o.Reason, o.Why = m.Node, decide.Drain, fmt.Sprintf("node %s is decommissioned", m.Node)
		}
	}
	o.To = d.ownTarget(own, o.From, false)
	if o.From == 0 {
		if other, ok := d.ownNumber(o, own, now); ok {
			return other, true
		}
		return d.ownSpread(own, now)
	}
	switch {
	case o.To != 0:
		o.Kind = fsm.OperationMove
	case voters > OwnLeast, d.nodes[o.From].Leaves && d.everywhere(own):
		o.Kind = fsm.OperationRemove
		o.Why += ", and every other node has a replica"
	case o.Reason == decide.Repair:
		// One more loss would stop it: as with ranges a risky copy is better than none.
		o.Kind, o.To = fsm.OperationMove, d.ownTarget(own, o.From, true)
		o.Why += ", and no other node can take its replica than one that hears hardly any other"
		return o, o.To != 0
	default:
		return o, false
	}
	return o, true
}

// everywhere says whether every node that serves, and is not lost, has a replica of the group,
// and one of them can lead it.
func (d *decider) everywhere(own *keyspace.Descriptor) bool {
	votes := false
	for id, n := range d.nodes {
		_, has := own.ReplicaOn(id)
		if !has && n.State == decide.Serving && !d.lost[id] {
			return false
		}
		votes = votes || has && n.Takes()
	}
	return votes
}

// ownNumber brings the group to the number of voters that a bootstrap with these nodes would have
// given it, and to no fewer than a range is to have. Else a cluster bootstrapped by one node
// would always stop with that node, and one bootstrapped by three with any two of its voters. It
// begins only if there are nodes for an odd number. More voters stay, since an operator has asked
// for them. But an even number on all nodes, as a node leaves that goes, loses one more.
func (d *decider) ownNumber(o fsm.Operation, own *keyspace.Descriptor, now clock.Time) (fsm.Operation, bool) {
	voters, reach, silent := len(own.Replicas), len(own.Replicas), false
	for id, n := range d.nodes {
		_, has := own.ReplicaOn(id)
		silent = silent || has && n.Silent
		if !has && n.Takes() {
			reach++
		}
	}
	want := max(fsm.PlacementVotersFor(d.members), d.settings.ReplicationFactor)
	o.Reason = decide.Factor
	switch {
	case voters < odd(min(want, reach)) && !silent && !mutation.Is(mutation.GrownKeepsThree): // a repair may be due first
		o.Kind = fsm.OperationAdd
		o.Why = fmt.Sprintf("the placement group has %d voters, and in a cluster of %d nodes it has %d", voters, d.members, want)
	case EvenOnAll(voters, d.members, d.settings.ReplicationFactor):
		o.Kind, o.From, o.To = fsm.OperationRemove, d.ownSpare(own), 0
		o.Why = fmt.Sprintf("the placement group has a voter on each of %d nodes, and an even number survives no more losses than one less", voters)
	default:
		d.ownNumberAt = 0
		return o, false
	}
	if d.ownNumberAt == 0 {
		d.ownNumberAt = now
	}
	// Nodes come and go. But fewer voters than these are a risk that every moment prolongs.
	hurry := voters < max(OwnLeast, d.settings.ReplicationFactor)
	return o, hurry || now.Sub(d.ownNumberAt) >= d.settings.Patience
}

// EvenOnAll says whether the placement group has an even number of voters, more than it is to have,
// and a voter on each node. Then one is taken away.
func EvenOnAll(voters, members, replication int) bool {
	return voters%2 == 0 && voters >= members && voters > max(fsm.PlacementVotersFor(members), replication)
}

// odd returns the largest odd number up to n.
func odd(n int) int { return n - (n+1)%2 }

// ownSpare returns whose voter is missed least, and not this node's: who cannot be counted on now,
// or is in the zone with most of them.
func (d *decider) ownSpare(own *keyspace.Descriptor) keyspace.NodeID {
	zones := map[string]int{}
	for _, m := range own.Replicas {
		zones[d.nodes[m.Node].Zone]++
	}
	missed := func(id keyspace.NodeID) int {
		n := d.nodes[id]
		switch {
		case n.Silent:
			return 0
		case !n.Takes():
			return 1
		}
		return 2
	}
	var best keyspace.NodeID
	for _, m := range own.Replicas {
		if m.Node == d.s.o.Self {
			continue
		}
		if best == 0 || cmp.Or(cmp.Compare(missed(m.Node), missed(best)), cmp.Compare(zones[d.nodes[best].Zone], zones[d.nodes[m.Node].Zone]), cmp.Compare(best, m.Node)) < 0 {
			best = m.Node
		}
	}
	return best
}

// ownSpread moves a voter out of the zone that has most of them: with that zone the group might
// stop, and nobody writes. Nodes say their zones one after the other when they are started, so
// that it waits a while.
func (d *decider) ownSpread(own *keyspace.Descriptor, now clock.Time) (fsm.Operation, bool) {
	o, ok := d.ownCrowd(own)
	if !ok {
		d.ownCrowdedAt = 0
		return o, false
	}
	if d.ownCrowdedAt == 0 {
		d.ownCrowdedAt = now
	}
	return o, now.Sub(d.ownCrowdedAt) >= d.settings.Patience
}

// ownCrowd returns the move of a voter to a zone that would then have fewer of them than its own has
// now; not the leader's, whose move costs most. Who never got its copy is not tried again.
func (d *decider) ownCrowd(own *keyspace.Descriptor) (fsm.Operation, bool) {
	o := fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationMove, Reason: decide.Zones}
	zones, most := map[string]int{}, 1
	for _, m := range own.Replicas {
		n := d.nodes[m.Node]
		if n.Silent {
			return o, false
		}
		zones[n.Zone]++
	}
	for _, m := range own.Replicas {
		if k := zones[d.nodes[m.Node].Zone]; k > most && m.Node != d.s.o.Self {
			o.From, most = m.Node, k
		}
	}
	if o.From == 0 {
		return o, false
	}
	o.To = d.ownTarget(own, o.From, false)
	o.Why = fmt.Sprintf("zone %q has %d voters of the placement group", d.nodes[o.From].Zone, most)
	return o, o.To != 0 && d.ownTried[o.To] == 0 && zones[d.nodes[o.To].Zone] <= most-2
}

// ownTarget returns a node that can take a replica of the group, in place of the one on from
// if from is not 0. It prefers zones with few of the other replicas, then low ids. With
// isolated, one that hears hardly any other counts as any; but after a first one, which may
// never get its copy, each has its turn by id. Those to which copies did not come are the
// last: this node may not reach them.
func (d *decider) ownTarget(own *keyspace.Descriptor, from keyspace.NodeID, isolated bool) keyspace.NodeID {
	zones := map[string]int{}
	for _, m := range own.Replicas {
		if m.Node != from {
			zones[d.nodes[m.Node].Zone]++
		}
	}
	rank := func(id keyspace.NodeID) int {
		switch {
		case !isolated || d.ownFallback == 0:
			return zones[d.nodes[id].Zone]
		case id > d.ownFallback:
			return 0
		}
		return 1
	}
	var best keyspace.NodeID
	for id, n := range d.nodes {
		n.Isolated = n.Isolated && !isolated
		if _, has := own.ReplicaOn(id); has || !n.Takes() {
			continue
		}
		if best == 0 || cmp.Or(cmp.Compare(d.ownTried[id], d.ownTried[best]), cmp.Compare(rank(id), rank(best)), cmp.Compare(id, best)) < 0 {
			best = id
		}
	}
	return best
}

// handOverPauseMax bounds the pause between two attempts to hand the leadership over: each
// ends the allocations of revisions for a moment.
const handOverPauseMax = time.Minute

// handOver gives the leadership of the group, and with it this one, to another node. Looking
// for a node that can take it costs nothing. If the attempt fails nevertheless, the next one
// follows after a pause, ever longer. leaving, if not 0, is the node whose replica is being
// moved away. It gets no lead, since it would hand it on at once, perhaps back to this one.
// tried is false if no node can take it now. This node then acts as any other leader would.
func (d *decider) handOver(ctx context.Context, own *keyspace.Descriptor, leaving keyspace.NodeID) (tried bool) {
	now := d.s.o.Clock.Now()
	if now < d.handOverAt {
		return false
	}
	ctx, cancel := clock.WithTimeout(ctx, d.s.o.Clock, OperationStep)
	defer cancel()
	var to keyspace.Replica
	for _, m := range own.Replicas {
		n, known := d.nodes[m.Node]
		if m.Role != keyspace.RoleVoter || m.Node == d.s.o.Self || m.Node == leaving || !known || !n.Takes() {
			continue
		}
		if d.s.o.Group.CanTransfer(ctx, m.ID) == nil {
			to = m
			break
		}
	}
	if to.Node == 0 {
		d.s.o.Logger.Debug("this node is drained, and nobody can lead placement yet")
		return false
	}
	d.handOverPause = min(max(2*d.handOverPause, decideEvery), handOverPauseMax)
	d.handOverAt = now.Add(d.handOverPause)
	err := d.s.o.Group.TransferLeader(ctx, to.Node)
	d.s.o.Logger.Info("this node is drained: another one leads placement", zap.Stringer("peer", to.Node), zap.Error(err))
	return true
}
