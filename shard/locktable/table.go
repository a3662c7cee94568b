package locktable

import (
	"iter"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// Table has the locks and commit records of a range at one replica, and who waits for them.
// Its owner guards it. The zero Table is not usable, see New.
type Table struct {
	shared *Shared
	// set is nil while there is no lock and no record.
	set *lockSet
	waiting
}

// New returns a table without locks. It shares what the node's tables have in common.
func New(shared *Shared) Table { return Table{shared: shared} }

// Empty says whether there is no lock and no record.
func (t *Table) Empty() bool { return t.set == nil }

// Len returns the number of locks, pending ones included, and of records.
func (t *Table) Len() (locks, records int) {
	if t.set == nil {
		return 0, 0
	}
	return len(t.set.all), len(t.set.records)
}

// Locks returns all locks, pending ones included, in no order. The table must not change
// meanwhile.
func (t *Table) Locks() iter.Seq[*Held] {
	return func(yield func(*Held) bool) {
		if t.set == nil {
			return
		}
		for h := range t.set.all {
			if !yield(h) {
				return
			}
		}
	}
}

// Records returns all commit records in no order. The table must not change meanwhile.
func (t *Table) Records() iter.Seq[*command.CommitRecord] {
	return func(yield func(*command.CommitRecord) bool) {
		if t.set == nil {
			return
		}
		for _, r := range t.set.records {
			if !yield(r.CommitRecord) {
				return
			}
		}
	}
}

// Record returns the commit record of an attempt, nil if there is none.
func (t *Table) Record(name rangeapi.TxnName) *command.CommitRecord {
	if t.set == nil || t.set.records[name] == nil {
		return nil
	}
	return t.set.records[name].CommitRecord
}

// Named returns the locks of an attempt. The caller must not keep or change the slice.
func (t *Table) Named(name rangeapi.TxnName) []*Held {
	if t.set == nil {
		return nil
	}
	return t.set.byName[name]
}

// Find returns the lock of the attempt with the id, nil if there is none.
func (t *Table) Find(name rangeapi.TxnName, id rangeapi.LockID) *Held {
	if t.set == nil {
		return nil
	}
	return t.set.find(name, id)
}

// OfLease returns the locks that attach keys to the lease or revoke it. The caller must not
// keep or change the slice.
func (t *Table) OfLease(lease keyspace.LeaseID) []*Held {
	if t.set == nil {
		return nil
	}
	return t.set.leases[lease]
}

// Attaches says whether a lock attaches a key to the lease.
func (t *Table) Attaches(lease keyspace.LeaseID) bool { return t.set != nil && t.set.attaches(lease) }

// LowestFloor returns the lowest floor of all locks, or otherwise if that is lower: above
// it the transactions may still make versions.
func (t *Table) LowestFloor(otherwise keyspace.Revision) keyspace.Revision {
	if t.set == nil {
		return otherwise
	}
	return t.set.lowestFloor(otherwise)
}

// Conflict returns a lock in the way of an operation of this range alone (L1).
func (t *Table) Conflict(op proto.Message) Meeting {
	if t.set == nil {
		return Meeting{}
	}
	return t.set.keeps(op)
}

// Holder returns a lock in the way of a read or write of one key, whosever it is.
func (t *Table) Holder(key []byte, writes bool) Meeting { return t.set.holder(key, writes) }

// Reader returns a lock for which a read of the span at the revision must wait (L1), nil if
// there is none. The locks of the reading transaction self do not count.
func (t *Table) Reader(s keyspace.Span, at keyspace.Revision, self rangeapi.TxnName) *Held {
	if t.set == nil {
		return nil
	}
	return t.set.reader(s, at, self)
}

// Meets returns a lock in the way of a Prepare in a range with the span. If dies is true, the
// transaction must give way to the lock and not wait (L2). outside reports whether a key of the
// Prepare lies outside of the span.
func (t *Table) Meets(op *rangeapi.Prepare, span keyspace.Span) (m Meeting, dies, outside bool) {
	meet := func(o *Held, key []byte, writes bool) {
		older := o.Name.Compare(op.Name.TxnID) < 0 && !op.WaitForOlder
		if m.Held == nil || older && !dies {
			m = Meeting{o, key, writes}
		}
		dies = dies || older
	}
	t.meetsLeases(op, func(o *Held) { meet(o, nil, false) })
	op.Keys(func(key, end []byte, writes bool) {
		s, ok := keyspace.FromEtcd(key, end)
		if !ok {
			outside = outside || !span.Contains(key)
			return
		}
		if outside = outside || !spanCovers(span, s); outside || t.set == nil {
			return
		}
		own := false
		t.set.spans.visit(s, func(o *Held, mode command.LockMode, key []byte) bool {
			switch {
			case o.Name == op.Name:
				own = true
			case writes || mode != command.Shared:
				meet(o, key, writes)
			}
			return !dies
		})
		if !writes && !own && m.Held == nil {
			if o := t.wantedBy(s, op.Name); o != nil {
				meet(o, nil, writes)
			}
		}
	})
	return m, dies, outside
}

// MeetsRevoke is Meets for the spans that a revoke has found to delete.
func (t *Table) MeetsRevoke(op *rangeapi.Prepare, spans []command.LockSpan) (met *Held, dies bool) {
	if t.set == nil {
		return nil, false
	}
	for i := range spans {
		t.set.spans.visit(spans[i].Span, func(o *Held, _ command.LockMode, _ []byte) bool {
			if o.Name == op.Name {
				return true // its answer was lost
			}
			met = o
			dies = !op.WaitForOlder && o.Name.Compare(op.Name.TxnID) < 0
			return !dies
		})
		if dies {
			break
		}
	}
	return met, dies
}

// Acquire adds a pending lock. Its intents may still lack revisions: bytes is what they and
// the lock will take.
func (t *Table) Acquire(l *command.Lock, bytes int64, now clock.Time) *Held {
	h := &Held{Lock: l, Pending: true, since: now, size: bytes}
	t.open().add(h)
	return h
}

// Release ends a pending lock whose entry will not be applied. woken says that waiters have
// their turn now.
func (t *Table) Release(h *Held) (woken bool) {
	t.set.remove(h)
	woken = t.Wake(h)
	t.trim()
	return woken
}

// Change is one applied change of locks and records.
type Change struct {
	// Removed has ended, Added is new. Both are set where a sweep has made a lock
	// smaller, and are the same where only others may decide about it again.
	Removed, Added *command.Lock
	// Record is new, Forgotten has gone.
	Record    *command.CommitRecord
	Forgotten rangeapi.TxnName
}

// Apply takes over an applied change. woken says that waiters have their turn now.
func (t *Table) Apply(ch *Change, now clock.Time) (woken bool) {
	set := t.open()
	if ch.Record != nil {
		set.records[ch.Record.Name] = &heldRecord{CommitRecord: ch.Record, since: now}
		set.most = max(set.most, len(set.records))
	}
	if !ch.Forgotten.IsZero() {
		delete(set.records, ch.Forgotten)
	}
	var h *Held
	switch {
	case ch.Removed != nil:
		h = set.find(ch.Removed.Name, ch.Removed.ID)
	case ch.Added != nil:
		h = set.find(ch.Added.Name, ch.Added.ID)
	}
	if h != nil && h.Pending && ch.Removed == nil {
		set.confirm(h, ch.Added)
		return false
	}
	if h != nil {
		now = min(now, h.since)
		set.remove(h)
	}
	if ch.Added != nil {
		if h == nil {
			h = &Held{}
		}
		h.Lock, h.Pending, h.since = ch.Added, false, now
		set.add(h)
	}
	if h != nil && ch.Removed != nil {
		woken = t.Wake(h)
	}
	t.trim()
	return woken
}

// DropPending ends pending locks and wakes all waiters: the leadership is over. woken is
// as Release's.
func (t *Table) DropPending() (woken bool) {
	if t.set == nil {
		return false
	}
	for h := range t.set.all {
		if h.Pending {
			t.set.remove(h)
		}
		woken = t.Wake(h) || woken
	}
	t.trim()
	return woken
}

// Forget drops all locks and records of a replica that is gone. They have not ended: other
// nodes have them, or another range of this one.
func (t *Table) Forget() {
	if t.set == nil {
		return
	}
	for h := range t.set.all {
		t.set.remove(h)
	}
	t.set = nil
}

// open returns the set, which there is one of from now on.
func (t *Table) open() *lockSet {
	if t.set == nil {
		if t.set, _ = t.shared.sets.Get().(*lockSet); t.set == nil {
			t.set = newLockSet(&t.shared.bytes)
		}
	}
	return t.set
}

// trim gives an empty set back: another transaction needs one soon, here or in another
// range. One that was large stays so, and is not kept.
func (t *Table) trim() {
	if t.set == nil || !t.set.empty() {
		return
	}
	if t.set.most <= maxKeptLocks {
		t.shared.sets.Put(t.set)
	}
	t.set = nil
}

// maxKeptLocks bounds the locks at a time of a set that is used again.
const maxKeptLocks = 64
