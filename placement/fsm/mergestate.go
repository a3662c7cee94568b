package fsm

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
)

// MergeRef names a merge: its operation's range and id.
type MergeRef struct {
	Range keyspace.RangeID
	ID    uint64
}

// AlignMerge begins a move of a replica of the right range, or with To 0 ends it: its
// replicas are to be where the left range's are.
type AlignMerge struct {
	Merge    MergeRef
	From, To keyspace.NodeID
}

// BindMerge says that orders may be sent from now on by which the ranges are bound.
type BindMerge struct{ Merge MergeRef }

// CommitMerge puts one range into the place of two that are as they were bound. It is the
// one point from which on a merge has happened.
type CommitMerge struct {
	Merge       MergeRef
	Left, Right RangeVersion
}

// AbortMerge decides that a merge is not committed, and ends one that has bound nothing.
type AbortMerge struct{ Merge MergeRef }

func (AlignMerge) kind() opKind  { return opAlignMerge }
func (BindMerge) kind() opKind   { return opBindMerge }
func (CommitMerge) kind() opKind { return opCommitMerge }
func (AbortMerge) kind() opKind  { return opAbortMerge }

func (m MergeRef) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(m.Range)), m.ID)
}

func (o AlignMerge) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(o.Merge.append(dst), uint64(o.From)), uint64(o.To))
}

func (o CommitMerge) append(dst []byte) []byte {
	return o.Right.append(o.Left.append(o.Merge.append(dst)))
}

func (o BindMerge) append(dst []byte) []byte  { return o.Merge.append(dst) }
func (o AbortMerge) append(dst []byte) []byte { return o.Merge.append(dst) }

func (r *Reader) mergeRef() MergeRef {
	return MergeRef{Range: keyspace.RangeID(r.Uvarint()), ID: r.Uvarint()}
}

// checkMerge returns the right neighbour that a range is to absorb, or why it cannot.
func checkMerge(o *Operation, left *keyspace.Descriptor, t *rangeTree) (*keyspace.Descriptor, error) {
	refuse := func(format string, args ...any) error {
		return kverror.New(kverror.BadRequest, "merge range %s: %s", o.Range, fmt.Sprintf(format, args...))
	}
	if len(left.Span.End) == 0 {
		return nil, refuse("it has no right neighbour")
	}
	right := &rowOf(t, left.Span.End).Descriptor
	switch {
	case o.Right != 0 && o.Right != right.Range:
		return nil, refuse("its right neighbour is range %s, not range %s", right.Range, o.Right)
	case o.From != 0 || o.To != 0:
		return nil, refuse("from node %s and to node %s", o.From, o.To)
	case Joint(left) || Joint(right):
		return nil, kverror.New(kverror.Busy, "the members of range %s or range %s are being changed", left.Range, right.Range)
	case len(left.Replicas) != len(right.Replicas):
		return nil, refuse("it has %d replicas, range %s has %d", len(left.Replicas), right.Range, len(right.Replicas))
	}
	return right, nil
}

// CheckMerge returns the right neighbour that a range is to absorb, or why it cannot.
func (v *View) CheckMerge(o *Operation, left *keyspace.Descriptor) (*keyspace.Descriptor, error) {
	return checkMerge(o, left, v.tree)
}

// decidedMerge says why a merge that was decided, and that nobody has asked for, is not to
// be. What keeps the two apart may have come after the decision.
func decidedMerge(op *Operation, left, right *Range) error {
	switch {
	case op.Reason == decide.None:
		return nil
	case right.Kept:
		return kverror.New(kverror.Busy, "range %s is to begin where it does", right.Descriptor.Range)
	case !Mergeable(&left.Descriptor, &right.Descriptor):
		return kverror.New(kverror.Busy, "the replicas of range %s and range %s are on different nodes", left.Descriptor.Range, right.Descriptor.Range)
	}
	return nil
}

// beginMerge takes a merge in, on both ranges.
func (s *State) beginMerge(index uint64, o BeginOperation, left *keyspace.Descriptor) Result {
	op := o.Operation
	right, err := checkMerge(&op, left, s.tree)
	if err != nil {
		return Result{Err: err}
	}
	if is := VersionOf(right); o.Right != (RangeVersion{}) && is != o.Right {
		return Result{Err: kverror.New(kverror.Busy, "range %s has changed meanwhile", right.Range)}
	}
	if err := decidedMerge(&op, s.row(op.Range), s.row(right.Range)); err != nil {
		return Result{Err: err}
	}
	if !s.row(op.Range).Created || !s.row(right.Range).Created {
		return Result{Err: kverror.New(kverror.Busy, "range %s or range %s is not on all of its nodes yet", op.Range, right.Range)}
	}
	if have, busy := s.operationOn(right.Range); busy {
		return Result{Err: kverror.New(kverror.BadRequest, "range %s has operation %d under way: %s", right.Range, have.ID, have.String())}
	}
	op = Operation{ID: index, Range: op.Range, Kind: OperationMerge, Right: right.Range, Reason: op.Reason, Why: op.Why}
	s.setOperation(op)
	return Result{Operation: op}
}

// merging returns the merge that a command is about.
func (s *State) merging(m MergeRef) (Operation, error) {
	op, ok := s.operations[m.Range]
	if !ok || op.ID != m.ID || op.Kind != OperationMerge {
		return Operation{}, kverror.New(kverror.BadRequest, "merge %d of range %s is over", m.ID, m.Range)
	}
	return op, nil
}

// applyAlignMerge notes the move of the right range that comes next, with an id for its new
// replica.
func (s *State) applyAlignMerge(o AlignMerge) Result {
	op, err := s.merging(o.Merge)
	right := s.row(op.Right)
	if err != nil || !op.Phase.Undecided() || right == nil {
		return Result{Err: err, Operation: op}
	}
	op.From, op.To, op.Replica, op.Leaving = o.From, o.To, 0, 0
	if o.To != 0 {
		from, has := right.Descriptor.ReplicaOn(o.From)
		if !has {
			return Result{Err: kverror.New(kverror.Busy, "range %s has changed meanwhile", op.Right)}
		}
		op.Replica, op.Leaving = s.NextReplica, from.ID
		s.NextReplica++
		s.dirty.meta = true
	}
	s.setOperation(op)
	return Result{Operation: op}
}

// applyBindMerge notes that the merge binds. Nothing is bound where it is refused: behind an
// abort that came first nobody is released.
func (s *State) applyBindMerge(o BindMerge) Result {
	op, err := s.merging(o.Merge)
	switch {
	case err != nil:
	case op.Phase == MergePreparing:
		op.Phase = MergeBinding
		s.setOperation(op)
	case op.Phase != MergeBinding:
		err = kverror.New(kverror.BadRequest, "merge %d is %s", op.ID, op.Phase)
	}
	return Result{Err: err, Operation: op}
}

// applyCommitMerge is the commit point of a merge. It refuses ranges that have changed: the
// merge is to be aborted then.
func (s *State) applyCommitMerge(index uint64, o CommitMerge) Result {
	op, err := s.merging(o.Merge)
	switch {
	case err != nil:
		return Result{Err: err}
	case op.Phase == MergeCommitted:
		return Result{Operation: op}
	case op.Phase != MergeBinding:
		return Result{Err: kverror.New(kverror.BadRequest, "merge %d is %s", op.ID, op.Phase)}
	}
	left, right := s.row(op.Range), s.row(op.Right)
	if left == nil || right == nil || VersionOf(&left.Descriptor) != o.Left || VersionOf(&right.Descriptor) != o.Right ||
		!Mergeable(&left.Descriptor, &right.Descriptor) {
		return Result{Err: kverror.New(kverror.Busy, "range %s or range %s has changed meanwhile", op.Range, op.Right)}
	}
	if err := decidedMerge(&op, left, right); err != nil {
		return Result{Err: err}
	}
	d := left.Descriptor
	d.Span.End = right.Descriptor.Span.End
	d.Generation = max(left.Descriptor.Generation, right.Descriptor.Generation) + 1
	old := []*Range{left, right}
	if mutation.Is(mutation.AbsorbedStaysMapped) {
		old = old[:1]
	}
	s.replace(index, component{Old: old, New: []keyspace.Descriptor{d}})
	// Attachments of leases are about to be for the whole span. Whoever revokes one comes to all of it.
	s.leases.widen(d.Span)
	op.Phase = MergeCommitted
	s.setOperation(op)
	return Result{Operation: op}
}

// Mergeable says whether the ranges are neighbours with voters on the same nodes.
func Mergeable(left, right *keyspace.Descriptor) bool {
	if len(left.Span.End) == 0 || !bytes.Equal(left.Span.End, right.Span.Start) || len(left.Replicas) != len(right.Replicas) {
		return false
	}
	for _, m := range left.Replicas {
		o, ok := right.ReplicaOn(m.Node)
		if !ok || m.Role != keyspace.RoleVoter || o.Role != keyspace.RoleVoter {
			return false
		}
	}
	return true
}

// applyAbortMerge ends a merge at once where it has bound nothing: releasing the ranges takes a
// quorum of each. Whether it has is decided here and not by whoever proposes the abort, who may
// have seen an older phase.
func (s *State) applyAbortMerge(o AbortMerge) Result {
	op, err := s.merging(o.Merge)
	switch {
	case err != nil:
	case op.Phase == MergePreparing:
		s.dropOperation(op)
		return Result{}
	case op.Phase == MergeBinding:
		op.Phase = MergeAborted
		s.setOperation(op)
	}
	return Result{Err: err, Operation: op}
}

// widen has every lease with keys in a part of the span list all of it. The record of a lease
// that is being ended is set anew, even if it lists the whole span already: the range's
// attachment may return to a place from which it was removed.
func (s *leases) widen(span keyspace.Span) {
	var wider []*Lease
	s.tree.Ascend(func(l *Lease) bool {
		for _, o := range l.Spans {
			if o.Overlaps(span) && (!l.Covers(span) || l.Revoking) {
				wider = append(wider, l.with(span))
				break
			}
		}
		return true
	})
	for _, l := range wider {
		s.set(l)
	}
}
