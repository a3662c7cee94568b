package eval

import (
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// knownCount returns the number of living keys of the span at the revision where
// it can be had without a scan. All changes at or below the revision are applied.
func (r *Reader) knownCount(s keyspace.Span, at keyspace.Revision) (int64, bool) {
	r.guard.Lock()
	generation := r.rec.Generation
	if r.rec.Counted && s.Covers(SpanFromFirst(r.rec.Span)) {
		if n, ok := r.live.At(at, r.rec.Live); ok {
			r.guard.Unlock()
			return n, true
		}
	}
	r.guard.Unlock()
	n, ok := r.shared.Pages.Get(PageOf(r.id, generation, at, s))
	if ok {
		r.shared.Metrics.PagesKnown.Inc()
	}
	return n, ok
}

// count is knownCount, and a scan where it does not know.
func (r *Reader) count(s keyspace.Span, at keyspace.Revision) (int64, error) {
	if n, ok := r.knownCount(s, at); ok {
		return n, nil
	}
	n, err := r.store.Count(s, at)
	if err != nil {
		return 0, fmt.Errorf("eval: range %s: count %s at %d: %w", r.id, s, at, err)
	}
	r.shared.Metrics.CountScans.Inc()
	r.rememberCount(s, at, n)
	return n, nil
}

// rememberCount keeps the count of a span at a resolved revision.
func (r *Reader) rememberCount(s keyspace.Span, at keyspace.Revision, n int64) {
	r.guard.Lock()
	generation := r.rec.Generation
	r.guard.Unlock()
	r.shared.Pages.Put(PageOf(r.id, generation, at, s), n)
}
