package load

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/load/heat"
)

const (
	// tick is how often the meter measures a range in use.
	tick = time.Second
	// meanTime is the time over which load is averaged: load so long ago counts for a third.
	meanTime = 10 * time.Second
	// restTicks is after how many ticks without a request or an entry a range is at rest. By
	// then the means have come down to a twentieth.
	restTicks = 30
	// estimatesPerTick bounds the questions to the store for a size. An answer costs some
	// 20 µs: 10,000 ranges of a node that starts take two minutes and no more than a
	// hundredth of a core.
	estimatesPerTick = 100
	// sweptPerFlush is how many ranges at rest are looked at anew when the store has written
	// tables: compactions let go of bytes that ranges had.
	sweptPerFlush = 16
)

// Store knows how large spans are.
type Store interface {
	// EstimateSpanBytes is about what the tables hold of the span.
	EstimateSpanBytes(span keyspace.Span) (int64, error)
	// Flush returns when all that was committed before is in tables.
	Flush(ctx context.Context) error
	// Middle is as mvcc.FindSplitKey.
	Middle(span keyspace.Span) (mvcc.Split, error)
}

// Config is what a Meter is made of. All fields but Heat are required.
type Config struct {
	Clock clock.Clock
	Store Store
	// MaxBytes is how large a range may be before it is split. 0 and negative: without bound.
	MaxBytes int64
	// MaxLoad is how many requests a second a range may have before it is split, if the load
	// divides. Negative: without bound.
	MaxLoad int64
	// Some returns at most that many ranges of the node, other ones each time.
	Some    func(most int) []*Range
	Metrics *Metrics
	// Heat takes what the ranges serve; nil is nobody.
	Heat *heat.Recorder
}

// Meter measures the ranges of a node and splits those that exceed a bound.
type Meter struct {
	cfg  Config
	list list
	// flushes counts how often the store has written tables.
	flushes atomic.Uint64
	// splitting counts the splits under way, which splits waits for.
	splitting atomic.Int64
	splits    sync.WaitGroup // and the flushes for the heat map

	// The fields below are Run's alone. It measures the active ranges at every tick. The
	// unflushed ones are at rest with bytes outside of tables: Run measures them when the
	// store has written tables. estimates is the rest of estimatesPerTick; swept are the
	// flushes when ranges at rest were last looked at.
	active, unflushed map[*Range]struct{}
	estimates         int
	swept             uint64
	// heatUnsaved is how many minutes of the heat map were kept since so many flushes.
	heatFlushes uint64
	heatUnsaved int
	// heatSaving says that the store is asked to write them.
	heatSaving atomic.Bool
}

// NewMeter returns a meter that has no range on its list.
func NewMeter(cfg Config) *Meter {
	return &Meter{cfg: cfg, list: list{wake: wake.New()}, active: map[*Range]struct{}{}, unflushed: map[*Range]struct{}{}}
}

// Flushed notes that the store has written tables.
func (m *Meter) Flushed() {
	m.flushes.Add(1)
	m.list.wake.Set()
}

// Run measures until ctx ends, and returns when the splits that it has started have
// ended.
func (m *Meter) Run(ctx context.Context) {
	defer m.splits.Wait()
	defer m.endHeat()
	for {
		if len(m.active) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-m.list.wake:
			}
		}
		m.tick(ctx)
		if clock.Sleep(ctx, m.cfg.Clock, tick) != nil {
			return
		}
	}
}

// tick measures all ranges in use.
func (m *Meter) tick(ctx context.Context) {
	for _, r := range m.list.take() {
		m.active[r] = struct{}{}
		delete(m.unflushed, r)
	}
	flushes := m.flushes.Load()
	if flushes != m.swept {
		m.sweep(flushes)
	}
	m.turnHeat(ctx, flushes)
	m.estimates = estimatesPerTick
	now := m.cfg.Clock.Now()
	for r := range m.active {
		if m.measure(ctx, r, now, flushes) {
			continue
		}
		delete(m.active, r)
		r.mu.Lock()
		if !r.owner.LoadState().Stopped && r.applied != r.flushed {
			m.unflushed[r] = struct{}{}
		}
		r.mu.Unlock()
	}
}

// sweep puts ranges at rest back on the list: those with bytes that were not in tables,
// and some others.
func (m *Meter) sweep(flushes uint64) {
	m.swept = flushes
	for r := range m.unflushed {
		m.active[r] = struct{}{}
	}
	clear(m.unflushed)
	for _, r := range m.cfg.Some(sweptPerFlush) {
		m.active[r] = struct{}{}
	}
}

// measure measures one range, and starts what follows from it. It says whether the
// range is in use.
func (m *Meter) measure(ctx context.Context, r *Range, now clock.Time, flushes uint64) (inUse bool) {
	r.mu.Lock()
	s := r.owner.LoadState()
	served := r.servedLocked(s)
	if s.Stopped || s.Generation == 0 {
		r.last = r.counters
		r.restLocked()
		r.mu.Unlock()
		m.cfg.Heat.Add(served)
		return false
	}
	r.metered = true
	before := r.last.applied
	r.rateLocked(now)
	stale := !r.estimated || r.generation != s.Generation || r.gauge.flushes != flushes
	judge := r.sampleLocked(now)
	r.mu.Unlock()
	m.cfg.Heat.Add(served)
	if stale && m.estimates > 0 {
		m.estimates--
		r.estimate(before, flushes)
		stale = false
	}
	if judge != nil {
		r.judge(judge, now)
	}
	cause, wants := r.splitDue(now)
	if cause != splitNone {
		m.split(ctx, r, cause)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if stale || wants || r.quiet < restTicks {
		return true
	}
	r.restLocked()
	return false
}
