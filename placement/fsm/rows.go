package fsm

import (
	"bytes"
	"fmt"

	"github.com/google/btree"

	"github.com/skeindb/skein/keyspace"
)

// mapDegree is the fan-out of the range map's tree.
const mapDegree = 32

// rangeTree is the range map in key order: rows by their start key, each pointing
// to a row that is never changed once it is in a tree. Cloning is O(1), so that
// readers have an unchanging map while the state machine goes on.
type rangeTree = btree.BTreeG[*Range]

func newRangeTree() *rangeTree {
	return btree.NewG(mapDegree, func(a, b *Range) bool {
		return bytes.Compare(a.Descriptor.Span.Start, b.Descriptor.Span.Start) < 0
	})
}

// rows are the rows of the range map, in three orders. Each change goes to all of them. Copies of
// the struct share the rows; a clone goes its own way.
type rows struct {
	tree *rangeTree
	// ids are by range, recent by when they last changed.
	ids, recent *rangeTree
}

func newRows() rows {
	return rows{
		tree: newRangeTree(),
		ids:  btree.NewG(mapDegree, func(a, b *Range) bool { return a.Descriptor.Range < b.Descriptor.Range }),
		recent: btree.NewG(mapDegree, func(a, b *Range) bool {
			if a.Changed != b.Changed {
				return a.Changed < b.Changed
			}
			return a.Descriptor.Range < b.Descriptor.Range
		}),
	}
}

// clone costs O(1).
func (r rows) clone() rows {
	return rows{tree: r.tree.Clone(), ids: r.ids.Clone(), recent: r.recent.Clone()}
}

// row returns the row of a range, nil if there is none.
func (r rows) row(id keyspace.RangeID) *Range {
	g, _ := r.ids.Get(&Range{Descriptor: keyspace.Descriptor{Range: id}})
	return g
}

// put adds a row, in the place of the one with its start key and id if there is one. If only one
// of the two is the same, check finds it.
func (r rows) put(g *Range) {
	if old, ok := r.tree.ReplaceOrInsert(g); ok {
		r.recent.Delete(old)
	}
	r.ids.ReplaceOrInsert(g)
	r.recent.ReplaceOrInsert(g)
}

// remove removes a row if it is there.
func (r rows) remove(g *Range) {
	r.tree.Delete(g)
	r.ids.Delete(g)
	r.recent.Delete(g)
}

// check returns an error where the rows do not cover the keyspace exactly once, or differ in the
// three orders.
func (r rows) check() error {
	if r.tree.Len() != r.ids.Len() || r.tree.Len() != r.recent.Len() {
		return fmt.Errorf("placement: %d rows by key, %d by range, %d by their last change", r.tree.Len(), r.ids.Len(), r.recent.Len())
	}
	ds := make([]keyspace.Descriptor, 0, r.tree.Len())
	var err error
	r.tree.Ascend(func(g *Range) bool {
		if o := r.row(g.Descriptor.Range); o != g {
			err = fmt.Errorf("placement: range %s has row %+v by key and %+v by range", g.Descriptor.Range, g, o)
		} else if o, _ := r.recent.Get(g); o != g {
			err = fmt.Errorf("placement: range %s has row %+v by key and %+v by its last change", g.Descriptor.Range, g, o)
		}
		ds = append(ds, g.Descriptor)
		return err == nil
	})
	if err == nil && !tiles(ds, keyspace.Span{}) {
		err = fmt.Errorf("placement: the %d ranges do not cover the keyspace exactly once", len(ds))
	}
	return err
}

// tiles says whether the descriptors, sorted by start, cover the span exactly once.
func tiles(ds []keyspace.Descriptor, span keyspace.Span) bool {
	at := span.Start
	for i := range ds {
		if !bytes.Equal(ds[i].Span.Start, at) || i > 0 && len(at) == 0 {
			return false
		}
		at = ds[i].Span.End
	}
	return len(ds) > 0 && bytes.Equal(at, span.End)
}
