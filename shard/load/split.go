package load

import (
	"bytes"
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// splitCause is why a range is split automatically.
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
	// splitsAtOnce bounds the automatic splits of one node that are under way.
	splitsAtOnce = 2
	// splitAfter is how long the load must have been above the bound before the range is
	// split: load that is over by then needed no split.
	splitAfter = 30 * time.Second
	// splitRest is how long a range that was split is not split again: by then its size
	// and load are its own.
	splitRest = 10 * time.Second
	// splitTimeout bounds one attempt.
	splitTimeout = 30 * time.Second
	// The wait after a failed attempt doubles each time, up to splitRetryMost. It starts at
	// splitRetry where something was in the way, and at splitHopeless where the range cannot
	// be divided.
	splitRetry     = 5 * time.Second
	splitHopeless  = time.Minute
	splitRetryMost = time.Hour
)

// Reasons why a range is not split, as labels of the metric.
const (
	reasonOneKey = "one-key"
	reasonFailed = "failed"
)

// errSmaller says that a range that was to be split by size is not too large.
var errSmaller = errors.New("load: the range is not too large")

// splitDue returns why the range is to be split now, or splitNone. wants says whether it
// is to be split now or later.
func (r *Range) splitDue(now clock.Time) (cause splitCause, wants bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, most := r.owner.LoadState(), r.meter.cfg.MaxBytes
	switch {
	case !s.Leads || s.Draining:
		return splitNone, false
	case most > 0 && r.estimated && r.generation == s.Generation && r.bytesLocked() > most:
		cause = splitBySize
	case r.divides != nil && now.Sub(r.hotAt) >= splitAfter:
		cause = splitByLoad
	default:
		return splitNone, false
	}
	if r.splitting || now < r.splitAt {
		return splitNone, true
	}
	return cause, true
}

// split starts to split a range, unless too many splits are under way.
func (m *Meter) split(ctx context.Context, r *Range, cause splitCause) {
	if m.splitting.Load() >= splitsAtOnce {
		return
	}
	m.splitting.Add(1)
	r.mu.Lock()
	r.splitting = true
	r.mu.Unlock()
	m.splits.Go(func() {
		defer m.splitting.Add(-1)
		ctx, cancel := clock.WithTimeout(ctx, m.cfg.Clock, splitTimeout)
		defer cancel()
		r.splitEnded(cause, r.split(ctx, cause))
	})
}

// split splits the range where its bytes or its load divide.
func (r *Range) split(ctx context.Context, cause splitCause) error {
	if err := r.owner.CanSplit(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	s, key := r.owner.LoadState(), r.divides
	r.mu.Unlock()
	if cause == splitByLoad {
		if !s.Span.Contains(key) || bytes.Equal(key, s.Span.Start) {
			return kverror.New(kverror.WrongRange, "the load divided at %q, and range %s is %s now", key, r.id, s.Span)
		}
	} else {
		h, err := r.Halve(ctx, s.Generation, s.Span)
		if err == nil && h.Bytes <= r.meter.cfg.MaxBytes {
			err = errSmaller
		}
		if err != nil {
			return err
		}
		key = h.Key
	}
	return r.owner.Split(ctx, s.Generation, key)
}

// splitEnded notes how an automatic split ended.
func (r *Range) splitEnded(cause splitCause, err error) {
	now := r.meter.cfg.Clock.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.owner.LoadState()
	r.splitting = false
	switch {
	case err == nil:
		r.meter.cfg.Metrics.Splits.WithLabelValues(cause.String()).Inc()
		r.backoff, r.splitAt, r.unsplit = 0, now.Add(splitRest), ""
		r.writesRate, r.readsRate, r.bytesRate = r.writesRate/2, r.readsRate/2, r.bytesRate/2
		r.coolLocked()
		r.log.Info("split the range automatically", zap.Stringer("cause", cause), zap.Stringer("span", s.Span))
		return
	case errors.Is(err, errSmaller):
		r.backoff, r.splitAt = 0, now.Add(splitRest)
		return
	case !s.Leads || s.Stopped:
		return
	case errors.Is(err, mvcc.ErrNoSplitKey):
		r.backoff = max(r.backoff, splitHopeless/2)
		r.unsplitLocked(reasonOneKey, "it is too large and is not split: one key has most of it")
	default:
		r.backoff = max(r.backoff, splitRetry/2)
		r.unsplitLocked(reasonFailed, "it is to be split and cannot be yet: "+err.Error())
	}
	if cause == splitByLoad {
		r.divides = nil // it may divide elsewhere by then
	}
	r.backoff = min(2*r.backoff, splitRetryMost)
	r.splitAt = now.Add(r.backoff)
}
