package replicas

import (
	"context"
	"fmt"
	"maps"
	"slices"

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
	now, ok := m.cfg.Placed.Descriptor(d.Range)
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

// End implements lifecycle.Remover. The replicas keep their spans from others until Gone.
func (m *Manager) End(ctx context.Context, gs []keyspace.GroupID) (failed map[keyspace.GroupID]error) {
	m.ending = make(map[keyspace.GroupID]Replica, len(gs))
	open := make(map[keyspace.GroupID]State, len(gs))
	for _, g := range gs {
		if r := m.cfg.Owner.Replica(g.Range()); r != nil {
			m.ending[g], open[g] = r, r.State()
		}
	}
	failed = m.absorbDurably(ctx, open)
	var ended []keyspace.GroupID
	for _, g := range gs {
		if r := m.ending[g]; r != nil && failed[g] == nil {
			r.Expel()
			ended = append(ended, g)
		}
	}
	// The deletion writes the tombstone itself if a durable applied record names the replica. A
	// replica without data has none, nor has a child whose first record is not flushed. After a
	// crash behind the wal's tombstone the deletion would not know their ids, and a replayed
	// split would make such a child anew.
	left := make(map[keyspace.GroupID]keyspace.ReplicaID)
	for _, g := range ended {
		left[g] = open[g].Replica
	}
	err := m.cfg.Engine.VisitDurableApplied(ended, func(g keyspace.GroupID, _ engine.Applied) error {
		delete(left, g)
		return nil
	})
	if err == nil && len(left) > 0 {
		err = m.Tombstones.Store(ctx, left)
	}
	if err != nil {
		for _, g := range ended {
			failed[g] = err
		}
	}
	return failed
}

// absorbDurably makes it durable that the targets of merges have absorbed the replicas that were
// merged away. After that a crash cannot take a target back to where it needs its source again.
func (m *Manager) absorbDurably(ctx context.Context, open map[keyspace.GroupID]State) (failed map[keyspace.GroupID]error) {
	failed = make(map[keyspace.GroupID]error)
	var flush []keyspace.GroupID
	for g, s := range open {
		if !m.mergedAway(&s) {
			continue
		}
		target, ok, err := m.DurableRecord(s.Merge.Other)
		if err != nil {
			failed[g] = err
		} else if !ok || target.Merged < s.Merge.ID {
			flush = append(flush, g)
		}
	}
	if len(flush) > 0 {
		if err := m.cfg.Engine.Flush(ctx); err != nil {
			for _, g := range flush {
				failed[g] = err
			}
		}
	}
	for g, err := range failed {
		s := open[g]
		failed[g] = fmt.Errorf("shard: range %s: that range %s has absorbed it: %w", g.Range(), s.Merge.Other, err)
	}
	return failed
}

// Destroy implements lifecycle.Remover. All deletions are written before the first is committed.
// Meanwhile nobody else may come to hold a part of what they delete.
func (m *Manager) Destroy(ctx context.Context, gs []keyspace.GroupID) (failed map[keyspace.GroupID]error) {
	open := make(map[keyspace.GroupID]State, len(gs))
	for _, g := range gs {
		if r := m.ending[g]; r != nil {
			open[g] = r.State()
		}
	}
	failed = m.beginDeletions(open)
	defer m.endDeletions()
	free := slices.DeleteFunc(slices.Clone(gs), func(g keyspace.GroupID) bool { return failed[g] != nil })
	maps.Copy(failed, m.cfg.Groups.Remove(ctx, free, m.deleter()))
	for g, err := range failed {
		failed[g] = fmt.Errorf("shard: remove the replica of range %s: %w", g.Range(), err)
	}
	return failed
}

// Gone implements lifecycle.Remover.
func (m *Manager) Gone(g keyspace.GroupID) error {
	id := g.Range()
	open := m.ending[g] != nil
	switch {
	case open:
		m.cfg.Owner.Drop(id)
	case m.cfg.Owner.Replica(id) == nil:
		m.Unclaim(id)
	}
	m.log.Info("removed a replica that is no member any more", zap.Stringer("range", id), zap.Bool("open", open))
	delete(m.ending, g)
	return nil
}
