package shard

import (
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
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

// BadTable puts every replica in quarantine whose keys a bad table may hold. Which of the keys are
// lost is not known, so the replica's state is not either. A replica that a snapshot has filled since
// the table was first met is in other tables. One goroutine calls BadTable.
func (s *Store) BadTable(c engine.Corruption) {
	if mutation.Is(mutation.RotServed) {
		return
	}
	met, ok := s.rotten[c.Path]
	if !ok {
		met = s.cfg.Clock.Now()
		s.rotten[c.Path] = met
	}
	held := false
	for _, r := range s.Replicas() {
		if r.mayBeIn(c.Bounds, met) {
			held = true
			s.cfg.Groups.Quarantine(r.id.Group(), c.String())
		}
	}
	if !held {
		s.dropTable(&c)
	}
}

// dropTable drops a bad table that no replica has keys in any more. Otherwise each compaction would
// meet it again, and so would the copy that brings a replica back.
func (s *Store) dropTable(c *engine.Corruption) {
	span, only := c.UserSpan()
	if !only {
		// Nothing keeps the records of ranges that are yet to come out of such a span.
		s.log.Warn("a bad table stays, although no replica has keys in it", zap.Stringer("corruption", c))
		return
	}
	if err := s.lifecycle.DropUnheld(s.ctx, span); err != nil {
		s.log.Warn("a bad table is not dropped", zap.Stringer("corruption", c), zap.Error(err))
		return
	}
	s.metrics.tablesDropped.Inc()
	s.log.Info("dropped a bad table: no replica has keys in it", zap.Stringer("corruption", c))
}

// mayBeIn says whether a table with the bounds, which was first met at the time, may hold keys of the
// replica.
func (r *Replica) mayBeIn(bounds engine.KeySpan, met clock.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.rec.Generation == 0 || r.absorbed:
		return false // it has no data
	case r.filledAt > met:
		return false
	case bounds.Overlaps(engine.VersionedSpan(r.rec.Span)), bounds.Overlaps(engine.GroupLocalSpan(r.id.Group())):
		return true
	}
	// The index of leases is the node's and divided by leases, not by ranges.
	first, _, err1 := engine.DecodeLeaseKey(bounds.Lower)
	last, _, err2 := engine.DecodeLeaseKey(bounds.Upper)
	if err1 != nil || err2 != nil {
		return bounds.Overlaps(engine.LeaseIndexSpan())
	}
	return first != last || bounds.Overlaps(engine.LeaseSpan(first, r.rec.Span))
}
