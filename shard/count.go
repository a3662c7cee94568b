package shard

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sort"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// delta is a change of the number of live keys at a revision.
type delta struct {
	rev keyspace.Revision
	n   int64
}

func addDelta(d []delta, rev keyspace.Revision, n int64) []delta {
	if k := len(d); k > 0 && d[k-1].rev == rev {
		d[k-1].n += n
		return d
	}
	return append(d, delta{rev, n})
}

// maxDeltas bounds the changes that a range remembers. A count at an older
// revision scans.
const maxDeltas = 1024

// liveCounter knows the number of live keys of a range at every revision from
// base on: it is the record's number less the changes behind the revision. Guarded
// by the replica's mu.
type liveCounter struct {
	base   keyspace.Revision
	deltas []delta
}

// reset forgets the changes up to the revision.
func (l *liveCounter) reset(base keyspace.Revision) { l.base, l.deltas = base, nil }

func (l *liveCounter) apply(d []delta) {
	if l.follow(d) {
		l.deltas = append(l.deltas, d...)
	} else {
		for _, x := range d {
			l.add(x)
		}
	}
	if over := len(l.deltas) - maxDeltas; over > 0 {
		// Half is dropped at a time, so that a steady load does not copy for each entry.
		over = max(over, maxDeltas/2)
		l.base = l.deltas[over-1].rev
		l.deltas = append(l.deltas[:0:0], l.deltas[over:]...)
	}
}

// follow says whether the changes are in order behind all others, as they are without
// transactions over several ranges.
func (l *liveCounter) follow(d []delta) bool {
	last := l.base
	if n := len(l.deltas); n > 0 {
		last = l.deltas[n-1].rev
	}
	for i := range d {
		if d[i].rev <= last {
			return false
		}
		last = d[i].rev
	}
	return true
}

// add puts a change in its place. That of a transaction over several ranges may come
// late: at or below the base it is in every number already.
func (l *liveCounter) add(d delta) {
	n := len(l.deltas)
	if n == 0 || l.deltas[n-1].rev < d.rev {
		if d.rev > l.base {
			l.deltas = append(l.deltas, d)
		}
		return
	}
	i := sort.Search(n, func(i int) bool { return l.deltas[i].rev >= d.rev })
	switch {
	case d.rev <= l.base:
	case l.deltas[i].rev == d.rev:
		l.deltas[i].n += d.n
	default:
		l.deltas = slices.Insert(l.deltas, i, d)
	}
}

// at returns the number at the revision, given that of the last one.
func (l *liveCounter) at(rev keyspace.Revision, last int64) (int64, bool) {
	if rev < l.base {
		return 0, false
	}
	for i := len(l.deltas) - 1; i >= 0 && l.deltas[i].rev > rev; i-- {
		last -= l.deltas[i].n
	}
	return last, true
}

// pageKey names a place in a range at a revision: a count from there to the end of
// what was asked for. It has the span's digest and not its keys, which a client may
// choose as long as a request: so all pages together have a bound in bytes too. No
// client finds two spans with one digest, since a wrong count would be the answer.
type pageKey struct {
	rangeID    keyspace.RangeID
	generation keyspace.Generation
	at         keyspace.Revision
	span       [sha256.Size]byte
}

func pageOf(id keyspace.RangeID, g keyspace.Generation, at keyspace.Revision, s keyspace.Span) pageKey {
	k := pageKey{rangeID: id, generation: g, at: at}
	// The length sets apart where one key ends and the other begins.
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(s.Start)))
	h := sha256.New()
	h.Write(length[:])
	h.Write(s.Start)
	h.Write(s.End)
	h.Sum(k.span[:0])
	return k
}

// pages remembers counts, so that paging through a span counts it once: what is
// behind a page is its count less its keys. A count at a revision that was resolved
// never changes. The oldest are forgotten first.
type pages struct {
	mu     sync.Mutex
	counts map[pageKey]int64
	ring   []pageKey
	next   int
}

func newPages(n int) *pages {
	return &pages{counts: make(map[pageKey]int64), ring: make([]pageKey, 0, n)}
}

func (p *pages) put(k pageKey, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, have := p.counts[k]; have {
		return
	}
	p.counts[k] = n
	if len(p.ring) < cap(p.ring) {
		p.ring = append(p.ring, k)
		return
	}
	delete(p.counts, p.ring[p.next])
	p.ring[p.next] = k
	p.next = (p.next + 1) % len(p.ring)
}

func (p *pages) get(k pageKey) (int64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.counts[k]
	return n, ok
}

// knownCount returns the number of living keys of the span at the revision where
// it can be had without a scan. All changes at or below the revision are applied.
func (r *Replica) knownCount(s keyspace.Span, at keyspace.Revision) (int64, bool) {
	r.mu.Lock()
	generation := r.rec.Generation
	if r.rec.Counted && s.Covers(spanFromFirst(r.rec.Span)) {
		if n, ok := r.live.at(at, r.rec.Live); ok {
			r.mu.Unlock()
			return n, true
		}
	}
	r.mu.Unlock()
	n, ok := r.node.pages.get(pageOf(r.id, generation, at, s))
	if ok {
		r.node.metrics.pagesKnown.Inc()
	}
	return n, ok
}

// count is knownCount, and a scan where it does not know.
func (r *Replica) count(s keyspace.Span, at keyspace.Revision) (int64, error) {
	if n, ok := r.knownCount(s, at); ok {
		return n, nil
	}
	n, err := r.store.count(s, at)
	if err != nil {
		return 0, fmt.Errorf("shard: range %s: count %s at %d: %w", r.id, s, at, err)
	}
	r.node.metrics.countScans.Inc()
	r.mu.Lock()
	generation := r.rec.Generation
	r.mu.Unlock()
	r.node.pages.put(pageOf(r.id, generation, at, s), n)
	return n, nil
}

// spanFromFirst returns the span without the empty key, which does not exist.
func spanFromFirst(s keyspace.Span) keyspace.Span {
	if len(s.Start) == 0 {
		s.Start = rangeapi.FirstKey
	}
	return s
}
