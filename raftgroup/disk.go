package raftgroup

import (
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// diskProgress watches a counter that grows while a disk makes progress.
type diskProgress struct {
	count uint64
	moved clock.Time // when it last grew, or nothing was pending
}

// stalledFor returns how long the disk has made no progress although something was
// pending.
func (w *diskProgress) stalledFor(now clock.Time, count uint64, idle bool) time.Duration {
	if count != w.count || idle {
		w.count, w.moved = count, now
	}
	return now.Sub(w.moved)
}

// checkDisks decides whether this node's wal and store make progress. While one does not,
// the host neither ticks its groups nor reports healthy disks. Its leaders then send no
// heartbeats and lose their leases, and others take over.
//
// A store that stalls commits because it flushes slowly does not count: every replica
// applies the same entries, so another leader would be no faster.
func (p *peers) checkDisks(now clock.Time, n uint64) {
	limit := p.h.cfg.ElectionTimeout
	syncs, pending := p.h.cfg.WAL.Progress()
	// A long queue alone is no sign of a stalled disk: fsyncs complete meanwhile.
	wal := min(pending, p.wal.stalledFor(now, syncs, pending == 0)) >= limit
	var applying time.Duration
	for _, a := range p.h.appliers {
		applying = max(applying, a.pending(now))
	}
	still := p.store.stalledFor(now, p.h.cfg.Engine.Progress(), applying == 0)
	store := min(applying, still) >= limit
	p.h.m.walStalled.Set(float64(boolInt(wal)))
	p.h.m.applyStalled.Set(float64(boolInt(store)))
	// A failed component has nothing pending, and its node is about to stop.
	failed := p.h.failed.Load() || p.h.cfg.WAL.Err() != nil || p.h.cfg.Engine.Err() != nil
	if stalled := wal || store || failed; p.h.diskStalled.Swap(stalled) != stalled {
		p.h.log.Warn("disk progress changed", zap.Bool("stalled", stalled),
			zap.Duration("pending", pending), zap.Duration("applying", applying), zap.Bool("failed", failed))
	}
	// An idle wal proves nothing, so it is asked to sync once in five rounds of liveness messages.
	if pending == 0 && n%(5*p.h.cfg.livenessEvery()) == 1 && !p.h.stopping.Load() {
		p.probe.Set()
	}
}

// probeLoop is the goroutine that asks the wal for an fsync, one at a time.
func (p *peers) probeLoop() {
	for {
		select {
		case <-p.probe:
		case <-p.h.ctx.Done():
			return
		}
		// The wal reports its own errors; success shows in Progress.
		_ = p.h.cfg.WAL.Sync(p.h.ctx)
	}
}

// pending returns how long the current batch has been entering the engine. The engine
// stalls commits while it has too much to flush, which soon happens on a disk that hangs
// or is full. A state machine may also have to read.
func (a *applier) pending(now clock.Time) time.Duration {
	if at := clock.Time(a.began.Load()); at != 0 {
		return now.Sub(at)
	}
	return 0
}

// DiskStalled reports whether this node's wal or store makes no progress.
func (h *Host) DiskStalled() bool { return h.diskStalled.Load() }
