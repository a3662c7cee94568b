package shard

import (
	"bytes"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
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
	v      mvcc.Version
	before prior
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
	id     rangeapi.LockID
	name   rangeapi.TxnName
	anchor []byte
	// floor is the highest revision that its leader's node had heard of when it was
	// evaluated. The transaction's own will be above (trap 74).
	floor  keyspace.Revision
	spans  []lockSpan
	writes []intent
	// revoke is the lease all of whose keys the lock deletes, the zero mark for none.
	revoke rangeapi.Attachment
	// leases are those that the writes attach keys to.
	leases []keyspace.LeaseID
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

// covers says whether the key lies in a piece of the lock.
func (l *lock) covers(key []byte) bool {
	return slices.ContainsFunc(l.spans, func(s lockSpan) bool { return s.span.Contains(key) })
}

// writtenIn returns the keys of the span that have an intent of their own, in order.
func (l *lock) writtenIn(s keyspace.Span) (keys [][]byte) {
	for i := range l.writes {
		if k := l.writes[i].v.Key; s.Contains(k) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, bytes.Compare)
	return keys
}

// txnRecord says that an attempt is committed. It is at the anchor until no lock of the
// attempt is left.
type txnRecord struct {
	name     rangeapi.TxnName
	anchor   []byte
	revision keyspace.Revision
	locks    []rangeapi.LockRef
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
	// size is what the table has counted for it. Of one that is evaluated here it is known
	// before it is in the table.
	size int64
	// since is when this replica first saw it.
	since clock.Time
	push  pushTime
	// asked says that somebody waits for its end who holds up others, so that it is soon
	// asked for.
	asked bool
	// deciding says that an entry is on its way that ends or changes the lock.
	deciding bool
	// waiters are calls that are evaluated again once the lock has changed; ended is
	// closed then, nil until somebody waits for it.
	waiters []*waiters
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
	byName  map[rangeapi.TxnName][]*held
	records map[rangeapi.TxnName]*heldRecord
	pieces  spanIndex[*held]
	// most is how many locks or records there were at a time.
	most int
	// leases has who attaches keys to a lease, and who revokes it; nil where nobody does.
	leases map[keyspace.LeaseID][]*held
	// bytes is what the locks of all tables of the node take.
	bytes *atomic.Int64
}

func newLockTable(total *atomic.Int64) *lockTable {
	return &lockTable{
		bytes: total,
		all:   map[*held]struct{}{}, byName: map[rangeapi.TxnName][]*held{}, records: map[rangeapi.TxnName]*heldRecord{},
	}
}

func (t *lockTable) empty() bool { return len(t.all) == 0 && len(t.records) == 0 }

func (t *lockTable) add(h *held) {
	t.all[h] = struct{}{}
	t.most = max(t.most, len(t.all))
	t.byName[h.name] = append(t.byName[h.name], h)
	h.size = max(h.size, int64(h.lock.bytes()))
	t.bytes.Add(h.size)
	for i := range h.spans {
		t.pieces.add(h.spans[i].span, h, h.spans[i].mode)
	}
	t.addLeases(h)
}

func (t *lockTable) remove(h *held) {
	delete(t.all, h)
	t.bytes.Add(-h.size)
	if l := slices.DeleteFunc(t.byName[h.name], func(o *held) bool { return o == h }); len(l) > 0 {
		t.byName[h.name] = l
	} else {
		delete(t.byName, h.name)
	}
	for i := range h.spans {
		t.pieces.remove(h.spans[i].span, h)
	}
	t.removeLeases(h)
}

// find returns the lock of the attempt with the id.
func (t *lockTable) find(name rangeapi.TxnName, id rangeapi.LockID) *held {
	for _, h := range t.byName[name] {
		if h.id == id {
			return h
		}
	}
	return nil
}

// conflict returns a lock of another attempt that keeps a call from the span: a read
// from what is written, a write from everything.
func (t *lockTable) conflict(s keyspace.Span, writes bool, self rangeapi.TxnName) (m meeting) {
	t.pieces.visit(s, func(h *held, mode lockMode, key []byte) bool {
		if h.name != self && (writes || mode != lockShared) {
			m = meeting{h, key, writes}
		}
		return m.h == nil
	})
	return m
}

// holder is conflict of one key and any attempt. There is none of no key, nor in no table.
func (t *lockTable) holder(key []byte, writes bool) (m meeting) {
	if t == nil || key == nil {
		return m
	}
	t.pieces.visitKey(key, func(h *held, mode lockMode, at []byte) bool {
		if writes || mode != lockShared {
			m = meeting{h, at, writes}
		}
		return m.h == nil
	})
	return m
}

// reader returns a lock for which a read of the span at the revision must wait: its
// transaction's revision is, or may turn out to be, at or below. self's own are none.
func (t *lockTable) reader(s keyspace.Span, at keyspace.Revision, self rangeapi.TxnName) (found *held) {
	t.pieces.visit(s, func(h *held, mode lockMode, _ []byte) bool {
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

// publishTxnsLocked takes over what an applied entry has done to locks and records.
func (r *Replica) publishTxnsLocked(changes []lockChange) {
	now := r.node.cfg.Clock.Now()
	for i := range changes {
		ch := &changes[i]
		if ch.mark.Lease != 0 {
			r.publishMarkLocked(ch.mark)
			continue
		}
		t := r.tableLocked()
		if ch.record != nil {
			t.records[ch.record.name] = &heldRecord{txnRecord: ch.record, since: now}
			t.most = max(t.most, len(t.records))
		}
		if !ch.forgotten.IsZero() {
			delete(t.records, ch.forgotten)
		}
		var h *held
		switch {
		case ch.removed != nil:
			h = t.find(ch.removed.name, ch.removed.id)
		case ch.added != nil:
			h = t.find(ch.added.name, ch.added.id)
		}
		if h != nil {
			now = min(now, h.since)
			t.remove(h)
		}
		if ch.added != nil {
			if h == nil {
				h = &held{}
			}
			h.lock, h.batch, h.since = ch.added, nil, now
			t.add(h)
		}
		if h != nil && ch.removed != nil {
			r.wakeLocked(h)
		}
		now = r.node.cfg.Clock.Now()
	}
	r.dropTableLocked()
}

// forgetLocks gives back what the locks of a replica that is gone count with. They have not
// ended: other nodes have them, or another range of this one.
func (r *Replica) forgetLocks() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgetLocksLocked()
}

func (r *Replica) forgetLocksLocked() {
	if r.locks == nil {
		return
	}
	for h := range r.locks.all {
		r.locks.remove(h)
	}
	r.locks = nil
}

// loadTableLocked makes the table of a replica whose state was read from the engine.
func (r *Replica) loadTableLocked(s *txnState) {
	r.forgetLocksLocked()
	r.marks = maps.Clone(s.marks)
	changes := make([]lockChange, 0, len(s.locks)+len(s.records))
	for _, l := range s.locks {
		changes = append(changes, lockChange{added: l})
	}
	for _, t := range s.records {
		changes = append(changes, lockChange{record: t})
	}
	r.publishTxnsLocked(changes)
}
