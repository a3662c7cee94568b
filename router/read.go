package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Range reads keys at one revision, from any number of ranges. The response's header has only the
// revision.
func (r *Router) Range(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	if len(req.GetRangeEnd()) == 0 {
		return r.rangeAt(ctx, req, nil, nil)
	}
	reserved := r.reservation()
	defer reserved.Release()
	return r.rangeSpan(ctx, req, &reserved, nil)
}

// RangeSpan is Range of a span of keys. It waits until the answer has memory, and returns what the
// answer holds of Config.Answers. The caller gives that back once the answer is sent. The keys
// of an answer in key order come encoded, as in a RangeStream, and resp has none then; share holds
// exactly their bytes.
func (r *Router) RangeSpan(ctx context.Context, req *pb.RangeRequest) (keys [][]byte, resp *pb.RangeResponse, share *budget.Share, err error) {
	reserved := r.reservation()
	encoded := &keys
	if !comesEncoded(req) {
		encoded = nil
	}
	if resp, err = r.rangeSpan(ctx, req, &reserved, encoded); err != nil {
		reserved.Release()
		return nil, nil, nil, err
	}
	reserved.Complete()
	return keys, resp, &reserved.Share, nil
}

// rangeSpan is Range of a span. First it waits for its turn, so that few hold what they have
// read while they wait for more memory.
func (r *Router) rangeSpan(ctx context.Context, req *pb.RangeRequest, reserved *reservation, encoded *[][]byte) (*pb.RangeResponse, error) {
	if err := r.tooLarge(reserved.Take(ctx, 0)); err != nil {
		return nil, err
	}
	return r.rangeAt(ctx, req, reserved, encoded)
}

func (r *Router) rangeAt(ctx context.Context, req *pb.RangeRequest, reserved *reservation, encoded *[][]byte) (*pb.RangeResponse, error) {
	if req.GetSerializable() && r.cfg.Local != nil {
		if resp, done, err := r.rangeHere(ctx, req, reserved, encoded); done {
			return resp, err
		}
	}
	resp, err := r.rangeNow(ctx, req, reserved, encoded)
	if err == nil && req.GetSerializable() {
		r.noteServed(req, keyspace.Revision(resp.GetHeader().GetRevision()))
	}
	return resp, err
}

// rangeNow is Range at the current revision. With a reservation, the router's timeout counts for
// each of its requests, because there may be many.
func (r *Router) rangeNow(ctx context.Context, req *pb.RangeRequest, reserved *reservation, encoded *[][]byte) (*pb.RangeResponse, error) {
	if reserved == nil {
		limit := r.limited(ctx)
		defer limit.End()
		resp, err := r.read(limit.LazyDeadline, req, nil, nil)
		return resp, limit.outcome(err)
	}
	resp, err := r.read(ctx, req, reserved, encoded)
	if err != nil && ctx.Err() != nil {
		err = kverror.Of(ctx.Err())
	}
	return resp, err
}

// read asks for a revision and reads at it. It starts over if the revision was
// compacted meanwhile; a read without explicit revision never fails for that.
func (r *Router) read(ctx context.Context, req *pb.RangeRequest, reserved *reservation, encoded *[][]byte) (*pb.RangeResponse, error) {
	for {
		beginAnew(reserved, encoded)
		now, err := r.presentOf(ctx, req, reserved != nil)
		if err != nil {
			return nil, err
		}
		span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
		if !ok {
			return &pb.RangeResponse{Header: header(now.Current)}, nil
		}
		resp, err := r.readAt(ctx, span, req, readPoint{rev: now.Current, term: now.Term, reserved: reserved, encoded: encoded})
		if err == nil {
			resp.Header = header(now.Current)
			return resp, nil
		}
		if !overtaken(req, err) || ctx.Err() != nil {
			return nil, err
		}
		if errors.Is(err, kverror.ReadAgain) {
			// An old sequencer may go on answering for as long as it believes in its lease.
			_ = clock.Sleep(ctx, r.cfg.Clock, firstPause)
		}
	}
}

// presentOf is present, optionally within the router's own timeout.
func (r *Router) presentOf(ctx context.Context, req *pb.RangeRequest, patiently bool) (keyspace.SequenceAnswer, error) {
	if !patiently {
		return r.present(ctx, req)
	}
	limit := r.limited(ctx)
	defer limit.End()
	now, err := r.present(limit.LazyDeadline, req)
	return now, limit.outcome(err)
}

// present returns the current revision, after it has checked the one that the request names.
func (r *Router) present(ctx context.Context, req *pb.RangeRequest) (keyspace.SequenceAnswer, error) {
	_ = permitOf(ctx)
	now, err := r.currentOrWait(ctx)
	if err != nil {
		return now, err
	}
	switch explicit := keyspace.Revision(req.GetRevision()); {
	case explicit > now.Current:
		return now, &kverror.Error{Kind: kverror.FutureRevision}
	case explicit > 0 && explicit < now.Compacted:
		return now, &kverror.Error{Kind: kverror.Compacted, CompactRevision: now.Compacted}
	}
	return now, nil
}

// overtaken says whether a read has to be repeated at another revision.
func overtaken(req *pb.RangeRequest, err error) bool {
	return errors.Is(err, kverror.Compacted) && req.GetRevision() <= 0 || needsNewRevision(err)
}
