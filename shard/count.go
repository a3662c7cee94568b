package shard

import (
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// knownCount returns the number of living keys of the span at the revision where
// it can be had without a scan. All changes at or below the revision are applied.
func (r *Replica) knownCount(s keyspace.Span, at keyspace.Revision) (int64, bool) {
	r.mu.Lock()
	generation := r.rec.Generation
	if r.rec.Counted && s.Covers(spanFromFirst(r.rec.Span)) {
		if n, ok := r.live.At(at, r.rec.Live); ok {
			r.mu.Unlock()
			return n, true
		}
	}
	r.mu.Unlock()
	n, ok := r.node.pages.Get(eval.PageOf(r.id, generation, at, s))
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
	n, err := r.store.Count(s, at)
	if err != nil {
		return 0, fmt.Errorf("shard: range %s: count %s at %d: %w", r.id, s, at, err)
	}
	r.node.metrics.countScans.Inc()
	r.rememberCount(s, at, n)
	return n, nil
}

// rememberCount keeps the count of a span at a resolved revision.
func (r *Replica) rememberCount(s keyspace.Span, at keyspace.Revision, n int64) {
	r.mu.Lock()
	generation := r.rec.Generation
	r.mu.Unlock()
	r.node.pages.Put(eval.PageOf(r.id, generation, at, s), n)
}

// spanFromFirst returns the span without the empty key, which does not exist.
func spanFromFirst(s keyspace.Span) keyspace.Span {
	if len(s.Start) == 0 {
		s.Start = rangeapi.FirstKey
	}
	return s
}
