package fsm

import (
	"encoding/binary"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// BeginOperation begins an operation on a range as it was when that was decided.
type BeginOperation struct {
	Generation keyspace.Generation
	ConfIndex  uint64
	// Right is what the other range of a merge was then; where it is 0 any will do.
	Right RangeVersion
	// Operation is without ID and Replica, which are given when it is applied.
	Operation Operation
}

// EndOperation ends an operation, whatever came of it.
type EndOperation struct {
	Range keyspace.RangeID
	ID    uint64
}

func (BeginOperation) kind() opKind { return opBeginOperation }

func (EndOperation) kind() opKind { return opEndOperation }

func (o BeginOperation) append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(o.Generation))
	dst = binary.AppendUvarint(dst, o.ConfIndex)
	return AppendOperation(o.Right.append(dst), &o.Operation)
}

func (o EndOperation) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(o.Range)), o.ID)
}

// applyBeginOperation takes an operation in if the range still is what it was decided
// for. CheckOperation refuses what cannot be executed at all.
func (s *State) applyBeginOperation(index uint64, o BeginOperation) Result {
	op := o.Operation
	d, ok := s.descriptor(op.Range)
	if !ok {
		return Result{Err: kverror.New(kverror.WrongRange, "there is no range %s", op.Range)}
	}
	if have, busy := s.operationOn(op.Range); busy {
		return Result{Err: kverror.New(kverror.BadRequest, "%s has operation %d under way: %s", GroupName(op.Range), have.ID, have.String())}
	}
	if d.Generation != o.Generation || d.ConfIndex != o.ConfIndex {
		return Result{Err: kverror.New(kverror.Busy, "%s has changed meanwhile", GroupName(op.Range))}
	}
	if len(s.operations) >= MaxOperations {
		return Result{Err: kverror.New(kverror.TooManyRequests, "%d operations are under way", len(s.operations))}
	}
	if op.Kind == OperationMerge {
		return s.beginMerge(index, o, &d)
	}
	if err := CheckOperation(&op, &d, s.nodes); err != nil {
		return Result{Err: err}
	}
	op.ID, op.Replica, op.Leaving, op.Right, op.Phase = index, 0, 0, 0, 0
	if to, left := d.ReplicaOn(op.To); op.Kind.Adds() && left {
		op.Replica = to.ID
	} else if op.Kind.Adds() {
		op.Replica = s.NextReplica
		s.NextReplica++
		s.dirty.meta = true
	}
	if op.Kind.takes() {
		from, _ := d.ReplicaOn(op.From)
		op.Leaving = from.ID
	}
	s.setOperation(op)
	return Result{Operation: op}
}

func (s *State) applyEndOperation(o EndOperation) {
	have, ok := s.operations[o.Range]
	if !ok || have.ID != o.ID || have.Kind == OperationMerge && have.Phase.Undecided() {
		return // nothing is known of a merge that is not decided
	}
	s.dropOperation(have)
}
