package shard

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// itemKind is what one item of a batch does: a step of a transaction over several
// ranges, which has no revision of its own. docs/format/shard.md has the bytes.
type itemKind uint8

const (
	// itemLock brings a lock.
	itemLock itemKind = iota + 1
	// itemResolve ends a lock: its intents become versions, or nothing.
	itemResolve
	// itemCommit stores the record of a committed attempt and resolves the anchor's lock.
	itemCommit
	// itemFence aborts an attempt at its anchor: its locks end, and no attempt up to the
	// fence can be anchored here any more.
	itemFence
	// itemForget removes a record.
	itemForget
	// itemSweep deletes some of the keys under a lock and makes it smaller.
	itemSweep
	// itemMark brings the mark of a lease, itemUnmark takes it away.
	itemMark
	itemUnmark
	// itemRelease ends a lock on a lease that has no key anywhere, and takes the mark away.
	itemRelease
)

// String returns the kind as logs and stories print it.
func (k itemKind) String() string {
	return [...]string{"?", "lock", "resolve", "commit", "fence", "forget", "sweep", "mark", "unmark", "release"}[min(k, itemRelease)]
}

// txnItem is one step of a transaction in an entry.
type txnItem struct {
	kind itemKind
	// lock is what an itemLock brings. Its id is not in the bytes: it is the entry's and
	// the item's place.
	lock *lock
	// id is the lock that is resolved or swept, or the anchor's of a commit; ids are
	// those that a fence ends.
	id  rangeapi.LockID
	ids []rangeapi.LockID
	// revision is that of a resolve, 0 for an abort, or of a sweep.
	revision keyspace.Revision
	record   *txnRecord
	// name is the attempt to be forgotten, fence the highest attempt that is aborted.
	name  rangeapi.TxnName
	fence uint64
	// Of a sweep: which piece of the lock, the keys that are deleted, and where what is
	// left of the piece begins; nil says that nothing is.
	piece int
	keys  [][]byte
	// leases are those that the keys are attached to, 0 for none.
	leases []keyspace.LeaseID
	next   []byte
	// mark is that of a lease; of an itemUnmark only its lease counts.
	mark rangeapi.Attachment
}

// cursor reads what stands in entries and in the applied state.
type cursor struct{ rangeapi.Reader }

func newCursor(b []byte) cursor { return cursor{rangeapi.NewReader(b)} }

// appendLock appends a lock without its id.
func appendLock(dst []byte, l *lock) []byte {
	dst = wire.AppendBytes(rangeapi.AppendName(dst, l.name), l.anchor)
	dst = binary.AppendUvarint(dst, uint64(l.floor))
	dst = binary.AppendUvarint(dst, uint64(len(l.spans)))
	for i := range l.spans {
		s := &l.spans[i]
		dst = rangeapi.AppendSpan(dst, byte(s.mode), s.span)
		if s.mode == lockSweep {
			dst = binary.AppendUvarint(dst, uint64(s.sub))
		}
	}
	dst = binary.AppendUvarint(dst, uint64(len(l.writes)))
	for i := range l.writes {
		dst = appendIntent(dst, &l.writes[i])
	}
	return rangeapi.AppendAttachment(dst, l.revoke)
}

// lock reads what appendLock wrote. Keys and values stay parts of what is read.
func (c *cursor) lock() *lock {
	l := &lock{name: c.Name(), anchor: c.Bytes(), floor: c.Revision()}
	n := c.Count(2)
	l.spans = make([]lockSpan, 0, n)
	for range n {
		flags := c.Byte()
		s := lockSpan{mode: lockMode(flags &^ rangeapi.SpanSingle)}
		if s.mode > lockSweep {
			c.Fail(fmt.Errorf("shard: lock of mode %d", s.mode))
		}
		s.span = c.Span(flags&rangeapi.SpanSingle != 0)
		if s.mode == lockSweep {
			s.sub = uint32(c.Uvarint())
		}
		l.spans = append(l.spans, s)
	}
	n = c.Count(3)
	l.writes = make([]intent, 0, n)
	for range n {
		l.writes = append(l.writes, c.intent())
	}
	l.revoke = c.Attachment()
	l.noteLeases()
	return l
}

func appendIntent(dst []byte, i *intent) []byte {
	v := &i.v
	flags := versionHead(v, i.before) & intentFlags
	dst = wire.AppendBytes(append(dst, flags), v.Key)
	dst = binary.AppendUvarint(dst, uint64(v.Sub))
	if flags&versionDetach != 0 {
		dst = binary.AppendUvarint(dst, uint64(i.before.lease))
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

func (c *cursor) intent() (i intent) {
	flags := c.Byte()
	i.v.Tombstone = flags&versionTombstone != 0
	i.before.lived, i.before.replaced = flags&versionLived != 0, flags&versionReplaced != 0
	if flags&^intentFlags != 0 || !knownFlags(flags) {
		c.Fail(fmt.Errorf("shard: intent with flags %#x", flags))
	}
	i.v.Key, i.v.Sub = c.Bytes(), uint32(c.Uvarint())
	if len(i.v.Key) == 0 {
		c.Fail(wire.ErrTruncated)
	}
	if flags&versionDetach != 0 {
		i.before.lease = c.Lease()
	}
	if i.v.Tombstone {
		return i
	}
	i.v.Create, i.v.Version = c.Revision(), int64(c.Uvarint())
	if i.v.Version < 1 {
		c.Fail(fmt.Errorf("shard: intent of version %d", i.v.Version))
	}
	if flags&versionLease != 0 {
		i.v.Lease = c.Lease()
	}
	i.v.Value = c.Bytes()
	return i
}

func appendTxnRecord(dst []byte, t *txnRecord) []byte {
	dst = wire.AppendBytes(rangeapi.AppendName(dst, t.name), t.anchor)
	return rangeapi.AppendLocks(binary.AppendUvarint(dst, uint64(t.revision)), t.locks)
}

func (c *cursor) txnRecord() *txnRecord {
	t := &txnRecord{name: c.Name(), anchor: c.Bytes(), revision: c.Revision()}
	t.locks = c.Locks()
	if c.OK() && t.revision == 0 {
		c.Fail(fmt.Errorf("shard: record of %s without a revision", t.name))
	}
	return t
}

func appendItem(dst []byte, i *txnItem) []byte {
	dst = append(dst, byte(i.kind))
	switch i.kind {
	case itemLock:
		return appendLock(dst, i.lock)
	case itemResolve:
		return binary.AppendUvarint(rangeapi.AppendLockID(dst, i.id), uint64(i.revision))
	case itemCommit:
		return appendTxnRecord(rangeapi.AppendLockID(dst, i.id), i.record)
	case itemFence:
		dst = binary.AppendUvarint(dst, i.fence)
		dst = binary.AppendUvarint(dst, uint64(len(i.ids)))
		for _, id := range i.ids {
			dst = rangeapi.AppendLockID(dst, id)
		}
		return dst
	case itemForget:
		return rangeapi.AppendName(dst, i.name)
	case itemSweep:
		dst = binary.AppendUvarint(rangeapi.AppendLockID(dst, i.id), uint64(i.revision))
		dst = binary.AppendUvarint(dst, uint64(i.piece))
		dst = wire.AppendBytes(dst, i.next)
		dst = binary.AppendUvarint(dst, uint64(len(i.keys)))
		for n, k := range i.keys {
			dst = binary.AppendUvarint(wire.AppendBytes(dst, k), uint64(i.leases[n]))
		}
	case itemMark, itemUnmark:
		return rangeapi.AppendAttachment(dst, i.mark)
	case itemRelease:
		return rangeapi.AppendLockID(dst, i.id)
	}
	return dst
}

// item reads one item. What is in it stays a part of what is read.
func (c *cursor) item() txnItem {
	i := txnItem{kind: itemKind(c.Byte())}
	switch i.kind {
	case itemLock:
		i.lock = c.lock()
	case itemResolve:
		i.id, i.revision = c.LockID(), c.Revision()
	case itemCommit:
		i.id, i.record = c.LockID(), c.txnRecord()
	case itemFence:
		i.fence = c.Uvarint()
		for range c.Count(4) {
			i.ids = append(i.ids, c.LockID())
		}
	case itemForget:
		i.name = c.Name()
	case itemSweep:
		i.id, i.revision, i.piece = c.LockID(), c.Revision(), int(min(c.Uvarint(), 1<<30))
		if i.next = c.Bytes(); len(i.next) == 0 {
			i.next = nil
		}
		n := c.Count(3)
		i.keys, i.leases = make([][]byte, 0, n), make([]keyspace.LeaseID, 0, n)
		for range n {
			i.keys, i.leases = append(i.keys, c.Bytes()), append(i.leases, keyspace.LeaseID(c.Uvarint()))
		}
		if c.OK() && (i.revision == 0 || slices.ContainsFunc(i.keys, func(k []byte) bool { return len(k) == 0 })) {
			c.Fail(wire.ErrTruncated)
		}
	case itemMark, itemUnmark:
		if i.mark = c.Attachment(); c.OK() && (i.mark.Lease == 0 || i.kind == itemMark && i.mark.Incarnation == 0) {
			c.Fail(wire.ErrTruncated)
		}
	case itemRelease:
		i.id = c.LockID()
	default:
		c.Fail(fmt.Errorf("shard: item of kind %d", i.kind))
	}
	return i
}

// txnVersion leads what a range keeps of transactions and leases in its engine.
const txnVersion = 3

// The first byte of what is behind a group's prefix.
const (
	suffixLock   = 'l'
	suffixRecord = 'c'
	suffixMark   = 'm'
)

// lockKey is where a lock is kept. The order means nothing.
func lockKey(r keyspace.RangeID, id rangeapi.LockID) []byte {
	return engine.GroupLocalKey(r.Group(), rangeapi.AppendLockID([]byte{suffixLock}, id))
}

// recordKey is where a record is kept.
func recordKey(r keyspace.RangeID, name rangeapi.TxnName) []byte {
	return engine.GroupLocalKey(r.Group(), rangeapi.AppendName([]byte{suffixRecord}, name))
}

// decodeStored reads a lock or a record of the engine into s.
func (s *txnState) decodeStored(suffix, value []byte) error {
	if len(suffix) == 0 || len(value) == 0 {
		return fmt.Errorf("shard: transaction state %x of %d bytes", suffix, len(value))
	}
	if err := keyspace.CheckVersion("transaction state", uint64(value[0]), txnVersion); err != nil {
		return fmt.Errorf("shard: %x: %w", suffix, err)
	}
	key, c := newCursor(suffix[1:]), newCursor(slices.Clone(value[1:]))
	switch suffix[0] {
	case suffixLock:
		l := c.lock()
		l.id = key.LockID()
		s.putLock(l)
	case suffixRecord:
		t := c.txnRecord()
		if n := key.Name(); n != t.name {
			c.Fail(fmt.Errorf("shard: record of %s under %s", t.name, n))
		}
		s.putRecord(t)
	case suffixMark:
		s.putMark(rangeapi.Attachment{Lease: keyspace.LeaseID(key.Uint64BE()), Incarnation: keyspace.LeaseIncarnation(c.Uvarint())})
	default:
		c.Fail(fmt.Errorf("shard: transaction state %x", suffix))
	}
	if err := key.End(); err != nil {
		return err
	}
	return c.End()
}

// txnState is the replicated state of transactions over several ranges as Apply
// leaves it.
type txnState struct {
	locks   map[rangeapi.LockID]*lock
	records map[rangeapi.TxnName]*txnRecord
	// marks are the leases that keys of the range may be attached to.
	marks map[keyspace.LeaseID]keyspace.LeaseIncarnation
}

func (s *txnState) putLock(l *lock) {
	if s.locks == nil {
		s.locks = map[rangeapi.LockID]*lock{}
	}
	s.locks[l.id] = l
}

func (s *txnState) putRecord(t *txnRecord) {
	if s.records == nil {
		s.records = map[rangeapi.TxnName]*txnRecord{}
	}
	s.records[t.name] = t
}

// loadTxns reads the replicated state of transactions of one range from the engine.
func loadTxns(e engine.Reader, r keyspace.RangeID) (txnState, error) {
	all, err := loadTxnsOf(e, engine.GroupLocalSpan(r.Group()))
	return all[r], err
}

// loadAllTxns is loadTxns of all ranges that have any, in one pass.
func loadAllTxns(e engine.Reader) (map[keyspace.RangeID]txnState, error) {
	first, last := engine.GroupLocalSpan(0), engine.GroupLocalSpan(keyspace.PlacementGroup-1)
	return loadTxnsOf(e, engine.KeySpan{Lower: first.Lower, Upper: last.Upper})
}

func loadTxnsOf(e engine.Reader, span engine.KeySpan) (all map[keyspace.RangeID]txnState, err error) {
	all = map[keyspace.RangeID]txnState{}
	it, err := e.NewIter(engine.IterOptions{Lower: span.Lower, Upper: span.Upper})
	if err != nil {
		return nil, err
	}
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var g keyspace.GroupID
		var suffix, value []byte
		if g, suffix, err = engine.DecodeGroupLocalKey(it.Key()); err != nil || g.IsSystem() {
			continue
		}
		s := all[g.Range()]
		if value, err = it.ValueAndErr(); err == nil {
			err = s.decodeStored(suffix, value)
		}
		all[g.Range()] = s
	}
	if err == nil {
		err = it.Error()
	}
	if cerr := it.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, fmt.Errorf("shard: load the locks of transactions: %w", err)
	}
	return all, nil
}

func putLock(w engine.Writer, r keyspace.RangeID, l *lock) error {
	return w.Set(lockKey(r, l.id), appendLock([]byte{txnVersion}, l))
}

func putRecord(w engine.Writer, r keyspace.RangeID, t *txnRecord) error {
	return w.Set(recordKey(r, t.name), appendTxnRecord([]byte{txnVersion}, t))
}

// sweepVersion is the tombstone that a sweep leaves of a key.
func sweepVersion(key []byte, s *lockSpan, rev keyspace.Revision) mvcc.Version {
	return mvcc.Version{Key: key, Mod: rev, Sub: s.sub, Tombstone: true}
}
