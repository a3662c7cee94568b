package shard

import (
	"bytes"
	"slices"
	"sync/atomic"

	"github.com/google/btree"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// lockMode says what a lock keeps others from.
type lockMode uint8

const (
	// lockShared: what was compared does not change.
	lockShared lockMode = iota
	// lockExclusive: it is written, or was deleted and stays empty.
	lockExclusive
	// lockSweep: every key in the span is deleted. The tombstones do not fit into one
	// entry; what is under the lock stays as it is, so that the lock is the intent.
	lockSweep
)

// lockSpan is one piece of what a lock covers.
type lockSpan struct {
	span keyspace.Span
	mode lockMode
	// sub is the number of the operation, for a sweep.
	sub uint32
}

// intent is a version that a lock will leave behind. Its Mod is 0, and so is a Create
// that will be the transaction's own revision.
type intent struct {
	v     mvcc.Version
	lived bool
}

// at returns the version with the transaction's revision.
func (i *intent) at(rev keyspace.Revision) mvcc.Version {
	v := i.v
	v.Mod = rev
	if !v.Tombstone && v.Create == 0 {
		v.Create = rev
	}
	return v
}

// lock is what one attempt of a transaction holds of one range. It is not changed once
// its entry is made: all replicas have the same ones at the same index.
type lock struct {
	id     LockID
	name   TxnName
	anchor []byte
	// floor is the highest revision that its leader's node had heard of when it was
	// evaluated. The transaction's own will be above (trap 74).
	floor  keyspace.Revision
	spans  []lockSpan
	writes []intent
}

// bytes is about what the lock takes in memory and in an entry.
func (l *lock) bytes() int {
	n := lockOverheadBytes + len(l.anchor)
	for i := range l.spans {
		n += len(l.spans[i].span.Start) + len(l.spans[i].span.End) + versionOverheadBytes
	}
	for i := range l.writes {
		n += len(l.writes[i].v.Key) + len(l.writes[i].v.Value) + versionOverheadBytes
	}
	return n
}

// lockOverheadBytes is about what a lock has beside its keys.
const lockOverheadBytes = 128

// sweep returns the first piece that is to be swept, -1 where there is none.
func (l *lock) sweep() int {
	return slices.IndexFunc(l.spans, func(s lockSpan) bool { return s.mode == lockSweep })
}

// writesKey says whether the key has an intent of its own.
func (l *lock) writesKey(key []byte) bool {
	return slices.ContainsFunc(l.writes, func(i intent) bool { return bytes.Equal(i.v.Key, key) })
}

// txnRecord says that an attempt is committed. It is at the anchor until no lock of the
// attempt is left.
type txnRecord struct {
	name     TxnName
	anchor   []byte
	revision keyspace.Revision
	locks    []LockRef
}

// bytes is about what the record takes.
func (t *txnRecord) bytes() int {
	n := lockOverheadBytes + len(t.anchor)
	for i := range t.locks {
		n += len(t.locks[i].Span.Start) + len(t.locks[i].Span.End) + versionOverheadBytes
	}
	return n
}

// held is a lock as the evaluation sees it, and those who wait for its end.
type held struct {
	*lock
	// batch is the one that brings the lock; nil once it is applied.
	batch *batch
	// size is what the table has counted for it.
	size int64
	// since is when this replica first saw it.
	since clock.Time
	push  pushTime
	// deciding says that an entry is on its way that ends or changes the lock.
	deciding bool
	// waiters are calls that are evaluated again once the lock has changed; ended is
	// closed then, nil until somebody waits for it.
	waiters []*call
	ended   chan struct{}
}

// wait returns a channel that is closed when the lock has ended or changed.
func (h *held) wait() <-chan struct{} {
	if h.ended == nil {
		h.ended = make(chan struct{})
	}
	return h.ended
}

// heldRecord is a record as the evaluation sees it.
type heldRecord struct {
	*txnRecord
	since clock.Time
	push  pushTime
}

// lockTable has the locks of a replica: those that are applied, and on top of them
// those that its leader has evaluated. The replica's mu guards it. A replica without
// locks and records has none.
type lockTable struct {
	all     map[*held]struct{}
	byName  map[TxnName][]*held
	records map[TxnName]*heldRecord
	// keys has the pieces of one key, spans all others, which are few.
	keys  *btree.BTreeG[*lockedKey]
	spans []spanHolder
	probe lockedKey
	// bytes is what the locks of all tables of the node take.
	bytes *atomic.Int64
}

// lockedKey is one key with those who hold it.
type lockedKey struct {
	key     []byte
	holders []holder
}

type holder struct {
	h    *held
	mode lockMode
}

type spanHolder struct {
	holder
	span keyspace.Span
}

func newLockTable(total *atomic.Int64) *lockTable {
	return &lockTable{
		bytes: total,
		all:   map[*held]struct{}{}, byName: map[TxnName][]*held{}, records: map[TxnName]*heldRecord{},
		keys: btree.NewG(16, func(a, b *lockedKey) bool { return bytes.Compare(a.key, b.key) < 0 }),
	}
}

func (t *lockTable) empty() bool { return len(t.all) == 0 && len(t.records) == 0 }

// isKey says whether the span holds exactly one key.
func isKey(s keyspace.Span) bool {
	return len(s.End) == len(s.Start)+1 && s.End[len(s.Start)] == 0 && bytes.HasPrefix(s.End, s.Start)
}

func (t *lockTable) add(h *held) {
	t.all[h] = struct{}{}
	t.byName[h.name] = append(t.byName[h.name], h)
	h.size = int64(h.lock.bytes())
	t.bytes.Add(h.size)
	for i := range h.spans {
		s := &h.spans[i]
		if !isKey(s.span) {
			t.spans = append(t.spans, spanHolder{holder{h, s.mode}, s.span})
			continue
		}
		t.probe.key = s.span.Start
		k, ok := t.keys.Get(&t.probe)
		if !ok {
			k = &lockedKey{key: s.span.Start}
			t.keys.ReplaceOrInsert(k)
		}
		k.holders = append(k.holders, holder{h, s.mode})
	}
	t.probe.key = nil
}

func (t *lockTable) remove(h *held) {
	delete(t.all, h)
	t.bytes.Add(-h.size)
	if l := slices.DeleteFunc(t.byName[h.name], func(o *held) bool { return o == h }); len(l) > 0 {
		t.byName[h.name] = l
	} else {
		delete(t.byName, h.name)
	}
	t.spans = slices.DeleteFunc(t.spans, func(s spanHolder) bool { return s.h == h })
	for i := range h.spans {
		if !isKey(h.spans[i].span) {
			continue
		}
		t.probe.key = h.spans[i].span.Start
		if k, ok := t.keys.Get(&t.probe); ok {
			k.holders = slices.DeleteFunc(k.holders, func(o holder) bool { return o.h == h })
			if len(k.holders) == 0 {
				t.keys.Delete(k)
			}
		}
	}
	t.probe.key = nil
}

// find returns the lock of the attempt with the id.
func (t *lockTable) find(name TxnName, id LockID) *held {
	for _, h := range t.byName[name] {
		if h.id == id {
			return h
		}
	}
	return nil
}

// visit calls fn with everybody who holds something of the span until it returns false.
func (t *lockTable) visit(s keyspace.Span, fn func(h *held, mode lockMode) bool) {
	for i := range t.spans {
		if o := &t.spans[i]; o.span.Overlaps(s) && !fn(o.h, o.mode) {
			return
		}
	}
	each := func(k *lockedKey) bool {
		for _, o := range k.holders {
			if !fn(o.h, o.mode) {
				return false
			}
		}
		return true
	}
	from := &lockedKey{key: s.Start}
	if len(s.End) == 0 {
		t.keys.AscendGreaterOrEqual(from, each)
		return
	}
	t.keys.AscendRange(from, &lockedKey{key: s.End}, each)
}

// conflict returns a lock of another attempt that keeps a call from the span: a read
// from what is written, a write from everything.
func (t *lockTable) conflict(s keyspace.Span, writes bool, self TxnName) (found *held) {
	t.visit(s, func(h *held, mode lockMode) bool {
		if h.name != self && (writes || mode != lockShared) {
			found = h
		}
		return found == nil
	})
	return found
}

// reader returns a lock for which a read of the span at the revision must wait: its
// transaction's revision is, or may turn out to be, at or below. self's own are none.
func (t *lockTable) reader(s keyspace.Span, at keyspace.Revision, self TxnName) (found *held) {
	t.visit(s, func(h *held, mode lockMode) bool {
		if mode != lockShared && h.floor < at && h.name != self {
			found = h
		}
		return found == nil
	})
	return found
}

// lowestFloor returns the lowest floor of all locks, or no if there is none.
func (t *lockTable) lowestFloor(no keyspace.Revision) keyspace.Revision {
	for h := range t.all {
		no = min(no, h.floor)
	}
	return no
}
