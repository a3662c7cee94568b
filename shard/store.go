package shard

import (
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

func (s engineStore) count(span keyspace.Span, at keyspace.Revision) (int64, error) {
	return mvcc.Count(s.e, span, at)
}
