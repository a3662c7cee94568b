package shard

import (
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/kverror"
)

// Quarantined implements raftgroup.Quarantiner: the replica answers nobody any more, and whoever
// asks it is sent to the others.
func (r *Replica) Quarantined(reason string) {
	r.end(kverror.New(kverror.RangeNotHere, "range %s is in quarantine on node %s: %s", r.id, r.store.cfg.Self, reason))
	r.stopRemoval()
}

// leaveTableEvery is how often it is tried to drop a bad table.
const leaveTableEvery = time.Second

// BadTable puts every replica in quarantine whose data a bad table may hold, and drops the table once
// none is left. Which of its keys are lost is not known, so the replica's state is not either.
func (s *Store) BadTable(c engine.Corruption) {
	if !mutation.Is(mutation.RotServed) && s.lifecycle.KeepOutOf(&c) {
		s.leaveTable(&c, 0)
	}
}

// leaveTable has all replicas leave a bad table, and drops it. Otherwise each compaction would meet
// it again, and so would every replica whose records come to lie between its keys.
func (s *Store) leaveTable(c *engine.Corruption, tries int) {
	for _, g := range s.lifecycle.In(c) {
		s.cfg.Groups.Quarantine(g, c.String())
	}
	err := s.lifecycle.DropTable(s.ctx, c)
	if err == nil {
		s.metrics.tablesDropped.Inc()
		s.log.Info("dropped a bad table: no replica has data in it", zap.Stringer("corruption", c))
		return
	}
	if tries%60 == 0 {
		s.log.Warn("a bad table stays until no replica has data in it", zap.Stringer("corruption", c), zap.Error(err))
	}
	s.after(leaveTableEvery, func() { s.leaveTable(c, tries+1) })
}
