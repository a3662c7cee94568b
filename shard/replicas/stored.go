package replicas

import (
	"context"
	"errors"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/shard/command"
)

// OpenStored implements lifecycle.Opener.
func (m *Manager) OpenStored(ctx context.Context, u lifecycle.Unknown) (done bool, err error) {
	if id := u.Group.Range(); m.cfg.Owner.Replica(id) == nil {
		return m.openDurable(ctx, id)
	}
	return true, nil
}

// openDurable is openMade if it is not known where the record comes from. The record of an order
// to create is made again by no log after a crash, unlike a split's. It is made durable first, or
// the replica that has voted and stored entries would be another one afterwards.
func (m *Manager) openDurable(ctx context.Context, id keyspace.RangeID) (opened bool, err error) {
	_, have, err := m.cfg.Engine.Applied(id.Group())
	if err != nil || !have {
		return false, err
	}
	_, durable, err := m.cfg.Engine.DurableApplied(id.Group())
	if err == nil && !durable {
		err = m.cfg.Engine.Flush(ctx)
	}
	if err != nil {
		return false, err
	}
	return m.openMade(id)
}

// openMade opens the range's replica if the engine has a record of it.
func (m *Manager) openMade(id keyspace.RangeID) (opened bool, err error) {
	m.making.Lock()
	defer m.making.Unlock()
	if m.cfg.Owner.Replica(id) != nil {
		return true, nil
	}
	a, ok, err := m.cfg.Engine.Applied(id.Group())
	if err != nil || !ok {
		return false, err
	}
	return true, m.openHeld(id, &a)
}

// openHeld opens the range's replica from its record and gives its claim up.
func (m *Manager) openHeld(id keyspace.RangeID, a *engine.Applied) error {
	s := Start{Range: id, Applied: a}
	s.Txns, s.Unreadable = command.LoadTxns(m.cfg.Engine, id)
	err := m.openRecord(&s)
	if errors.Is(err, raftgroup.ErrExists) {
		return nil // somebody else was faster, and gives the claim up
	}
	if err == nil && m.cfg.Owner.Replica(id) != nil { // else its span waits for its removal
		m.Unclaim(id)
	}
	return err
}

// openRecord opens the replica of an applied record. s has neither replica nor record yet.
func (m *Manager) openRecord(s *Start) error {
	id, a := s.Range, s.Applied
	if keyspace.IsVersionError(s.Unreadable) {
		return s.Unreadable // no fault of the replica: this build is the wrong one
	}
	rec, err := command.DecodeRecord(a.Payload)
	if err != nil {
		return fmt.Errorf("shard: range %s: applied record at index %d: %w", id, a.Index, err)
	}
	self, _ := on(a.Replicas, m.cfg.Self)
	gone, err := m.goneStored(&rec, self)
	if err != nil {
		return err
	}
	if gone {
		// The node went down before the replica was removed. Its span is nobody else's until then.
		m.ClaimHeld(id, rec.Span)
		m.Check(id)
		return nil
	}
	s.Replica, s.Record = self, rec
	return m.cfg.Owner.Open(s)
}

// goneStored reports whether a stored replica is to be removed and not opened. It is if its
// record is without this node, or it has a tombstone, or the target of its merge has absorbed it
// by a snapshot.
func (m *Manager) goneStored(rec *command.Record, self keyspace.ReplicaID) (bool, error) {
	left, err := m.Tombstones.Left(rec.RangeID.Group())
	if err != nil || self <= left {
		return self <= left, err
	}
	if !rec.Merge.Frozen() {
		return false, nil
	}
	target, here, err := m.Record(rec.Merge.Other)
	if err != nil || !here || target.Generation <= rec.Generation || !target.Span.Contains(rec.Span.Start) {
		return false, err
	}
	return true, m.commit(func(b *engine.Batch) error { return m.Tombstones.Set(b, rec.RangeID.Group(), self) })
}
