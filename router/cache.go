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
	// leader is the node that led last time, 0 if unknown. Only a hint.
	leader keyspace.NodeID
}

// rangeCache is a cache of the range map: ranges sorted by start, never
// overlapping, with holes where nothing is known. Readers take no lock: a change
// makes a new slice.
type rangeCache struct {
	mu     sync.Mutex // serialises changes
	routes atomic.Pointer[[]*route]
}

// newRangeCache returns a cache that knows nothing.
func newRangeCache() *rangeCache {
	c := &rangeCache{}
	c.routes.Store(&[]*route{})
	return c
}

// find returns the range that holds the key, nil if unknown.
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

// update takes in descriptors. One replaces every range that it overlaps, unless
// one of these is certainly newer: of the same range by Newer, of another by its
// generation (a range's generation rises above those of all that its span came
// from). It says whether anything changed.
func (c *rangeCache) update(descs ...keyspace.Descriptor) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	rs := *c.routes.Load()
	changed := false
	for i := range descs {
		if next, ok := replaced(rs, &descs[i]); ok {
			rs, changed = next, true
		}
	}
	if changed {
		c.routes.Store(&rs)
	}
	return changed
}

func replaced(rs []*route, d *keyspace.Descriptor) ([]*route, bool) {
	next := &route{desc: *d}
	out := make([]*route, 0, len(rs)+1)
	for _, r := range rs {
		same := r.desc.Range == d.Range
		if !same && !r.desc.Span.Overlaps(d.Span) {
			out = append(out, r)
			continue
		}
		if same && !d.Newer(&r.desc) {
			return nil, false
		}
		if !same && r.desc.Generation > d.Generation {
			return nil, false
		}
		if _, still := d.ReplicaOn(r.leader); still && (same || next.leader == 0) {
			next.leader = r.leader
		}
	}
	out = append(out, next)
	slices.SortFunc(out, func(a, b *route) int { return bytes.Compare(a.desc.Span.Start, b.desc.Span.Start) })
	return out, true
}

// setLeader notes who leads a range. 0 forgets the hint, but only where it still
// is the one that misled.
func (c *rangeCache) setLeader(id keyspace.RangeID, leader, unless keyspace.NodeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	rs := *c.routes.Load()
	for i, r := range rs {
		if r.desc.Range != id {
			continue
		}
		if r.leader == leader || (leader == 0 && r.leader != unless) {
			return
		}
		next := slices.Clone(rs)
		next[i] = &route{desc: r.desc, leader: leader}
		c.routes.Store(&next)
		return
	}
}
