package keyspace

import "fmt"

// MergeStep is one step of a merge of two adjacent ranges, as placement orders it. The
// target, on the left, absorbs the source, on the right.
type MergeStep uint8

// The steps, in order except for the last two. All may be repeated.
const (
	// MergeBind makes the target's leader bind the target to the merge: from then on
	// neither its span nor its members change.
	MergeBind MergeStep = iota + 1
	// MergeStore makes a node's applied state durable.
	MergeStore
	// MergeFreeze makes the source's leader freeze the source, which then answers no
	// request.
	MergeFreeze
	// MergeSettle returns once the node's replica of the source has durably applied the
	// freeze.
	MergeSettle
	// MergeAbsorb makes the target's leader absorb the source. Placement orders it only
	// after the merge is committed.
	MergeAbsorb
	// MergeRelease makes the leader of either range end its binding to the merge for
	// good. Placement orders it only after the merge is aborted.
	MergeRelease
	// MergeHold makes the target's leader evaluate no more requests, so that it can
	// absorb at once. The hold ends with the absorption, with the order's context, or
	// after a time limit. It comes with MergeFreeze, and a merge works without it.
	MergeHold
)

// String returns the step's name.
func (s MergeStep) String() string {
	names := [...]string{"?", "bind", "store", "freeze", "settle", "absorb", "release", "hold"}
	if int(s) >= len(names) {
		return fmt.Sprintf("merge step %d", uint8(s))
	}
	return names[s]
}

// MergeOrder asks a node to take one step of a merge.
type MergeOrder struct {
	Step MergeStep
	// ID identifies the merge. A later merge has a higher id.
	ID uint64
	// Range is the range that takes the step.
	Range RangeID
	// Generation and ConfIndex are those of the range on which the merge decision is
	// based. Only for MergeBind and MergeFreeze.
	Generation Generation
	ConfIndex  uint64
	// Other is the source for MergeBind and the target for MergeFreeze.
	Other RangeID
	// Hull covers both ranges. Only for MergeBind.
	Hull Span
}
