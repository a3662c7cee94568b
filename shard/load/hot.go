package load

import (
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace/divide"
)

const (
	// sampleRest is how long a range whose load does not divide is not sampled again.
	sampleRest = 30 * time.Second
	// coolPart is the part of the bound below which load is not high any more.
	coolPart = 0.8
)

var shapeReasons = map[divide.Shape]string{divide.HotKey: "hot-key", divide.Tail: "tail", divide.Spans: "spans"}

// sampleLocked starts and ends the sampling of a hot range. It returns a sample that is
// to be judged, or nil.
func (r *Range) sampleLocked(now clock.Time) *sampler {
	bound, load := float64(r.meter.cfg.MaxLoad), r.writesRate+r.readsRate
	switch {
	case !r.owner.LoadState().Leads || bound < 0 || load < bound*coolPart:
		if r.hotAt != 0 {
			r.coolLocked()
			r.unsplit = ""
		}
		return nil
	case load >= bound && r.hotAt == 0:
		r.hotAt, r.sampleAt = now, now
	case r.hotAt == 0:
		return nil
	}
	if s := r.sample; s != nil && now.Sub(s.began) >= sampleTime {
		r.sample, r.due = nil, never
		return s
	}
	if r.sample == nil && now >= r.sampleAt {
		r.sample, r.due = newSampler(now, load), 0
	}
	return nil
}

// judge notes where the sampled load divides, or why it does not.
func (r *Range) judge(s *sampler, now clock.Time) {
	sample := divide.Sample{Requests: s.requests}
	key, shape := sample.Divide()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hotAt == 0 {
		return
	}
	r.sampleAt = now
	span := r.owner.LoadState().Span
	if shape == divide.Divides && span.Contains(key) && string(key) != string(span.Start) {
		r.divides = key
		return
	}
	r.divides, r.sampleAt = nil, now.Add(sampleRest)
	if shape != divide.Divides && shape != divide.TooFew {
		r.unsplitLocked(shapeReasons[shape], "it has much load and is not split: "+shape.String())
	}
}

// unsplitLocked notes why a range that exceeds a bound is not split.
func (r *Range) unsplitLocked(reason, words string) {
	if r.unsplit == words {
		return
	}
	r.unsplit = words
	r.meter.cfg.Metrics.Unsplit.WithLabelValues(reason).Inc()
	r.log.Info("the range exceeds a bound and is not split", zap.String("why", words),
		zap.Int64("bytes", r.bytesLocked()), zap.Float64("requests_per_second", r.writesRate+r.readsRate))
}
