package shard

import (
	"maps"
	"slices"
	"sync/atomic"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// held is a lock as the evaluation sees it, and those who wait for its end.
type held struct {
	*command.Lock
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
	*command.CommitRecord
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
	t.byName[h.Name] = append(t.byName[h.Name], h)
	h.size = max(h.size, int64(h.Lock.Bytes()))
	t.bytes.Add(h.size)
	for i := range h.Spans {
		t.pieces.add(h.Spans[i].Span, h, h.Spans[i].Mode)
	}
	t.addLeases(h)
}

func (t *lockTable) remove(h *held) {
	delete(t.all, h)
	t.bytes.Add(-h.size)
	if l := slices.DeleteFunc(t.byName[h.Name], func(o *held) bool { return o == h }); len(l) > 0 {
		t.byName[h.Name] = l
	} else {
		delete(t.byName, h.Name)
	}
	for i := range h.Spans {
		t.pieces.remove(h.Spans[i].Span, h)
	}
	t.removeLeases(h)
}

// find returns the lock of the attempt with the id.
func (t *lockTable) find(name rangeapi.TxnName, id rangeapi.LockID) *held {
	for _, h := range t.byName[name] {
		if h.ID == id {
			return h
		}
	}
	return nil
}

// conflict returns a lock of another attempt that keeps a call from the span: a read
// from what is written, a write from everything.
func (t *lockTable) conflict(s keyspace.Span, writes bool, self rangeapi.TxnName) (m meeting) {
	t.pieces.visit(s, func(h *held, mode command.LockMode, key []byte) bool {
		if h.Name != self && (writes || mode != command.Shared) {
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
	t.pieces.visitKey(key, func(h *held, mode command.LockMode, at []byte) bool {
		if writes || mode != command.Shared {
			m = meeting{h, at, writes}
		}
		return m.h == nil
	})
	return m
}

// reader returns a lock for which a read of the span at the revision must wait: its
// transaction's revision is, or may turn out to be, at or below. self's own are none.
func (t *lockTable) reader(s keyspace.Span, at keyspace.Revision, self rangeapi.TxnName) (found *held) {
	t.pieces.visit(s, func(h *held, mode command.LockMode, _ []byte) bool {
		if mode != command.Shared && h.Floor < at && h.Name != self {
			found = h
		}
		return found == nil
	})
	return found
}

// lowestFloor returns the lowest floor of all locks, or no if there is none.
func (t *lockTable) lowestFloor(no keyspace.Revision) keyspace.Revision {
	for h := range t.all {
		no = min(no, h.Floor)
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
			t.records[ch.record.Name] = &heldRecord{CommitRecord: ch.record, since: now}
			t.most = max(t.most, len(t.records))
		}
		if !ch.forgotten.IsZero() {
			delete(t.records, ch.forgotten)
		}
		var h *held
		switch {
		case ch.removed != nil:
			h = t.find(ch.removed.Name, ch.removed.ID)
		case ch.added != nil:
			h = t.find(ch.added.Name, ch.added.ID)
		}
		if h != nil {
			now = min(now, h.since)
			t.remove(h)
		}
		if ch.added != nil {
			if h == nil {
				h = &held{}
			}
			h.Lock, h.batch, h.since = ch.added, nil, now
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
func (r *Replica) loadTableLocked(s *command.TxnState) {
	r.forgetLocksLocked()
	r.marks = maps.Clone(s.Attachments)
	changes := make([]lockChange, 0, len(s.Locks)+len(s.Records))
	for _, l := range s.Locks {
		changes = append(changes, lockChange{added: l})
	}
	for _, t := range s.Records {
		changes = append(changes, lockChange{record: t})
	}
	r.publishTxnsLocked(changes)
}
