package shard

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/removal"
)

// pinLocked keeps the range from compacting beyond the revision, or beyond those that
// are still to come where it is 0.
func (r *Replica) pinLocked(at keyspace.Revision) {
	if at == 0 {
		// The compacted revision has been allocated, so the transaction's revision will be
		// above it.
		at = max(r.store.Floor(), r.store.Compacted())
	}
	r.pins.Add(r.store.cfg.Clock.Now(), at)
}

// pinnedLocked returns the highest revision, c at most, to which pins let this leader compact.
func (r *Replica) pinnedLocked(c keyspace.Revision) keyspace.Revision {
	if !r.pins.Any() {
		return c
	}
	return r.pins.Lowest(r.store.cfg.Clock.Now(), r.store.unpins.below(), c)
}

// keepLocked returns the highest revision to which this leader may compact now.
func (r *Replica) keepLocked(c keyspace.Revision) keyspace.Revision {
	c = r.pinnedLocked(c)
	c = r.locks.LowestFloor(c)
	// A batch that is being sequenced may get revisions below and come behind the compaction in
	// the log. The versions that it replaces would stay until the next compaction.
	return r.pipe.LowestFloor(c)
}

// The pauses between two questions whether pins are still needed grow from first to last
// by doubling: most transactions take milliseconds.
const (
	unpinPauseFirst = 5 * time.Millisecond
	unpinPauseLast  = 500 * time.Millisecond
)

// unpins finds out, for all leaders of a node, that nobody reads the pinned versions any more.
// A pin below the cluster's compacted revision belongs to a transaction that began before this
// node heard of the compaction: a later one is refused or pins a higher revision. So once no
// coordinator has such a transaction, there will be none.
type unpins struct {
	store *Store
	// done is the revision below which nobody reads any more.
	done atomic.Int64

	mu sync.Mutex
	// Guarded by mu. held are the replicas to look after when it is known; asking says that
	// somebody is finding out.
	held   map[*Replica]struct{}
	asking bool
}

func (u *unpins) below() keyspace.Revision { return keyspace.Revision(u.done.Load()) }

// note has a replica looked after that is held back by pins, once it is not.
func (u *unpins) note(r *Replica) {
	if u.store.cfg.Txns == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.held[r] = struct{}{}
	if !u.asking {
		u.asking = true
		u.store.wg.Go(u.ask)
	}
}

// ask asks the coordinators until they need no pin below what is compacted. When all pins
// must have expired it gives up: whoever is held back then has noted itself again.
func (u *unpins) ask() {
	s := u.store
	start := s.cfg.Clock.Now()
	for pause := unpinPauseFirst; ; pause = min(2*pause, unpinPauseLast) {
		c := s.Compacted()
		ctx, cancel := clock.WithTimeout(s.ctx, s.cfg.Clock, pushTimeout)
		reads, err := s.cfg.Txns.Reads(ctx, c)
		cancel()
		if err == nil && !reads {
			raise(&u.done, int64(c))
			if !u.end(c) {
				return
			}
			pause = unpinPauseFirst
			continue
		}
		if clock.Sleep(s.ctx, s.cfg.Clock, pause) != nil || s.cfg.Clock.Now().Sub(start) >= 2*removal.PinFor {
			if s.ctx.Err() == nil {
				s.log.Info("whether pins are needed was not found out", zap.Int64("compacted", int64(c)), zap.Error(err))
			}
			u.end(keyspace.MaxRevision)
			return
		}
	}
}

// end has those looked after that were held back, and ends the asking unless more than c is
// compacted by now.
func (u *unpins) end(c keyspace.Revision) (more bool) {
	u.mu.Lock()
	held := u.held
	u.held = map[*Replica]struct{}{}
	more = u.store.Compacted() > c
	u.asking = more
	u.mu.Unlock()
	for r := range held {
		u.store.maintenance.note(r)
	}
	return more
}
