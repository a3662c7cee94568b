package shard

import (
	"errors"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// refusal says that an entry breaks a rule, whatever replica looks at it: entry and replicated
// state say so alone. Every other error of Apply is one of this replica, such as a failed read.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// refuse makes a refusal of an error that depends on entry and replicated state alone, and of nil
// nothing. An entry of a later format is no refusal: other builds apply it.
func refuse(err error) error {
	if err == nil || keyspace.IsVersionError(err) {
		return err
	}
	return &refusal{err}
}

// asRefusal returns err if it is a refusal, else nil.
func asRefusal(err error) error {
	if r := (*refusal)(nil); errors.As(err, &r) {
		return err
	}
	return nil
}

// txnUndo is what one change of the replicated locks, records or attachments has replaced. One
// of lock, record and attachment is not zero.
type txnUndo struct {
	lock   rangeapi.LockID
	locked *command.Lock // nil: there was none

	record   rangeapi.TxnName
	recorded *command.CommitRecord // nil: there was none

	attachment rangeapi.Attachment // without an incarnation: there was none
}

// setLock puts a lock in the place of the one with the id, or nothing with nil.
func (s *applyState) setLock(id rangeapi.LockID, l *command.Lock) {
	s.undo = append(s.undo, txnUndo{lock: id, locked: s.txns.Locks[id]})
	s.putLock(id, l)
}

func (s *applyState) putLock(id rangeapi.LockID, l *command.Lock) {
	if l == nil {
		delete(s.txns.Locks, id)
		return
	}
	s.txns.PutLock(l)
}

// setRecord puts a commit record in the place of the one with the name, or nothing with nil.
func (s *applyState) setRecord(name rangeapi.TxnName, t *command.CommitRecord) {
	s.undo = append(s.undo, txnUndo{record: name, recorded: s.txns.Records[name]})
	s.putRecord(name, t)
}

func (s *applyState) putRecord(name rangeapi.TxnName, t *command.CommitRecord) {
	if t == nil {
		delete(s.txns.Records, name)
		return
	}
	s.txns.PutRecord(t)
}

// setAttachment puts an attachment in the place of the one of its lease, or nothing where it has
// no incarnation.
func (s *applyState) setAttachment(m rangeapi.Attachment) {
	was := rangeapi.Attachment{Lease: m.Lease, Incarnation: s.txns.Attachments[m.Lease]}
	s.undo = append(s.undo, txnUndo{attachment: was})
	s.putAttachment(m)
}

func (s *applyState) putAttachment(m rangeapi.Attachment) {
	if m.Incarnation == 0 {
		delete(s.txns.Attachments, m.Lease)
		return
	}
	s.txns.PutAttachment(m)
}

// undoTxns takes back what the entry at hand has changed.
func (s *applyState) undoTxns() {
	for i := len(s.undo) - 1; i >= 0; i-- {
		switch u := &s.undo[i]; {
		case u.lock != rangeapi.LockID{}:
			s.putLock(u.lock, u.locked)
		case u.attachment != rangeapi.Attachment{}:
			s.putAttachment(u.attachment)
		default:
			s.putRecord(u.record, u.recorded)
		}
	}
}
