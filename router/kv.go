package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// Put stores one key. The caller has checked the request (etcdapi). The response's header has only
// the revision.
func (r *Router) Put(ctx context.Context, req *pb.PutRequest) (*pb.PutResponse, error) {
	return write[*pb.PutResponse](ctx, r, keyspace.Single(req.GetKey()), req)
}

// DeleteRange deletes a span of keys at one revision, in any number of ranges.
func (r *Router) DeleteRange(ctx context.Context, req *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
	if !ok {
		rev, err := r.emptyWrite(ctx)
		return &pb.DeleteRangeResponse{Header: header(rev)}, err
	}
	return write[*pb.DeleteRangeResponse](ctx, r, span, req)
}

// Txn runs a transaction, over any number of ranges.
func (r *Router) Txn(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	span, ok := rangeapi.Bounds(req)
	if !ok {
		rev, err := r.emptyWrite(ctx)
		resp := keyless(req)
		resp.Header = header(rev)
		return resp, err
	}
	return write[*pb.TxnResponse](ctx, r, span, req)
}

// keyless answers a transaction that names no key. It has no compares, so it succeeds, and so do
// its nested transactions, the only operations that it can have. etcd leaves their headers empty.
func keyless(req *pb.TxnRequest) *pb.TxnResponse {
	resp := &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: true}
	for _, op := range req.GetSuccess() {
		n := keyless(op.GetRequestTxn())
		resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: n}})
	}
	return resp
}

// Compact makes revisions below the request's unreadable on all nodes. A physical compaction is
// answered when every live replica has removed them, also if the revision was compacted before, as
// in etcd. As in
// etcd, only the client's context bounds that wait.
func (r *Router) Compact(ctx context.Context, req *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	rev, err := r.compact(ctx, keyspace.Revision(req.GetRevision()))
	if at := keyspace.Revision(req.GetRevision()); req.GetPhysical() && at > 0 && (err == nil || errors.Is(err, kverror.Compacted)) {
		if waited := r.cfg.Removal.AwaitRemoval(ctx, at); waited != nil {
			if ended := ctx.Err(); ended != nil {
				waited = ended
			}
			return nil, kverror.Of(waited)
		}
	}
	if err != nil {
		return nil, err
	}
	return &pb.CompactionResponse{Header: header(rev)}, nil
}

func (r *Router) compact(ctx context.Context, at keyspace.Revision) (current keyspace.Revision, err error) {
	limit := r.limited(ctx)
	defer limit.End()
	current, err = r.cfg.Placement.Compact(limit.LazyDeadline, at)
	return current, limit.outcome(err)
}

// emptyWrite answers a write that names no key with the current revision.
func (r *Router) emptyWrite(ctx context.Context) (keyspace.Revision, error) {
	_ = permitOf(ctx)
	limit := r.limited(ctx)
	defer limit.End()
	a, err := r.currentOrWait(limit.LazyDeadline)
	return a.Current, limit.outcome(err)
}

// write sends op to the range of its span and returns the response.
func write[R proto.Message](ctx context.Context, r *Router, span keyspace.Span, op proto.Message) (R, error) {
	var none R
	got, err := r.writeWithin(r.limited(ctx), span, op, nil)
	if err != nil {
		return none, err
	}
	resp, ok := got.(R)
	if !ok {
		return none, kverror.New(kverror.Internal, "a range answered %T with %T", op, got)
	}
	return resp, nil
}

// writeWithin sends op to the range of its span, and ends the limit. begun is as in write.
func (r *Router) writeWithin(limit limit, span keyspace.Span, op proto.Message, begun *attempt) (proto.Message, error) {
	defer limit.End()
	got, err := r.write(limit.LazyDeadline, span, op, begun)
	if errors.Is(err, errMultiRange) || err != nil && deleteTooLarge(err, op) {
		got, err = r.writeMultiRange(limit.LazyDeadline, op)
	}
	return got, limit.outcome(err)
}

// Start begins a put, delete or transaction whose range is led here, and does not block. The caller has checked the request.
// answered is called once, from any goroutine, when the range has answered; ok says that it has no error. It must not
// block. wait returns what Put, DeleteRange or Txn would. It is called once, after answered was called or ctx has ended; it
// blocks if the range's answer is an error, and until then. Start returns nil where nothing has happened, because
// the request has to go another way.
func (r *Router) Start(ctx context.Context, op proto.Message, answered func(ok bool)) (wait func() (proto.Message, error)) {
	permit := permitOf(ctx)
	if r.cfg.Starter == nil {
		return nil
	}
	span, ok := writtenSpan(op)
	if t, isTxn := op.(*pb.TxnRequest); isTxn {
		span, ok = rangeapi.Bounds(t)
	}
	if !ok {
		return nil
	}
	rt := r.cache.find(span.Start)
	if rt == nil || rt.leader() != r.cfg.Self || !rt.desc.Span.Covers(span) {
		return nil
	}
	limit := r.limited(ctx)
	answer := r.cfg.Starter.Start(limit.LazyDeadline, writing(rt, permit, op), answered)
	if answer == nil {
		limit.End()
		return nil
	}
	return func() (proto.Message, error) { return r.writeWithin(limit, span, op, &attempt{rt, answer}) }
}

// writeMultiRange executes what one range cannot do alone.
func (r *Router) writeMultiRange(ctx context.Context, op proto.Message) (proto.Message, error) {
	switch o := op.(type) {
	case *pb.TxnRequest:
		return r.runTxn(ctx, o)
	case *pb.DeleteRangeRequest:
		resp, err := r.runTxn(ctx, &pb.TxnRequest{
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: o}}},
		})
		if err != nil {
			return nil, err
		}
		d := resp.GetResponses()[0].GetResponseDeleteRange()
		d.Header = resp.GetHeader()
		return d, nil
	}
	return nil, kverror.New(kverror.Internal, "%T over several ranges", op)
}

// deleteTooLarge says whether a range refused a delete because it does not fit into one entry.
func deleteTooLarge(err error, op proto.Message) bool {
	return kverror.Of(err).Kind == kverror.RequestTooLarge && deletesSpan(op)
}

// deletesSpan says whether an operation may delete more than one key.
func deletesSpan(op proto.Message) bool {
	switch o := op.(type) {
	case *pb.DeleteRangeRequest:
		return len(o.GetRangeEnd()) > 0
	case *pb.TxnRequest:
		for _, ops := range [2][]*pb.RequestOp{o.GetSuccess(), o.GetFailure()} {
			for _, op := range ops {
				if d := op.GetRequestDeleteRange(); d != nil && deletesSpan(d) {
					return true
				}
				if n := op.GetRequestTxn(); n != nil && deletesSpan(n) {
					return true
				}
			}
		}
	}
	return false
}
