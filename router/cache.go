package router

import (
	"bytes"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
)

// route is one range as this gateway knows it.
type route struct {
	desc keyspace.Descriptor
	// hint is the node that led last, or 0.
	hint atomic.Uint64
	// served is the highest revision at which this gateway answered a serializable read of the
	// range, or of a range that it comes from.
	served atomic.Int64
}

// leader returns the node that led the range last, or 0. It is a hint.
func (r *route) leader() keyspace.NodeID { return keyspace.NodeID(r.hint.Load()) }

// noteServed notes the revision of a serializable answer.
func (r *route) noteServed(rev keyspace.Revision) {
	for old := r.served.Load(); old < int64(rev) && !r.served.CompareAndSwap(old, int64(rev)); old = r.served.Load() {
	}
}

// rangeCache caches the range map: ranges sorted by start that do not overlap, with holes for
// unknown ones. Readers take no lock, because a change makes a new slice.
type rangeCache struct {
	mu sync.Mutex // serializes changes
	// byID has the same routes by their ranges. Guarded by mu.
	byID map[keyspace.RangeID]*route
	// former are the spans of ranges in earlier generations, of which others may still speak; order
	// is the order in which they came. Guarded by mu.
	former map[formerKey]former
	order  []formerKey
	routes atomic.Pointer[[]*route]
}

// newRangeCache returns an empty cache.
func newRangeCache() *rangeCache {
	c := &rangeCache{byID: map[keyspace.RangeID]*route{}, former: map[formerKey]former{}}
	c.routes.Store(&[]*route{})
	return c
}

// maxFormer bounds the remembered earlier generations.
const maxFormer = 4096

type formerKey struct {
	id         keyspace.RangeID
	generation keyspace.Generation
}

// former is the span of a range in an earlier generation, and its route.served then.
type former struct {
	span   keyspace.Span
	served keyspace.Revision
}

// rememberLocked remembers a range that is about to change.
func (c *rangeCache) rememberLocked(r *route) {
	k := formerKey{r.desc.Range, r.desc.Generation}
	f, known := c.former[k]
	if !known && len(c.order) == maxFormer {
		delete(c.former, c.order[0])
		c.order = c.order[1:]
	}
	if !known {
		c.order = append(c.order, k)
	}
	c.former[k] = former{r.desc.Span, max(f.served, keyspace.Revision(r.served.Load()))}
}

// spanOf returns the span of the range at the generation, if it is known.
func (c *rangeCache) spanOf(id keyspace.RangeID, g keyspace.Generation) (keyspace.Span, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.byID[id]; r != nil && r.desc.Generation == g {
		return r.desc.Span, true
	}
	f, ok := c.former[formerKey{id, g}]
	return f.span, ok
}

// find returns the range that holds the key, or nil.
func (c *rangeCache) find(key []byte) *route {
	rs := *c.routes.Load()
	i := sort.Search(len(rs), func(i int) bool { return bytes.Compare(rs[i].desc.Span.Start, key) > 0 }) - 1
	if i < 0 || !rs[i].desc.Span.Contains(key) {
		return nil
	}
	return rs[i]
}

// all returns every known range in order. The slice must not be changed.
func (c *rangeCache) all() []*route { return *c.routes.Load() }

// update takes in descriptors. One replaces every range that it overlaps, unless one of these is
// certainly newer: the
// same range by Newer, another one by its generation. (A range's generation is above those of
// all ranges that its span came from.) It returns true if anything changed.
func (c *rangeCache) update(descs ...keyspace.Descriptor) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	rs := *c.routes.Load()
	changed, own := false, false
	for i := range descs {
		if known := c.byID[descs[i].Range]; known != nil && !descs[i].Newer(&known.desc) {
			continue // true for nearly all of a map that is loaded again
		}
		if !own {
			rs, own = slices.Clone(rs), true // readers have the old one
		}
		var took bool
		rs, took = c.takeLocked(rs, &descs[i])
		changed = changed || took
	}
	if changed {
		c.routes.Store(&rs)
	}
	return changed
}

// takeLocked takes in a descriptor that is not older than the known one of its range. It may change
// rs in place, and returns true if it did.
func (c *rangeCache) takeLocked(rs []*route, d *keyspace.Descriptor) ([]*route, bool) {
	known := c.byID[d.Range]
	lo, hi := window(rs, d.Span)
	for _, r := range rs[lo:hi] {
		if r != known && r.desc.Generation > d.Generation {
			return rs, false
		}
	}
	next := &route{desc: *d}
	inherit := func(r *route) {
		if _, still := d.ReplicaOn(r.leader()); still && next.leader() == 0 {
			next.hint.Store(uint64(r.leader()))
		}
		next.noteServed(keyspace.Revision(r.served.Load()))
	}
	if known != nil {
		inherit(known)
		if at := position(rs, known); at < lo || at >= hi {
			rs = slices.Delete(rs, at, at+1)
			lo, hi = window(rs, d.Span)
		}
		c.rememberLocked(known)
		delete(c.byID, d.Range)
	}
	for _, r := range rs[lo:hi] {
		inherit(r)
		c.rememberLocked(r)
		delete(c.byID, r.desc.Range)
	}
	if _, whole := overlapping(rs, d.Span); !whole {
		// The heirs of a split come one after the other, and the first one leaves a hole.
		for _, f := range c.former {
			if f.span.Overlaps(d.Span) {
				next.noteServed(f.served)
			}
		}
	}
	c.byID[d.Range] = next
	return slices.Replace(rs, lo, hi, next), true
}

// noteServed notes the revision of a serializable answer for the span: for the known ranges, and in
// a hole for the remembered ones.
func (c *rangeCache) noteServed(span keyspace.Span, rev keyspace.Revision) {
	older := func(r *route) bool { return r.served.Load() < int64(rev) }
	if routes, whole := overlapping(c.all(), span); whole && !slices.ContainsFunc(routes, older) {
		return
	}
	c.mu.Lock() // a range that changes hands its revision on
	defer c.mu.Unlock()
	rs := c.all()
	lo, hi := window(rs, span)
	for _, r := range rs[lo:hi] {
		r.noteServed(rev)
	}
	if _, whole := overlapping(rs, span); whole {
		return
	}
	for k, f := range c.former {
		if f.span.Overlaps(span) {
			c.former[k] = former{f.span, max(f.served, rev)}
		}
	}
}

// window returns which routes overlap the span: rs[lo:hi].
func window(rs []*route, s keyspace.Span) (lo, hi int) {
	lo = sort.Search(len(rs), func(i int) bool {
		end := rs[i].desc.Span.End
		return len(end) == 0 || bytes.Compare(end, s.Start) > 0
	})
	hi = lo + sort.Search(len(rs)-lo, func(i int) bool {
		return len(s.End) != 0 && bytes.Compare(rs[lo+i].desc.Span.Start, s.End) >= 0
	})
	return lo, hi
}

// position returns the index of the route in rs, which must have it.
func position(rs []*route, r *route) int {
	return sort.Search(len(rs), func(i int) bool { return bytes.Compare(rs[i].desc.Span.Start, r.desc.Span.Start) >= 0 })
}

// setLeader notes a range's leader. 0 removes the hint, if it still is the node given in unless.
func (c *rangeCache) setLeader(id keyspace.RangeID, leader, unless keyspace.NodeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.byID[id]; r != nil && (leader != 0 || r.leader() == unless) {
		r.hint.Store(uint64(leader))
	}
}

// overlapping returns the routes that overlap the span; ok is false if they leave a hole.
func overlapping(all []*route, span keyspace.Span) (routes []*route, ok bool) {
	lo, hi := window(all, span)
	if routes = all[lo:hi:hi]; len(routes) == 0 || bytes.Compare(routes[0].desc.Span.Start, span.Start) > 0 {
		return nil, false
	}
	for i, rt := range routes[1:] {
		if !bytes.Equal(routes[i].desc.Span.End, rt.desc.Span.Start) {
			return nil, false
		}
	}
	last := routes[len(routes)-1].desc.Span.End
	return routes, len(last) == 0 || len(span.End) != 0 && bytes.Compare(last, span.End) >= 0
}
