package shard

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// Bounds of a drain.
const (
	// drainClose is how long pipelines may take to close. A range without quorum takes
	// all of it; what the caller's time leaves is for transfers.
	drainClose = 3 * time.Second
	// transferTimeout is how long one transfer may take: a group without quorum must
	// not keep others from theirs.
	transferTimeout = time.Second
	// drainAtOnce bounds the ranges whose pipelines are waited for, transfers the
	// leaderships that are handed over at a time.
	drainAtOnce = 1024
	transfers   = 16
)

// Drain closes the pipelines of all replicas for good, waits until what holds or
// awaits revisions is applied and answered, and hands each leadership over as soon
// as its pipeline is closed. Reads go on as long as this node leads. Ranges that
// have not closed within drainClose keep their leader. An error says how many did
// not close or have kept their leader; pipelines stay closed.
func (s *Store) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	all := s.Replicas()
	for _, r := range all {
		r.mu.Lock()
		r.pipe.Drain()
		r.mu.Unlock()
		r.pipe.Schedule()
	}
	closing, cancel := clock.WithTimeout(ctx, s.cfg.Clock, drainClose)
	defer cancel()
	var wg sync.WaitGroup
	d := drain{store: s, gate: make(chan struct{}, transfers)}
	slots := make(chan struct{}, drainAtOnce)
	for _, r := range all {
		if !r.needsDrain() {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			d.one(ctx, closing, r)
		})
	}
	wg.Wait()
	open, kept := d.open.Load(), d.kept.Load()
	if open > 0 || kept > 0 {
		return fmt.Errorf("shard: %d pipelines did not close, %d leaderships could not be handed over", open, kept)
	}
	return nil
}

// needsDrain says whether the replica has anything to finish or to hand over.
func (r *Replica) needsDrain() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pipe.Leads() || !r.idleLocked()
}

// drain is one run of Drain.
type drain struct {
	store *Store
	// gate bounds the transfers.
	gate chan struct{}
	// open and kept count the ranges that were not closed and not handed over.
	open, kept atomic.Int64
}

func (d *drain) one(ctx, closing context.Context, r *Replica) {
	if err := r.closePipeline(closing); err != nil {
		d.open.Add(1)
		r.log.Warn("the queue of a range has not emptied before the stop", zap.Error(err))
		return
	}
	r.mu.Lock()
	leads := r.pipe.Leads() && len(r.replicas) > 1
	r.mu.Unlock()
	if !leads {
		return
	}
	select {
	case d.gate <- struct{}{}:
	case <-ctx.Done():
		d.kept.Add(1)
		return
	}
	defer func() { <-d.gate }()
	tctx, cancel := clock.WithTimeout(ctx, d.store.cfg.Clock, transferTimeout)
	defer cancel()
	if err := r.group.Transfer(tctx, 0); err != nil {
		d.kept.Add(1)
		r.log.Warn("the leadership of a range was not handed over", zap.Error(err))
	}
}
