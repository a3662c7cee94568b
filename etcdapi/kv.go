package etcdapi

import (
	"context"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// kvServer is etcd's KV service.
type kvServer struct {
	s *Server
	// A method that a newer etcd adds is a compile error, not a surprise.
	pb.UnsafeKVServer
}

// Range reads keys.
func (k *kvServer) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if err := rangeapi.CheckRange(r); err != nil {
		return nil, kverror.GRPC(err)
	}
	ctx, c, err := k.s.permitted(ctx, r)
	if err != nil {
		return nil, err
	}
	if a, ok := ctx.Value(spanAnswerKey{}).(*spanAnswer); ok {
		return k.rangeSpan(ctx, r, c, a)
	}
	resp, err := serve(ctx, k.s, r, k.s.opts.KV.Range)
	if err == nil && r.GetSerializable() {
		err = k.s.held(c)
	}
	if err == nil {
		k.s.metrics.Ranges.Inc()
	}
	return resp, err
}

// mayChange is permitted for a change, with what etcd checks before: who sends it, its size and alarms. The permit is
// of a view no newer than the alarms that were looked at: raising one ends it, as taking a right does.
func (k *kvServer) mayChange(ctx context.Context, r proto.Message) (context.Context, error) {
	for {
		c, err := k.s.allowed(ctx, func(*auth.Caller) error { return nil })
		if err == nil {
			err = k.s.checkSize(r, c)
		}
		if err == nil {
			err = k.s.checkAlarms(ctx, r)
		}
		if err != nil {
			return nil, kverror.GRPC(err)
		}
		if auth.Check(c, r) == nil {
			ctx = keyspace.WithPermit(ctx, c.Permit())
			return ctx, k.s.mayAttach(ctx, c, r)
		}
		// If a newer view allows it, everything is looked at once more by that.
		if _, _, err := k.s.permitted(ctx, r); err != nil {
			return nil, err
		}
	}
}

// permittedNow returns the context of a change that passes all checks of its method, which are made in their order and
// without waiting. It is nil where one refuses it or waits: the method tells.
func (s *Server) permittedNow(ctx context.Context, change proto.Message) context.Context {
	var err error
	switch r := change.(type) {
	case *pb.PutRequest:
		err = rangeapi.CheckPut(r)
	case *pb.DeleteRangeRequest:
		err = rangeapi.CheckDelete(r)
	case *pb.TxnRequest:
		if readOnly(r) || readsSpan(r) {
			return nil
		}
		err = checkTxn(r, s.opts.MaxTxnOps)
	default:
		return nil
	}
	if err != nil {
		return nil
	}
	c := s.opts.Users.Gate.Off()
	if c == nil {
		if c, err = s.identify(noWait{ctx}); err != nil {
			return nil
		}
	}
	if s.checkSize(change, c) != nil || s.opts.Alarms != nil && refusal(s.opts.Alarms.Sticky(), change) != nil || auth.Check(c, change) != nil {
		return nil
	}
	if c.Root() != nil && len(leasesOf(change)) > 0 {
		return nil // others may look at the keys of the lease
	}
	return keyspace.WithPermit(ctx, c.Permit())
}

// changed completes and counts the response of a change, and returns it.
func (s *Server) changed(change, resp proto.Message) proto.Message {
	switch r := resp.(type) {
	case *pb.PutResponse:
		s.fill(checkedHeader(r))
		s.metrics.countPut(change.(*pb.PutRequest)) //nolint:forcetypeassert // what a put is answered with
	case *pb.DeleteRangeResponse:
		s.fill(checkedHeader(r))
		s.metrics.Deletes.Inc()
	case *pb.TxnResponse:
		s.fill(checkedHeader(r))
		s.metrics.countTxn(change.(*pb.TxnRequest), r) //nolint:forcetypeassert // what a transaction is answered with
	}
	return resp
}

// rangeSpan reads a span for gRPC, which sends a instead of the response.
func (k *kvServer) rangeSpan(ctx context.Context, r *pb.RangeRequest, c *auth.Caller, a *spanAnswer) (*pb.RangeResponse, error) {
	var err error
	if a.keys, a.rest, a.share, err = k.s.opts.KV.RangeSpan(ctx, r); err != nil {
		return nil, kverror.GRPC(err)
	}
	if r.GetSerializable() {
		if err := k.s.held(c); err != nil {
			a.share.Release()
			return nil, err
		}
	}
	k.s.fill(checkedHeader(a.rest))
	k.s.metrics.Ranges.Inc()
	return a.rest, nil
}

// awaitRoom waits until those that read before have memory. A transaction waits before it begins: later,
// others may wait for its locks.
func (s *Server) awaitRoom(ctx context.Context) error {
	turn := s.opts.Answers.Share()
	defer turn.Release()
	if err := turn.Take(ctx, 0); err != nil {
		return kverror.Of(err)
	}
	return nil
}

// RangeStream reads keys in key order and sends them as they come.
func (k *kvServer) RangeStream(r *pb.RangeRequest, rs pb.KV_RangeStreamServer) error {
	if err := checkRangeStream(r); err != nil {
		return kverror.GRPC(err)
	}
	// A stream that is refused for rights that were taken away has sent nothing yet.
	return k.s.again(rs.Context(), func(ctx context.Context) error {
		ctx, c, err := k.s.permitted(ctx, r)
		if err != nil {
			return err
		}
		begun := false
		return kverror.GRPC(k.s.opts.KV.RangeStream(ctx, r, func(keys []byte, last *pb.RangeResponse) error {
			if !begun && r.GetSerializable() {
				if err := k.s.held(c); err != nil {
					return err
				}
			}
			begun = true
			if last != nil {
				k.s.fill(checkedHeader(last))
				k.s.metrics.Ranges.Inc()
			}
			return rs.SendMsg(&streamedKeys{keys, last})
		}))
	})
}

// Put stores a key.
func (k *kvServer) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	if err := rangeapi.CheckPut(r); err != nil {
		return nil, kverror.GRPC(err)
	}
	ctx, err := k.mayChange(ctx, r)
	if err != nil {
		return nil, err
	}
	resp, err := serve(ctx, k.s, r, k.s.opts.KV.Put)
	if err == nil {
		k.s.metrics.countPut(r)
	}
	return resp, err
}

// DeleteRange deletes keys.
func (k *kvServer) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	if err := rangeapi.CheckDelete(r); err != nil {
		return nil, kverror.GRPC(err)
	}
	ctx, err := k.mayChange(ctx, r)
	if err != nil {
		return nil, err
	}
	resp, err := serve(ctx, k.s, r, k.s.opts.KV.DeleteRange)
	if err == nil {
		k.s.metrics.Deletes.Inc()
	}
	return resp, err
}

// Txn runs a transaction.
func (k *kvServer) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	if err := checkTxn(r, k.s.opts.MaxTxnOps); err != nil {
		return nil, kverror.GRPC(err)
	}
	var err error
	if readOnly(r) {
		ctx, _, err = k.s.permitted(ctx, r)
	} else {
		ctx, err = k.mayChange(ctx, r)
	}
	if err != nil {
		return nil, err
	}
	if readsSpan(r) {
		if err := k.s.awaitRoom(ctx); err != nil {
			return nil, kverror.GRPC(err)
		}
	}
	resp, err := serve(ctx, k.s, r, k.s.opts.KV.Txn)
	if err == nil {
		k.s.metrics.countTxn(r, resp)
	}
	return resp, err
}

// Compact makes old revisions unreadable.
func (k *kvServer) Compact(ctx context.Context, r *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	if err := k.s.checkAlarms(ctx, r); err != nil {
		return nil, kverror.GRPC(err)
	}
	return serve(ctx, k.s, r, k.s.opts.KV.Compact)
}

// response is a response of the KV service.
type response interface{ GetHeader() *pb.ResponseHeader }

// serve passes a checked request to the router, which bounds it in time, and completes the
// response.
func serve[Q any, A response](ctx context.Context, s *Server, req Q, f func(context.Context, Q) (A, error)) (none A, _ error) {
	resp, err := f(ctx, req)
	if err != nil {
		return none, kverror.GRPC(err)
	}
	s.fill(checkedHeader(resp))
	return resp, nil
}

// checkedHeader returns the header of a response, which must have a revision.
func checkedHeader(resp response) *pb.ResponseHeader {
	h := resp.GetHeader()
	if h == nil || h.Revision <= 0 {
		// Clients take the revision for a resource version; a zero would corrupt them.
		panic(fmt.Sprintf("etcdapi: a response %T without a revision: header %v", resp, h))
	}
	return h
}

// fill completes a header apart from its revision.
func (s *Server) fill(h *pb.ResponseHeader) {
	h.ClusterId = uint64(s.opts.Cluster)
	h.MemberId = uint64(s.opts.Self)
	h.RaftTerm = s.opts.Node.Term()
	for told := s.told.Load(); told < h.Revision && !s.told.CompareAndSwap(told, h.Revision); told = s.told.Load() {
	}
}

// own returns the header of a node's answer about itself. The node's ranges may have heard of lower
// revisions than it has told its clients, and headers do not go back. The empty store is at revision 1.
func (s *Server) own(heard keyspace.Revision) *pb.ResponseHeader {
	h := &pb.ResponseHeader{Revision: max(1, int64(heard), s.told.Load())}
	s.fill(h)
	return h
}
