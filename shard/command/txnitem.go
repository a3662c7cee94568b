package command

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// itemKind is the kind of one item of a batch: what a command of a transaction over several
// ranges changes. An item has no revision of its own. docs/format/shard.md has the bytes.
type itemKind uint8

const (
	// ItemLock brings a lock.
	ItemLock itemKind = iota + 1
	// ItemResolve ends a lock: its intents become versions, or nothing.
	ItemResolve
	// ItemCommit stores the record of a committed attempt and resolves the anchor's lock.
	ItemCommit
	// ItemFence aborts an attempt at its anchor: its locks end, and no attempt up to the
	// fence can be anchored here any more.
	ItemFence
	// ItemForget removes a record.
	ItemForget
	// ItemSweep deletes some of the keys under a lock and makes it smaller.
	ItemSweep
	// ItemAttach lets keys be attached to a lease from now on.
	ItemAttach
	// ItemDetach ends that: nobody may be attached to the lease any more.
	ItemDetach
	// ItemRelease ends a lock on a lease that has no key anywhere, and takes the attachment away.
	ItemRelease
)

// String returns the kind as logs and stories print it.
func (k itemKind) String() string {
	return [...]string{"?", "lock", "resolve", "commit", "fence", "forget", "sweep", "attach", "detach", "release"}[min(k, ItemRelease)]
}

// TxnItem is one item of a batch: what a transaction's command changes.
type TxnItem struct {
	Kind itemKind
	// Lock is what an ItemLock brings. Its id is not in the bytes: it is the entry's and
	// the item's place.
	Lock *Lock
	// ID is the lock that is resolved or swept, or the anchor's of a commit; ids are
	// those that a fence ends.
	ID  rangeapi.LockID
	IDs []rangeapi.LockID
	// Revision is that of a resolve, 0 for an abort, or of a sweep.
	Revision keyspace.Revision
	Record   *CommitRecord
	// Name is the attempt to be forgotten, fence the highest attempt that is aborted.
	Name  rangeapi.TxnName
	Fence uint64
	// A sweep has these three: the index of the lock's span, the keys that it deletes, and
	// Next, where the rest of the span begins. Next is nil if nothing is left.
	SpanIndex int
	Keys      [][]byte
	// Leases are those that the keys are attached to, 0 for none.
	Leases []keyspace.LeaseID
	Next   []byte
	// Attachment is that of a lease; of an ItemDetach only its lease counts.
	Attachment rangeapi.Attachment
}

// Cursor reads what stands in entries and in the applied state.
type Cursor struct{ rangeapi.Reader }

// NewCursor returns a cursor of b. What it reads stays a part of b.
func NewCursor(b []byte) Cursor { return Cursor{rangeapi.NewReader(b)} }

// AppendLock appends a lock without its id.
func AppendLock(dst []byte, l *Lock) []byte {
	dst = wire.AppendBytes(rangeapi.AppendName(dst, l.Name), l.Anchor)
	dst = binary.AppendUvarint(dst, uint64(l.Floor))
	dst = binary.AppendUvarint(dst, uint64(len(l.Spans)))
	for i := range l.Spans {
		s := &l.Spans[i]
		dst = rangeapi.AppendSpan(dst, byte(s.Mode), s.Span)
		if s.Mode == Sweep {
			dst = binary.AppendUvarint(dst, uint64(s.Sub))
		}
	}
	dst = binary.AppendUvarint(dst, uint64(len(l.Writes)))
	for i := range l.Writes {
		dst = appendIntent(dst, &l.Writes[i])
	}
	return rangeapi.AppendAttachment(dst, l.Revoke)
}

// lock reads what AppendLock wrote. Keys and values stay parts of what is read.
func (c *Cursor) lock() *Lock {
	l := &Lock{Name: c.Name(), Anchor: c.Bytes(), Floor: c.Revision()}
	n := c.Count(2)
	l.Spans = make([]LockSpan, 0, n)
	for range n {
		flags := c.Byte()
		s := LockSpan{Mode: LockMode(flags &^ rangeapi.SpanSingle)}
		if s.Mode > Sweep {
			c.Fail(fmt.Errorf("command: lock of mode %d", s.Mode))
		}
		s.Span = c.Span(flags&rangeapi.SpanSingle != 0)
		if s.Mode == Sweep {
			s.Sub = uint32(c.Uvarint())
		}
		l.Spans = append(l.Spans, s)
	}
	n = c.Count(3)
	l.Writes = make([]Intent, 0, n)
	for range n {
		l.Writes = append(l.Writes, c.intent())
	}
	l.Revoke = c.Attachment()
	l.NoteLeases()
	return l
}

func appendIntent(dst []byte, i *Intent) []byte {
	v := &i.V
	flags := versionHead(v, i.Before) & intentFlags
	dst = wire.AppendBytes(append(dst, flags), v.Key)
	dst = binary.AppendUvarint(dst, uint64(v.Sub))
	if flags&versionDetach != 0 {
		dst = binary.AppendUvarint(dst, uint64(i.Before.Lease))
	}
	if v.Tombstone {
		return dst
	}
	dst = binary.AppendUvarint(dst, uint64(v.Create))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	if v.Lease != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Lease))
	}
	return wire.AppendBytes(dst, v.Value)
}

func (c *Cursor) intent() (i Intent) {
	flags := c.Byte()
	i.V.Tombstone = flags&versionTombstone != 0
	i.Before.Lived, i.Before.Replaced = flags&versionLived != 0, flags&versionReplaced != 0
	if flags&^intentFlags != 0 || !knownFlags(flags) {
		c.Fail(fmt.Errorf("command: intent with flags %#x", flags))
	}
	i.V.Key, i.V.Sub = c.Bytes(), uint32(c.Uvarint())
	if len(i.V.Key) == 0 {
		c.Fail(wire.ErrTruncated)
	}
	if flags&versionDetach != 0 {
		i.Before.Lease = c.Lease()
	}
	if i.V.Tombstone {
		return i
	}
	i.V.Create, i.V.Version = c.Revision(), int64(c.Uvarint())
	if i.V.Version < 1 {
		c.Fail(fmt.Errorf("command: intent of version %d", i.V.Version))
	}
	if flags&versionLease != 0 {
		i.V.Lease = c.Lease()
	}
	i.V.Value = c.Bytes()
	return i
}

// AppendCommitRecord appends the binary form of a commit record.
func AppendCommitRecord(dst []byte, t *CommitRecord) []byte {
	dst = wire.AppendBytes(rangeapi.AppendName(dst, t.Name), t.Anchor)
	return rangeapi.AppendLocks(binary.AppendUvarint(dst, uint64(t.Revision)), t.Locks)
}

func (c *Cursor) txnRecord() *CommitRecord {
	t := &CommitRecord{Name: c.Name(), Anchor: c.Bytes(), Revision: c.Revision()}
	t.Locks = c.Locks()
	if c.OK() && t.Revision == 0 {
		c.Fail(fmt.Errorf("command: record of %s without a revision", t.Name))
	}
	return t
}

// AppendItem appends the binary form of an item.
func AppendItem(dst []byte, i *TxnItem) []byte {
	dst = append(dst, byte(i.Kind))
	switch i.Kind {
	case ItemLock:
		return AppendLock(dst, i.Lock)
	case ItemResolve:
		return binary.AppendUvarint(rangeapi.AppendLockID(dst, i.ID), uint64(i.Revision))
	case ItemCommit:
		return AppendCommitRecord(rangeapi.AppendLockID(dst, i.ID), i.Record)
	case ItemFence:
		dst = binary.AppendUvarint(dst, i.Fence)
		dst = binary.AppendUvarint(dst, uint64(len(i.IDs)))
		for _, id := range i.IDs {
			dst = rangeapi.AppendLockID(dst, id)
		}
		return dst
	case ItemForget:
		return rangeapi.AppendName(dst, i.Name)
	case ItemSweep:
		dst = binary.AppendUvarint(rangeapi.AppendLockID(dst, i.ID), uint64(i.Revision))
		dst = binary.AppendUvarint(dst, uint64(i.SpanIndex))
		dst = wire.AppendBytes(dst, i.Next)
		dst = binary.AppendUvarint(dst, uint64(len(i.Keys)))
		for n, k := range i.Keys {
			dst = binary.AppendUvarint(wire.AppendBytes(dst, k), uint64(i.Leases[n]))
		}
	case ItemAttach, ItemDetach:
		return rangeapi.AppendAttachment(dst, i.Attachment)
	case ItemRelease:
		return rangeapi.AppendLockID(dst, i.ID)
	}
	return dst
}

// Item reads one item. What is in it stays a part of what is read.
func (c *Cursor) Item() TxnItem {
	i := TxnItem{Kind: itemKind(c.Byte())}
	switch i.Kind {
	case ItemLock:
		i.Lock = c.lock()
	case ItemResolve:
		i.ID, i.Revision = c.LockID(), c.Revision()
	case ItemCommit:
		i.ID, i.Record = c.LockID(), c.txnRecord()
	case ItemFence:
		i.Fence = c.Uvarint()
		for range c.Count(4) {
			i.IDs = append(i.IDs, c.LockID())
		}
	case ItemForget:
		i.Name = c.Name()
	case ItemSweep:
		i.ID, i.Revision, i.SpanIndex = c.LockID(), c.Revision(), int(min(c.Uvarint(), 1<<30))
		if i.Next = c.Bytes(); len(i.Next) == 0 {
			i.Next = nil
		}
		n := c.Count(3)
		i.Keys, i.Leases = make([][]byte, 0, n), make([]keyspace.LeaseID, 0, n)
		for range n {
			i.Keys, i.Leases = append(i.Keys, c.Bytes()), append(i.Leases, keyspace.LeaseID(c.Uvarint()))
		}
		if c.OK() && (i.Revision == 0 || slices.ContainsFunc(i.Keys, func(k []byte) bool { return len(k) == 0 })) {
			c.Fail(wire.ErrTruncated)
		}
	case ItemAttach, ItemDetach:
		if i.Attachment = c.Attachment(); c.OK() && (i.Attachment.Lease == 0 || i.Kind == ItemAttach && i.Attachment.Incarnation == 0) {
			c.Fail(wire.ErrTruncated)
		}
	case ItemRelease:
		i.ID = c.LockID()
	default:
		c.Fail(fmt.Errorf("command: item of kind %d", i.Kind))
	}
	return i
}

// SweepVersion is the tombstone that a sweep leaves of a key.
func SweepVersion(key []byte, s *LockSpan, rev keyspace.Revision) mvcc.Version {
	return mvcc.Version{Key: key, Mod: rev, Sub: s.Sub, Tombstone: true}
}

// Sweep adds a key that is deleted.
func (i *TxnItem) Sweep(v *mvcc.Version) {
	i.Keys = append(i.Keys, bytes.Clone(v.Key))
	i.Leases = append(i.Leases, v.Lease)
}
