package watch

import (
	"bytes"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

type groupKey struct {
	start, end string
	prev       bool
}

func keyOf(g *group) groupKey {
	return groupKey{string(g.span.Start), string(g.span.End), g.prev}
}

// groupIndex finds live groups by their span, and by a key that they want.
type groupIndex struct {
	bySpan map[groupKey]*group
	// singles are the groups of one key each, by that key. The others are in tree, or in fresh
	// until there are maxFresh of those.
	singles map[string][]*group
	// tree is sorted by start, and has gone entries that are not live any more. ends[i] is the
	// greatest end in the subtree of i.
	tree  []*group
	ends  []keyspace.Span
	gone  int
	fresh []*group
}

// maxFresh bounds the groups that each event is compared with one by one.
const maxFresh = 128

func newGroupIndex() groupIndex {
	return groupIndex{bySpan: map[groupKey]*group{}, singles: map[string][]*group{}}
}

func isSingle(s keyspace.Span) bool {
	return len(s.Start) > 0 && len(s.End) == len(s.Start)+1 && s.End[len(s.Start)] == 0 && bytes.Equal(s.End[:len(s.Start)], s.Start)
}

func (x *groupIndex) add(g *group) {
	x.bySpan[keyOf(g)] = g
	g.indexed = true
	switch {
	case isSingle(g.span):
		x.singles[string(g.span.Start)] = append(x.singles[string(g.span.Start)], g)
	case g.inTree:
		x.gone--
	default:
		if x.fresh = append(x.fresh, g); len(x.fresh) > maxFresh {
			x.merge()
		}
	}
}

func (x *groupIndex) remove(g *group) {
	delete(x.bySpan, keyOf(g))
	g.indexed = false
	switch k := string(g.span.Start); {
	case isSingle(g.span):
		if x.singles[k] = slices.DeleteFunc(x.singles[k], func(o *group) bool { return o == g }); len(x.singles[k]) == 0 {
			delete(x.singles, k)
		}
	case g.inTree:
		if x.gone++; x.gone > maxFresh && x.gone > len(x.tree)/2 {
			x.merge()
		}
	default:
		x.fresh = slices.DeleteFunc(x.fresh, func(o *group) bool { return o == g })
	}
}

// each calls f with the groups that want the key. f must not change the index.
func (x *groupIndex) each(key []byte, f func(*group)) {
	for _, g := range x.singles[string(key)] {
		f(g)
	}
	for _, g := range x.fresh {
		if g.span.Contains(key) {
			f(g)
		}
	}
	x.search(key, 0, len(x.tree), f)
}

// merge moves the fresh groups into the tree and removes those that are gone. The tree is sorted
// already, so a hundred thousand groups take a millisecond or two.
func (x *groupIndex) merge() {
	byStart := func(a, b *group) int { return bytes.Compare(a.span.Start, b.span.Start) }
	slices.SortFunc(x.fresh, byStart)
	tree, fresh := make([]*group, 0, len(x.tree)-x.gone+len(x.fresh)), x.fresh
	for _, g := range x.tree {
		if !g.indexed {
			g.inTree = false
			continue
		}
		for len(fresh) > 0 && byStart(fresh[0], g) < 0 {
			tree, fresh = append(tree, fresh[0]), fresh[1:]
		}
		tree = append(tree, g)
	}
	tree = append(tree, fresh...)
	for _, g := range x.fresh {
		g.inTree = true
	}
	x.tree, x.fresh, x.gone = tree, nil, 0
	x.ends = make([]keyspace.Span, len(tree))
	x.greatest(0, len(tree))
}

// greatest fills in ends for tree[lo:hi] and returns the greatest end there.
func (x *groupIndex) greatest(lo, hi int) (end keyspace.Span, ok bool) {
	if lo >= hi {
		return end, false
	}
	mid := (lo + hi) / 2
	end = keyspace.Span{End: x.tree[mid].span.End}
	for _, half := range [2][2]int{{lo, mid}, {mid + 1, hi}} {
		if e, ok := x.greatest(half[0], half[1]); ok && e.Covers(end) {
			end = e
		}
	}
	x.ends[mid] = end
	return end, true
}

func (x *groupIndex) search(key []byte, lo, hi int, f func(*group)) {
	if lo >= hi {
		return
	}
	mid := (lo + hi) / 2
	if !x.ends[mid].Contains(key) {
		return // the whole subtree ends at or below the key
	}
	x.search(key, lo, mid, f)
	if g := x.tree[mid]; bytes.Compare(g.span.Start, key) <= 0 {
		if g.indexed && g.span.Contains(key) {
			f(g)
		}
		x.search(key, mid+1, hi, f)
	}
}
