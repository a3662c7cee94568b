package router

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// Hashes asks replicas for hashes; node makes one from the ranges' clients.
type Hashes interface {
	// HashPart returns the hash of a part of a range as the node's replica has it, and the key at
	// which the next part begins, nil at the range's end.
	HashPart(ctx context.Context, node keyspace.NodeID, q *rangeapi.HashRequest) (sum uint64, next []byte, err error)
	// AwaitResolved asks a range's leader for the position at which everything up to a revision is
	// applied.
	AwaitResolved(ctx context.Context, node keyspace.NodeID, q *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error)
}

// maxHashAgain bounds how often a hash begins anew: who compacts more often than a hash takes would have
// it never end.
const maxHashAgain = 2

// HashKV returns the hash of all versions at a revision, 0 for the current one. Each range's part is
// that of this node's replica, if it has one. So members differ if and only if replicas do. The sum
// does not depend on the order and the borders of ranges. The hash is bounded by ctx alone. One runs at
// a time, and others wait. A compaction that goes through the ranges meanwhile begins it anew, twice at most.
func (r *Router) HashKV(ctx context.Context, req *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	select {
	case r.hashing <- struct{}{}:
		defer func() { <-r.hashing }()
	case <-ctx.Done():
		return nil, kverror.Of(ctx.Err())
	}
	for again := 0; ; again++ {
		limit := r.limited(ctx)
		a, err := r.currentOrWait(limit)
		err = limit.outcome(err)
		limit.End()
		if err != nil {
			return nil, err
		}
		at := keyspace.Revision(req.GetRevision())
		switch {
		case at > 0 && at < a.Compacted:
			return nil, &kverror.Error{Kind: kverror.Compacted, CompactRevision: a.Compacted}
		case at > a.Current:
			return nil, kverror.New(kverror.FutureRevision, "the revision %d is above the current one, %d", at, a.Current)
		case at == 0:
			at = a.Current
		}
		sum, err := r.hashAll(ctx, at, a.Compacted)
		if err == nil {
			return &pb.HashKVResponse{
				Header: header(a.Current), Hash: uint32(sum>>32) ^ uint32(sum), CompactRevision: int64(a.Compacted), HashRevision: int64(at), //nolint:gosec // folded
			}, nil
		}
		if kverror.Of(err).Kind != kverror.Compacted {
			return nil, err
		}
		if again == maxHashAgain {
			return nil, kverror.New(kverror.Timeout, "a compaction has come between %d times: ask when fewer compactions run", again+1)
		}
		r.cfg.Logger.Info("a hash begins anew after a compaction", zap.Int64("revision", int64(at)), zap.Int64("compacted", int64(a.Compacted)), zap.Error(err))
		if err := clock.Sleep(ctx, r.cfg.Clock, lastPause); err != nil {
			return nil, kverror.Of(err)
		}
	}
}

// hashAll returns the sum of the hashes of all versions at a revision.
func (r *Router) hashAll(ctx context.Context, at, compacted keyspace.Revision) (sum uint64, err error) {
	w := hashWalk{nearby: nearby{r: r, at: at}, compacted: compacted}
	for at >= 0 { // etcd hashes nothing at a negative one
		began := r.cfg.Clock.Now()
		more, err := w.step(ctx)
		if err != nil || !more {
			return w.sum, err
		}
		// Half of the disk's time at most.
		if err := clock.Sleep(ctx, r.cfg.Clock, r.cfg.Clock.Now().Sub(began)); err != nil {
			return 0, kverror.Of(err)
		}
	}
	return 0, nil
}

// hashWalk is how far a hash has come: all keys below from are in sum.
type hashWalk struct {
	nearby
	compacted keyspace.Revision
	from      []byte
	sum       uint64
}

// hashedPart is the hash of a part of a range, and the key at which the next part begins, nil at the range's end.
type hashedPart struct {
	sum  uint64
	next []byte
}

// step adds the next part, within a request's time.
func (w *hashWalk) step(ctx context.Context) (more bool, err error) {
	p, span, err := askNearby(ctx, &w.nearby, w.from, func(ctx context.Context, node keyspace.NodeID) (p hashedPart, err error) {
		p.sum, p.next, err = w.r.cfg.Hashes.HashPart(ctx, node, &rangeapi.HashRequest{
			Range: w.of.id, Generation: w.of.g, From: w.from, Revision: w.at, Compacted: w.compacted, Position: w.position,
		})
		return p, err
	})
	if err != nil {
		return false, err
	}
	w.sum += p.sum
	if w.from = p.next; p.next == nil {
		w.from = span.End
	}
	return len(w.from) > 0 && !(mutation.Is(mutation.RangeUnhashed) && p.next == nil), nil
}
