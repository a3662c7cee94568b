package shard

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
)

const (
	// meterTick is how often a range in use is measured.
	meterTick = time.Second
	// loadMeanTime is the time over which load is averaged: what was that long ago counts
	// for a third.
	loadMeanTime = 10 * time.Second
	// restTicks is after how many ticks without a request or an entry a range is at rest. By
	// then the means have come down to a twentieth.
	restTicks = 30
	// estimatesPerTick bounds the questions to the store how large a range is: some 20 µs
	// each, so that 10,000 ranges of a node that starts take two minutes and no more than a
	// hundredth of a core.
	estimatesPerTick = 100
	// sweptPerFlush is how many ranges at rest are looked at anew when the store has written
	// tables: compactions let go of what they have.
	sweptPerFlush = 16
)

// gauge is what the meter has made of a replica's tally. The replica's mu guards it.
type gauge struct {
	// stored is about what the span takes in tables, by the estimate that was made of this
	// generation's span behind so many flushes; where estimated is false there is none.
	// flushed is the tally's applied bytes that were in tables then.
	stored     int64
	estimated  bool
	generation keyspace.Generation
	flushes    uint64
	flushed    uint64

	// last is the tally when it was last looked at, at that time; 0 is not since a rest.
	last tally
	at   clock.Time
	// quiet counts the ticks since anything was counted.
	quiet int
	// writes and reads are requests a second, bytes what the writes bring.
	writes, reads, bytes float64

	// hotAt is since when there is more load than the bound, 0 where there is not.
	// sampleAt is when requests are sampled next, divides the key at which the last
	// sample divides.
	hotAt, sampleAt clock.Time
	divides         []byte
	// unsplit is why it is not split although it should be, for people.
	unsplit string
	// splitting says that it is being split by itself, splitAt when that may be tried next.
	splitting bool
	splitAt   clock.Time
	backoff   time.Duration
}

// meter measures the ranges of a node in one goroutine, and has those split that this
// node leads and that are too large or too hot. A range at rest is on no list: its first
// request, or entry, puts it there.
type meter struct {
	n    *Node
	kick chan struct{}
	// flushes counts what the engine says of tables that were written.
	flushes atomic.Uint64
	// splitting counts the splits under way.
	splitting atomic.Int64

	mu sync.Mutex
	// noted are those that have begun to be used. Guarded by mu.
	noted []*Replica

	// Only run touches these. active is measured at every tick, unflushed when the store has
	// written tables: it is at rest, and not all of it was in tables. estimates is what is
	// left of estimatesPerTick, swept the flushes when ranges at rest were last looked at.
	active, unflushed map[*Replica]struct{}
	estimates         int
	swept             uint64
}

func newMeter(n *Node) *meter {
	return &meter{n: n, kick: make(chan struct{}, 1), active: map[*Replica]struct{}{}, unflushed: map[*Replica]struct{}{}}
}

// note has a replica measured from the next tick on.
func (m *meter) note(r *Replica) {
	m.mu.Lock()
	m.noted = append(m.noted, r)
	m.mu.Unlock()
	m.wake()
}

func (m *meter) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// run is the meter's goroutine.
func (m *meter) run(ctx context.Context) {
	remove := m.n.cfg.Engine.OnDurable(func() {
		m.flushes.Add(1)
		m.wake()
	})
	defer remove()
	for {
		if len(m.active) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-m.kick:
			}
		}
		m.tick()
		if clock.Sleep(ctx, m.n.cfg.Clock, meterTick) != nil {
			return
		}
	}
}

// tick measures all that is in use.
func (m *meter) tick() {
	m.mu.Lock()
	noted := m.noted
	m.noted = nil
	m.mu.Unlock()
	for _, r := range noted {
		m.active[r] = struct{}{}
		delete(m.unflushed, r)
	}
	flushes := m.flushes.Load()
	if flushes != m.swept {
		m.sweep(flushes)
	}
	m.estimates = estimatesPerTick
	now := m.n.cfg.Clock.Now()
	for r := range m.active {
		if m.measure(r, now, flushes) {
			continue
		}
		delete(m.active, r)
		r.mu.Lock()
		if !r.stopped && r.tally.applied != r.gauge.flushed {
			m.unflushed[r] = struct{}{}
		}
		r.mu.Unlock()
	}
}

// sweep has those measured again that were at rest and have grown before, and some others.
func (m *meter) sweep(flushes uint64) {
	m.swept = flushes
	for r := range m.unflushed {
		m.active[r] = struct{}{}
	}
	clear(m.unflushed)
	m.n.mu.RLock()
	defer m.n.mu.RUnlock()
	some := sweptPerFlush
	for _, r := range m.n.replicas {
		m.active[r] = struct{}{}
		if some--; some == 0 {
			return
		}
	}
}

// measure takes one replica's measure, and begins what follows from it. It says whether
// the replica is in use.
func (m *meter) measure(r *Replica, now clock.Time, flushes uint64) (inUse bool) {
	r.mu.Lock()
	if r.stopped || r.rec.Generation == 0 {
		r.restLocked()
		r.mu.Unlock()
		return false
	}
	r.tally.metered = true
	before := r.gauge.last.applied
	r.rateLocked(now)
	stale := !r.gauge.estimated || r.gauge.generation != r.rec.Generation || r.gauge.flushes != flushes
	judge := r.sampledLocked(now)
	r.mu.Unlock()
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
		m.split(r, cause)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if stale || wants || r.gauge.quiet < restTicks {
		return true
	}
	r.restLocked()
	return false
}

// rateLocked brings the rates up to now.
func (r *Replica) rateLocked(now clock.Time) {
	g, t := &r.gauge, &r.tally
	g.quiet++
	if g.at == 0 || t.writes != g.last.writes || t.reads != g.last.reads || t.applied != g.last.applied {
		g.quiet = 0
	}
	if took := now.Sub(g.at).Seconds(); g.at != 0 && took > 0 {
		weight := 1 - math.Exp(-took/loadMeanTime.Seconds())
		mean := func(rate *float64, now, then uint64) { *rate += (float64(now-then)/took - *rate) * weight }
		mean(&g.writes, t.writes, g.last.writes)
		mean(&g.reads, t.reads, g.last.reads)
		mean(&g.bytes, t.bytes, g.last.bytes)
	}
	g.last, g.at = tally{writes: t.writes, reads: t.reads, bytes: t.bytes, applied: t.applied}, now
}

// restLocked takes the replica off the meter's list.
func (r *Replica) restLocked() {
	g, t := &r.gauge, &r.tally
	g.writes, g.reads, g.bytes, g.at = 0, 0, 0, 0
	t.metered, t.due = false, 0
	r.coolLocked()
}

// replacedLocked says that a snapshot has taken the place of all that was here.
func (r *Replica) replacedLocked() {
	r.gauge.estimated, r.gauge.flushed = false, r.tally.applied
	r.meterLocked()
}

// estimate asks the store what the range takes. What was applied before, up to the
// tally's applied, is in tables where the store has written some since the last estimate.
func (r *Replica) estimate(applied, flushes uint64) {
	r.mu.Lock()
	span, generation := r.rec.Span, r.rec.Generation
	r.mu.Unlock()
	bytes, err := r.node.cfg.Engine.EstimateSpanBytes(span)
	if err != nil {
		r.log.Warn("estimate the range's size", zap.Error(err))
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	g := &r.gauge
	switch {
	case generation != r.rec.Generation:
		return
	case g.generation != generation:
		// Of what is not in tables nobody knows whose it is: too little is counted until it
		// is, so that a range that was just split is not split again for what has left it.
		g.flushed = r.tally.applied
	case g.flushes != flushes:
		g.flushed = max(g.flushed, applied)
	}
	g.stored, g.estimated, g.generation, g.flushes = bytes, true, generation, flushes
}

// coolLocked ends what there is for a hot range alone.
func (r *Replica) coolLocked() {
	g := &r.gauge
	g.hotAt, g.sampleAt, g.divides = 0, 0, nil
	if r.tally.sample != nil {
		r.tally.sample = nil
		r.tally.due = never
	}
}

// sampledLocked sees to the sampling of a hot range's requests, and returns a sample that
// is to be judged.
func (r *Replica) sampledLocked(now clock.Time) *sampler {
	g, t, bound := &r.gauge, &r.tally, float64(r.node.cfg.Limits.RangeSplitLoad)
	load := g.writes + g.reads
	switch {
	case r.lead == nil || bound < 0 || load < bound*coolPart:
		if g.hotAt != 0 {
			r.coolLocked()
			g.unsplit = ""
		}
		return nil
	case load >= bound && g.hotAt == 0:
		g.hotAt, g.sampleAt = now, now
	case g.hotAt == 0:
		return nil
	}
	if s := t.sample; s != nil && now.Sub(s.began) >= sampleTime {
		t.sample, t.due = nil, never
		return s
	}
	if t.sample == nil && now >= g.sampleAt {
		t.sample, t.due = newSampler(now, load), 0
	}
	return nil
}

// judge says where the sampled load divides, or why it does not.
func (r *Replica) judge(s *sampler, now clock.Time) {
	sample := divide.Sample{Requests: s.requests}
	key, shape := sample.Divide()
	r.mu.Lock()
	defer r.mu.Unlock()
	g := &r.gauge
	if g.hotAt == 0 {
		return
	}
	g.sampleAt = now
	if shape == divide.Divides && r.rec.Span.Contains(key) && string(key) != string(r.rec.Span.Start) {
		g.divides = key
		return
	}
	g.divides, g.sampleAt = nil, now.Add(sampleRest)
	if shape != divide.Divides && shape != divide.TooFew {
		r.unsplitLocked(shapeReasons[shape], "it has much load and is not split: "+shape.String())
	}
}
