package keyspace

import "fmt"

// MergeStep is one step of a merge of two neighbouring ranges, as placement orders it. The
// target, on the left, absorbs the source, on the right.
type MergeStep uint8

// The steps, in their order but for the last. All may be repeated.
const (
	// MergeBind has the target's leader bind the target to the merge: from then on neither
	// its span nor its members change.
	MergeBind MergeStep = iota + 1
	// MergeStore has a node make durable what it has applied.
	MergeStore
	// MergeFreeze has the source's leader freeze the source: it answers nothing any more.
	MergeFreeze
	// MergeSettle returns once the node's replica of the source has applied the freeze, and
	// that is durable.
	MergeSettle
	// MergeAbsorb has the target's leader absorb the source. It is ordered only once the
	// merge is committed.
	MergeAbsorb
	// MergeRelease has the leader of either range end what binds it to the merge, for good. It
	// is ordered only once the merge is aborted.
	MergeRelease
	// MergeHold has the target's leader evaluate no more requests, so that it can absorb at
	// once, until it does, the order's context ends or it takes too long. It comes with
	// MergeFreeze, and is no step that a merge needs.
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

// MergeOrder asks one node to take one step of a merge.
type MergeOrder struct {
	Step MergeStep
	// ID names the merge. Of two merges the later one has the higher id.
	ID uint64
	// Range is the one that the step is about.
	Range RangeID
	// Generation and ConfIndex are those of the range that the merge was decided by. Only
	// for MergeBind and MergeFreeze.
	Generation Generation
	ConfIndex  uint64
	// Other is the source for MergeBind and the target for MergeFreeze.
	Other RangeID
	// Hull covers both ranges. Only for MergeBind.
	Hull Span
}
