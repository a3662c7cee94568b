package replicas

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/lifecycle"
)

// Suspects implements lifecycle.Remover.
func (m *Manager) Suspects() (gs []keyspace.GroupID) {
	for _, r := range m.cfg.Owner.Replicas() {
		if s := r.State(); m.expelled(&s) || m.mergedAway(&s) {
			gs = append(gs, r.Range().Group())
		}
	}
	return gs
}

// Verdict implements lifecycle.Remover.
func (m *Manager) Verdict(g keyspace.GroupID) (lifecycle.Verdict, error) {
	r := m.cfg.Owner.Replica(g.Range())
	if r == nil {
		return m.verdictStored(g)
	}
	s := r.State()
	switch {
	case !m.mergedAway(&s) && !m.expelled(&s) || mutation.Is(mutation.NeverRemoved):
		return lifecycle.Stay, nil
	case !s.Ended && !r.CaughtUp():
		// One of these entries may be a split, which makes a child: without this log nothing
		// would, and the child's own log may stand in the wal since before a crash. A replica
		// that has ended, by a merge or an attempt that failed, makes no child any more.
		return lifecycle.Wait, nil
	}
	return lifecycle.Remove, nil
}

// verdictStored judges what the engine has of a replica that was not opened, because the
// configuration in its record is without it.
func (m *Manager) verdictStored(g keyspace.GroupID) (lifecycle.Verdict, error) {
	a, ok, err := m.cfg.Engine.Applied(g)
	if err != nil || !ok {
		return lifecycle.Stay, err
	}
	left, err := m.Tombstones.Left(g)
	if self, member := on(a.Replicas, m.cfg.Self); err != nil || member && self > left {
		return lifecycle.Stay, err // it is being opened
	}
	return lifecycle.Remove, nil
}

// expelled says whether the replica is certainly no member of its group any more.
func (m *Manager) expelled(s *State) bool {
	d := &s.Descriptor
	if d.Generation == 0 {
		d = &s.Introduced
	}
	if s.Replica == 0 {
		return false
	}
	if !lifecycle.Has(d.Replicas, s.Replica) {
		return true
	}
	if m.cfg.Placed == nil {
		return false
	}
	now, ok := m.cfg.Placed.Descriptor(d.Range, d.Span.Start)
	if !ok {
		return !s.Merge.Frozen() && m.overtaken(d)
	}
	return lifecycle.Removed(s.Replica, d, &now)
}

// overtaken says whether another range has come to hold the descriptor's first key after it,
// by the map. A range keeps its first key until it is absorbed: that has happened then, and
// every replica that was a member is frozen.
func (m *Manager) overtaken(d *keyspace.Descriptor) bool {
	now, ok := m.cfg.Placed.At(d.Span.Start)
	return ok && now.Range != d.Range && now.Generation > d.Generation
}

// mergedAway says whether the merge for which the replica is frozen is certainly committed,
// and no other replica here needs what this one has at the end.
func (m *Manager) mergedAway(s *State) bool {
	if !s.Merge.Frozen() {
		return false
	}
	target, here, err := m.Record(s.Merge.Other)
	if err != nil || here && target.Merged < s.Merge.ID {
		return false
	}
	return s.Absorbed || m.cfg.Placed != nil && m.overtaken(&s.Descriptor)
}

// End implements lifecycle.Remover. The replica keeps its span from others until Gone.
func (m *Manager) End(ctx context.Context, g keyspace.GroupID) error {
	r := m.cfg.Owner.Replica(g.Range())
	if m.ending = r; r == nil {
		return nil
	}
	s := r.State()
	if m.mergedAway(&s) {
		if err := m.absorbDurably(ctx, &s); err != nil {
			return err
		}
	}
	r.Expel()
	// The deletion writes the tombstone itself if a durable applied record names the replica. A
	// replica without data has none, nor has a child whose first record is not flushed. After a
	// crash behind the wal's tombstone the deletion would not know their ids, and a replayed
	// split would make such a child anew.
	_, durable, err := m.cfg.Engine.DurableApplied(g)
	if err != nil || durable {
		return err
	}
	return m.Tombstones.Store(ctx, g, s.Replica)
}

// absorbDurably returns once a crash cannot take the target of a merge back to where it
// needs the frozen replica again.
func (m *Manager) absorbDurably(ctx context.Context, s *State) error {
	target, ok, err := m.DurableRecord(s.Merge.Other)
	if err == nil && (!ok || target.Merged < s.Merge.ID) {
		err = m.cfg.Engine.Flush(ctx)
	}
	if err != nil {
		return fmt.Errorf("shard: range %s: that range %s has absorbed it: %w", s.Descriptor.Range, s.Merge.Other, err)
	}
	return nil
}

// Destroy implements lifecycle.Remover.
func (m *Manager) Destroy(ctx context.Context, g keyspace.GroupID) error {
	err := m.cfg.Groups.Remove(ctx, g, func(b *engine.Batch) error {
		a, ok, err := m.cfg.Engine.Applied(g)
		if err != nil {
			return err
		}
		if !ok {
			return m.deleteData(b, g, nil)
		}
		return m.deleteData(b, g, &a)
	})
	if err != nil {
		return fmt.Errorf("shard: remove the replica of range %s: %w", g.Range(), err)
	}
	return nil
}

// Gone implements lifecycle.Remover.
func (m *Manager) Gone(g keyspace.GroupID) error {
	id := g.Range()
	switch {
	case m.ending != nil:
		m.cfg.Owner.Drop(id)
	case m.cfg.Owner.Replica(id) == nil:
		m.Unclaim(id)
	}
	m.log.Info("removed a replica that is no member any more", zap.Stringer("range", id), zap.Bool("open", m.ending != nil))
	m.ending = nil
	return nil
}
