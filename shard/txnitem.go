package shard

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
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
	id  LockID
	ids []LockID
	// revision is that of a resolve, 0 for an abort, or of a sweep.
	revision keyspace.Revision
	record   *txnRecord
	// name is the attempt to be forgotten, fence the highest attempt that is aborted.
	name  TxnName
	fence uint64
	// Of a sweep: which piece of the lock, the keys that are deleted, and where what is
	// left of the piece begins; nil says that nothing is.
	piece int
	keys  [][]byte
	// leases are those that the keys are attached to, 0 for none.
	leases []keyspace.LeaseID
	next   []byte
	// mark is that of a lease; of an itemUnmark only its lease counts.
	mark mark
}

// cursor reads a format and remembers the first error.
type cursor struct {
	b   []byte
	err error
}

func (c *cursor) fail(err error) {
	if c.err == nil {
		c.err, c.b = err, nil
	}
}

func (c *cursor) byte() byte {
	if len(c.b) == 0 {
		c.fail(errTruncated)
		return 0
	}
	v := c.b[0]
	c.b = c.b[1:]
	return v
}

func (c *cursor) uvarint() uint64 {
	v, rest, err := uvarint(c.b)
	if err != nil {
		c.fail(err)
		return 0
	}
	c.b = rest
	return v
}

// bytes reads a length and so many bytes, which stay a part of what is read.
func (c *cursor) bytes() []byte {
	v, rest, err := bytesField(c.b)
	if err != nil {
		c.fail(err)
		return nil
	}
	c.b = rest
	return v
}

// count reads the number of things that follow, each of which has min bytes at least.
func (c *cursor) count(least int) int {
	n := c.uvarint()
	if n > uint64(len(c.b)/least) {
		c.fail(errTruncated)
		return 0
	}
	return int(n)
}

func (c *cursor) revision() keyspace.Revision {
	v := c.uvarint()
	if v >= uint64(keyspace.MaxRevision) {
		c.fail(fmt.Errorf("shard: revision %d", v))
		return 0
	}
	return keyspace.Revision(v)
}

// span reads a span whose flag says that it is one key.
func (c *cursor) span(single bool) keyspace.Span {
	start := c.bytes()
	if single {
		return keyspace.Single(start)
	}
	s := keyspace.Span{Start: start, End: c.bytes()}
	if c.err == nil && len(s.End) > 0 && string(s.Start) >= string(s.End) {
		c.fail(fmt.Errorf("shard: span %s", s))
	}
	return s
}

// end returns the first error, or one where bytes are left over.
func (c *cursor) end() error {
	if c.err == nil && len(c.b) > 0 {
		return fmt.Errorf("shard: %d bytes left over", len(c.b))
	}
	return c.err
}

// spanSingle marks a span of one key, whose end is left out.
const spanSingle = 0x80

func appendSpan(dst []byte, flags byte, s keyspace.Span) []byte {
	if isKey(s) {
		return appendBytes(append(dst, flags|spanSingle), s.Start)
	}
	return appendBytes(appendBytes(append(dst, flags), s.Start), s.End)
}

func appendName(dst []byte, n TxnName) []byte {
	dst = binary.AppendUvarint(dst, uint64(n.Start))
	dst = binary.AppendUvarint(dst, uint64(n.Node))
	dst = binary.BigEndian.AppendUint64(dst, uint64(n.Boot))
	dst = binary.AppendUvarint(dst, n.Counter)
	return binary.AppendUvarint(dst, n.Attempt)
}

func (c *cursor) fixed64() uint64 {
	if len(c.b) < 8 {
		c.fail(errTruncated)
		return 0
	}
	v := binary.BigEndian.Uint64(c.b)
	c.b = c.b[8:]
	return v
}

// maxAttempt is above the numbers of all attempts: one behind it can still be counted.
const maxAttempt = 1 << 62

// attempt reads the number of an attempt.
func (c *cursor) attempt() uint64 {
	v := c.uvarint()
	if v >= maxAttempt {
		c.fail(fmt.Errorf("shard: attempt %d", v))
	}
	return v
}

func (c *cursor) name() (n TxnName) {
	n.Start, n.Node = c.revision(), keyspace.NodeID(c.uvarint())
	n.Boot = keyspace.BootID(c.fixed64())
	n.Counter, n.Attempt = c.uvarint(), c.attempt()
	return n
}

func appendLockID(dst []byte, id LockID) []byte {
	dst = binary.AppendUvarint(dst, uint64(id.Range))
	dst = binary.AppendUvarint(dst, id.Term)
	dst = binary.AppendUvarint(dst, id.Number)
	return binary.AppendUvarint(dst, uint64(id.Index))
}

func (c *cursor) lockID() LockID {
	return LockID{Range: keyspace.RangeID(c.uvarint()), Term: c.uvarint(), Number: c.uvarint(), Index: uint32(c.uvarint())}
}

func appendLocks(dst []byte, ls []LockRef) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ls)))
	for i := range ls {
		dst = appendSpan(appendLockID(dst, ls[i].ID), 0, ls[i].Span)
	}
	return dst
}

func (c *cursor) locks() []LockRef {
	n := c.count(6)
	ls := make([]LockRef, 0, n)
	for range n {
		l := LockRef{ID: c.lockID()}
		flags := c.byte()
		if flags&^spanSingle != 0 {
			c.fail(fmt.Errorf("shard: flags %#x of a span", flags))
		}
		l.Span = c.span(flags != 0)
		ls = append(ls, l)
	}
	return ls
}

// appendLock appends a lock without its id.
func appendLock(dst []byte, l *lock) []byte {
	dst = appendBytes(appendName(dst, l.name), l.anchor)
	dst = binary.AppendUvarint(dst, uint64(l.floor))
	dst = binary.AppendUvarint(dst, uint64(len(l.spans)))
	for i := range l.spans {
		s := &l.spans[i]
		dst = appendSpan(dst, byte(s.mode), s.span)
		if s.mode == lockSweep {
			dst = binary.AppendUvarint(dst, uint64(s.sub))
		}
	}
	dst = binary.AppendUvarint(dst, uint64(len(l.writes)))
	for i := range l.writes {
		dst = appendIntent(dst, &l.writes[i])
	}
	return appendLeaseMark(dst, l.revoke)
}

// lock reads what appendLock wrote. Keys and values stay parts of what is read.
func (c *cursor) lock() *lock {
	l := &lock{name: c.name(), anchor: c.bytes(), floor: c.revision()}
	n := c.count(2)
	l.spans = make([]lockSpan, 0, n)
	for range n {
		flags := c.byte()
		s := lockSpan{mode: lockMode(flags &^ spanSingle)}
		if s.mode > lockSweep {
			c.fail(fmt.Errorf("shard: lock of mode %d", s.mode))
		}
		s.span = c.span(flags&spanSingle != 0)
		if s.mode == lockSweep {
			s.sub = uint32(c.uvarint())
		}
		l.spans = append(l.spans, s)
	}
	n = c.count(3)
	l.writes = make([]intent, 0, n)
	for range n {
		l.writes = append(l.writes, c.intent())
	}
	l.revoke = c.mark()
	l.noteLeases()
	return l
}

func appendIntent(dst []byte, i *intent) []byte {
	v := &i.v
	flags := versionHead(v, i.before) & intentFlags
	dst = appendBytes(append(dst, flags), v.Key)
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
	return appendBytes(dst, v.Value)
}

func (c *cursor) intent() (i intent) {
	flags := c.byte()
	i.v.Tombstone = flags&versionTombstone != 0
	i.before.lived, i.before.replaced = flags&versionLived != 0, flags&versionReplaced != 0
	if flags&^intentFlags != 0 || !knownFlags(flags) {
		c.fail(fmt.Errorf("shard: intent with flags %#x", flags))
	}
	i.v.Key, i.v.Sub = c.bytes(), uint32(c.uvarint())
	if len(i.v.Key) == 0 {
		c.fail(errTruncated)
	}
	if flags&versionDetach != 0 {
		i.before.lease = c.lease()
	}
	if i.v.Tombstone {
		return i
	}
	i.v.Create, i.v.Version = c.revision(), int64(c.uvarint())
	if i.v.Version < 1 {
		c.fail(fmt.Errorf("shard: intent of version %d", i.v.Version))
	}
	if flags&versionLease != 0 {
		i.v.Lease = c.lease()
	}
	i.v.Value = c.bytes()
	return i
}

func appendTxnRecord(dst []byte, t *txnRecord) []byte {
	dst = appendBytes(appendName(dst, t.name), t.anchor)
	return appendLocks(binary.AppendUvarint(dst, uint64(t.revision)), t.locks)
}

func (c *cursor) txnRecord() *txnRecord {
	t := &txnRecord{name: c.name(), anchor: c.bytes(), revision: c.revision()}
	t.locks = c.locks()
	if c.err == nil && t.revision == 0 {
		c.fail(fmt.Errorf("shard: record of %s without a revision", t.name))
	}
	return t
}

func appendItem(dst []byte, i *txnItem) []byte {
	dst = append(dst, byte(i.kind))
	switch i.kind {
	case itemLock:
		return appendLock(dst, i.lock)
	case itemResolve:
		return binary.AppendUvarint(appendLockID(dst, i.id), uint64(i.revision))
	case itemCommit:
		return appendTxnRecord(appendLockID(dst, i.id), i.record)
	case itemFence:
		dst = binary.AppendUvarint(dst, i.fence)
		dst = binary.AppendUvarint(dst, uint64(len(i.ids)))
		for _, id := range i.ids {
			dst = appendLockID(dst, id)
		}
		return dst
	case itemForget:
		return appendName(dst, i.name)
	case itemSweep:
		dst = binary.AppendUvarint(appendLockID(dst, i.id), uint64(i.revision))
		dst = binary.AppendUvarint(dst, uint64(i.piece))
		dst = appendBytes(dst, i.next)
		dst = binary.AppendUvarint(dst, uint64(len(i.keys)))
		for n, k := range i.keys {
			dst = binary.AppendUvarint(appendBytes(dst, k), uint64(i.leases[n]))
		}
	case itemMark, itemUnmark:
		return appendLeaseMark(dst, i.mark)
	case itemRelease:
		return appendLockID(dst, i.id)
	}
	return dst
}

// item reads one item. What is in it stays a part of what is read.
func (c *cursor) item() txnItem {
	i := txnItem{kind: itemKind(c.byte())}
	switch i.kind {
	case itemLock:
		i.lock = c.lock()
	case itemResolve:
		i.id, i.revision = c.lockID(), c.revision()
	case itemCommit:
		i.id, i.record = c.lockID(), c.txnRecord()
	case itemFence:
		i.fence = c.uvarint()
		for range c.count(4) {
			i.ids = append(i.ids, c.lockID())
		}
	case itemForget:
		i.name = c.name()
	case itemSweep:
		i.id, i.revision, i.piece = c.lockID(), c.revision(), int(min(c.uvarint(), 1<<30))
		if i.next = c.bytes(); len(i.next) == 0 {
			i.next = nil
		}
		n := c.count(3)
		i.keys, i.leases = make([][]byte, 0, n), make([]keyspace.LeaseID, 0, n)
		for range n {
			i.keys, i.leases = append(i.keys, c.bytes()), append(i.leases, keyspace.LeaseID(c.uvarint()))
		}
		if c.err == nil && (i.revision == 0 || slices.ContainsFunc(i.keys, func(k []byte) bool { return len(k) == 0 })) {
			c.fail(errTruncated)
		}
	case itemMark, itemUnmark:
		if i.mark = c.mark(); c.err == nil && (i.mark.lease == 0 || i.kind == itemMark && i.mark.incarnation == 0) {
			c.fail(errTruncated)
		}
	case itemRelease:
		i.id = c.lockID()
	default:
		c.fail(fmt.Errorf("shard: item of kind %d", i.kind))
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
func lockKey(r keyspace.RangeID, id LockID) []byte {
	return engine.GroupLocalKey(r.Group(), appendLockID([]byte{suffixLock}, id))
}

// recordKey is where a record is kept.
func recordKey(r keyspace.RangeID, name TxnName) []byte {
	return engine.GroupLocalKey(r.Group(), appendName([]byte{suffixRecord}, name))
}

// decodeStored reads a lock or a record of the engine into s.
func (s *txnState) decodeStored(suffix, value []byte) error {
	if len(suffix) == 0 || len(value) == 0 {
		return fmt.Errorf("shard: transaction state %x of %d bytes", suffix, len(value))
	}
	if err := keyspace.CheckVersion("transaction state", uint64(value[0]), txnVersion); err != nil {
		return fmt.Errorf("shard: %x: %w", suffix, err)
	}
	key, c := cursor{b: suffix[1:]}, cursor{b: slices.Clone(value[1:])}
	switch suffix[0] {
	case suffixLock:
		l := c.lock()
		l.id = key.lockID()
		s.putLock(l)
	case suffixRecord:
		t := c.txnRecord()
		if n := key.name(); n != t.name {
			c.fail(fmt.Errorf("shard: record of %s under %s", t.name, n))
		}
		s.putRecord(t)
	case suffixMark:
		s.putMark(mark{lease: keyspace.LeaseID(key.fixed64()), incarnation: keyspace.LeaseIncarnation(c.uvarint())})
	default:
		c.fail(fmt.Errorf("shard: transaction state %x", suffix))
	}
	if err := key.end(); err != nil {
		return err
	}
	return c.end()
}

// txnState is the replicated state of transactions over several ranges as Apply
// leaves it.
type txnState struct {
	locks   map[LockID]*lock
	records map[TxnName]*txnRecord
	// marks are the leases that keys of the range may be attached to.
	marks map[keyspace.LeaseID]keyspace.LeaseIncarnation
}

func (s *txnState) putLock(l *lock) {
	if s.locks == nil {
		s.locks = map[LockID]*lock{}
	}
	s.locks[l.id] = l
}

func (s *txnState) putRecord(t *txnRecord) {
	if s.records == nil {
		s.records = map[TxnName]*txnRecord{}
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
