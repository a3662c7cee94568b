package router

import (
	"context"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// nearby reads ranges at a revision, one after the other and each of them part by part, from this node's replicas
// where they have all that there will ever be at the revision, or will have it in a moment. Otherwise it reads
// from the leaders' replicas.
type nearby struct {
	r  *Router
	at keyspace.Revision
	// position is where the leader of of has resolved the revision, zero if it was not asked.
	of       rangeOf
	position rangeapi.FeedPosition
}

// rangeOf is a range as it was.
type rangeOf struct {
	id keyspace.RangeID
	g  keyspace.Generation
}

// askNearby has read read the next part, within a request's time, from the range that holds the key now. So ranges
// may split, merge and move between two parts. It returns the range's span. read asks a node about n.of.
func askNearby[T any](ctx context.Context, n *nearby, key []byte, read func(ctx context.Context, node keyspace.NodeID) (T, error)) (part T, span keyspace.Span, err error) {
	limit := n.r.limited(ctx)
	defer limit.End()
	var a retryState
	for {
		rt, err := n.r.holder(limit, key)
		if err != nil {
			return part, span, limit.outcome(err)
		}
		node := a.choose(rt, n.r.cfg.Self, n.r.cfg.Alive)
		if now := (rangeOf{rt.desc.Range, rt.desc.Generation}); n.of != now {
			n.of, n.position = now, rangeapi.FeedPosition{}
		}
		part, err = readNearby(limit, n, node, read)
		if err == nil {
			return part, rt.desc.Span, nil
		}
		e := kverror.Of(err)
		if limit.Err() != nil || e.Retry() != kverror.RetryRouter && e.Fate() != kverror.Unknown || e.Kind == kverror.Corrupt {
			return part, span, limit.outcome(err)
		}
		n.of = rangeOf{}
		if err := n.r.learn(limit, &a, rt, node, e); err != nil {
			return part, span, limit.outcome(err)
		}
	}
}

// readNearby asks this node's replica of the range, and the leader only if there is none that can tell.
func readNearby[T any](ctx context.Context, n *nearby, leader keyspace.NodeID, read func(ctx context.Context, node keyspace.NodeID) (T, error)) (part T, err error) {
	if part, err = read(ctx, n.r.cfg.Self); err == nil || decides(err) {
		return part, err
	}
	if n.position == (rangeapi.FeedPosition{}) {
		alive := n.r.whileAlive(ctx, leader)
		n.position, err = n.r.cfg.Hashes.AwaitResolved(alive, leader, &rangeapi.ResolvedRequest{Range: n.of.id, Generation: n.of.g, Revision: n.at})
		alive.End()
		if err != nil {
			return part, err
		}
	}
	// A replica of this node comes to where the leader is within moments, unless it is cut off.
	late := n.r.cfg.Clock.Now().Add(n.r.cfg.AttemptTimeout)
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		if part, err = read(ctx, n.r.cfg.Self); err == nil || decides(err) {
			return part, err
		}
		if kverror.Of(err).Kind == kverror.RangeNotHere || n.r.cfg.Clock.Now() >= late {
			break
		}
		if err := clock.Sleep(ctx, n.r.cfg.Clock, pause); err != nil {
			return part, err
		}
	}
	if leader == n.r.cfg.Self {
		return read(ctx, leader)
	}
	alive := n.r.whileAlive(ctx, leader)
	defer alive.End()
	return read(alive, leader)
}

// decides says whether the error of this node's replica is the outcome, whatever the leader would say: a
// replica that cannot be read must not be passed over.
func decides(err error) bool {
	switch kverror.Of(err).Kind {
	case kverror.Compacted, kverror.HoldEnded, kverror.Corrupt, kverror.Internal:
		return true
	default:
		return false
	}
}
