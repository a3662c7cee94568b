package decide

import (
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// Kind is what an operation does.
type Kind uint8

// The kinds of operations.
const (
	// AddReplica makes a voter on To: a learner first, promoted when it has caught up.
	// A learner that is there already is taken up.
	AddReplica Kind = iota
	// MoveReplica is AddReplica on To and the end of the replica on From in one joint
	// configuration. If From leads, or Lead is given, the lead goes to Lead: first if Lead is a
	// voter, and otherwise as soon as it has become one.
	MoveReplica
	// RemoveReplica ends the replica on From; where From leads, the lead goes to Lead
	// first.
	RemoveReplica
	// LeaveJoint ends a joint configuration that was left behind.
	LeaveJoint
	// TransferLeader gives the lead from From to Lead.
	TransferLeader
	// Merge lets the range absorb Other, its right neighbour, whose replicas are on the
	// same nodes and which is led by the same node.
	Merge
)

var kindNames = [...]string{"add", "move", "remove", "leave-joint", "transfer", "merge"}

// String returns the kind in one word.
func (k Kind) String() string { return kindNames[k] }

// Reason is why something needs to be done, in the order of urgency.
type Reason uint8

// The reasons, most urgent first. The numbers are stored with operations.
const (
	// None: there is nothing to do.
	None Reason = iota
	// QuorumRisk: a voter is lost, and one more loss stops the range.
	QuorumRisk
	// Repair: a voter is lost.
	Repair
	// Joint: a joint configuration was left behind.
	Joint
	// Learner: a learner was left behind.
	Learner
	// Drain: a node that is drained leads, or one that is decommissioned has a replica.
	Drain
	// Zones: replicas share a zone while another one has room.
	Zones
	// Factor: the number of voters is not the replication factor.
	Factor
	// 8 and 9 are not used: ranges are split by their leaders.
	_
	_
	// Cold: the range and its right neighbour are small and cold.
	Cold
	// Bytes, Load and Leaders: balance between nodes.
	Bytes
	Load
	Leaders

	reasons = int(Leaders) + 1
)

var reasonNames = [...]string{
	"none", "quorum-risk", "repair", "joint", "learner", "drain", "zones", "factor",
	8: "", 9: "", 10: "cold", "bytes", "load", "leaders",
}

// Known says whether there is such a reason: operations are stored with theirs.
func (r Reason) Known() bool { return int(r) < reasons && reasonNames[r] != "" }

// String returns the reason in one word.
func (r Reason) String() string { return reasonNames[r] }

// Operation is one change of one range (a merge: of two).
type Operation struct {
	Kind   Kind
	Range  keyspace.RangeID
	Other  keyspace.RangeID // Merge: the right neighbour
	From   keyspace.NodeID  // MoveReplica, RemoveReplica, TransferLeader
	To     keyspace.NodeID  // AddReplica, MoveReplica
	Source keyspace.NodeID  // AddReplica, MoveReplica: the leader, which sends the copy
	Lead   keyspace.NodeID  // who leads then: TransferLeader; MoveReplica and RemoveReplica where the lead changes; 0 else
	Bytes  int64            // AddReplica, MoveReplica: what is to be copied
	Reason Reason
	// Why says it in words, for the operator.
	Why string
	// Requires is what must still hold when the operation is admitted, and again when
	// each of its steps is applied as far as that step depends on it.
	Requires Requirement
}

// String returns the operation in one line, without why.
func (o *Operation) String() string {
	s := fmt.Sprintf("%s range %s", o.Kind, o.Range)
	if o.Other != 0 {
		s += fmt.Sprintf(" with %s", o.Other)
	}
	if o.From != 0 {
		s += fmt.Sprintf(" from %s", o.From)
	}
	if o.To != 0 {
		s += fmt.Sprintf(" to %s", o.To)
	}
	if o.Lead != 0 {
		s += fmt.Sprintf(" lead %s", o.Lead)
	}
	return s
}

// copies says whether the operation copies a replica.
func (o *Operation) copies() bool { return o.Kind == AddReplica || o.Kind == MoveReplica }

// Requirement is what an operation was decided on. Two leaders of placement, one of
// them of yesterday, may decide on different states; where it holds, the operation is
// right whoever decided it.
type Requirement struct {
	// Ranges have this generation, this configuration and no operation under way.
	Ranges []RangeIs
	// Live nodes are heard, hear others, and are neither drained nor decommissioned.
	Live []keyspace.NodeID
	// Heard nodes are heard, and neither drained nor decommissioned; whom they hear does not
	// count. What is decided for them is in Live otherwise.
	Heard []keyspace.NodeID
	// Silent nodes are not heard.
	Silent []keyspace.NodeID
	// Leaving nodes are drained or decommissioned.
	Leaving []keyspace.NodeID
}

// RangeIs pins a range: Replicas are those of the configuration ConfIndex.
type RangeIs struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	ConfIndex  uint64
	Replicas   []keyspace.Replica
}

// Facts are what a requirement is checked against: placement's state when the
// operation is applied.
type Facts interface {
	// Descriptor returns the newest descriptor of the range that is known.
	Descriptor(keyspace.RangeID) (keyspace.Descriptor, bool)
	// Busy says whether another operation on the range is under way.
	Busy(keyspace.RangeID) bool
	// Node returns the node's row.
	Node(keyspace.NodeID) (Node, bool)
}

// Check returns nil if every requirement holds. Otherwise its error names the first one that
// does not, as wanted and as it is.
func (q *Requirement) Check(f Facts) error {
	for _, want := range q.Ranges {
		is, ok := f.Descriptor(want.Range)
		switch {
		case !ok:
			return fmt.Errorf("range %s is gone", want.Range)
		case is.Generation != want.Generation:
			return fmt.Errorf("range %s has generation %d, decided on %d", want.Range, is.Generation, want.Generation)
		case is.ConfIndex != want.ConfIndex || !slices.Equal(is.Replicas, want.Replicas):
			return fmt.Errorf("range %s has replicas %v since %d, decided on %v since %d",
				want.Range, is.Replicas, is.ConfIndex, want.Replicas, want.ConfIndex)
		case f.Busy(want.Range):
			return fmt.Errorf("range %s has an operation under way", want.Range)
		}
	}
	return q.checkNodes(f)
}

func (q *Requirement) checkNodes(f Facts) error {
	for _, id := range q.Live {
		if n, ok := f.Node(id); !ok || !n.Takes() {
			return fmt.Errorf("node %s was to take part and is %s", id, n.describe(ok))
		}
	}
	for _, id := range q.Heard {
		if n, ok := f.Node(id); !ok || n.Silent || n.State != Serving {
			return fmt.Errorf("node %s was to take part and is %s", id, n.describe(ok))
		}
	}
	for _, id := range q.Silent {
		if n, ok := f.Node(id); ok && !n.Silent {
			return fmt.Errorf("node %s was taken for lost and is %s", id, n.describe(ok))
		}
	}
	for _, id := range q.Leaving {
		if n, ok := f.Node(id); ok && n.State == Serving {
			return fmt.Errorf("node %s was to be emptied and is %s", id, n.describe(ok))
		}
	}
	return nil
}
