package command

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// LockMode says what a lock keeps others from.
type LockMode uint8

const (
	// Shared keeps writers away: what was compared does not change.
	Shared LockMode = iota
	// Exclusive keeps all others away: it is written, or was deleted and stays empty.
	Exclusive
	// Sweep deletes: every key in the span is deleted. The tombstones do not fit into one
	// entry; what is under the lock stays as it is, so that the lock is the intent.
	Sweep
)

// LockSpan is one of the spans that a lock covers.
type LockSpan struct {
	Span keyspace.Span
	Mode LockMode
	// Sub is the number of the operation, for a sweep.
	Sub uint32
}

// Intent is a version that a lock will leave behind. Its Mod is 0, and so is a Create
// that will be the transaction's own revision.
type Intent struct {
	V      mvcc.Version
	Before Prior
}

// At returns the version with the transaction's revision.
func (i *Intent) At(rev keyspace.Revision) mvcc.Version {
	v := i.V
	v.Mod = rev
	if !v.Tombstone && v.Create == 0 {
		v.Create = rev
	}
	return v
}

// Lock is what one attempt of a transaction holds of one range. It is not changed once
// its entry is made: all replicas have the same ones at the same index.
type Lock struct {
	ID     rangeapi.LockID
	Name   rangeapi.TxnName
	Anchor []byte
	// Floor is the highest revision that its leader's node had heard of when it was
	// evaluated. The transaction's own will be above (trap 74).
	Floor  keyspace.Revision
	Spans  []LockSpan
	Writes []Intent
	// Revoke is the lease all of whose keys the lock deletes, the zero attachment for none.
	Revoke rangeapi.Attachment
	// Leases are those that the writes attach keys to.
	Leases []keyspace.LeaseID
}

// Bytes is about what the lock takes in memory and in an entry.
func (l *Lock) Bytes() int {
	n := lockOverheadBytes + len(l.Anchor)
	for i := range l.Spans {
		n += len(l.Spans[i].Span.Start) + len(l.Spans[i].Span.End) + VersionOverheadBytes
	}
	for i := range l.Writes {
		n += len(l.Writes[i].V.Key) + len(l.Writes[i].V.Value) + VersionOverheadBytes
	}
	return n
}

// lockOverheadBytes is about what a lock has beside its keys.
const lockOverheadBytes = 128

// Sweep returns the index of the first span that is to be swept, -1 if there is none.
func (l *Lock) Sweep() int {
	return slices.IndexFunc(l.Spans, func(s LockSpan) bool { return s.Mode == Sweep })
}

// Covers says whether the key lies in a span of the lock.
func (l *Lock) Covers(key []byte) bool {
	return slices.ContainsFunc(l.Spans, func(s LockSpan) bool { return s.Span.Contains(key) })
}

// WrittenIn returns the keys of the span that have an intent of their own, in order.
func (l *Lock) WrittenIn(s keyspace.Span) (keys [][]byte) {
	for i := range l.Writes {
		if k := l.Writes[i].V.Key; s.Contains(k) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, bytes.Compare)
	return keys
}

// CommitRecord says that an attempt is committed. It is at the anchor until no lock of the
// attempt is left.
type CommitRecord struct {
	Name     rangeapi.TxnName
	Anchor   []byte
	Revision keyspace.Revision
	Locks    []rangeapi.LockRef
}

// Bytes is about what the record takes.
func (t *CommitRecord) Bytes() int {
	n := lockOverheadBytes + len(t.Anchor)
	for i := range t.Locks {
		n += len(t.Locks[i].Span.Start) + len(t.Locks[i].Span.End) + VersionOverheadBytes
	}
	return n
}

// Keyless says whether the lock is that of a lease that has no key here.
func (l *Lock) Keyless() bool { return l.Revoke.Lease != 0 && len(l.Writes) == 0 && len(l.Spans) == 0 }

// NoteLeases finds the leases that the lock attaches keys to.
func (l *Lock) NoteLeases() {
	l.Leases = nil
	for i := range l.Writes {
		l.Leases = AddLease(l.Leases, l.Writes[i].V.Lease)
	}
}

// AddLease adds a lease to a list in which each stands once. Lease 0 is none.
func AddLease(all []keyspace.LeaseID, lease keyspace.LeaseID) []keyspace.LeaseID {
	if lease == 0 || slices.Contains(all, lease) {
		return all
	}
	return append(all, lease)
}

// Leaves says whether the lock's transaction will leave versions behind, if it is committed.
func (l *Lock) Leaves() bool {
	return len(l.Writes) > 0 || slices.ContainsFunc(l.Spans, func(s LockSpan) bool { return s.Mode != Shared })
}

// Above says whether the revision can be that of the lock's transaction.
func (l *Lock) Above(rev keyspace.Revision) error {
	if rev <= l.Floor {
		return fmt.Errorf("lock %s of %s with floor %d is committed at revision %d", l.ID, l.Name, l.Floor, rev)
	}
	for i := range l.Writes {
		if l.Writes[i].V.Create > rev {
			return fmt.Errorf("lock %s is committed at %d, key %q was created at %d", l.ID, rev, l.Writes[i].V.Key, l.Writes[i].V.Create)
		}
	}
	return nil
}

// Cut divides a lock at key; a side on which it has nothing is nil.
func (l *Lock) Cut(key []byte) (left, right *Lock) {
	a, z := *l, *l
	a.Spans, z.Spans, a.Writes, z.Writes = nil, nil, nil, nil
	for _, s := range l.Spans {
		if low, ok := s.Span.Intersect(keyspace.Span{End: key}); ok {
			a.Spans = append(a.Spans, LockSpan{low, s.Mode, s.Sub})
		}
		if high, ok := s.Span.Intersect(keyspace.Span{Start: key}); ok {
			z.Spans = append(z.Spans, LockSpan{high, s.Mode, s.Sub})
		}
	}
	for _, w := range l.Writes {
		if bytes.Compare(w.V.Key, key) < 0 {
			a.Writes = append(a.Writes, w)
		} else {
			z.Writes = append(z.Writes, w)
		}
	}
	a.NoteLeases()
	z.NoteLeases()
	// Of a lease that is revoked both sides lock the attachment.
	if len(a.Spans) > 0 || l.Revoke.Lease != 0 {
		left = &a
	}
	if len(z.Spans) > 0 || l.Revoke.Lease != 0 {
		right = &z
	}
	return left, right
}
