package eval

import (
	"bytes"
	"errors"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/command"
)

// sweepChunkBytes bounds the tombstones of one sweep.
const sweepChunkBytes = 512 << 10

// Sweep finds the next keys that a committed lock deletes at the revision, a part of the
// entry's bytes at most. Nothing changes under the lock, so that the store shows what there
// was before it.
func Sweep(store Store, l *command.Lock, rev keyspace.Revision, maxEntryBytes int) (*command.TxnItem, error) {
	it := &command.TxnItem{Kind: command.ItemSweep, Revision: rev, SpanIndex: l.Sweep()}
	bytesLeft := min(sweepChunkBytes, maxEntryBytes/4)
	span := l.Spans[it.SpanIndex].Span
	if l.Revoke.Lease != 0 {
		return it, sweepLease(store, l, it, span, bytesLeft)
	}
	written := l.WrittenIn(span)
	err := store.Scan(span, Newest, true, func(v *mvcc.Version) error {
		for len(written) > 0 && bytes.Compare(written[0], v.Key) < 0 {
			written = written[1:]
		}
		if v.Mod >= rev || len(written) > 0 && bytes.Equal(written[0], v.Key) {
			return nil
		}
		if bytesLeft -= len(v.Key) + command.VersionOverheadBytes; bytesLeft < 0 && len(it.Keys) > 0 {
			it.Next = bytes.Clone(v.Key)
			return ErrStop
		}
		it.Sweep(v)
		return nil
	})
	if errors.Is(err, ErrStop) {
		err = nil
	}
	return it, err
}

// sweepLease finds the next keys of a lease that a committed lock deletes.
func sweepLease(store Store, l *command.Lock, it *command.TxnItem, span keyspace.Span, bytesLeft int) error {
	err := store.Attached(l.Revoke.Lease, span, func(key []byte) error {
		v, ok, err := store.Get(key, Newest)
		if err != nil || !ok || v.Lease != l.Revoke.Lease || v.Mod >= it.Revision {
			return err
		}
		if bytesLeft -= len(key) + command.VersionOverheadBytes; bytesLeft < 0 && len(it.Keys) > 0 {
			it.Next = bytes.Clone(key)
			return ErrStop
		}
		it.Sweep(&mvcc.Version{Key: key, Lease: l.Revoke.Lease})
		return nil
	})
	if errors.Is(err, ErrStop) {
		err = nil
	}
	return err
}
