package command

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// AttachmentKey is where an attachment is kept.
func AttachmentKey(r keyspace.RangeID, lease keyspace.LeaseID) []byte {
	return engine.GroupLocalKey(r.Group(), binary.BigEndian.AppendUint64([]byte{SuffixAttachment}, uint64(lease)))
}

// PutAttachment stores that keys of the range may be attached to a lease.
func PutAttachment(w engine.Writer, r keyspace.RangeID, m rangeapi.Attachment) error {
	return w.Set(AttachmentKey(r, m.Lease), binary.AppendUvarint([]byte{txnVersion}, uint64(m.Incarnation)))
}

// PutAttachment adds an attachment.
func (s *TxnState) PutAttachment(m rangeapi.Attachment) {
	if s.Attachments == nil {
		s.Attachments = map[keyspace.LeaseID]keyspace.LeaseIncarnation{}
	}
	s.Attachments[m.Lease] = m.Incarnation
}

// Revokes says whether a lock revokes the lease.
func (s *TxnState) Revokes(lease keyspace.LeaseID) bool {
	for _, l := range s.Locks {
		if l.Revoke.Lease == lease {
			return true
		}
	}
	return false
}

// Write writes the state of transactions with which a range begins.
func (s *TxnState) Write(b *engine.Batch, r keyspace.RangeID) error {
	for _, l := range s.Locks {
		if err := PutLock(b, r, l); err != nil {
			return err
		}
	}
	for _, t := range s.Records {
		if err := PutRecord(b, r, t); err != nil {
			return err
		}
	}
	for lease, incarnation := range s.Attachments {
		if err := PutAttachment(b, r, rangeapi.Attachment{Lease: lease, Incarnation: incarnation}); err != nil {
			return err
		}
	}
	return nil
}

// Lowest returns the lowest floor of the locks that will leave versions behind, MaxRevision
// if there is none.
func (s *TxnState) Lowest() keyspace.Revision {
	lowest := keyspace.MaxRevision
	for _, l := range s.Locks {
		if l.Leaves() {
			lowest = min(lowest, l.Floor)
		}
	}
	return lowest
}

// txnVersion leads what a range keeps of transactions and leases in its engine.
const txnVersion = 3

// The first byte of what is behind a group's prefix.
const (
	suffixLock       = 'l'
	suffixRecord     = 'c'
	SuffixAttachment = 'm'
)

// LockKey is where a lock is kept. The order means nothing.
func LockKey(r keyspace.RangeID, id rangeapi.LockID) []byte {
	return engine.GroupLocalKey(r.Group(), rangeapi.AppendLockID([]byte{suffixLock}, id))
}

// RecordKey is where a record is kept.
func RecordKey(r keyspace.RangeID, name rangeapi.TxnName) []byte {
	return engine.GroupLocalKey(r.Group(), rangeapi.AppendName([]byte{suffixRecord}, name))
}

// decodeStored reads a lock or a record of the engine into s.
func (s *TxnState) decodeStored(suffix, value []byte) error {
	if len(suffix) == 0 || len(value) == 0 {
		return fmt.Errorf("command: transaction state %x of %d bytes", suffix, len(value))
	}
	if err := keyspace.CheckVersion("transaction state", uint64(value[0]), txnVersion); err != nil {
		return fmt.Errorf("command: %x: %w", suffix, err)
	}
	key, c := NewCursor(suffix[1:]), NewCursor(slices.Clone(value[1:]))
	switch suffix[0] {
	case suffixLock:
		l := c.lock()
		l.ID = key.LockID()
		s.PutLock(l)
	case suffixRecord:
		t := c.txnRecord()
		if n := key.Name(); n != t.Name {
			c.Fail(fmt.Errorf("command: record of %s under %s", t.Name, n))
		}
		s.PutRecord(t)
	case SuffixAttachment:
		s.PutAttachment(rangeapi.Attachment{Lease: keyspace.LeaseID(key.Uint64BE()), Incarnation: keyspace.LeaseIncarnation(c.Uvarint())})
	default:
		c.Fail(fmt.Errorf("command: transaction state %x", suffix))
	}
	if err := key.End(); err != nil {
		return err
	}
	return c.End()
}

// TxnState is the replicated state of transactions over several ranges as the applied
// entries leave it.
type TxnState struct {
	Locks   map[rangeapi.LockID]*Lock
	Records map[rangeapi.TxnName]*CommitRecord
	// Attachments are the leases that keys of the range may be attached to.
	Attachments map[keyspace.LeaseID]keyspace.LeaseIncarnation
}

// PutLock adds a lock.
func (s *TxnState) PutLock(l *Lock) {
	if s.Locks == nil {
		s.Locks = map[rangeapi.LockID]*Lock{}
	}
	s.Locks[l.ID] = l
}

// PutRecord adds a commit record.
func (s *TxnState) PutRecord(t *CommitRecord) {
	if s.Records == nil {
		s.Records = map[rangeapi.TxnName]*CommitRecord{}
	}
	s.Records[t.Name] = t
}

// LoadTxns reads the replicated state of transactions of one range from the engine.
func LoadTxns(e engine.Reader, r keyspace.RangeID) (TxnState, error) {
	all, err := loadTxnsOf(e, engine.GroupLocalSpan(r.Group()))
	return all[r], err
}

// LoadAllTxns is LoadTxns of all ranges that have any, in one pass.
func LoadAllTxns(e engine.Reader) (map[keyspace.RangeID]TxnState, error) {
	first, last := engine.GroupLocalSpan(0), engine.GroupLocalSpan(keyspace.PlacementGroup-1)
	return loadTxnsOf(e, engine.KeySpan{Lower: first.Lower, Upper: last.Upper})
}

func loadTxnsOf(e engine.Reader, span engine.KeySpan) (all map[keyspace.RangeID]TxnState, err error) {
	all = map[keyspace.RangeID]TxnState{}
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
		return nil, fmt.Errorf("command: load the locks of transactions: %w", err)
	}
	return all, nil
}

// PutLock stores a lock of the range.
func PutLock(w engine.Writer, r keyspace.RangeID, l *Lock) error {
	return w.Set(LockKey(r, l.ID), AppendLock([]byte{txnVersion}, l))
}

// PutRecord stores a commit record of the range.
func PutRecord(w engine.Writer, r keyspace.RangeID, t *CommitRecord) error {
	return w.Set(RecordKey(r, t.Name), AppendCommitRecord([]byte{txnVersion}, t))
}
