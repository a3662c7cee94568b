package router

import (
	"bytes"
	"context"
	"errors"
	"math"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/shard"
)

// maxParallelParts bounds how many ranges one read asks at the same time.
const maxParallelParts = 8

// Range reads keys at one revision, from as many ranges as they lie in. The
// response's header holds the revision only.
func (r *Router) Range(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	limit := r.limited(ctx)
	defer limit.End()
	resp, err := r.read(limit.Patience, req)
	return resp, limit.outcome(err)
}

// moment is when a read is made.
type moment struct {
	// at is the current revision, which the read may not exceed, and reads where it names
	// none.
	at keyspace.Revision
	// txn is the committed transaction for which it is made, nil for none.
	txn *shard.TxnName
}

// read asks for a revision and reads at it, and does so again where the revision
// was overtaken by a compaction before it was read: a read that named no revision
// never learns of that.
func (r *Router) read(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	for {
		now, err := r.currentOrWait(ctx)
		if err != nil {
			return nil, err
		}
		explicit := keyspace.Revision(req.GetRevision())
		if explicit > now.Current {
			return nil, &kverror.Error{Kind: kverror.FutureRevision}
		}
		if explicit > 0 && explicit < now.Compacted {
			return nil, &kverror.Error{Kind: kverror.Compacted, CompactRevision: now.Compacted}
		}
		span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
		if !ok {
			return &pb.RangeResponse{Header: header(now.Current)}, nil
		}
		resp, err := r.readAt(ctx, span, req, moment{at: now.Current})
		switch {
		case err == nil:
			resp.Header = header(now.Current)
			return resp, nil
		case errors.Is(err, kverror.Compacted) && explicit <= 0, errors.Is(err, kverror.ReadAgain), errors.Is(err, errSeveral):
			if ctx.Err() != nil {
				return nil, err
			}
		default:
			return nil, err
		}
	}
}

// readAt reads a span at a moment.
func (r *Router) readAt(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at moment) (*pb.RangeResponse, error) {
	if rt := r.cache.find(span.Start); rt != nil && rt.desc.Span.Covers(span) {
		return r.part(ctx, span, req, at)
	}
	routes, err := r.resolve(ctx, span)
	if err != nil {
		return nil, err
	}
	if len(routes) == 1 {
		return r.part(ctx, span, req, at)
	}
	r.cfg.Metrics.Several.Inc()
	spans := make([]keyspace.Span, 0, len(routes))
	for _, rt := range routes {
		s, ok := rt.desc.Span.Intersect(span)
		if ok {
			spans = append(spans, s)
		}
	}
	// The ranges are asked for their keys in the order of their bytes: only all of
	// them together can be sorted.
	scan := unsorted(req)
	var resp *pb.RangeResponse
	if scan.GetLimit() > 0 && !req.GetCountOnly() {
		resp, err = r.page(ctx, spans, scan, at)
	} else {
		resp, err = r.whole(ctx, spans, scan, at)
	}
	if err == nil && !byKeyUp(req) {
		finish(req, resp)
	}
	return resp, err
}

// part answers a request, which is for the span and no more, from the range that holds
// it. Where the span has been split meanwhile it reads the pieces.
func (r *Router) part(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at moment) (*pb.RangeResponse, error) {
	got, err := r.single(ctx, span, func(rt *route) *shard.Request {
		return &shard.Request{Range: rt.desc.Range, Generation: rt.desc.Generation, ReadRevision: at.at, Txn: at.txn, Op: req}
	}, true)
	if errors.Is(err, errSeveral) {
		return r.readAt(ctx, span, req, at)
	}
	if err != nil {
		return nil, err
	}
	resp, ok := got.(*pb.RangeResponse)
	if !ok {
		return nil, kverror.New(kverror.Internal, "a range answered a read with %T", got)
	}
	return resp, nil
}

// whole reads every span in full, in parallel, and joins what they hold.
func (r *Router) whole(ctx context.Context, spans []keyspace.Span, req *pb.RangeRequest, at moment) (*pb.RangeResponse, error) {
	parts, err := r.parts(ctx, spans, req, at)
	if err != nil {
		return nil, err
	}
	out := &pb.RangeResponse{}
	n := 0
	for _, p := range parts {
		n += len(p.GetKvs())
	}
	if n > 0 {
		out.Kvs = make([]*mvccpb.KeyValue, 0, n)
	}
	for _, p := range parts {
		out.Kvs = append(out.Kvs, p.GetKvs()...)
		out.Count += p.GetCount()
		out.More = out.More || p.GetMore()
	}
	return out, nil
}

// page reads the spans in order until limit keys are found, and of the rest only
// how many keys there are: most pages end in their first range.
func (r *Router) page(ctx context.Context, spans []keyspace.Span, req *pb.RangeRequest, at moment) (*pb.RangeResponse, error) {
	out := &pb.RangeResponse{}
	left := req.GetLimit()
	for left > 0 && len(spans) > 0 {
		sub := clip(req, spans[0])
		sub.Limit = left
		p, err := r.part(ctx, spans[0], sub, at)
		if err != nil {
			return nil, err
		}
		out.Kvs = append(out.Kvs, p.GetKvs()...)
		out.Count += p.GetCount()
		out.More = p.GetMore()
		left -= int64(len(p.GetKvs()))
		spans = spans[1:]
	}
	if len(spans) == 0 {
		return out, nil
	}
	rest := clip(req, spans[0])
	if filtered(req) {
		// Which of the keys pass the filters is not in the count.
		rest.Limit, rest.KeysOnly = 1, true
	} else {
		rest.Limit, rest.CountOnly = 0, true
	}
	parts, err := r.parts(ctx, spans, rest, at)
	if err != nil {
		return nil, err
	}
	for _, p := range parts {
		out.Count += p.GetCount()
		out.More = out.More || len(p.GetKvs()) > 0 || (!filtered(req) && p.GetCount() > 0)
	}
	return out, nil
}

// parts reads a request's share of each span, a bounded number at a time.
func (r *Router) parts(ctx context.Context, spans []keyspace.Span, req *pb.RangeRequest, at moment) ([]*pb.RangeResponse, error) {
	parts := make([]*pb.RangeResponse, len(spans))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxParallelParts)
	var held atomic.Int64
	defer func() { r.joined.Add(-held.Load()) }()
	for i, s := range spans {
		g.Go(func() (err error) {
			if parts[i], err = r.part(ctx, s, clip(req, s), at); err != nil {
				return err
			}
			return r.hold(&held, int64(proto.Size(parts[i])))
		})
	}
	return parts, g.Wait()
}

// hold takes the bytes of one part from the budget of answers that are being put
// together. held are those of this answer.
func (r *Router) hold(held *atomic.Int64, bytes int64) error {
	if bytes == 0 {
		return nil
	}
	held.Add(bytes)
	if all := r.joined.Add(bytes); all > r.cfg.ReadBytes && held.Load() < all {
		return kverror.New(kverror.TooManyRequests, "answers of %d bytes are being put together, at most %d", all, r.cfg.ReadBytes)
	}
	return nil
}

// clip returns the request for a part of its span.
func clip(req *pb.RangeRequest, span keyspace.Span) *pb.RangeRequest {
	c := &pb.RangeRequest{
		Key: span.Start, RangeEnd: span.End,
		Limit: req.GetLimit(), Revision: req.GetRevision(),
		SortOrder: req.GetSortOrder(), SortTarget: req.GetSortTarget(),
		Serializable: req.GetSerializable(), KeysOnly: req.GetKeysOnly(), CountOnly: req.GetCountOnly(),
		MinModRevision: req.GetMinModRevision(), MaxModRevision: req.GetMaxModRevision(),
		MinCreateRevision: req.GetMinCreateRevision(), MaxCreateRevision: req.GetMaxCreateRevision(),
	}
	if len(c.Key) == 0 {
		c.Key = []byte{0}
	}
	if len(c.RangeEnd) == 0 {
		c.RangeEnd = []byte{0}
	} else if bytes.Equal(keyspace.Next(c.Key), c.RangeEnd) {
		c.RangeEnd = nil
	}
	return c
}

// byKeyUp says whether the answer is in the order in which ranges hold keys.
func byKeyUp(req *pb.RangeRequest) bool {
	return req.GetSortTarget() == pb.RangeRequest_KEY && req.GetSortOrder() != pb.RangeRequest_DESCEND
}

func filtered(req *pb.RangeRequest) bool {
	return req.GetMinModRevision() != 0 || req.GetMaxModRevision() != 0 ||
		req.GetMinCreateRevision() != 0 || req.GetMaxCreateRevision() != 0
}

// unsorted returns what the ranges are asked for so that [finish] can make the
// answer of it.
func unsorted(req *pb.RangeRequest) *pb.RangeRequest {
	if byKeyUp(req) {
		return req
	}
	scan := clip(req, keyspace.Span{})
	scan.SortTarget, scan.SortOrder = pb.RangeRequest_KEY, pb.RangeRequest_NONE
	scan.KeysOnly = req.GetKeysOnly() && req.GetSortTarget() != pb.RangeRequest_VALUE
	switch {
	case req.GetSortOrder() != pb.RangeRequest_NONE || filtered(req):
		scan.Limit = 0
	case scan.Limit > 0 && scan.Limit < math.MaxInt64:
		// A target without an order sorts no more than what etcd's scan has found: the
		// limit's number of keys and the one that says that there are more.
		scan.Limit++
	}
	return scan
}

// finish applies to the keys of all ranges what [unsorted] has held back.
func finish(req *pb.RangeRequest, resp *pb.RangeResponse) {
	shard.SortKeys(req, resp.Kvs)
	resp.More = false
	if l := req.GetLimit(); l > 0 && int64(len(resp.Kvs)) > l {
		clear(resp.Kvs[l:])
		resp.Kvs, resp.More = resp.Kvs[:l], true
	}
	if req.GetKeysOnly() {
		for _, kv := range resp.Kvs {
			kv.Value = nil
		}
	}
}
