package raftgroup

import (
	"encoding/json"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Quarantine closes the group's replica on this host, and keeps it closed until Remove, also over
// restarts: no vote, no lead, no apply, no read. Its log is intact, so a leader hands over first,
// for one election timeout at most. Quarantine does not wait, and does nothing for a replica that
// is not open. The group goes on without this replica as it does without a node.
func (h *Host) Quarantine(id keyspace.GroupID, reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.mu.groups[id]
	if g == nil || h.stopping.Load() {
		return
	}
	sm, ok := g.sm.(Quarantiner)
	if !ok {
		h.fail(fmt.Errorf("raftgroup: group %s: %s", id, reason))
		return
	}
	q, added := h.quarantineLocked(id, g.self, reason)
	if !added {
		return
	}
	g.broken.Store(true)
	h.wg.Go(func() { h.isolate(g, sm, q) })
}

// KeepClosed puts a replica in quarantine that is about to be opened: what the node has of it cannot
// be read. Open keeps it closed then.
func (h *Host) KeepClosed(id keyspace.GroupID, self keyspace.ReplicaID, reason string) {
	h.mu.Lock()
	q, added := h.quarantineLocked(id, self, reason)
	h.mu.Unlock()
	if added {
		h.tryNoteQuarantine(id, q)
	}
}

func (h *Host) quarantineLocked(id keyspace.GroupID, self keyspace.ReplicaID, reason string) (q Quarantine, added bool) {
	if q, ok := h.mu.quarantined[id]; ok && q.Replica == self {
		return q, false
	}
	q = Quarantine{Replica: self, Reason: reason, Since: h.cfg.Clock.Wall()}
	h.mu.quarantined[id] = q
	h.m.quarantined.Set(float64(len(h.mu.quarantined)))
	h.log.Error("the replica is in quarantine until it is replaced",
		zap.Stringer("group", id), zap.Uint64("replica", uint64(self)), zap.String("reason", reason))
	return q, true
}

// isolate ends a replica for its users, its leadership and the group here, and notes it. The note
// comes last: what it keeps away until then is met again after a crash.
func (h *Host) isolate(g *Group, sm Quarantiner, q Quarantine) {
	sm.Quarantined(q.Reason)
	ctx, cancel := clock.WithTimeout(h.ctx, h.cfg.Clock, h.cfg.ElectionTimeout)
	defer cancel()
	if err := g.Transfer(ctx, 0); err != nil && !errors.Is(err, ErrNotLeader) {
		g.zap.Warn("a replica in quarantine could not hand its leadership over", zap.Error(err))
	}
	h.beginClose(g.id)
	h.tryNoteQuarantine(g.id, q)
}

// tryNoteQuarantine notes the quarantine, unless the replica is being removed: the removal, which
// forgets the quarantine before it deletes the note, may be past that.
func (h *Host) tryNoteQuarantine(id keyspace.GroupID, q Quarantine) {
	err := h.noteQuarantine(id, q)
	if _, stands := h.inQuarantine(id, q.Replica); !stands && err == nil {
		err = h.deleteQuarantineNote(id)
	}
	if err != nil && h.ctx.Err() == nil {
		h.log.Warn("a restart may open the replica in quarantine again", zap.Stringer("group", id), zap.Error(err))
	}
}

func (h *Host) noteQuarantine(id keyspace.GroupID, q Quarantine) error {
	v, err := json.Marshal(q)
	if err != nil {
		return fmt.Errorf("raftgroup: note the quarantine: %w", err)
	}
	b := h.cfg.Engine.NewBatch()
	if err = b.Set(quarantineKey(id), v); err == nil {
		err = b.Commit()
	}
	if err = errors.Join(err, b.Close()); err == nil {
		err = h.cfg.Engine.Flush(h.ctx)
	}
	if err != nil {
		return fmt.Errorf("raftgroup: note the quarantine: %w", err)
	}
	return nil
}

func (h *Host) deleteQuarantineNote(id keyspace.GroupID) error {
	b := h.cfg.Engine.NewBatch()
	err := b.Delete(quarantineKey(id))
	if err == nil {
		err = b.Commit()
	}
	if err = errors.Join(err, b.Close()); err != nil {
		return fmt.Errorf("raftgroup: delete the note of a quarantine: %w", err)
	}
	return nil
}
