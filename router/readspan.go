package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// gather reads a span in key order. It reads all ranges in parallel, or one after the other if a
// limit will probably end the read in the first one.
func (r *Router) gather(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	limit := req.GetLimit()
	if limit > 0 && !filtered(req) {
		l := r.newSpanReader(span, req, at, limit)
		found, err := l.all(ctx)
		if at.encoded != nil {
			*at.encoded = found.encoded
		}
		return &pb.RangeResponse{Kvs: found.kvs, Count: found.count, More: found.count > l.found}, err
	}
	spans, err := r.divide(ctx, span)
	if err != nil {
		return nil, err
	}
	if len(spans) > 1 {
		r.cfg.Metrics.MultiRangeReads.Inc()
	}
	if limit > 0 && limit < maxLimit {
		limit++ // one more key shows that there are more
	}
	found := make([]foundKeys, len(spans))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxParallelParts)
	for i, s := range spans {
		g.Go(func() (err error) {
			found[i], err = r.newSpanReader(s, req, at, limit).all(ctx)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	out := &pb.RangeResponse{Kvs: found[0].kvs, Count: found[0].count}
	if at.encoded != nil {
		for i := range found {
			*at.encoded = append(*at.encoded, found[i].encoded...)
		}
	}
	for i := 1; i < len(found); i++ {
		out.Kvs = append(out.Kvs, found[i].kvs...)
		out.Count += found[i].count
		found[i].kvs = nil
	}
	if wanted := req.GetLimit(); wanted > 0 && int64(len(out.Kvs)) > wanted {
		clear(out.Kvs[wanted:])
		out.Kvs, out.More = out.Kvs[:wanted], true
	}
	return out, nil
}

// comesEncoded says whether an answer to a read of a span consists of the ranges' keys as they are.
func comesEncoded(req *pb.RangeRequest) bool {
	return byKeyUp(req) && !req.GetCountOnly() && (req.GetLimit() <= 0 || !filtered(req))
}

// lastKeys reads the last keys of a span, up to the limit, from its ranges in reverse order. It
// only counts the keys of the ranges before.
func (r *Router) lastKeys(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	spans, err := r.divide(ctx, span)
	if err != nil {
		return nil, err
	}
	out := &pb.RangeResponse{}
	i := len(spans) - 1
	for ; i >= 0 && int64(len(out.Kvs)) < req.GetLimit(); i-- {
		q := clip(req, spans[i])
		q.Limit = req.GetLimit() - int64(len(out.Kvs))
		resp, err := r.readAt(ctx, spans[i], q, at)
		if err != nil {
			return nil, err
		}
		out.Kvs = append(out.Kvs, resp.GetKvs()...)
		out.Count += resp.GetCount()
	}
	if i >= 0 {
		n, err := r.count(ctx, keyspace.Span{Start: span.Start, End: spans[i].End}, req, at)
		if err != nil {
			return nil, err
		}
		out.Count += n
	}
	out.More = out.Count > int64(len(out.Kvs))
	return out, nil
}

// readAt reads a span at a read point.
func (r *Router) readAt(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	if len(req.GetRangeEnd()) == 0 {
		return r.part(ctx, span, req, at)
	}
	if req.GetCountOnly() {
		n, err := r.count(ctx, span, req, at)
		return &pb.RangeResponse{Count: n}, err
	}
	if !byKeyUp(req) {
		// A range that holds the whole span sends only what the request asks for.
		resp, err := r.whole(ctx, span, req, at)
		if err == nil || !errors.Is(err, kverror.ReadByPages) && !errors.Is(err, errMultiRange) {
			return resp, err
		}
		if errors.Is(err, errMultiRange) && byKeyDown(req) && req.GetLimit() > 0 && !filtered(req) {
			return r.lastKeys(ctx, span, req, at)
		}
	}
	// The ranges send their keys in key order, because only all of them together can be sorted.
	resp, err := r.gather(ctx, span, unsorted(req), at)
	if err == nil && !byKeyUp(req) {
		finish(req, resp)
	}
	return resp, err
}
