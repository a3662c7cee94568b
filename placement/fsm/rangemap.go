package fsm

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// rowOf returns the row of a tree that covers the keyspace in whose span key lies.
func rowOf(t *rangeTree, key []byte) *Range {
	probe := &Range{Descriptor: keyspace.Descriptor{Span: keyspace.Span{Start: key}}}
	var found *Range
	t.DescendLessOrEqual(probe, func(g *Range) bool {
		found = g
		return false
	})
	if found == nil {
		panic(fmt.Sprintf("placement: the range map of %d ranges does not cover key %q", t.Len(), key))
	}
	return found
}

// overlapping returns the rows that overlap the span, in key order.
func overlapping(t *rangeTree, span keyspace.Span) []*Range {
	var rows []*Range
	t.AscendGreaterOrEqual(rowOf(t, span.Start), func(g *Range) bool {
		if !g.Descriptor.Span.Overlaps(span) {
			return false
		}
		rows = append(rows, g)
		return true
	})
	return rows
}

// A component is a set of reported descriptors that replaces a set of rows of the
// range map, both tiling the same span.
type component struct {
	Old []*Range
	New []keyspace.Descriptor
}

// fitting is what fit found out about a report.
type fitting struct {
	// Apply can replace rows now, in key order.
	Apply []component
	// Held are newer than what the map has, but leave a hole or an overlap now: an
	// earlier report is still to come.
	Held []keyspace.Descriptor
	// Stale are known already, or impossible.
	Stale []keyspace.Descriptor
}

// fit decides what of a report may enter the map. Descriptors are reported one range at a time
// and in any order, and the map must cover the keyspace exactly once after each change
// (invariant 3). So descriptors enter only in groups. A group is all reported descriptors that
// are connected through rows that they overlap. It enters if it tiles the span of those rows
// exactly, and if every replaced row belongs to a range of the group. A split's parent thus
// never enters without its child, and no report makes a range disappear.
//
// next bounds the range ids that exist. fit changes nothing; its answer depends
// on its arguments alone.
func fit(r rows, next keyspace.RangeID, reported []keyspace.Descriptor) fitting {
	var f fitting
	fresh := newest(r, next, reported, &f)
	for len(fresh) > 0 {
		n, span := group(r.tree, fresh)
		f.place(r, fresh[:n], span)
		fresh = fresh[n:]
	}
	return f
}

// newest returns the newest copy of each range in the report that is newer than
// the map's row, sorted by start; the others it adds to f.Stale.
func newest(r rows, next keyspace.RangeID, reported []keyspace.Descriptor, f *fitting) []keyspace.Descriptor {
	best := make(map[keyspace.RangeID]keyspace.Descriptor, len(reported))
	for _, d := range reported {
		known := r.row(d.Range)
		if validDescriptor(&d, next) != nil || known != nil && !d.Newer(&known.Descriptor) || outrun(r.tree, &d) {
			f.Stale = append(f.Stale, d)
			continue
		}
		if had, ok := best[d.Range]; ok {
			if !d.Newer(&had) {
				f.Stale = append(f.Stale, d)
				continue
			}
			f.Stale = append(f.Stale, had)
		}
		best[d.Range] = d
	}
	fresh := make([]keyspace.Descriptor, 0, len(best))
	for _, d := range best {
		fresh = append(fresh, d)
	}
	slices.SortFunc(fresh, func(a, b keyspace.Descriptor) int {
		if c := bytes.Compare(a.Span.Start, b.Span.Start); c != 0 {
			return c
		}
		return int(min(max(int64(a.Range)-int64(b.Range), -1), 1))
	})
	return fresh
}

// outrun says whether another range has come to hold a key of the descriptor's after it: a
// key's generation only ever grows, whichever ranges hold it. So it is with what was
// absorbed by a neighbour, of which nobody reports anything newer.
func outrun(t *rangeTree, d *keyspace.Descriptor) bool {
	return slices.ContainsFunc(overlapping(t, d.Span), func(g *Range) bool {
		return g.Descriptor.Range != d.Range && g.Descriptor.Generation >= d.Generation
	})
}

// group returns how many of the first descriptors hang together through the rows
// that they overlap, and the span of those rows.
func group(t *rangeTree, fresh []keyspace.Descriptor) (int, keyspace.Span) {
	var span keyspace.Span
	n := 0
	for n < len(fresh) && (n == 0 || fresh[n].Span.Overlaps(span)) {
		rows := overlapping(t, fresh[n].Span)
		last := rows[len(rows)-1].Descriptor.Span
		if n == 0 {
			span.Start = rows[0].Descriptor.Span.Start
			span.End = last.End
		} else if len(span.End) != 0 && (len(last.End) == 0 || bytes.Compare(last.End, span.End) > 0) {
			span.End = last.End
		}
		n++
	}
	return n, span
}

// place takes one group of descriptors that the rows of span connect. It puts the group into
// Apply if it fits, and into Held if it does not fit yet.
func (f *fitting) place(r rows, ds []keyspace.Descriptor, span keyspace.Span) {
	old := overlapping(r.tree, span)
	in := make(map[keyspace.RangeID]bool, len(ds))
	for i := range ds {
		in[ds[i].Range] = true
	}
	fits := tiles(ds, span)
	goes := make(map[keyspace.RangeID]bool, len(old))
	for _, g := range old {
		goes[g.Descriptor.Range] = true
		fits = fits && in[g.Descriptor.Range]
	}
	for id := range in {
		fits = fits && (goes[id] || r.row(id) == nil)
	}
	if !fits {
		f.Held = append(f.Held, ds...)
		return
	}
	f.Apply = append(f.Apply, component{Old: old, New: slices.Clone(ds)})
}

// validDescriptor says what makes a descriptor impossible, whatever the map holds.
func validDescriptor(d *keyspace.Descriptor, next keyspace.RangeID) error {
	switch {
	case d.Range == 0 || d.Range >= next:
		return fmt.Errorf("range id %s was never given out (next is %s)", d.Range, next)
	case d.Generation == 0:
		return fmt.Errorf("range %s has generation 0", d.Range)
	case len(d.Span.End) != 0 && bytes.Compare(d.Span.Start, d.Span.End) >= 0:
		return fmt.Errorf("range %s has no key in %s", d.Range, d.Span)
	case len(d.Replicas) == 0:
		return fmt.Errorf("range %s has no replica", d.Range)
	}
	seen := make(map[keyspace.NodeID]bool, len(d.Replicas))
	for _, r := range d.Replicas {
		if r.ID == 0 || r.Node == 0 || seen[r.Node] {
			return fmt.Errorf("range %s has replicas %v", d.Range, d.Replicas)
		}
		seen[r.Node] = true
	}
	return nil
}
