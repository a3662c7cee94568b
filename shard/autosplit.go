package shard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// A leader splits its range by itself where it is larger than Limits.RangeMaxBytes, and
// where it has more load than Limits.RangeSplitLoad and the load divides. It needs
// nobody for that: a split moves no data and asks no other node, and whether a range can
// be divided at all only its leader knows, from the keys. Placement hears of it as of
// any other.

// splitCause is why a range is split by itself.
type splitCause uint8

const (
	splitNone splitCause = iota
	splitBySize
	splitByLoad
)

var splitCauses = [...]string{"none", "size", "load"}

// String returns the cause in one word.
func (c splitCause) String() string { return splitCauses[c] }

const (
	// splitsAtOnce bounds the splits by itself of one node that are under way.
	splitsAtOnce = 2
	// splitPatience is how long load must have been too high before a range is split for
	// it: what is over by then needed no split.
	splitPatience = 30 * time.Second
	// coolPart is the part of the bound below which load is not high any more.
	coolPart = 0.8
	// sampleRest is how long a range whose load does not divide is not sampled again.
	sampleRest = 30 * time.Second
	// splitRest is how long a range that was split is not split again: by then its size
	// and load are its own.
	splitRest = 10 * time.Second
	// splitTimeout bounds one attempt.
	splitTimeout = 30 * time.Second
	// After an attempt that failed the next one waits, twice as long each time: from
	// splitRetry where something was in the way, from splitHopeless where the range cannot
	// be divided, to splitRetryMost.
	splitRetry     = 5 * time.Second
	splitHopeless  = time.Minute
	splitRetryMost = time.Hour
)

// Reasons why a range is not split, as the metric has them.
const (
	reasonOneKey = "one-key"
	reasonFailed = "failed"
)

var shapeReasons = map[divide.Shape]string{divide.HotKey: "hot-key", divide.Tail: "tail", divide.Spans: "spans"}

// errSmaller says that a range which was to be split for its size is not too large.
var errSmaller = errors.New("shard: it is not too large")

// unsplitLocked notes why a range is not split that should be.
func (r *Replica) unsplitLocked(reason, words string) {
	if r.gauge.unsplit == words {
		return
	}
	r.gauge.unsplit = words
	r.node.metrics.unsplit.WithLabelValues(reason).Inc()
	r.log.Info("the range is not split by itself", zap.String("why", words),
		zap.Int64("bytes", r.bytesLocked()), zap.Float64("requests_per_second", r.gauge.writes+r.gauge.reads))
}

// splitDue says whether the range is to be split now, and whether it should be, now or
// later.
func (r *Replica) splitDue(now clock.Time) (cause splitCause, wants bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := &r.gauge
	switch most := r.node.cfg.Limits.RangeMaxBytes; {
	case r.lead == nil || r.draining:
		return splitNone, false
	case most > 0 && g.estimated && g.generation == r.rec.Generation && r.bytesLocked() > most:
		cause = splitBySize
	case g.divides != nil && now.Sub(g.hotAt) >= splitPatience:
		cause = splitByLoad
	default:
		return splitNone, false
	}
	if g.splitting || now < g.splitAt {
		return splitNone, true
	}
	return cause, true
}

// split has a range split, if there is room for one more.
func (m *meter) split(r *Replica, cause splitCause) {
	if m.splitting.Load() >= splitsAtOnce {
		return
	}
	m.splitting.Add(1)
	r.mu.Lock()
	r.gauge.splitting = true
	r.mu.Unlock()
	m.n.wg.Go(func() {
		defer m.splitting.Add(-1)
		ctx, cancel := clock.WithTimeout(m.n.ctx, m.n.cfg.Clock, splitTimeout)
		defer cancel()
		r.splitEnded(cause, r.splitItself(ctx, cause))
	})
}

// splitItself splits the range where its bytes or its load divide.
func (r *Replica) splitItself(ctx context.Context, cause splitCause) error {
	if err := r.calm(ctx); err != nil {
		return err
	}
	d := r.Descriptor()
	var key []byte
	if cause == splitByLoad {
		r.mu.Lock()
		key = r.gauge.divides
		r.mu.Unlock()
		if !d.Span.Contains(key) || bytes.Equal(key, d.Span.Start) {
			return kverror.New(kverror.WrongRange, "the load divided at %q, and range %s is %s now", key, r.id, d.Span)
		}
	} else {
		h, err := r.halve(ctx, &d)
		if err == nil && h.Bytes <= r.node.cfg.Limits.RangeMaxBytes {
			err = errSmaller
		}
		if err != nil {
			return err
		}
		key = h.Key
	}
	_, err := r.Split(ctx, d.Generation, key)
	return err
}

// SplitMiddle is Split at the key that halves the range's bytes.
func (r *Replica) SplitMiddle(ctx context.Context, generation keyspace.Generation) ([]keyspace.Descriptor, error) {
	d := r.Descriptor()
	h, err := r.halve(ctx, &d)
	if errors.Is(err, mvcc.ErrIndivisible) {
		return nil, kverror.New(kverror.BadRequest, "%v", err)
	}
	if err != nil {
		return nil, err
	}
	return r.Split(ctx, generation, h.Key)
}

// calm refuses to split a range whose members are changing or of which a voter is
// silent: a child's learner would be nobody's, and whoever is behind gets two ranges to
// catch up with.
func (r *Replica) calm(ctx context.Context) error {
	r.mu.Lock()
	members := r.replicas
	r.mu.Unlock()
	for _, m := range members {
		if m.Role != keyspace.RoleVoter {
			return kverror.New(kverror.Busy, "range %s: its members are being changed", r.id)
		}
	}
	ps, err := r.group.Progress(ctx)
	if err != nil {
		return kverror.New(kverror.Busy, "range %s: %v", r.id, err)
	}
	for i := range ps {
		if !ps[i].NodeAlive {
			return kverror.New(kverror.Busy, "range %s: node %s is silent", r.id, ps[i].Replica.Node)
		}
	}
	return nil
}

// halve returns the key that halves the range's bytes. The store knows them by its
// tables: what is not in one is written first, where it is much.
func (r *Replica) halve(ctx context.Context, d *keyspace.Descriptor) (mvcc.Halves, error) {
	r.mu.Lock()
	applied, memory, stored := r.tally.applied, r.bytesLocked()-r.gauge.stored, r.gauge.stored
	r.mu.Unlock()
	e := r.node.cfg.Engine
	if memory > stored/4 || !r.measured(d) {
		if err := e.Flush(ctx); err != nil {
			return mvcc.Halves{}, fmt.Errorf("shard: halve range %s: %w", r.id, err)
		}
		r.mu.Lock()
		r.gauge.flushed = max(r.gauge.flushed, applied)
		r.mu.Unlock()
	}
	r.estimate(applied, r.node.meter.flushes.Load())
	h, err := mvcc.Middle(e, d.Span)
	if err != nil {
		return h, fmt.Errorf("shard: halve range %s: %w", r.id, err)
	}
	return h, nil
}

// measured says whether there is an estimate of the range as it is.
func (r *Replica) measured(d *keyspace.Descriptor) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gauge.estimated && r.gauge.generation == d.Generation
}

// splitEnded notes what became of a split that the range began by itself.
func (r *Replica) splitEnded(cause splitCause, err error) {
	now := r.node.cfg.Clock.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	g := &r.gauge
	g.splitting = false
	switch {
	case err == nil:
		r.node.metrics.splitsItself.WithLabelValues(cause.String()).Inc()
		g.backoff, g.splitAt, g.unsplit = 0, now.Add(splitRest), ""
		g.writes, g.reads, g.bytes = g.writes/2, g.reads/2, g.bytes/2
		r.coolLocked()
		r.log.Info("the range was split by itself", zap.Stringer("cause", cause), zap.Stringer("span", r.rec.Span))
		return
	case errors.Is(err, errSmaller):
		g.backoff, g.splitAt = 0, now.Add(splitRest)
		return
	case r.lead == nil || r.stopped:
		return
	case errors.Is(err, mvcc.ErrIndivisible):
		g.backoff = max(g.backoff, splitHopeless/2)
		r.unsplitLocked(reasonOneKey, "it is too large and is not split: one key has most of it")
	default:
		g.backoff = max(g.backoff, splitRetry/2)
		r.unsplitLocked(reasonFailed, "it is to be split and cannot be yet: "+err.Error())
	}
	if cause == splitByLoad {
		g.divides = nil // it may divide elsewhere by then
	}
	g.backoff = min(2*g.backoff, splitRetryMost)
	g.splitAt = now.Add(g.backoff)
}
