package router

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// Router is one node's gateway. Its methods may be called from many goroutines.
type Router struct {
	cfg         Config
	cache       *rangeCache
	counts      *counts
	coordinator *coordinator
	// refreshing holds a token while the range map is reloaded.
	refreshing chan struct{}
	// hashing holds a token while a hash is computed.
	hashing chan struct{}
	timers  clock.Timers
}

// New returns a router that knows no range yet.
func New(cfg Config) *Router {
	if cfg.Timeout <= 0 {
		cfg.Timeout = 7 * time.Second
	}
	if cfg.AttemptTimeout <= 0 {
		cfg.AttemptTimeout = time.Second
	}
	if cfg.Answers == nil {
		cfg.Answers = budget.New(256<<20, 512<<20)
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
	return &Router{cfg: cfg, cache: newRangeCache(), counts: newCounts(), coordinator: newCoordinator(&cfg), refreshing: make(chan struct{}, 1), hashing: make(chan struct{}, 1)}
}

// Learn takes in descriptors from elsewhere: the node's own replicas, placement's feed.
func (r *Router) Learn(descs ...keyspace.Descriptor) { r.cache.update(descs...) }

// Led notes a range's leader.
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

// LeaderOf returns the span of the range that holds a key and the live node that has led it last, 0 if this gateway knows of
// none. It does not block.
func (r *Router) LeaderOf(key []byte) (keyspace.Span, keyspace.NodeID) {
	rt := r.cache.find(key)
	if rt == nil {
		return keyspace.Span{}, 0
	}
	leader := rt.leader()
	if leader != r.cfg.Self && !r.cfg.Alive(leader) {
		return keyspace.Span{}, 0
	}
	return rt.desc.Span, leader
}

// SpanOf returns the span of the range at the generation, if this gateway knows the generation. It
// does not block.
func (r *Router) SpanOf(id keyspace.RangeID, g keyspace.Generation) (keyspace.Span, bool) {
	return r.cache.spanOf(id, g)
}

// Refresh loads the range map from placement.
func (r *Router) Refresh(ctx context.Context) error { return r.refresh(ctx) }

// Current asks the sequencer for the current and the compacted revision. It asks again until ctx
// ends if the sequencer cannot be reached.
func (r *Router) Current(ctx context.Context) (keyspace.SequenceAnswer, error) {
	return r.currentOrWait(ctx)
}

// RegisterHandlers registers methods 20 and 25 at a bus that is not started yet.
func (r *Router) RegisterHandlers(b Registrar) {
	b.HandleCall(transport.MethodRouterReads, transport.ClassRequest, r.handleReads)
	b.HandleCall(transport.MethodRouterTxn, transport.ClassRequest, r.handleTxn)
}

// Drain refuses new transactions over several ranges, and waits a moment for those under way. A
// revision that one of them has must be used.
func (r *Router) Drain(ctx context.Context) {
	t := r.coordinator
	idle := make(chan struct{})
	t.mu.Lock()
	t.draining, t.idle = true, idle
	t.idleLocked()
	t.mu.Unlock()
	ctx, cancel := clock.WithTimeout(ctx, r.cfg.Clock, drainTimeout)
	defer cancel()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// Stop ends the router's own goroutines. Other nodes find out what became of transactions under
// decision.
func (r *Router) Stop() { r.coordinator.stop() }
