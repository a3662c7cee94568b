package raftgroup

import (
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/quarantine"
)

// Quarantine says why a replica is kept closed.
type Quarantine = quarantine.Entry

// Quarantiner is an optional interface of a StateMachine. An error that would put a replica in
// quarantine ends the host where the state machine lacks it. Placement's does: placement replaces
// replicas of ranges, and its own only together with the node.
type Quarantiner interface {
	// Quarantined is called from any goroutine, also by Open. The replica answers nobody any
	// more.
	Quarantined(reason string)
}

// Quarantined returns the replicas in quarantine.
func (h *Host) Quarantined() map[keyspace.GroupID]Quarantine { return h.quarantine.All() }

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
	if q, added := h.addQuarantine(id, g.self, reason); added {
		g.broken.Store(true)
		h.wg.Go(func() { h.isolate(g, sm, q) })
	}
}

// KeepClosed puts a replica in quarantine that is about to be opened: what the node has of it cannot
// be read. Open keeps it closed then.
func (h *Host) KeepClosed(id keyspace.GroupID, self keyspace.ReplicaID, reason string) {
	if q, added := h.addQuarantine(id, self, reason); added {
		h.noteQuarantine(id, q)
	}
}

func (h *Host) addQuarantine(id keyspace.GroupID, self keyspace.ReplicaID, reason string) (q Quarantine, added bool) {
	q = Quarantine{Replica: self, Reason: reason, Since: h.cfg.Clock.Wall()}
	if added = h.quarantine.Add(id, q); added {
		h.log.Error("the replica is in quarantine until it is replaced",
			zap.Stringer("group", id), zap.Uint64("replica", uint64(self)), zap.String("reason", reason))
	}
	return q, added
}

// isolate ends a replica for its users, its leadership and the group here, and notes it.
func (h *Host) isolate(g *Group, sm Quarantiner, q Quarantine) {
	sm.Quarantined(q.Reason)
	ctx, cancel := clock.WithTimeout(h.ctx, h.cfg.Clock, h.cfg.ElectionTimeout)
	defer cancel()
	if err := g.Transfer(ctx, 0); err != nil && !errors.Is(err, ErrNotLeader) {
		g.zap.Warn("a replica in quarantine could not hand its leadership over", zap.Error(err))
	}
	h.beginClose(g.id)
	h.noteQuarantine(g.id, q)
}

func (h *Host) noteQuarantine(id keyspace.GroupID, q Quarantine) {
	if err := h.quarantine.Note(h.ctx, id, q); err != nil && h.ctx.Err() == nil {
		h.log.Warn("a restart may open the replica in quarantine again", zap.Stringer("group", id), zap.Error(err))
	}
}

// shut returns the group of a replica in quarantine. It refuses everything, and no message
// reaches it.
func (h *Host) shut(id keyspace.GroupID, self keyspace.ReplicaID, sm StateMachine) *Group {
	g := &Group{
		h: h, id: id, self: self, sm: sm, log: h.cfg.WAL.Group(id), awakeAt: -1, closed: true,
		zap: h.log.WithLazy(zap.Stringer("group", id), zap.Uint64("replica", uint64(self))),
	}
	g.w, g.a = h.workerOf(id)
	g.broken.Store(true)
	g.public.asleep.Store(true)
	return g
}
