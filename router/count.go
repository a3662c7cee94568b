package router

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/keyspace"
)

// count returns how many keys a span has, without the request's filters.
func (r *Router) count(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (int64, error) {
	counts, err := r.countParts(ctx, span, req, at)
	var n int64
	for _, c := range counts {
		n += c.n
	}
	return n, err
}

// countBehind is count for a span that begins with a range and ends with a read's span. A client
// that pages through the read needs it for every page. So it is remembered, also for the part
// behind each further range.
func (r *Router) countBehind(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (int64, error) {
	rev := at.revision(req)
	if n, ok := r.counts.get(rev, span); ok {
		return n, nil
	}
	counts, err := r.countParts(ctx, span, req, at)
	if err != nil {
		return 0, err
	}
	var n int64
	for i := len(counts) - 1; i >= 0; i-- {
		n += counts[i].n
		r.counts.put(rev, keyspace.Span{Start: counts[i].start, End: span.End}, n)
	}
	return n, nil
}

// counted is the number of keys in the part of a span that begins at start.
type counted struct {
	start []byte
	n     int64
}

// countParts counts a span range by range.
func (r *Router) countParts(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) ([]counted, error) {
	spans, err := r.divide(ctx, span)
	if err != nil {
		return nil, err
	}
	counts := make([]counted, len(spans))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxParallelParts)
	for i, s := range spans {
		g.Go(func() error {
			q := clip(req, s)
			q.CountOnly, q.Limit = true, 0
			resp, err := r.whole(ctx, s, q, at)
			if errors.Is(err, errMultiRange) {
				n, err := r.count(ctx, s, req, at)
				counts[i] = counted{s.Start, n}
				return err
			}
			counts[i] = counted{s.Start, resp.GetCount()}
			return err
		})
	}
	return counts, g.Wait()
}

// maxCounts bounds the remembered counts, of 64 bytes each.
const maxCounts = 4096

// countKey is a span at a revision. It has the digest of the keys, because a client may choose keys
// as long as a request. SHA-256 keeps clients from finding two spans with one digest, which would
// give a wrong count.
type countKey struct {
	rev  keyspace.Revision
	span [sha256.Size]byte
}

// counts remembers how many keys spans have at revisions, which never changes. It forgets the
// oldest first.
type counts struct {
	mu sync.Mutex
	// Guarded by mu.
	known map[countKey]int64
	ring  []countKey
	next  int
}

func newCounts() *counts { return &counts{known: map[countKey]int64{}} }

func countKeyOf(rev keyspace.Revision, s keyspace.Span) countKey {
	k := countKey{rev: rev}
	// The length separates the two keys.
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(s.Start)))
	h := sha256.New()
	h.Write(length[:])
	h.Write(s.Start)
	h.Write(s.End)
	h.Sum(k.span[:0])
	return k
}

func (c *counts) get(rev keyspace.Revision, s keyspace.Span) (int64, bool) {
	k := countKeyOf(rev, s)
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.known[k]
	return n, ok
}

func (c *counts) put(rev keyspace.Revision, s keyspace.Span, n int64) {
	k := countKeyOf(rev, s)
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, have := c.known[k]; have {
		return
	}
	c.known[k] = n
	if len(c.ring) < maxCounts {
		c.ring = append(c.ring, k)
		return
	}
	delete(c.known, c.ring[c.next])
	c.ring[c.next] = k
	c.next = (c.next + 1) % maxCounts
}
