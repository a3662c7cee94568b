package eval

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"sort"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// CountChange is a change of the number of live keys at a revision.
type CountChange struct {
	Rev keyspace.Revision
	N   int64
}

// AddCountChange adds a change at the newest revision to the list.
func AddCountChange(d []CountChange, rev keyspace.Revision, n int64) []CountChange {
	if k := len(d); k > 0 && d[k-1].Rev == rev {
		d[k-1].N += n
		return d
	}
	return append(d, CountChange{rev, n})
}

// MaxCountChanges bounds the changes that a range remembers. A count at an older
// revision scans.
const MaxCountChanges = 1024

// LiveCounts knows the number of live keys of a range at every revision from
// base on: it is the record's number less the changes behind the revision. Guarded
// by the replica's mu.
type LiveCounts struct {
	base   keyspace.Revision
	deltas []CountChange
}

// Reset forgets the changes up to the revision.
func (l *LiveCounts) Reset(base keyspace.Revision) { l.base, l.deltas = base, nil }

// Apply adds the changes of an applied entry.
func (l *LiveCounts) Apply(d []CountChange) {
	if l.follow(d) {
		l.deltas = append(l.deltas, d...)
	} else {
		for _, x := range d {
			l.add(x)
		}
	}
	if over := len(l.deltas) - MaxCountChanges; over > 0 {
		// Half is dropped at a time, so that a steady load does not copy for each entry.
		over = max(over, MaxCountChanges/2)
		l.base = l.deltas[over-1].Rev
		l.deltas = append(l.deltas[:0:0], l.deltas[over:]...)
	}
}

// follow says whether the changes are in order behind all others, as they are without
// transactions over several ranges.
func (l *LiveCounts) follow(d []CountChange) bool {
	last := l.base
	if n := len(l.deltas); n > 0 {
		last = l.deltas[n-1].Rev
	}
	for i := range d {
		if d[i].Rev <= last {
			return false
		}
		last = d[i].Rev
	}
	return true
}

// add puts a change in its place. A transaction over several ranges may bring one late. A
// change at or below the base is in every number already.
func (l *LiveCounts) add(d CountChange) {
	n := len(l.deltas)
	if n == 0 || l.deltas[n-1].Rev < d.Rev {
		if d.Rev > l.base {
			l.deltas = append(l.deltas, d)
		}
		return
	}
	i := sort.Search(n, func(i int) bool { return l.deltas[i].Rev >= d.Rev })
	switch {
	case d.Rev <= l.base:
	case l.deltas[i].Rev == d.Rev:
		l.deltas[i].N += d.N
	default:
		l.deltas = slices.Insert(l.deltas, i, d)
	}
}

// At returns the number at the revision, given that of the last one.
func (l *LiveCounts) At(rev keyspace.Revision, last int64) (int64, bool) {
	if rev < l.base {
		return 0, false
	}
	for i := len(l.deltas) - 1; i >= 0 && l.deltas[i].Rev > rev; i-- {
		last -= l.deltas[i].N
	}
	return last, true
}

// PageKey names a place in a range at a revision: a count from there to the end of
// what was asked for. It has the span's digest and not its keys, which a client may
// choose as long as a request: so all pages together have a bound in bytes too. No
// client finds two spans with one digest, since a wrong count would be the answer.
type PageKey struct {
	rangeID    keyspace.RangeID
	generation keyspace.Generation
	at         keyspace.Revision
	span       [sha256.Size]byte
}

// PageOf returns the key of a span in a range at a revision.
func PageOf(id keyspace.RangeID, g keyspace.Generation, at keyspace.Revision, s keyspace.Span) PageKey {
	k := PageKey{rangeID: id, generation: g, at: at}
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

// PageCounts remembers counts, so that paging through a span counts it once: what is
// behind a page is its count less its keys. A count at a resolved revision
// never changes. The oldest are forgotten first.
type PageCounts struct {
	mu     sync.Mutex
	counts map[PageKey]int64
	ring   []PageKey
	next   int
}

// NewPageCounts returns a memory of at most n counts.
func NewPageCounts(n int) *PageCounts {
	return &PageCounts{counts: make(map[PageKey]int64), ring: make([]PageKey, 0, n)}
}

// Put remembers a count.
func (p *PageCounts) Put(k PageKey, n int64) {
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

// Get returns a remembered count.
func (p *PageCounts) Get(k PageKey) (int64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.counts[k]
	return n, ok
}

// SpanFromFirst returns the span without the empty key, which does not exist.
func SpanFromFirst(s keyspace.Span) keyspace.Span {
	if len(s.Start) == 0 {
		s.Start = rangeapi.FirstKey
	}
	return s
}
