package router

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
)

// write sends an operation that may change something to the one range that holds all its keys. It
// sends it again if it certainly was not proposed. begun, if not nil, is the first attempt.
func (r *Router) write(ctx context.Context, span keyspace.Span, op proto.Message, begun *attempt) (proto.Message, error) {
	permit := permitOf(ctx)
	return r.single(ctx, span, func(rt *route) *rangeapi.Request { return writing(rt, permit, op) }, false, begun)
}

// writing returns the request of an operation that may change something.
func writing(rt *route, permit keyspace.Permit, op proto.Message) *rangeapi.Request {
	return &rangeapi.Request{Range: rt.desc.Range, Generation: rt.desc.Generation, Permit: permit, Op: op}
}

// attempt is one that has begun, at this node.
type attempt struct {
	rt     *route
	answer func() (*rangeapi.Response, error)
}

// errMultiRange says that a span lies in several ranges.
var errMultiRange = errors.New("router: span lies in several ranges")

// single sends a request to the range that covers span until it is answered or fails for good. It
// repeats a read also if its fate is unknown. It returns errMultiRange if the span lies in several
// ranges. begun, if not nil, is the first attempt.
func (r *Router) single(ctx context.Context, span keyspace.Span, build func(*route) *rangeapi.Request, read bool, begun *attempt) (proto.Message, error) {
	var a retryState
	for {
		var resp *rangeapi.Response
		var node keyspace.NodeID
		var rt *route
		var err error
		if begun != nil {
			rt, node, a.leader = begun.rt, r.cfg.Self, r.cfg.Self
			resp, err = begun.answer()
			begun = nil
		} else {
			if rt, err = r.cover(ctx, span); err != nil {
				return nil, err
			}
			node = a.choose(rt, r.cfg.Self, r.cfg.Alive)
			req := build(rt)
			req.Traced = r.cfg.Traces && stages.Of(ctx).Traced()
			resp, err = r.attempt(ctx, node, req, read)
		}
		if err == nil {
			if known := rt.leader(); known != node {
				r.cache.setLeader(rt.desc.Range, node, known)
			}
			return resp.Op, nil
		}
		e := kverror.Of(err)
		if ctx.Err() != nil {
			stages.Of(ctx).Silent(rt.desc.Range, node)
			return nil, err
		}
		r.cfg.Metrics.Failed.WithLabelValues(e.Kind.Error()).Inc()
		repeat := e.Retry() == kverror.RetryRouter || (read && e.Fate() == kverror.Unknown && e.Kind != kverror.Corrupt)
		if !repeat || (read && e.Kind == kverror.ReadAgain) {
			return nil, err
		}
		err = r.learn(ctx, &a, rt, node, e)
		noteRetry(ctx, rt, node, e)
		if err != nil {
			return nil, err
		}
	}
}

// noteRetry notes an attempt that is made again in the context's request.
func noteRetry(ctx context.Context, rt *route, node keyspace.NodeID, e *kverror.Error) {
	if c := stages.Of(ctx); c != nil {
		leaderless := e.Kind == kverror.NotLeader || e.Kind == kverror.NoLeader || e.Kind == kverror.Unreachable
		c.Retry(rt.desc.Range, node, leaderless, e.Kind.Error())
	}
}

// attempt sends a request to a node once.
func (r *Router) attempt(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request, read bool) (*rangeapi.Response, error) {
	// A node always considers itself alive.
	if !read || node == r.cfg.Self {
		return r.cfg.Ranges.Do(ctx, node, req)
	}
	alive := r.whileAlive(ctx, node)
	defer alive.End()
	return r.cfg.Ranges.Do(alive, node, req)
}

// whileAlive returns a context that ends when the node is found dead. A read may take long, which
// alone is no reason to ask another node.
func (r *Router) whileAlive(ctx context.Context, node keyspace.NodeID) *clock.LazyDeadline {
	check := func() bool { return r.cfg.Alive(node) }
	if p, ok := ctx.(*clock.LazyDeadline); ok {
		return p.While(r.cfg.AttemptTimeout, check)
	}
	return r.timers.LazyDeadline(ctx, 0).While(r.cfg.AttemptTimeout, check)
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
		return nil, errMultiRange
	}
	return rt, nil
}

// retryState is what one request has learned from its attempts so far.
type retryState struct {
	// hint is the leader that the last answer named.
	hint keyspace.NodeID
	// leader is the presumed leader that failed; the first round leaves it out. next is the replica
	// to ask if no leader is known.
	leader keyspace.NodeID
	next   int
	pause  time.Duration
	// failed counts the attempts since the range was last known to have moved.
	failed int
}

// choose returns the node to ask. It prefers live nodes, because a write to a dead one waits until
// the bus gives the node up.
func (a *retryState) choose(rt *route, self keyspace.NodeID, alive func(keyspace.NodeID) bool) keyspace.NodeID {
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

// learn takes in why an attempt failed. It waits before the next attempt unless the answer named a
// leader.
func (r *Router) learn(ctx context.Context, a *retryState, rt *route, node keyspace.NodeID, e *kverror.Error) error {
	news := r.cache.update(e.Descriptors...)
	a.failed++
	a.hint = 0
	r.cache.setLeader(rt.desc.Range, 0, node)
	switch {
	case e.Kind == kverror.WrongRange && news:
		*a = retryState{}
		return nil
	case e.Leader != 0 && e.Leader != node && a.failed <= 2*len(rt.desc.Replicas):
		a.hint = e.Leader
		if e.Kind == kverror.NotLeader {
			return nil
		}
	case e.Kind == kverror.WrongRange || e.Kind == kverror.RangeNotHere || a.failed%len(rt.desc.Replicas) == 0:
		// No node that we know of leads the range, so the map may be stale.
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

// resolve returns the ranges that overlap the span, in order and without holes. It asks placement
// if the cache has a hole.
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

// refresh loads the range map from placement. Only one of many callers loads, and the others wait
// for it.
func (r *Router) refresh(ctx context.Context) error {
	before := r.cache.routes.Load()
	select {
	case r.refreshing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-r.refreshing }()
	if r.cache.routes.Load() != before {
		return nil // another caller has refreshed it
	}
	descs, err := r.cfg.Placement.RangeMap(ctx)
	if err != nil {
		return err
	}
	r.cfg.Metrics.Refreshes.Inc()
	r.cache.update(descs...)
	return nil
}

// The pauses between attempts double from first to last.
const (
	firstPause = 2 * time.Millisecond
	lastPause  = 100 * time.Millisecond
)

// holder returns the range that holds a key.
func (r *Router) holder(ctx context.Context, key []byte) (*route, error) {
	if rt := r.cache.find(key); rt != nil {
		return rt, nil
	}
	routes, err := r.resolve(ctx, keyspace.Single(key))
	if err != nil {
		return nil, err
	}
	return routes[0], nil
}

// divide cuts a span at the borders of ranges.
func (r *Router) divide(ctx context.Context, span keyspace.Span) ([]keyspace.Span, error) {
	limit := r.limited(ctx)
	defer limit.End()
	routes, err := r.resolve(limit.LazyDeadline, span)
	if err != nil {
		return nil, limit.outcome(err)
	}
	spans := make([]keyspace.Span, 0, len(routes))
	for _, rt := range routes {
		if s, ok := rt.desc.Span.Intersect(span); ok {
			spans = append(spans, s)
		}
	}
	return spans, nil
}

// needsNewRevision says whether a read with this error has to be repeated at another revision.
func needsNewRevision(err error) bool {
	return errors.Is(err, kverror.ReadAgain) || errors.Is(err, errMultiRange)
}
