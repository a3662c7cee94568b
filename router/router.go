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
	"bytes"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// Ranges reaches the replicas of ranges; *rangeapi.Client is one.
type Ranges interface {
	// Do sends a request to the replica of its range on a node.
	Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error)
}

// Sequencer asks for the current revision; placement's client is one.
type Sequencer interface {
	// Sequence calls done exactly once, after less time than a request has.
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

// Removal waits for what compaction takes away; node makes one of the ranges' client.
type Removal interface {
	// AwaitRemoval returns nil once every replica that lives has removed what compaction
	// at the committed compacted revision lets go, and an error when ctx ends before.
	AwaitRemoval(ctx context.Context, compacted keyspace.Revision) error
}

// Config is what a Router is made of.
type Config struct {
	// Self is this node: of several replicas that could be asked its own goes first. Boot
	// is its present run.
	Self      keyspace.NodeID
	Boot      keyspace.BootID
	Clock     clock.Clock
	Ranges    Ranges
	Sequencer Sequencer
	Placement Placement
	// Local reads from this node's own replicas; nil where serializable reads are like
	// others.
	Local   Local
	Removal Removal
	// Txns and Bus are for transactions over several ranges.
	Txns Steps
	Bus  Bus
	// Timeout is how long a request is worked on at most, etcd's 5 s plus two election
	// timeouts. Default 7 s. What is not answered by then gets etcd's timeout error.
	Timeout time.Duration
	// AttemptTimeout is after how long without an answer a read looks whether the
	// asked node still lives, and asks another one if not. Writes are never asked
	// twice for that. Default 1 s.
	AttemptTimeout time.Duration
	// Alive says whether a node lives as far as this one knows. Required.
	Alive func(keyspace.NodeID) bool
	// ReadBytes bounds the answers to reads of spans that are being put together or
	// streamed, those of transactions over several ranges too, all together. One at a time
	// may be larger than half of it or exceed it; more are refused with TooManyRequests.
	// Default 256 MiB.
	ReadBytes int64
	// AnswerBytes bounds that one: what is larger gets AnswerTooLarge. Default 512 MiB.
	AnswerBytes int64
	// TxnBytes bounds the transactions over several ranges that are under way; more are
	// refused with TooManyRequests. One alone always fits. Default 64 MiB.
	TxnBytes int64
	Logger   *zap.Logger
	Metrics  *Metrics
}

// Router is one node's gateway. Its methods may be called from many goroutines.
type Router struct {
	cfg   Config
	cache *rangeCache
	// joined are the bytes of answers that are being put together.
	joined atomic.Int64
	// large says that one answer is larger than its share of them; it counts alone.
	large  atomic.Bool
	counts *counts
	txns   *txns
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
	return &Router{cfg: cfg, cache: newRangeCache(), counts: newCounts(), txns: newTxns(&cfg), refreshing: make(chan struct{}, 1)}
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

// limited bounds a request by the router's own timeout, as a deadline that crosses
// the bus with it: the end of the router's patience is etcd's timeout, the end of the
// client's stays what it is.
func (r *Router) limited(ctx context.Context) limit {
	return limit{r.timers.Patience(ctx, r.cfg.Timeout), ctx}
}

// limit is a request's time.
type limit struct {
	*clock.Patience
	client context.Context
}

// outcome turns the error with which a request ended into the client's.
func (l limit) outcome(err error) error {
	if err == nil {
		return nil
	}
	if ended := l.client.Err(); ended != nil {
		return kverror.Of(ended)
	}
	ended := l.Err()
	if ended == nil {
		return err
	}
	own, _ := l.Deadline()
	if by, ok := l.client.Deadline(); ok && !own.Before(by) {
		return kverror.Of(ended) // the client's own timer is about to say so
	}
	if e := kverror.Of(err); e.Kind == kverror.Canceled || e.Kind == kverror.DeadlineExceeded {
		return &kverror.Error{Kind: kverror.Timeout, Detail: e.Detail}
	}
	return err
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
		r.txns.heard(a.Current)
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

// The pauses between attempts grow from first to last by doubling.
const (
	firstPause = 2 * time.Millisecond
	lastPause  = 100 * time.Millisecond
)

// write sends an operation that may change something to the one range that holds
// all its keys, and again where it certainly was not proposed.
func (r *Router) write(ctx context.Context, span keyspace.Span, op proto.Message) (proto.Message, error) {
	return r.single(ctx, span, func(rt *route) *rangeapi.Request {
		return &rangeapi.Request{Range: rt.desc.Range, Generation: rt.desc.Generation, Op: op}
	}, false)
}

// errSeveral says that a span lies in several ranges.
var errSeveral = errors.New("router: span lies in several ranges")

// single sends a request to the range that covers span, until it is answered or
// fails for good. A read is also sent again where its fate is unknown. Where the
// span lies in several ranges it returns errSeveral.
func (r *Router) single(ctx context.Context, span keyspace.Span, build func(*route) *rangeapi.Request, read bool) (proto.Message, error) {
	var a attempt
	for {
		rt, err := r.cover(ctx, span)
		if err != nil {
			return nil, err
		}
		node := a.choose(rt, r.cfg.Self, r.cfg.Alive)
		resp, err := r.attempt(ctx, node, build(rt), read)
		if err == nil {
			if known := rt.leader(); known != node {
				r.cache.setLeader(rt.desc.Range, node, known)
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

// attempt sends a request to a node once.
func (r *Router) attempt(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request, read bool) (*rangeapi.Response, error) {
	// Of itself a node always thinks that it lives.
	if !read || node == r.cfg.Self {
		return r.cfg.Ranges.Do(ctx, node, req)
	}
	alive := r.whileAlive(ctx, node)
	defer alive.End()
	return r.cfg.Ranges.Do(alive, node, req)
}

// whileAlive returns a context that ends when the node is found not to live. A read
// may take long; that alone is no reason to ask somebody else.
func (r *Router) whileAlive(ctx context.Context, node keyspace.NodeID) *clock.Patience {
	check := func() bool { return r.cfg.Alive(node) }
	if p, ok := ctx.(*clock.Patience); ok {
		return p.While(r.cfg.AttemptTimeout, check)
	}
	return r.timers.Patience(ctx, 0).While(r.cfg.AttemptTimeout, check)
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

// choose returns the node to ask: not one that does not live while others do, since a
// write that is sent there waits for an answer until the bus gives the node up.
func (a *attempt) choose(rt *route, self keyspace.NodeID, alive func(keyspace.NodeID) bool) keyspace.NodeID {
	lives := func(n keyspace.NodeID) bool { return n == self || alive(n) }
	switch {
	case a.hint != 0 && lives(a.hint):
		return a.hint
	case a.failed == 0 && a.leader == 0:
		if a.leader = rt.leader(); a.leader != 0 && lives(a.leader) {
			return a.leader
		}
	}
	rs := rt.desc.Replicas
	own := max(0, slices.IndexFunc(rs, func(rep keyspace.Replica) bool { return rep.Node == self }))
	var node keyspace.NodeID
	for range rs {
		node = rs[(own+a.next)%len(rs)].Node
		a.next++
		if lives(node) && (node != a.leader || a.next > len(rs)) {
			return node
		}
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
	lo, hi := window(all, span)
	if routes = all[lo:hi:hi]; len(routes) == 0 || bytes.Compare(routes[0].desc.Span.Start, span.Start) > 0 {
		return nil, false
	}
	for i, rt := range routes[1:] {
		if !bytes.Equal(routes[i].desc.Span.End, rt.desc.Span.Start) {
			return nil, false
		}
	}
	last := routes[len(routes)-1].desc.Span.End
	return routes, len(last) == 0 || len(span.End) != 0 && bytes.Compare(last, span.End) >= 0
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
