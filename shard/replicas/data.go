package replicas

import (
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/command"
)

// deleteData writes the deletion of what the node has of a removed replica, and its tombstone. Its
// user keys stay where another replica holds a part of its span by now: a snapshot for the rest
// clears it.
func (m *Manager) deleteData(b *engine.Batch, g keyspace.GroupID, a *engine.Applied) error {
	local := engine.GroupLocalSpan(g)
	if err := b.DeleteRange(local.Lower, local.Upper); err != nil || g.IsSystem() {
		return err
	}
	if err := m.cfg.Owner.DeleteNotes(b, g.Range()); err != nil || a == nil {
		return err
	}
	if self, member := on(a.Replicas, m.cfg.Self); member {
		if err := m.Tombstones.Set(b, g, self); err != nil {
			return err
		}
	}
	rec, err := command.DecodeRecord(a.Payload)
	if err != nil {
		return fmt.Errorf("shard: range %s: applied record at index %d: %w", g.Range(), a.Index, err)
	}
	held, err := m.heldByOthers(g, rec.Span)
	if err != nil || held {
		return err
	}
	txns, err := command.LoadTxns(m.cfg.Engine, g.Range())
	if err != nil {
		return err
	}
	return deleteSpan(b, rec.Span, &txns)
}

// DeleteUnheld deletes the keys of a span, unless another range's replica holds a part of it here.
func (m *Manager) DeleteUnheld(id keyspace.RangeID, span keyspace.Span) error {
	held, err := m.heldByOthers(id.Group(), span)
	if err != nil || held {
		return err
	}
	data := engine.VersionedSpan(span)
	return m.commit(func(b *engine.Batch) error { return b.DeleteRange(data.Lower, data.Upper) })
}

// heldByOthers says whether a part of the span is that of another group's replica here, by the
// engine's records.
func (m *Manager) heldByOthers(g keyspace.GroupID, span keyspace.Span) (held bool, err error) {
	err = m.cfg.Engine.VisitApplied(func(o keyspace.GroupID, a engine.Applied) error {
		if held || o == g || o.IsSystem() {
			return nil
		}
		other, err := command.DecodeRecord(a.Payload)
		if err != nil || !other.Span.Overlaps(span) {
			return err
		}
		left, err := m.Tombstones.Left(o)
		self, member := on(a.Replicas, m.cfg.Self)
		held = member && self > left
		return err
	})
	return held, err
}

// deleteSpan writes the deletion of the keys of a span and of their places in the index
// of leases.
func deleteSpan(b *engine.Batch, span keyspace.Span, txns *command.TxnState) error {
	data := engine.VersionedSpan(span)
	err := b.DeleteRange(data.Lower, data.Upper)
	for lease := range txns.Attachments {
		if s := engine.LeaseSpan(lease, span); err == nil {
			err = b.DeleteRange(s.Lower, s.Upper)
		}
	}
	return err
}
