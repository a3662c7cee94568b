// Package router is the gateway's side of the keyspace: it knows which ranges
// there are and where they are led, sends each request to the range that it
// belongs to, reads over several ranges at one revision, and repeats unseen what
// certainly was not proposed.
//
// It guarantees that a write is sent again only where the answer says that the
// first attempt did not and will not take effect (kverror's table), that every
// linearizable read is answered at one revision asked for after the request came,
// and that a request ends at its deadline. It holds no data and no state that
// cannot be asked for again. etcdapi calls it; the ranges are behind
// package shard's Client, the range map and revisions behind placement's.
package router

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/shard"
)

// Ranges reaches the replicas of ranges; *shard.Client is one.
type Ranges interface {
	// Do sends a request to the replica of its range on a node.
	Do(ctx context.Context, node keyspace.NodeID, req *shard.Request) (*shard.Response, error)
}

// Sequencer asks for the current revision; placement's client is one.
type Sequencer interface {
	Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer))
}

// Placement is the placement group's part in requests; placement's client is one.
type Placement interface {
	// RangeMap returns the descriptors of all ranges.
	RangeMap(ctx context.Context) ([]keyspace.Descriptor, error)
	// Compact commits the cluster's compacted revision. It returns the current
	// revision.
	Compact(ctx context.Context, rev keyspace.Revision) (keyspace.Revision, error)
}

// Config is what a Router is made of.
type Config struct {
	// Self is this node: of several replicas that could be asked its own goes first.
	Self      keyspace.NodeID
	Clock     clock.Clock
	Ranges    Ranges
	Sequencer Sequencer
	Placement Placement
	// Timeout is how long a request is worked on at most, etcd's 5 s plus two election
	// timeouts. Default 7 s. What is not answered by then gets etcd's timeout error.
	Timeout time.Duration
	// AttemptTimeout is after how long without an answer a read looks whether the
	// asked node still lives, and asks another one if not. Writes are never asked
	// twice for that. Default 1 s.
	AttemptTimeout time.Duration
	// Alive says whether a node lives as far as this one knows. Required.
	Alive func(keyspace.NodeID) bool
	// ReadBytes bounds the answers that are put together from several ranges, all
	// together; more are refused with TooManyRequests. One alone always fits. Default
	// 256 MiB.
	ReadBytes int64
	Logger    *zap.Logger
	Metrics   *Metrics
}

// Router is one node's gateway. Its methods may be called from many goroutines.
type Router struct {
	cfg   Config
	cache *rangeCache
	// joined are the bytes of answers that are being put together.
	joined atomic.Int64
	// refreshing holds the one reload of the range map that may be under way.
	refreshing chan struct{}
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
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(nil)
	}
	return &Router{cfg: cfg, cache: newRangeCache(), refreshing: make(chan struct{}, 1)}
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
		out[i] = Located{Descriptor: rt.desc, Leader: rt.leader}
	}
	return out, nil
}

// limited bounds a request by the router's own timeout, as a deadline that crosses
// the bus with it. outcome turns the error
// with which it ended into the client's: the end of the router's patience is
// etcd's timeout, the end of the client's stays what it is.
func (r *Router) limited(ctx context.Context) (inner context.Context, cancel context.CancelFunc, outcome func(error) error) {
	inner, cancel = context.WithTimeoutCause(ctx, r.cfg.Timeout, errPatience)
	outcome = func(err error) error {
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return kverror.Of(ctx.Err())
		}
		e := kverror.Of(err)
		if errors.Is(context.Cause(inner), errPatience) && (e.Kind == kverror.Canceled || e.Kind == kverror.DeadlineExceeded) {
			return &kverror.Error{Kind: kverror.Timeout, Detail: e.Detail}
		}
		return err
	}
	return inner, cancel, outcome
}

// errPatience is the cause of a context that the router itself has ended.
var errPatience = errors.New("router: request took too long")

// current asks the sequencer for the current revision.
func (r *Router) current(ctx context.Context) (keyspace.SequenceAnswer, error) {
	got := make(chan keyspace.SequenceAnswer, 1)
	r.cfg.Sequencer.Sequence(keyspace.SequenceRequest{}, func(a keyspace.SequenceAnswer) { got <- a })
	select {
	case a := <-got:
		return a, a.Err
	case <-ctx.Done():
		return keyspace.SequenceAnswer{}, ctx.Err()
	}
}

// currentOrWait is current, asked again for as long as ctx lasts where the
// sequencer could not be reached: asking changes nothing.
func (r *Router) currentOrWait(ctx context.Context) (keyspace.SequenceAnswer, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		a, err := r.current(ctx)
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

// The pauses between attempts grow from first to last by doubling.
const (
	firstPause = 2 * time.Millisecond
	lastPause  = 100 * time.Millisecond
)

// write sends an operation that may change something to the one range that holds
// all its keys, and again where it certainly was not proposed.
func (r *Router) write(ctx context.Context, span keyspace.Span, op proto.Message) (proto.Message, error) {
	return r.single(ctx, span, func(rt *route) *shard.Request {
		return &shard.Request{Range: rt.desc.Range, Generation: rt.desc.Generation, Op: op}
	}, false)
}

// errSeveral says that a span lies in several ranges.
var errSeveral = errors.New("router: span lies in several ranges")

// single sends a request to the range that covers span, until it is answered or
// fails for good. A read is also sent again where its fate is unknown. Where the
// span lies in several ranges it returns errSeveral.
func (r *Router) single(ctx context.Context, span keyspace.Span, build func(*route) *shard.Request, read bool) (proto.Message, error) {
	var a attempt
	for {
		rt, err := r.cover(ctx, span)
		if err != nil {
			return nil, err
		}
		node := a.choose(rt, r.cfg.Self)
		actx, cancel := ctx, func() {}
		// Of itself a node always thinks that it lives.
		if read && node != r.cfg.Self {
			actx, cancel = r.whileAlive(ctx, node)
		}
		resp, err := r.cfg.Ranges.Do(actx, node, build(rt))
		cancel()
		if err == nil {
			if rt.leader != node {
				r.cache.setLeader(rt.desc.Range, node, rt.leader)
			}
			return resp.Op, nil
		}
		e := kverror.Of(err)
		if ctx.Err() != nil {
			return nil, err
		}
		r.cfg.Metrics.Failed.WithLabelValues(e.Kind.Error()).Inc()
		repeat := e.Retry() == kverror.RetryRouter || (read && e.Fate() == kverror.Unknown && e.Kind != kverror.Corrupt)
		if !repeat || (read && e.Kind == kverror.ReadAgain) {
			return nil, err
		}
		if err := r.learn(ctx, &a, rt, node, e); err != nil {
			return nil, err
		}
	}
}

// whileAlive returns a context that ends when the node is found not to live. A read
// may take long; that alone is no reason to ask somebody else.
func (r *Router) whileAlive(ctx context.Context, node keyspace.NodeID) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	var t clock.Timer
	var mu sync.Mutex // orders the first firing behind the assignment of t
	mu.Lock()
	defer mu.Unlock()
	t = r.cfg.Clock.AfterFunc(r.cfg.AttemptTimeout, func() {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case ctx.Err() != nil:
		case !r.cfg.Alive(node):
			cancel()
		default:
			t.Reset(r.cfg.AttemptTimeout)
		}
	})
	return ctx, func() {
		cancel()
		mu.Lock()
		defer mu.Unlock()
		t.Stop()
	}
}

// cover returns the one range that covers the span.
func (r *Router) cover(ctx context.Context, span keyspace.Span) (*route, error) {
	rt := r.cache.find(span.Start)
	if rt == nil {
		routes, err := r.resolve(ctx, span)
		if err != nil {
			return nil, err
		}
		rt = routes[0]
	}
	if !rt.desc.Span.Covers(span) {
		return nil, errSeveral
	}
	return rt, nil
}

// attempt is what one request has learned from its earlier attempts.
type attempt struct {
	// hint is the leader that the last answer named.
	hint keyspace.NodeID
	// leader is the node that was thought to lead and failed: it is left out of the first
	// turn. next is the replica to ask where no leader is known.
	leader keyspace.NodeID
	next   int
	pause  time.Duration
	// failed counts the attempts since the range was last known to have moved.
	failed int
}

// choose returns the node to ask.
func (a *attempt) choose(rt *route, self keyspace.NodeID) keyspace.NodeID {
	switch {
	case a.hint != 0:
		return a.hint
	case rt.leader != 0 && a.failed == 0:
		a.leader = rt.leader
		return rt.leader
	}
	rs := rt.desc.Replicas
	own := max(0, slices.IndexFunc(rs, func(rep keyspace.Replica) bool { return rep.Node == self }))
	node := rs[(own+a.next)%len(rs)].Node
	a.next++
	if node == a.leader && a.next <= len(rs) && len(rs) > 1 {
		return a.choose(rt, self)
	}
	return node
}

// learn takes in why an attempt failed, and waits before the next one unless the
// answer said whom to ask.
func (r *Router) learn(ctx context.Context, a *attempt, rt *route, node keyspace.NodeID, e *kverror.Error) error {
	news := r.cache.update(e.Descriptors...)
	a.failed++
	a.hint = 0
	r.cache.setLeader(rt.desc.Range, 0, node)
	switch {
	case e.Kind == kverror.WrongRange && news:
		*a = attempt{}
		return nil
	case e.Leader != 0 && e.Leader != node && a.failed <= 2*len(rt.desc.Replicas):
		a.hint = e.Leader
		if e.Kind == kverror.NotLeader {
			return nil
		}
	case e.Kind == kverror.WrongRange || e.Kind == kverror.RangeNotHere || a.failed%len(rt.desc.Replicas) == 0:
		// Nobody whom we know of leads the range: the map may have moved on.
		if err := r.refresh(ctx); err != nil && ctx.Err() != nil {
			return err
		}
	}
	a.pause = max(firstPause, min(2*a.pause, lastPause))
	if err := clock.Sleep(ctx, r.cfg.Clock, a.pause); err != nil {
		// The last answer says more than "too late".
		return e
	}
	return nil
}

// resolve returns the ranges that overlap the span, in order and without holes,
// asking placement where the cache has one.
func (r *Router) resolve(ctx context.Context, span keyspace.Span) ([]*route, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		if routes, ok := overlapping(r.cache.all(), span); ok {
			return routes, nil
		}
		err := r.refresh(ctx)
		if err == nil {
			if routes, ok := overlapping(r.cache.all(), span); ok {
				return routes, nil
			}
			err = kverror.New(kverror.NoLeader, "placement knows no range for %s", span)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if sleep := clock.Sleep(ctx, r.cfg.Clock, pause); sleep != nil {
			return nil, err
		}
	}
}

// overlapping picks the routes that overlap the span; ok is false where they leave
// a hole.
func overlapping(all []*route, span keyspace.Span) (routes []*route, ok bool) {
	at := span.Start
	for _, rt := range all {
		if !rt.desc.Span.Overlaps(span) {
			continue
		}
		if !rt.desc.Span.Contains(at) && !(len(at) == 0 && len(rt.desc.Span.Start) == 0) {
			return nil, false
		}
		routes = append(routes, rt)
		if len(rt.desc.Span.End) == 0 {
			return routes, true
		}
		at = rt.desc.Span.End
		if len(span.End) != 0 && string(at) >= string(span.End) {
			return routes, true
		}
	}
	return nil, false
}

// refresh loads the range map from placement. Of many that want it at the same
// time one loads, the others wait for it.
func (r *Router) refresh(ctx context.Context) error {
	before := r.cache.routes.Load()
	select {
	case r.refreshing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-r.refreshing }()
	if r.cache.routes.Load() != before {
		return nil // somebody else's refresh has brought news
	}
	descs, err := r.cfg.Placement.RangeMap(ctx)
	if err != nil {
		return err
	}
	r.cfg.Metrics.Refreshes.Inc()
	r.cache.update(descs...)
	return nil
}
