package decide

import (
	"errors"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Why two neighbours are not merged.
var (
	errMergeOff    = errors.New("ranges are not merged by themselves here")
	errMergeAlone  = errors.New("it has no right neighbour")
	errMergeFew    = errors.New("there are as few ranges as there should be")
	errMergeLarge  = errors.New("they are too large together")
	errMergeHot    = errors.New("they have too much load together")
	errMergeYoung  = errors.New("one of them was split, merged or made not long ago")
	errMergeWarm   = errors.New("they have not been small and cold together for long")
	errMergeKept   = errors.New("somebody has set the border between them")
	errMergeFailed = errors.New("merging them has failed not long ago, or too often")
	errMergeUneasy = errors.New("one of them is busy, has a need of its own, or is led by a node that hears hardly any other")
)

// mergeable returns nil where the range and its right neighbour should be one.
func (c *Cluster) mergeable(r *rng) error {
	// Most ranges are seen here in turn, and most are left for what they are themselves.
	switch {
	case c.settings.MergeAge <= 0:
		return errMergeOff
	case r.Bytes > c.settings.mergeBytes():
		return errMergeLarge
	case r.Load > c.settings.mergeLoad():
		return errMergeHot
	}
	o := c.right(r)
	switch {
	case o == nil:
		return errMergeAlone
	case o.Kept:
		return errMergeKept
	case len(c.all) <= c.settings.MinRanges:
		return errMergeFew
	case r.Bytes+o.Bytes > c.settings.mergeBytes():
		return errMergeLarge
	case r.Load+o.Load > c.settings.mergeLoad():
		return errMergeHot
	case c.now.Sub(max(r.Born, o.Born)) < c.settings.MergeAge:
		return errMergeYoung
	case r.calmAt == 0 || c.now.Sub(r.calmAt) < c.settings.MergeAge:
		return errMergeWarm
	case c.failing(r, o):
		return errMergeFailed
	case o.op != nil || o.need != None && o.need != Cold:
		return errMergeUneasy
	case r.mate != nil && r.mate != o || o.mate != nil && o.mate != r:
		return errMergeUneasy
	}
	if t := c.count(o); t.silent > 0 || t.joint || t.learners > 0 || c.isolated(r) || c.isolated(o) {
		return errMergeUneasy
	}
	return nil
}

// noteCalm notes since when the range and its right neighbour are small and cold together:
// a moment of rest is no reason to merge what is written to every day.
func (c *Cluster) noteCalm(r *rng) {
	o := c.right(r)
	switch {
	case o == nil || r.Bytes+o.Bytes > c.settings.mergeBytes() || r.Load+o.Load > c.settings.mergeLoad():
		r.calmAt = 0
	case r.calmAt == 0:
		r.calmAt = max(c.now, 1)
	}
}

// failures are the merges of a range with its right neighbour that have failed, while
// they had these generations.
type failures struct {
	left, right keyspace.Generation
	count       int
	nextAt      clock.Time
}

// failing says whether merging the two has failed not long ago, or too often.
func (c *Cluster) failing(r, o *rng) bool {
	f := &r.failed
	return f.left == r.Descriptor.Generation && f.right == o.Descriptor.Generation &&
		(f.count >= c.settings.MergeTries || c.now < f.nextAt)
}

// noteFailure counts an operation of the range that has failed, if it was a step towards a
// merge.
func (c *Cluster) noteFailure(r *rng, op *Operation) {
	left := r
	if op.Kind != Merge && r.mate != nil && c.right(r.mate) == r {
		left = r.mate
	}
	o := c.right(left)
	if op.Reason != Cold || o == nil || op.Kind != Merge && r.mate == nil {
		return
	}
	f := &left.failed
	if f.left != left.Descriptor.Generation || f.right != o.Descriptor.Generation {
		*f = failures{left: left.Descriptor.Generation, right: o.Descriptor.Generation}
	}
	f.nextAt = c.now.Add(c.settings.MergeRetry << min(f.count, c.settings.MergeTries))
	f.count++
}

// part ends the plan to merge the range with a neighbour.
func (r *rng) part() {
	if r.mate != nil {
		r.mate.mate = nil
		r.mate = nil
	}
}

// aligned says whether two neighbours have their voters on the same nodes.
func aligned(a, b *rng) bool {
	if len(a.Descriptor.Replicas) != len(b.Descriptor.Replicas) {
		return false
	}
	for _, is := range a.Descriptor.Replicas {
		if !b.votesOn(is.Node) {
			return false
		}
	}
	return true
}

// settled says whether the range's replicas have stayed long enough to be moved for a merge.
// Otherwise the replicas of a row of neighbours would move to and fro as these are merged one
// after the other.
func (c *Cluster) settled(r *rng) bool {
	return r.movedAt == 0 || c.now.Sub(r.movedAt) >= c.settings.MergeAge
}

// cheaper says whether one of two neighbours, which would have to be brought together
// first, can be merged with its other neighbour as it is.
func (c *Cluster) cheaper(r, o *rng) bool {
	if l := c.left(r); l != nil && aligned(l, r) && c.mergeable(l) == nil {
		return true
	}
	after := c.right(o)
	return after != nil && aligned(o, after) && c.mergeable(o) == nil
}
