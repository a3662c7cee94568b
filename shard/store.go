package shard

import (
	"sync/atomic"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// engineStore is the applied state in the node's engine. Each call reads the
// newest state of the engine; what it shows at a revision does not change any more
// once all changes up to there are applied.
type engineStore struct{ e *engine.Engine }

func (s engineStore) get(key []byte, at keyspace.Revision) (mvcc.Version, bool, error) {
	return mvcc.Get(s.e, key, at)
}

func (s engineStore) scan(span keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(*mvcc.Version) error) error {
	_, err := mvcc.Scan(s.e, mvcc.ScanOptions{Span: span, At: at, KeysOnly: keysOnly}, fn)
	return err
}

func (s engineStore) attached(lease keyspace.LeaseID, span keyspace.Span, fn func(key []byte) error) error {
	return mvcc.Attached(s.e, lease, span, fn)
}

// passStore is the engineStore of one pass of evaluation. It keeps one iterator for
// its point reads, which costs a third of an iterator for each, as long as it may:
// until entries are applied, which then leave the overlay. A result of get is valid
// until the next one. It is for one goroutine.
type passStore struct {
	engineStore
	// applied counts the replica's applied batches; getter shows the state of at least
	// the seen-th.
	applied *atomic.Uint64
	seen    uint64
	getter  *mvcc.Getter
}

func (s *passStore) get(key []byte, at keyspace.Revision) (mvcc.Version, bool, error) {
	// The overlay was looked at before: where nothing was applied since the iterator
	// was made, nothing can have left the overlay that the iterator does not show.
	if now := s.applied.Load(); s.getter == nil || now != s.seen {
		if err := s.close(); err != nil {
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

func (s *passStore) close() error {
	if s.getter == nil {
		return nil
	}
	g := s.getter
	s.getter = nil
	return g.Close()
}

func (s engineStore) count(span keyspace.Span, at keyspace.Revision) (int64, error) {
	return mvcc.Count(s.e, span, at)
}
