package shard

import (
	"bytes"
	"errors"
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// store is the applied state: versioned keys of this replica's engine.
type store interface {
	// get returns the key's version that is alive at the revision. What it points to is
	// valid until the next call.
	get(key []byte, at keyspace.Revision) (v mvcc.Version, ok bool, err error)
	// scan calls fn with the living versions of the span at the revision in order of
	// their keys until it returns an error, which it returns. What v points to is
	// valid during the call only.
	scan(s keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(v *mvcc.Version) error) error
	// attached calls fn with the keys of the span that are attached to the lease, or were so
	// a moment ago, in their order until it returns an error, which it returns. A key is
	// valid during the call only.
	attached(lease keyspace.LeaseID, s keyspace.Span, fn func(key []byte) error) error
	// count counts the living keys of the span at the revision.
	count(s keyspace.Span, at keyspace.Revision) (int64, error)
}

// newest is the revision at which a store shows all that is applied.
const newest = keyspace.MaxRevision

// errStop ends a scan early.
var errStop = errors.New("stop")

// waitError says that an evaluation cannot be decided before the transaction has
// its revision.
type waitError struct{ txn *pendingTxn }

func (waitError) Error() string { return "waits for a revision" }

// item is one living key as a view shows it.
type item struct {
	key     []byte
	value   []byte
	mod     ref
	create  ref
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
		mod: ref{rev: v.Mod}, create: ref{rev: v.Create},
	}
}

func (h *head) item(key []byte) item {
	return item{key: key, value: h.value, version: h.version, lease: h.lease, mod: ref{rev: h.mod}, create: ref{rev: h.create}}
}

func pendingItem(v *pendingVersion) item {
	return item{
		key: v.key, value: v.value, version: v.version, lease: v.lease(),
		mod: ref{txn: v.txn}.fixed(), create: v.create.fixed(),
	}
}

// view is the state on which one request is evaluated: the store, over it the
// overlay, over that what the request itself has written so far.
//
// The overlay is looked at first and the store after it. What is applied in
// between is then in both, and the overlay's copy, the newer or an equal one, wins.
type view struct {
	store store
	// base is the revision at which the store is read: newest, or that of a read.
	base    keyspace.Revision
	overlay *overlay
	// mu guards the overlay.
	mu *sync.Mutex
	// own is what the request has written, nil while its compares are evaluated.
	own *changes
	// seen is the newest batch of which the request has seen a version.
	seen *batch
	// budget is what the request may read into memory.
	budget *readBudget
	// heads and reigns are of what the store shows at base newest; nil where base is
	// another. mu guards the reigns.
	heads  *heads
	reigns *reigns
}

// readBudget counts what one request holds of what it has read, against its own
// bound and the node's. It is for one goroutine.
type readBudget struct {
	n *Node
	// left is what the request may still take, reserved what it has taken from the
	// node and not used yet, taken all that it has taken from the node.
	left, reserved, taken int64
}

// What is taken from the node's budget at a time doubles from the first to the second:
// many small reads at a time hold little.
const (
	readReserveFirst = 4 << 10
	readReserveBytes = 256 << 10
)

func (n *Node) readBudget() readBudget { return readBudget{n: n, left: n.cfg.Limits.ScanBytes} }

func (b *readBudget) take(bytes int64) error {
	if b.left -= bytes; b.left < 0 {
		return kverror.New(kverror.TooManyRequests, "the request reads more than the node may hold for one: use a limit")
	}
	if b.reserved -= bytes; b.reserved >= 0 {
		return nil
	}
	more := max(min(max(b.taken, readReserveFirst), readReserveBytes), -b.reserved)
	if v := b.n.reading.Add(more); v > b.n.cfg.Limits.ReadBytes && v != b.taken+more {
		b.n.reading.Add(-more)
		return kverror.New(kverror.TooManyRequests, "node %s holds %d bytes for reads", b.n.cfg.Self, v-more)
	}
	b.taken += more
	b.reserved += more
	return nil
}

// giveBack makes room for what the request no longer holds.
func (b *readBudget) giveBack(bytes int64) {
	b.left += bytes
	b.reserved += bytes
}

// release gives the node back what was taken.
func (b *readBudget) release() { b.n.reading.Add(-b.taken) }

// lookup returns the newest pending version of the key, or what is known of its
// newest applied one where there is none.
func (w *view) lookup(key []byte) (pending *pendingVersion, applied head, known bool) {
	if w.own != nil {
		if v := w.own.get(key); v != nil {
			return v, head{}, false
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if v := w.overlay.newest(key); v != nil {
		w.seen = newerBatch(w.seen, v.txn.batch)
		return v, head{}, false
	}
	if w.heads != nil {
		applied, known = w.heads.get(w.reigns.of(key), key)
	}
	return nil, applied, known
}

// get returns the key as the request sees it. What it points to is valid until the
// next call, see retain.
func (w *view) get(key []byte) (it item, ok bool, err error) {
	v, applied, known := w.lookup(key)
	switch {
	case v != nil:
		return pendingItem(v), !v.tombstone, nil
	case known && (applied.whole || !applied.alive):
		return applied.item(key), applied.alive, nil
	}
	return w.stored(key)
}

// getHead is get for a caller that does not need the value, which is left out where
// that is cheaper.
func (w *view) getHead(key []byte) (it item, ok bool, err error) {
	v, applied, known := w.lookup(key)
	switch {
	case v != nil:
		return pendingItem(v), !v.tombstone, nil
	case known:
		return applied.item(key), applied.alive, nil
	}
	return w.stored(key)
}

func (w *view) stored(key []byte) (it item, ok bool, err error) {
	v, ok, err := w.store.get(key, w.base)
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
func (w *view) charge(n int) error { return w.budget.take(int64(n)) }

// layer returns the pending versions of the span, tombstones too, in order of
// their keys, the newest of each. With at below newest they are those at that
// revision, without the request's own.
func (w *view) layer(s keyspace.Span, at keyspace.Revision) ([]*pendingVersion, error) {
	var l []*pendingVersion
	var wait *pendingTxn
	w.mu.Lock()
	w.overlay.visit(s, func(k *overlayKey) bool {
		v := k.versions[len(k.versions)-1]
		if at != newest {
			found, unknown := k.at(at)
			if unknown != nil {
				wait = unknown.txn
				return false
			}
			v = found
		}
		if v != nil {
			w.seen = newerBatch(w.seen, v.txn.batch)
			l = append(l, v)
		}
		return true
	})
	w.mu.Unlock()
	if wait != nil {
		return nil, waitError{wait}
	}
	if w.own == nil || at != newest {
		return l, nil
	}
	return w.own.over(l, s), nil
}

// scan calls fn with the living keys of the span in order. With at below newest
// it shows the state at that revision, without the request's own changes. What it
// points to is valid during the call only, see retain.
func (w *view) scan(s keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(it *item) error) error {
	layer, err := w.layer(s, at)
	if err != nil {
		return err
	}
	emit := func(v *pendingVersion) error {
		if v.tombstone {
			return nil
		}
		it := pendingItem(v)
		return fn(&it)
	}
	err = w.store.scan(s, min(at, w.base), keysOnly, func(v *mvcc.Version) error {
		for len(layer) > 0 {
			c := bytes.Compare(layer[0].key, v.Key)
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
	if errors.Is(err, errStop) {
		return nil
	}
	return err
}

// changes are the writes of one request in the order of its operations. Of a key that is
// written twice (a put of one nested transaction, deleted by a later one) the last version
// counts; the others are marked as replaced.
type changes struct {
	txn    *pendingTxn
	writes []*pendingVersion
	bytes  int
	// index finds a key's last version in writes. It is made for the second write.
	index map[string]int
}

func (c *changes) get(key []byte) *pendingVersion {
	if c.index == nil {
		if len(c.writes) == 1 && bytes.Equal(c.writes[0].key, key) {
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
func (c *changes) add(v *pendingVersion) {
	c.bytes += v.bytes()
	if len(c.writes) == 0 {
		c.writes = append(c.writes, v)
		return
	}
	if c.index == nil {
		c.index = map[string]int{string(c.writes[0].key): 0}
	}
	if i, dup := c.index[string(v.key)]; dup {
		c.writes[i].replaced = true
	}
	c.index[string(v.key)] = len(c.writes)
	c.writes = append(c.writes, v)
}

// over returns the layer with the request's own versions of the span on top.
func (c *changes) over(l []*pendingVersion, s keyspace.Span) []*pendingVersion {
	var own []*pendingVersion
	for _, v := range c.writes {
		if !v.replaced && s.Contains(v.key) {
			own = append(own, v)
		}
	}
	if len(own) == 0 {
		return l
	}
	out := make([]*pendingVersion, 0, len(l)+len(own))
	for _, v := range l {
		if c.get(v.key) == nil {
			out = append(out, v)
		}
	}
	out = append(out, own...)
	slices.SortFunc(out, func(a, b *pendingVersion) int { return bytes.Compare(a.key, b.key) })
	return out
}
