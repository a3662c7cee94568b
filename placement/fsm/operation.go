package fsm

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
)

// OperationKind is what an Operation does to the replicas of a range; the numbers are
// stored.
type OperationKind byte

// The kinds of operations.
const (
	// OperationMove puts a voter on To in the place of the replica on From.
	OperationMove OperationKind = iota + 1
	// OperationAdd makes a voter on To.
	OperationAdd
	// OperationRemove takes the replica on From away.
	OperationRemove
	// OperationTidy takes the replica on From away if it is a learner yet.
	OperationTidy
	// OperationTransfer has To lead in the place of From.
	OperationTransfer
	// OperationMerge lets the range absorb its right neighbour, Right.
	OperationMerge
)

// String returns the kind's name.
func (k OperationKind) String() string {
	switch k {
	case OperationMove:
		return "move"
	case OperationAdd:
		return "add"
	case OperationRemove:
		return "remove"
	case OperationTidy:
		return "tidy"
	case OperationTransfer:
		return "transfer"
	case OperationMerge:
		return "merge"
	}
	return fmt.Sprintf("operation kind %d", byte(k))
}

func (k OperationKind) known() bool { return k >= OperationMove && k <= OperationMerge }

// Adds says whether an operation of the kind makes a replica, takes whether it takes one
// away.
func (k OperationKind) Adds() bool { return k == OperationMove || k == OperationAdd }

func (k OperationKind) takes() bool {
	return k != OperationAdd && k != OperationTransfer && k != OperationMerge
}

// Operation is a change of a range's replicas that placement executes, step by step.
// A range has one at a time. The record is all there is of it beside the range's own
// descriptor: whoever leads placement goes on from there.
type Operation struct {
	// ID is the index of the entry that began it.
	ID uint64
	// Range is the range, or OwnGroup for the placement group itself.
	Range keyspace.RangeID
	Kind  OperationKind
	// From and To are nodes; 0 where the kind has none.
	From, To keyspace.NodeID
	// Lead is who leads the range afterwards, if From or somebody else does before; 0
	// leaves it to the range.
	Lead keyspace.NodeID
	// Replica is the id of the replica on To: a new one, or that of a learner that was left
	// behind there. It is 0 if there is none.
	Replica keyspace.ReplicaID
	// Leaving is the id of the replica on From; 0 where there is none. A later one there is
	// none of the operation's business.
	Leaving keyspace.ReplicaID
	// Reason is why placement has decided it, None where somebody has asked for it.
	Reason decide.Reason
	// Why says for the operator what it is for, in at most MaxNameBytes bytes.
	Why string
	// Right is the range that a merge ends, and Phase how far the merge is. Its From, To,
	// Replica and Leaving are those of the move of Right that is under way, if one is.
	Right keyspace.RangeID
	Phase MergePhase
}

// ReasonWord says in one word why the operation is, as metrics and the log have it for what
// placement decides, and "command" for what somebody has asked for.
func (o *Operation) ReasonWord() string {
	if o.Reason == decide.None {
		return "command"
	}
	return o.Reason.String()
}

// MaxOperations bounds the operations of the cluster at a time.
const MaxOperations = 1 << 16

// AppendOperation appends an operation to dst.
func AppendOperation(dst []byte, o *Operation) []byte {
	dst = binary.AppendUvarint(dst, o.ID)
	dst = binary.AppendUvarint(dst, uint64(o.Range))
	dst = append(dst, byte(o.Kind))
	dst = binary.AppendUvarint(dst, uint64(o.From))
	dst = binary.AppendUvarint(dst, uint64(o.To))
	dst = binary.AppendUvarint(dst, uint64(o.Lead))
	dst = binary.AppendUvarint(dst, uint64(o.Replica))
	dst = binary.AppendUvarint(dst, uint64(o.Leaving))
	dst = append(dst, byte(o.Reason))
	dst = AppendString(dst, o.Why)
	dst = binary.AppendUvarint(dst, uint64(o.Right))
	return append(dst, byte(o.Phase))
}

// Operation reads what AppendOperation wrote.
func (r *Reader) Operation() Operation {
	o := Operation{
		ID: r.Uvarint(), Range: keyspace.RangeID(r.Uvarint()), Kind: OperationKind(r.Byte()),
		From: keyspace.NodeID(r.Uvarint()), To: keyspace.NodeID(r.Uvarint()), Lead: keyspace.NodeID(r.Uvarint()),
		Replica: keyspace.ReplicaID(r.Uvarint()), Leaving: keyspace.ReplicaID(r.Uvarint()),
		Reason: decide.Reason(r.Byte()), Why: r.StringUpTo(MaxNameBytes),
		Right: keyspace.RangeID(r.Uvarint()), Phase: MergePhase(r.Byte()),
	}
	if !o.Reason.Known() {
		r.Failf("unknown reason %d of operation", byte(o.Reason))
	}
	if !o.Kind.known() || o.Phase > MergeAborted {
		r.Failf("unknown kind %d of operation, phase %d", byte(o.Kind), byte(o.Phase))
	}
	return o
}

func decodeOperation(b []byte) (Operation, error) {
	r := NewReader(b)
	r.Version()
	o := r.Operation()
	if err := r.Finish(); err != nil {
		return Operation{}, fmt.Errorf("decode placement operation record: %w", err)
	}
	return o, nil
}

func (s *State) dropOperation(op Operation) {
	delete(s.operations, op.Range)
	delete(s.absorbing, op.Right)
	s.operated(op.Range)
}

func (s *State) setOperation(op Operation) {
	s.operations[op.Range] = op
	if op.Kind == OperationMerge {
		s.absorbing[op.Right] = op.Range
	}
	s.operated(op.Range)
}

// operationOn returns the operation of a range, also that of the neighbour that is to absorb
// it.
func (s *State) operationOn(id keyspace.RangeID) (Operation, bool) {
	if left, ok := s.absorbing[id]; ok {
		id = left
	}
	o, ok := s.operations[id]
	return o, ok
}

// operated notes that the range's operation has begun or ended.
func (s *State) operated(id keyspace.RangeID) {
	s.dirty.operations[id] = true
	s.operationsChanged++
}

// CheckOperation says why an operation makes no sense for a range.
func CheckOperation(o *Operation, d *keyspace.Descriptor, nodes map[keyspace.NodeID]Node) error {
	refuse := func(format string, args ...any) error {
		return kverror.New(kverror.BadRequest, "%s %s: %s", o.Kind, GroupName(o.Range), fmt.Sprintf(format, args...))
	}
	to, hasTo := d.ReplicaOn(o.To)
	from, hasFrom := d.ReplicaOn(o.From)
	taker, known := nodes[o.To]
	transfer := o.Kind == OperationTransfer
	voters := 0
	for _, m := range d.Replicas {
		if m.Role == keyspace.RoleVoter {
			voters++
		}
	}
	switch {
	case !o.Kind.known():
		return refuse("no such operation")
	case Joint(d):
		return kverror.New(kverror.Busy, "the members of %s are being changed", GroupName(o.Range))
	case o.Kind.takes() && !hasFrom:
		return refuse("node %s holds no replica of it", o.From)
	case o.Kind == OperationMove && from.Role != keyspace.RoleVoter:
		// To would be a voter more. Whoever made the learner, or tidy, takes it away.
		return refuse("the replica on node %s does not vote yet", o.From)
	case o.Kind == OperationTidy && from.Role != keyspace.RoleLearner:
		return refuse("the replica on node %s votes", o.From)
	case transfer && (!hasTo || to.Role != keyspace.RoleVoter || !hasFrom || o.From == o.To):
		return refuse("from node %s to node %s, which is to have another voter of it", o.From, o.To)
	case !transfer && (!o.Kind.Adds() && o.To != 0 || !o.Kind.takes() && o.From != 0):
		return refuse("from node %s and to node %s", o.From, o.To)
	case o.Kind.Adds() && !known:
		return refuse("there is no node %s", o.To)
	case o.Kind.Adds() && taker.State != NodeServing:
		return refuse("node %s is %s", o.To, taker.State)
	case o.Kind.Adds() && hasTo && to.Role != keyspace.RoleLearner:
		return refuse("node %s holds a replica of it", o.To)
	case o.Kind == OperationRemove && from.Role == keyspace.RoleVoter && voters < 2:
		return refuse("it has %d voters", voters)
	}
	return nil
}

// CheckOperation says why an operation makes no sense for a range as it is.
func (v *View) CheckOperation(o *Operation, d *keyspace.Descriptor) error {
	return CheckOperation(o, d, v.nodes)
}

// Joint says whether the range is between two configurations.
func Joint(d *keyspace.Descriptor) bool {
	return slices.ContainsFunc(d.Replicas, func(m keyspace.Replica) bool {
		return m.Role != keyspace.RoleVoter && m.Role != keyspace.RoleLearner
	})
}

// String says what the operation does.
func (o *Operation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", o.Kind)
	if o.Right != 0 {
		fmt.Fprintf(&b, " with range %s (%s)", o.Right, o.Phase)
	}
	if o.From != 0 {
		fmt.Fprintf(&b, " from node %s", o.From)
	}
	if o.To != 0 {
		fmt.Fprintf(&b, " to node %s", o.To)
	}
	return b.String()
}

// MergePhase says how far a merge is; the numbers are stored. Committed and aborted exclude
// each other, and neither is ever left.
type MergePhase byte

// The phases of a merge.
const (
	// MergePreparing: no order was ever sent by which a range is bound. An abort ends the merge.
	MergePreparing MergePhase = iota
	// MergeBinding: such an order may be on its way. The left range is bound, or will be, or not,
	// and the right one frozen.
	MergeBinding
	// MergeCommitted: the map has one range. The left one has absorbed the other, or will.
	MergeCommitted
	// MergeAborted: both ranges stay, and are released.
	MergeAborted
)

// String returns the phase's name.
func (p MergePhase) String() string {
	return [...]string{"preparing", "binding", "committed", "aborted", "?"}[min(p, MergeAborted+1)]
}

// Undecided reports whether the merge may still be committed or aborted.
func (p MergePhase) Undecided() bool { return p < MergeCommitted }

// RangeVersion is what a range was when something was decided.
type RangeVersion struct {
	Generation keyspace.Generation
	ConfIndex  uint64
}

// VersionOf returns the version of a range that its descriptor names.
func VersionOf(d *keyspace.Descriptor) RangeVersion { return RangeVersion{d.Generation, d.ConfIndex} }

func (v RangeVersion) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(v.Generation)), v.ConfIndex)
}

func (r *Reader) rangeVersion() RangeVersion {
	return RangeVersion{Generation: keyspace.Generation(r.Uvarint()), ConfIndex: r.Uvarint()}
}
