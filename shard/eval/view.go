package eval

import (
	"bytes"
	"errors"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// Store is the applied state: versioned keys of the engine.
type Store interface {
	// Get returns the key's version that is alive at the revision. What it points to is
	// valid until the next call.
	Get(key []byte, at keyspace.Revision) (v mvcc.Version, ok bool, err error)
	// Scan calls fn with the living versions of the span at the revision in order of
	// their keys until it returns an error, which it returns. What v points to is
	// valid during the call only.
	Scan(s keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(v *mvcc.Version) error) error
	// Attached calls fn with the keys of the span that are attached to the lease, or were so
	// a moment ago, in their order until it returns an error, which it returns. A key is
	// valid during the call only.
	Attached(lease keyspace.LeaseID, s keyspace.Span, fn func(key []byte) error) error
}

// Newest is the revision at which a store shows all that is applied.
const Newest = keyspace.MaxRevision

// ErrStop ends a scan early.
var ErrStop = errors.New("stop")

// WaitError says that an evaluation cannot be decided before the transaction has
// its revision.
type WaitError struct{ Txn *PendingTxn }

// Error implements error.
func (WaitError) Error() string { return "waits for a revision" }

// item is one living key as a view shows it.
type item struct {
	key     []byte
	value   []byte
	mod     Ref
	create  Ref
	version int64
	lease   keyspace.LeaseID
}

// kv returns the item as etcd's message. Revisions that are not known are left 0;
// the draft fills them in.
func (it *item) kv() *mvccpb.KeyValue {
	kv := &mvccpb.KeyValue{Key: it.key, Value: it.value, Version: it.version, Lease: int64(it.lease)}
	if r, ok := it.mod.known(); ok {
		kv.ModRevision = int64(r)
	}
	if r, ok := it.create.known(); ok {
		kv.CreateRevision = int64(r)
	}
	return kv
}

func storedItem(v *mvcc.Version) item {
	return item{
		key: v.Key, value: v.Value, version: v.Version, lease: v.Lease,
		mod: Ref{rev: v.Mod}, create: Ref{rev: v.Create},
	}
}

func (h *CachedVersion) item(key []byte) item {
	return item{key: key, value: h.Value, version: h.Version, lease: h.Lease, mod: Ref{rev: h.Mod}, create: Ref{rev: h.Create}}
}

// KeyValue returns the version as etcd's message.
func KeyValue(v *mvcc.Version) *mvccpb.KeyValue {
	it := storedItem(v)
	return it.kv()
}

// KeyValue returns the version as etcd's message, nil for a key that is not there.
func (h *CachedVersion) KeyValue(key []byte) *mvccpb.KeyValue {
	if !h.Alive {
		return nil
	}
	it := h.item(key)
	return it.kv()
}

func pendingItem(v *PendingVersion) item {
	return item{
		key: v.Key, value: v.value, version: v.version, lease: v.Lease(),
		mod: v.mod().fixed(), create: v.create.fixed(),
	}
}

// view is the state on which one request is evaluated: the store, over it the
// overlay, over that the request's own writes so far.
//
// It looks at the overlay first and at the store after it. A version applied in
// between is then in both. The overlay's copy is the newer or an equal one, and wins.
type view struct {
	in Input
	// own is what the request has written, nil while its compares are evaluated.
	own *changes
	// seen is the newest batch of which the request has seen a version.
	seen *Batch
}

// lookup returns the newest pending version of the key, or what is known of its
// newest applied one where there is none.
func (w *view) lookup(key []byte) (pending *PendingVersion, applied CachedVersion, known bool) {
	if w.own != nil {
		if v := w.own.get(key); v != nil {
			return v, CachedVersion{}, false
		}
	}
	w.in.Guard.Lock()
	defer w.in.Guard.Unlock()
	if v := w.in.Overlay.Newest(key); v != nil {
		w.seen = newerBatch(w.seen, v.Txn.Batch)
		return v, CachedVersion{}, false
	}
	if w.in.Cache != nil {
		applied, known = w.in.Cache.Get(w.in.Epochs.Of(key), key)
	}
	return nil, applied, known
}

// get returns the key as the request sees it. What it points to is valid until the
// next call, see retain.
func (w *view) get(key []byte) (it item, ok bool, err error) {
	v, applied, known := w.lookup(key)
	switch {
	case v != nil:
		return pendingItem(v), !v.Tombstone, nil
	case known && (applied.Whole || !applied.Alive):
		return applied.item(key), applied.Alive, nil
	}
	return w.stored(key)
}

// getHead is get for a caller that does not need the value. It leaves the value out if
// that is cheaper.
func (w *view) getHead(key []byte) (it item, ok bool, err error) {
	v, applied, known := w.lookup(key)
	switch {
	case v != nil:
		return pendingItem(v), !v.Tombstone, nil
	case known:
		return applied.item(key), applied.Alive, nil
	}
	return w.stored(key)
}

func (w *view) stored(key []byte) (it item, ok bool, err error) {
	v, ok, err := w.in.Store.Get(key, w.in.Base)
	if err != nil || !ok {
		return item{}, false, err
	}
	it = storedItem(&v)
	it.key = key
	return it, true, nil
}

// retain gives an item memory of its own and takes it from the request's
// budget.
func (w *view) retain(it *item) error {
	it.key, it.value = bytes.Clone(it.key), bytes.Clone(it.value)
	return w.charge(len(it.key) + len(it.value))
}

// charge takes bytes from the request's budget.
func (w *view) charge(n int) error { return w.in.Budget.Take(int64(n)) }

// layer is what lies over the store in a span.
type layer struct {
	// versions are the newest pending ones of each key, tombstones too, in order of their keys.
	versions []*PendingVersion
	// count is how many living keys the view shows in the span, counted says that it is known.
	// own is the part of it that comes from the request's own changes.
	count, own int64
	counted    bool
	// since tells whether the overlay has only lost what was applied since, and nothing else
	// was applied; nil if nobody asks.
	since *since
}

// since is from when on something is true.
type since struct {
	epoch                KeyEpoch
	discarded, forgotten uint64
}

// since returns what must not change for as long as counts are true. Guard is held.
func (w *view) since() *since {
	epoch, ok := w.in.Epochs.only()
	if w.in.Counts == nil || !ok {
		return nil
	}
	return &since{epoch, w.in.Overlay.discarded, w.in.Counts.forgotten}
}

// layer returns what is pending in the span. With at below Newest it is what was so at that
// revision, without the request's own.
func (w *view) layer(s keyspace.Span, at keyspace.Revision) (l layer, err error) {
	var wait *PendingTxn
	if w.in.KnownCount != nil {
		l.count, l.counted = w.in.KnownCount(s, min(at, w.in.Base))
	}
	w.in.Guard.Lock()
	if rec := w.in.Record; rec != nil && at == Newest && rec.Counted && s.Covers(SpanFromFirst(rec.Span)) {
		// The record changes in the same moment in which applied versions leave the overlay.
		l.count, l.counted = rec.Live, true
	} else if w.in.Counts != nil && at == Newest {
		l.count, l.counted = w.in.Counts.get(*w.in.Epochs, s)
		l.since = w.since()
	}
	w.in.Overlay.visit(s, func(k *overlayKey) bool {
		v := k.versions[len(k.versions)-1]
		l.count += k.liveChange()
		if at != Newest {
			found, unknown := k.at(at)
			if unknown != nil {
				wait = unknown.Txn
				return false
			}
			v = found
		}
		if v != nil {
			w.seen = newerBatch(w.seen, v.Txn.Batch)
			l.versions = append(l.versions, v)
		}
		return true
	})
	w.in.Guard.Unlock()
	if wait != nil {
		return layer{}, WaitError{wait}
	}
	if w.own != nil && at == Newest {
		w.own.over(&l, s)
	}
	return l, nil
}

// counted remembers that a scan under the layer found n living keys in the span. No evaluation
// has added to the overlay meanwhile, since this one is the range's only one. So it is the number of
// those applied, but for what is still pending.
func (w *view) counted(l *layer, s keyspace.Span, n int64) {
	if l.since == nil {
		return
	}
	w.in.Guard.Lock()
	defer w.in.Guard.Unlock()
	if now := w.since(); now != nil && *now == *l.since {
		w.in.Counts.put(*w.in.Epochs, s, n-l.own-w.in.Overlay.liveChange(s))
	}
}

// scan calls fn with the living keys of the span in order. What it points to is valid during
// the call only, see retain.
func (w *view) scan(s keyspace.Span, keysOnly bool, fn func(it *item) error) error {
	l, err := w.layer(s, Newest)
	if err != nil {
		return err
	}
	return w.scanUnder(l.versions, s, Newest, keysOnly, fn)
}

// scanUnder is scan under pending versions that were looked up before. With at below Newest it
// shows the state at that revision, without the request's own changes.
func (w *view) scanUnder(layer []*PendingVersion, s keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(it *item) error) error {
	emit := func(v *PendingVersion) error {
		if v.Tombstone {
			return nil
		}
		it := pendingItem(v)
		return fn(&it)
	}
	err := w.in.Store.Scan(s, min(at, w.in.Base), keysOnly, func(v *mvcc.Version) error {
		for len(layer) > 0 {
			c := bytes.Compare(layer[0].Key, v.Key)
			if c > 0 {
				break
			}
			if err := emit(layer[0]); err != nil {
				return err
			}
			layer = layer[1:]
			if c == 0 {
				return nil
			}
		}
		it := storedItem(v)
		return fn(&it)
	})
	for _, v := range layer {
		if err != nil {
			break
		}
		err = emit(v)
	}
	if errors.Is(err, ErrStop) {
		return nil
	}
	return err
}

// changes are the writes of one request in the order of its operations. A key may be written
// twice: a put of one nested transaction, deleted by a later one. Then the last version
// counts; the others are marked as replaced.
type changes struct {
	txn    *PendingTxn
	writes []*PendingVersion
	bytes  int
	// index finds a key's last version in writes. It is made for the second write.
	index map[string]int
}

func (c *changes) get(key []byte) *PendingVersion {
	if c.index == nil {
		if len(c.writes) == 1 && bytes.Equal(c.writes[0].Key, key) {
			return c.writes[0]
		}
		return nil
	}
	if i, ok := c.index[string(key)]; ok {
		return c.writes[i]
	}
	return nil
}

// add appends a version, which replaces an older one of its key.
func (c *changes) add(v *PendingVersion) {
	c.bytes += v.Bytes()
	if len(c.writes) == 0 {
		c.writes = append(c.writes, v)
		return
	}
	if c.index == nil {
		c.index = map[string]int{string(c.writes[0].Key): 0}
	}
	if i, dup := c.index[string(v.Key)]; dup {
		c.writes[i].replaced = true
	}
	c.index[string(v.Key)] = len(c.writes)
	c.writes = append(c.writes, v)
}

// over puts the request's own versions of the span on top of the layer.
func (c *changes) over(l *layer, s keyspace.Span) {
	var own []*PendingVersion
	for _, v := range c.writes {
		if !v.replaced && s.Contains(v.Key) {
			own = append(own, v)
			l.own += liveChange(v.Lived, v)
		}
	}
	l.count += l.own
	if len(own) == 0 {
		return
	}
	out := make([]*PendingVersion, 0, len(l.versions)+len(own))
	for _, v := range l.versions {
		if c.get(v.Key) == nil {
			out = append(out, v)
		}
	}
	out = append(out, own...)
	slices.SortFunc(out, func(a, b *PendingVersion) int { return bytes.Compare(a.Key, b.Key) })
	l.versions = out
}
