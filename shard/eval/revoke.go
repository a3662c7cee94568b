package eval

import (
	"bytes"
	"errors"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// Revoke deletes the keys of the span that are attached to the lease, unless they take more
// than maxBytes: then it does nothing and tooMany is set. Checked is as in rangeapi.Revoke.
func (e *Evaluation) Revoke(lease keyspace.LeaseID, checked keyspace.Revision, span keyspace.Span, maxBytes int) (tooMany bool, err error) {
	e.changes.txn = &PendingTxn{Floor: e.view.in.Floor}
	keys, whole, err := e.view.attached(lease, checked, span, maxBytes)
	if err == nil && whole {
		err = e.detachAll(lease, keys)
	}
	return !whole, err
}

// PrepareRevoke evaluates what a revoke over several ranges deletes in the span, if the range
// has the lease at all. More keys than take maxBytes are to be swept in hull; it is empty
// otherwise.
func (e *Evaluation) PrepareRevoke(
	lease keyspace.LeaseID, checked keyspace.Revision, revocable bool, span keyspace.Span, maxBytes int,
) (a *rangeapi.Prepared, hull keyspace.Span, err error) {
	e.changes.txn = &PendingTxn{Floor: e.view.in.Floor}
	a = &rangeapi.Prepared{}
	if !revocable {
		return a, hull, nil
	}
	keys, whole, err := e.view.attached(lease, checked, span, maxBytes)
	if err != nil {
		return a, hull, err
	}
	if a.Changes = len(keys) > 0; whole {
		e.sub = 1
		return a, hull, e.detachAll(lease, keys)
	}
	// The lock keeps the keys, and all between them, as they are until they are swept.
	return a, keyspace.Span{Start: keys[0], End: span.End}, nil
}

func (e *Evaluation) detachAll(lease keyspace.LeaseID, keys [][]byte) error {
	for _, k := range keys {
		if err := e.write(&PendingVersion{Key: k, Txn: e.changes.txn, Tombstone: true, Lived: true}, lease); err != nil {
			return err
		}
	}
	return nil
}

// attached returns the keys of the span that are attached to the lease, in their order, as
// far as they take limit bytes at most; whole says that these are all. With checked it looks at all of them, and
// returns KeysChanged for one that was written after that revision.
func (w *view) attached(lease keyspace.LeaseID, checked keyspace.Revision, s keyspace.Span, limit int) (keys [][]byte, whole bool, err error) {
	l, err := w.layer(s, Newest)
	if err != nil {
		return nil, false, err
	}
	layer := slices.DeleteFunc(l.versions, func(v *PendingVersion) bool { return v.Lease() != lease })
	whole = true
	add := func(key []byte) error {
		// The index says what was, a moment ago or before a crash; the version decides.
		it, ok, err := w.getHead(key)
		if err != nil || !ok || it.lease != lease {
			return err
		}
		if mod, ok := it.mod.known(); checked != 0 && (!ok || mod > checked) {
			return kverror.New(kverror.KeysChanged, "a key of lease %x was written at revision %d, and the keys were checked at %d", int64(lease), mod, checked)
		}
		if limit -= len(key) + command.VersionOverheadBytes; limit < 0 && len(keys) > 0 {
			if whole = false; checked != 0 {
				return nil
			}
			return ErrStop
		}
		keys = append(keys, bytes.Clone(key))
		return w.charge(len(key))
	}
	err = w.in.Store.Attached(lease, s, func(key []byte) error {
		for len(layer) > 0 && bytes.Compare(layer[0].Key, key) <= 0 {
			if !bytes.Equal(layer[0].Key, key) {
				if err := add(layer[0].Key); err != nil {
					return err
				}
			}
			layer = layer[1:]
		}
		return add(key)
	})
	for _, v := range layer {
		if err != nil {
			break
		}
		err = add(v.Key)
	}
	if errors.Is(err, ErrStop) {
		err = nil
	}
	return keys, whole, err
}
