package placement

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/plant"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// MergePhase says how far a merge is; the numbers are stored. Committed and aborted exclude
// each other, and neither is ever left.
type MergePhase byte

// The phases of a merge.
const (
	// MergePreparing: both ranges are what they were, or the right one is frozen.
	MergePreparing MergePhase = iota
	// MergeCommitted: the map has one range. The left one has absorbed the other, or will.
	MergeCommitted
	// MergeAborted: both ranges stay, and are released.
	MergeAborted
)

// String returns the phase's name.
func (p MergePhase) String() string {
	return [...]string{"preparing", "committed", "aborted", "?"}[min(p, MergeAborted+1)]
}

// mergeRef names a merge: its operation's range and id.
type mergeRef struct {
	Range keyspace.RangeID
	ID    uint64
}

// rangeVersion is what a range was when something was decided.
type rangeVersion struct {
	Generation keyspace.Generation
	ConfIndex  uint64
}

func versionOf(d *keyspace.Descriptor) rangeVersion { return rangeVersion{d.Generation, d.ConfIndex} }

// alignMerge begins a move of a replica of the right range, or with To 0 ends it: its
// replicas are to be where the left range's are.
type alignMerge struct {
	Merge    mergeRef
	From, To keyspace.NodeID
}

// commitMerge puts one range into the place of two that are as they were bound. It is the
// one point from which on a merge has happened.
type commitMerge struct {
	Merge       mergeRef
	Left, Right rangeVersion
}

// abortMerge ends a merge that is not committed.
type abortMerge struct{ Merge mergeRef }

func (alignMerge) kind() opKind  { return opAlignMerge }
func (commitMerge) kind() opKind { return opCommitMerge }
func (abortMerge) kind() opKind  { return opAbortMerge }

func (m mergeRef) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(m.Range)), m.ID)
}

func (v rangeVersion) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(v.Generation)), v.ConfIndex)
}

func (o alignMerge) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(o.Merge.append(dst), uint64(o.From)), uint64(o.To))
}

func (o commitMerge) append(dst []byte) []byte {
	return o.Right.append(o.Left.append(o.Merge.append(dst)))
}

func (o abortMerge) append(dst []byte) []byte { return o.Merge.append(dst) }

func (r *reader) mergeRef() mergeRef {
	return mergeRef{Range: keyspace.RangeID(r.uvarint()), ID: r.uvarint()}
}

func (r *reader) rangeVersion() rangeVersion {
	return rangeVersion{Generation: keyspace.Generation(r.uvarint()), ConfIndex: r.uvarint()}
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
	case joint(left) || joint(right):
		return nil, kverror.New(kverror.Busy, "the members of range %s or range %s are being changed", left.Range, right.Range)
	case len(left.Replicas) != len(right.Replicas):
		return nil, refuse("it has %d replicas, range %s has %d", len(left.Replicas), right.Range, len(right.Replicas))
	}
	return right, nil
}

// beginMerge takes a merge in, on both ranges.
func (s *state) beginMerge(index uint64, op Operation, left *keyspace.Descriptor) result {
	right, err := checkMerge(&op, left, s.tree)
	if err != nil {
		return result{Err: err}
	}
	if !s.ranges[op.Range].Created || !s.ranges[right.Range].Created {
		return result{Err: kverror.New(kverror.Busy, "range %s or range %s is not on all of its nodes yet", op.Range, right.Range)}
	}
	if have, busy := s.operationOn(right.Range); busy {
		return result{Err: kverror.New(kverror.BadRequest, "range %s has operation %d under way: %s", right.Range, have.ID, have.String())}
	}
	op = Operation{ID: index, Range: op.Range, Kind: OperationMerge, Right: right.Range, Reason: op.Reason, Why: op.Why}
	s.setOperation(op)
	return result{Operation: op}
}

// merging returns the merge that a command is about.
func (s *state) merging(m mergeRef) (Operation, error) {
	op, ok := s.operations[m.Range]
	if !ok || op.ID != m.ID || op.Kind != OperationMerge {
		return Operation{}, kverror.New(kverror.BadRequest, "merge %d of range %s is over", m.ID, m.Range)
	}
	return op, nil
}

// applyAlignMerge notes the move of the right range that comes next, with an id for its new
// replica.
func (s *state) applyAlignMerge(o alignMerge) result {
	op, err := s.merging(o.Merge)
	right := s.ranges[op.Right]
	if err != nil || op.Phase != MergePreparing || right == nil {
		return result{Err: err, Operation: op}
	}
	op.From, op.To, op.Replica, op.Leaving = o.From, o.To, 0, 0
	if o.To != 0 {
		from, has := right.Descriptor.ReplicaOn(o.From)
		if !has {
			return result{Err: kverror.New(kverror.Busy, "range %s has changed meanwhile", op.Right)}
		}
		op.Replica, op.Leaving = s.NextReplica, from.ID
		s.NextReplica++
		s.dirty.meta = true
	}
	s.setOperation(op)
	return result{Operation: op}
}

// applyCommitMerge is the commit point of a merge. What it finds changed it refuses: the
// merge is to be aborted then.
func (s *state) applyCommitMerge(index uint64, o commitMerge) result {
	op, err := s.merging(o.Merge)
	switch {
	case err != nil:
		return result{Err: err}
	case op.Phase == MergeCommitted:
		return result{Operation: op}
	case op.Phase == MergeAborted:
		return result{Err: kverror.New(kverror.BadRequest, "merge %d is aborted", op.ID)}
	}
	left, right := s.ranges[op.Range], s.ranges[op.Right]
	if left == nil || right == nil || versionOf(&left.Descriptor) != o.Left || versionOf(&right.Descriptor) != o.Right ||
		!mergeable(&left.Descriptor, &right.Descriptor) {
		return result{Err: kverror.New(kverror.Busy, "range %s or range %s has changed meanwhile", op.Range, op.Right)}
	}
	d := left.Descriptor
	d.Span.End = right.Descriptor.Span.End
	d.Generation = max(left.Descriptor.Generation, right.Descriptor.Generation) + 1
	old := []*Range{left, right}
	if plant.Is(plant.AbsorbedStaysMapped) {
		old = old[:1]
	}
	s.replace(index, component{Old: old, New: []keyspace.Descriptor{d}})
	// Marks of leases are about to be for the whole span. Whoever revokes one comes to all of it.
	s.leases.widen(d.Span)
	op.Phase = MergeCommitted
	s.setOperation(op)
	return result{Operation: op}
}

// mergeable says whether the ranges are neighbours with voters on the same nodes.
func mergeable(left, right *keyspace.Descriptor) bool {
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

func (s *state) applyAbortMerge(o abortMerge) result {
	op, err := s.merging(o.Merge)
	if err == nil && op.Phase == MergePreparing {
		op.Phase = MergeAborted
		s.setOperation(op)
	}
	return result{Err: err, Operation: op}
}

// widen has every lease with keys in a part of the span list all of it.
func (s *leases) widen(span keyspace.Span) {
	var wider []*Lease
	s.tree.Ascend(func(l *Lease) bool {
		for _, o := range l.Spans {
			if o.Overlaps(span) && !l.covers(span) {
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
