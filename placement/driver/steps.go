package driver

import (
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// Step is what is to be done next for an operation. Of the fields one is set.
type Step struct {
	// Done says that the operation is over.
	Done bool
	// Transfer says that another one is to lead before the next step: leader, or 0 for whom
	// the range's raft group takes for the best.
	Transfer bool
	Leader   keyspace.NodeID
	Change   []raftgroup.ConfChange
	// Stuck says why nothing can be done now.
	Stuck string
}

// NextStep returns the next step of the operation for a range as its leader has it. It depends
// on its arguments alone, so any leader of placement goes on where the last one was. The range
// refuses a repeated step, because its configuration has changed.
func NextStep(o *fsm.Operation, d *keyspace.Descriptor, leader keyspace.NodeID, alive func(keyspace.NodeID) bool) Step {
	if fsm.Joint(d) {
		return Step{Stuck: "its members are being changed"}
	}
	if o.Kind == fsm.OperationTransfer {
		return nextTransfer(o, d, leader, alive)
	}
	to, hasTo := d.ReplicaOn(o.To)
	from, hasFrom := d.ReplicaOn(o.From)
	hasFrom = hasFrom && from.ID == o.Leaving
	promote := raftgroup.ConfChange{Type: raftgroup.Promote, Replica: to.ID}
	remove := raftgroup.ConfChange{Type: raftgroup.RemoveReplica, Replica: from.ID}
	living, all := votersBeside(d, o.From, alive)
	switch {
	case o.Kind == fsm.OperationTidy && hasFrom && from.Role != keyspace.RoleLearner:
		return Step{Done: true} // it was one when the map last heard of it
	case o.To != 0 && !hasTo && !hasFrom && o.From != 0:
		return Step{Done: true} // somebody else has moved it on
	case o.To != 0 && !hasTo:
		return Step{Change: []raftgroup.ConfChange{{Type: raftgroup.AddLearner, Replica: o.Replica, Node: o.To}}}
	case o.To != 0 && to.Role == keyspace.RoleLearner && (!hasFrom || from.Role != keyspace.RoleVoter):
		return Step{Change: []raftgroup.ConfChange{promote}}
	case o.To != 0 && to.Role == keyspace.RoleLearner && leader != o.From:
		return Step{Change: []raftgroup.ConfChange{promote, remove}}
	case o.To != 0 && to.Role == keyspace.RoleLearner && living > 0:
		return Step{Transfer: true, Leader: heir(o, d, alive)}
	case o.To != 0 && to.Role == keyspace.RoleLearner && all > 0:
		// Not a voter more meanwhile: a split would leave it with its child for good.
		return Step{Stuck: "no other voter lives"}
	case o.To != 0 && to.Role == keyspace.RoleLearner:
		// From votes alone: To does beside it first, and leads then.
		return Step{Change: []raftgroup.ConfChange{promote}}
	case !hasFrom && o.Lead == o.To && hasTo && leader != o.To && heir(o, d, alive) == o.To:
		return Step{Transfer: true, Leader: o.To} // the lead goes along
	case !hasFrom:
		return Step{Done: true}
	case from.Role == keyspace.RoleVoter && 2*living <= all:
		return Step{Stuck: "without this replica no quorum of the range lives"}
	case leader == o.From && o.To != 0:
		return Step{Transfer: true, Leader: o.To}
	case leader == o.From:
		return Step{Transfer: true, Leader: heir(o, d, alive)}
	}
	return Step{Change: []raftgroup.ConfChange{remove}}
}

// nextTransfer is NextStep for a transfer: it is over as soon as somebody else leads.
func nextTransfer(o *fsm.Operation, d *keyspace.Descriptor, leader keyspace.NodeID, alive func(keyspace.NodeID) bool) Step {
	to, ok := d.ReplicaOn(o.To)
	switch {
	case leader != o.From || !ok || to.Role != keyspace.RoleVoter:
		return Step{Done: true}
	case !alive(o.To):
		return Step{Stuck: "the node that is to lead does not live"}
	}
	return Step{Transfer: true, Leader: o.To}
}

// mustLeave says that the lead must go, whoever takes it: the chosen node may be out of reach.
func mustLeave(o *fsm.Operation, leader keyspace.NodeID) bool {
	return leader == o.From && (o.Kind != fsm.OperationTransfer || o.Reason == decide.Drain)
}

// heir returns Lead if it can take the lead over, else 0: whom the range takes for the best.
func heir(o *fsm.Operation, d *keyspace.Descriptor, alive func(keyspace.NodeID) bool) keyspace.NodeID {
	m, ok := d.ReplicaOn(o.Lead)
	if !ok || m.Role != keyspace.RoleVoter || o.Lead == o.From || !alive(o.Lead) {
		return 0
	}
	return o.Lead
}

// votersBeside counts the voters on other nodes, and those of them that live.
func votersBeside(d *keyspace.Descriptor, node keyspace.NodeID, alive func(keyspace.NodeID) bool) (living, all int) {
	for _, m := range d.Replicas {
		if m.Role != keyspace.RoleVoter || m.Node == node {
			continue
		}
		all++
		if alive(m.Node) {
			living++
		}
	}
	return living, all
}
