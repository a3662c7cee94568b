package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// span reader reads a span at a moment piece by piece, each piece from whatever range holds its
// keys by then: a range that splits, moves or loses its leader is met by asking for the
// rest again.
type spanReader struct {
	r   *Router
	req *pb.RangeRequest
	at  readPoint
	// rest is what is not read yet, unless done.
	rest keyspace.Span
	done bool
	// left is how many keys are wanted yet; unlimited says that all are.
	left      int64
	unlimited bool
	// seen are the keys that were gone past, found those that passed the filters.
	seen, found int64
	// last is the newest piece, beyond what of the span reader lies outside of its range, if any.
	last      *rangeapi.PageAnswer
	beyond    keyspace.Span
	hasBeyond bool
	pageBytes int
}

// readPageBytes is a piece of an answer that is put together.
const readPageBytes = 1 << 20

// span reader returns a span reader for what a request wants of a span. A limit of 0 is none.
func (r *Router) newSpanReader(span keyspace.Span, req *pb.RangeRequest, at readPoint, limit int64) *spanReader {
	return &spanReader{r: r, req: req, at: at, rest: span, left: limit, unlimited: limit <= 0, pageBytes: readPageBytes}
}

// enough says whether nothing more is wanted.
func (l *spanReader) enough() bool { return l.done || !l.unlimited && l.left <= 0 }

// next reads a piece. It is called while there is not enough.
func (l *spanReader) next(ctx context.Context) (*rangeapi.PageAnswer, error) {
	limit := l.r.limited(ctx)
	defer limit.End()
	for {
		rt, err := l.r.holder(limit.Patience, l.rest.Start)
		if err != nil {
			return nil, limit.outcome(err)
		}
		span, ok := rt.desc.Span.Intersect(l.rest)
		if !ok {
			return nil, kverror.New(kverror.Internal, "range %s with %s holds nothing of %s", rt.desc.Range, rt.desc.Span, l.rest)
		}
		p := &rangeapi.Page{RangeRequest: clip(l.req, span), MaxBytes: l.pageBytes, WithCount: !l.unlimited}
		p.Limit = max(l.left, 0)
		got, err := l.r.readFrom(limit.Patience, span, l.at, p)
		if errors.Is(err, errMultiRange) {
			continue // it has split: its part of the span is smaller now
		}
		if err != nil {
			return nil, limit.outcome(err)
		}
		answer, ok := got.(*rangeapi.PageAnswer)
		if !ok {
			return nil, kverror.New(kverror.Internal, "a range answered a page of a read with %T", got)
		}
		l.advance(span, answer)
		return answer, nil
	}
}

// advance notes the answer for a span, the first part of what was not read yet.
func (l *spanReader) advance(span keyspace.Span, p *rangeapi.PageAnswer) {
	l.last = p
	l.seen += p.Seen
	l.found += p.N
	l.left -= p.N
	l.hasBeyond = string(span.End) != string(l.rest.End)
	if l.hasBeyond {
		l.beyond = keyspace.Span{Start: span.End, End: l.rest.End}
	}
	switch {
	case len(p.Next) > 0:
		l.rest.Start = p.Next
	case l.hasBeyond:
		l.rest = l.beyond
	default:
		l.done = true
	}
}

// behind returns how many keys there are behind those that the span reader has gone past. It
// must have a limit and have read a piece.
func (l *spanReader) behind(ctx context.Context) (int64, error) {
	if l.done {
		return 0, nil
	}
	var n int64
	if len(l.last.Next) > 0 {
		n = l.last.GetCount() - l.last.Seen
	}
	if !l.hasBeyond {
		return n, nil
	}
	rest, err := l.r.countBehind(ctx, l.beyond, l.req, l.at)
	return n + rest, err
}

// all reads until there is enough, and returns what it found and how many keys the span
// has.
func (l *spanReader) all(ctx context.Context) (kvs []*mvccpb.KeyValue, count int64, err error) {
	for !l.enough() {
		p, err := l.next(ctx)
		if err != nil {
			return nil, 0, err
		}
		if err := l.r.reserve(l.at.reserved, int64(len(p.Keys))+p.N*keyOverheadBytes); err != nil {
			return nil, 0, err
		}
		more, err := rangeapi.DecodeKeys(p.Keys, p.N)
		if err != nil {
			return nil, 0, kverror.New(kverror.Internal, "%v", err)
		}
		if kvs == nil {
			kvs = more
		} else {
			kvs = append(kvs, more...)
		}
	}
	n, err := l.behind(ctx)
	return kvs, l.seen + n, err
}

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

// divide cuts a span where ranges border.
func (r *Router) divide(ctx context.Context, span keyspace.Span) ([]keyspace.Span, error) {
	limit := r.limited(ctx)
	defer limit.End()
	routes, err := r.resolve(limit.Patience, span)
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

// gather reads a span in the order of its keys: all of its ranges at the same time, or
// one after the other where a limit is likely to end the read in the first.
func (r *Router) gather(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	limit := req.GetLimit()
	if limit > 0 && !filtered(req) {
		l := r.newSpanReader(span, req, at, limit)
		kvs, count, err := l.all(ctx)
		return &pb.RangeResponse{Kvs: kvs, Count: count, More: count > l.found}, err
	}
	spans, err := r.divide(ctx, span)
	if err != nil {
		return nil, err
	}
	if len(spans) > 1 {
		r.cfg.Metrics.MultiRangeReads.Inc()
	}
	if limit > 0 && limit < maxLimit {
		limit++ // one more says that there are more
	}
	found := make([]struct {
		kvs   []*mvccpb.KeyValue
		count int64
	}, len(spans))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxParallelParts)
	for i, s := range spans {
		g.Go(func() (err error) {
			found[i].kvs, found[i].count, err = r.newSpanReader(s, req, at, limit).all(ctx)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	out := &pb.RangeResponse{Kvs: found[0].kvs, Count: found[0].count}
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

// lastKeys reads the last keys of a span, as many as the limit says, from its ranges in
// the opposite order: of those before, only how many keys they have.
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
