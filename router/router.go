// Package router is the gateway's side of the keyspace: it knows which ranges
// there are and where they are led, sends each request to the range that it
// belongs to, reads over several ranges at one revision, coordinates transactions over
// several ranges, and repeats unseen what certainly was not proposed.
//
// It guarantees that a write is sent again only where the answer says that the
// first attempt did not and will not take effect (kverror's table), that every
// linearizable read is answered at one revision asked for after the request came and
// every serializable one at one that this node's replicas know, that a read of any size
// takes a bounded part of the node's memory, and that a request ends at its deadline. It
// holds no data and no state that cannot be asked for again. etcdapi calls it; the ranges
// are behind package rangeapi's Client, the range map and revisions behind placement's.
package router

import (
	"context"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Router is one node's gateway. Its methods may be called from many goroutines.
type Router struct {
	cfg   Config
	cache *rangeCache
	// reserved are the bytes of answers that are being put together.
	reserved atomic.Int64
	// large says that one answer is larger than its share of them; it counts alone.
	large       atomic.Bool
	counts      *counts
	coordinator *coordinator
	// refreshing holds the one reload of the range map that may be under way.
	refreshing chan struct{}
	timers     clock.Timers
}

// New returns a router that knows no range yet.
func New(cfg Config) *Router {
	if cfg.Timeout <= 0 {
		cfg.Timeout = 7 * time.Second
	}
	if cfg.AttemptTimeout <= 0 {
		cfg.AttemptTimeout = time.Second
	}
	if cfg.ReadBytes <= 0 {
		cfg.ReadBytes = 256 << 20
	}
	if cfg.AnswerBytes <= 0 {
		cfg.AnswerBytes = 512 << 20
	}
	if cfg.TxnBytes <= 0 {
		cfg.TxnBytes = 64 << 20
	}
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(nil)
	}
	return &Router{cfg: cfg, cache: newRangeCache(), counts: newCounts(), coordinator: newCoordinator(&cfg), refreshing: make(chan struct{}, 1)}
}

// Learn takes in descriptors that the node heard of by other ways (its own
// replicas, placement's feed).
func (r *Router) Learn(descs ...keyspace.Descriptor) { r.cache.update(descs...) }

// Led takes in who leads a range.
func (r *Router) Led(id keyspace.RangeID, leader keyspace.NodeID) { r.cache.setLeader(id, leader, 0) }

// Located is one range as this gateway knows it.
type Located struct {
	Descriptor keyspace.Descriptor
	// Leader is the last known leader, 0 if none is known.
	Leader keyspace.NodeID
}

// Locate returns the ranges that overlap the span, in order and without holes.
func (r *Router) Locate(ctx context.Context, span keyspace.Span) ([]Located, error) {
	routes, err := r.resolve(ctx, span)
	if err != nil {
		return nil, err
	}
	out := make([]Located, len(routes))
	for i, rt := range routes {
		out[i] = Located{Descriptor: rt.desc, Leader: rt.leader()}
	}
	return out, nil
}

// awaiter is clock.Await or clock.AwaitSoon.
type awaiter func(context.Context, <-chan keyspace.SequenceAnswer) (keyspace.SequenceAnswer, error)

// current asks the sequencer for the current revision.
func (r *Router) current(ctx context.Context, await awaiter) (keyspace.SequenceAnswer, error) {
	got := make(chan keyspace.SequenceAnswer, 1)
	r.cfg.Sequencer.Sequence(keyspace.SequenceRequest{}, func(a keyspace.SequenceAnswer) { got <- a })
	a, err := await(ctx, got)
	if err != nil {
		return a, err
	}
	if a.Err == nil {
		r.coordinator.observe(a.Current)
	}
	return a, a.Err
}

// currentOrWait is current, asked again for as long as ctx lasts where the
// sequencer could not be reached: asking changes nothing.
func (r *Router) currentOrWait(ctx context.Context) (keyspace.SequenceAnswer, error) {
	// The first answer comes well within the request's time, be it a refusal.
	await := clock.AwaitSoon[keyspace.SequenceAnswer]
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		a, err := r.current(ctx, await)
		await = clock.Await[keyspace.SequenceAnswer]
		if err == nil {
			return a, nil
		}
		switch e := kverror.Of(err); {
		case ctx.Err() != nil:
			return a, err
		case e.Kind == kverror.TooManyRequests || e.Kind == kverror.Internal:
			return a, err
		}
		if sleep := clock.Sleep(ctx, r.cfg.Clock, pause); sleep != nil {
			return a, err
		}
	}
}

// SpanOf returns the span of the range at the generation, if it is known: the newest one
// that this gateway has heard of, or one of those before. It does not block.
func (r *Router) SpanOf(id keyspace.RangeID, g keyspace.Generation) (keyspace.Span, bool) {
	return r.cache.spanOf(id, g)
}

// Refresh loads the range map from placement, as far as this node has it.
func (r *Router) Refresh(ctx context.Context) error { return r.refresh(ctx) }

// Current asks the sequencer for the current revision and the compacted one, again for
// as long as ctx lasts where it could not be reached.
func (r *Router) Current(ctx context.Context) (keyspace.SequenceAnswer, error) {
	return r.currentOrWait(ctx)
}
