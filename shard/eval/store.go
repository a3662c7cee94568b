package eval

import (
	"sync/atomic"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// EngineStore is the applied state in the node's engine. Each call reads the
// newest state of the engine; what it shows at a revision does not change any more
// once all changes up to there are applied. It implements [Store].
type EngineStore struct{ e *engine.Engine }

// NewEngineStore returns the applied state in the engine.
func NewEngineStore(e *engine.Engine) EngineStore { return EngineStore{e} }

// Get implements Store.
func (s EngineStore) Get(key []byte, at keyspace.Revision) (mvcc.Version, bool, error) {
	return mvcc.Get(s.e, key, at)
}

// Scan implements Store.
func (s EngineStore) Scan(span keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(*mvcc.Version) error) error {
	_, err := mvcc.Scan(s.e, mvcc.ScanOptions{Span: span, At: at, KeysOnly: keysOnly}, fn)
	return err
}

// Attached implements Store.
func (s EngineStore) Attached(lease keyspace.LeaseID, span keyspace.Span, fn func(key []byte) error) error {
	return mvcc.Attached(s.e, lease, span, fn)
}

// Count returns the number of living keys of the span at the revision. It scans.
func (s EngineStore) Count(span keyspace.Span, at keyspace.Revision) (int64, error) {
	return mvcc.Count(s.e, span, at)
}

// PassStore is the EngineStore of one pass of evaluations. It keeps one iterator for
// its point reads, which costs a third of an iterator for each read. It may do so until
// entries are applied, which then leave the overlay. A result of Get is valid
// until the next one. It is for one goroutine.
type PassStore struct {
	EngineStore
	// applied counts the replica's applied batches; getter shows the state of at least
	// the seen-th.
	applied *atomic.Uint64
	seen    uint64
	getter  *mvcc.Getter
}

// NewPassStore returns the store of a pass. applied is raised before the overlay loses what
// was applied.
func NewPassStore(s EngineStore, applied *atomic.Uint64) PassStore {
	return PassStore{EngineStore: s, applied: applied}
}

// Get implements Store.
func (s *PassStore) Get(key []byte, at keyspace.Revision) (mvcc.Version, bool, error) {
	// The overlay was looked at before: where nothing was applied since the iterator
	// was made, nothing can have left the overlay that the iterator does not show.
	if now := s.applied.Load(); s.getter == nil || now != s.seen {
		if err := s.Close(); err != nil {
			return mvcc.Version{}, false, err
		}
		g, err := mvcc.NewGetter(s.e)
		if err != nil {
			return mvcc.Version{}, false, err
		}
		s.getter, s.seen = g, now
	}
	v, ok, err := s.getter.Get(key, at)
	if err != nil || !ok || v.Tombstone {
		return mvcc.Version{}, false, err
	}
	return *v, true, nil
}

// Close closes the iterator. The store may be used again.
func (s *PassStore) Close() error {
	if s.getter == nil {
		return nil
	}
	g := s.getter
	s.getter = nil
	return g.Close()
}
