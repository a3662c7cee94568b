package etcdapi

import (
	"context"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/kverror"
)

// Operations are the calls of the KV service without a call of gRPC, for streams that carry many of them. Each passes
// what a call by gRPC does, so it is checked, counted, logged and audited alike. Contexts are those of the streams.
type Operations struct {
	s *Server

	read, put, remove, txn operation
}

// operation is one of KV's methods.
type operation struct {
	method  string
	handler grpc.UnaryHandler
}

func newOperations(s *Server) *Operations {
	k := &kvServer{s: s}
	return &Operations{
		s:      s,
		read:   operationOf(pb.KV_Range_FullMethodName, k.Range),
		put:    operationOf(pb.KV_Put_FullMethodName, k.Put),
		remove: operationOf(pb.KV_DeleteRange_FullMethodName, k.DeleteRange),
		txn:    operationOf(pb.KV_Txn_FullMethodName, k.Txn),
	}
}

func operationOf[Q, A any](method string, call func(context.Context, Q) (A, error)) operation {
	return operation{
		method:  method,
		handler: func(ctx context.Context, r any) (any, error) { return call(ctx, r.(Q)) },
	}
}

// Do serves a request of the KV service, which it may keep. It returns the response as gRPC sends it, to be freed when
// that has been done: large ones count in Options.Answers until then. Errors have a gRPC status.
func (o *Operations) Do(ctx context.Context, request any) (mem.BufferSlice, error) {
	op := o.of(request)
	return o.finish(o.s.comes(ctx, request, op.method), op)
}

// Begin is Do in two parts, of which the first does not block. finish is the other one, called once. If the request is begun,
// answered is called once, from any goroutine, when it has been carried out or has failed. After answered(true) finish does not
// block. Else it does, for no longer than ctx lasts.
func (o *Operations) Begin(ctx context.Context, request any, answered func(ok bool)) (finish func() (mem.BufferSlice, error), begun bool) {
	op := o.of(request)
	u := o.s.comes(ctx, request, op.method)
	begun = u.start(answered)
	return func() (mem.BufferSlice, error) { return o.finish(u, op) }, begun
}

func (o *Operations) of(request any) *operation {
	switch request.(type) {
	case *pb.RangeRequest:
		return &o.read
	case *pb.PutRequest:
		return &o.put
	case *pb.DeleteRangeRequest:
		return &o.remove
	case *pb.TxnRequest:
		return &o.txn
	}
	panic(fmt.Sprintf("etcdapi: %T is no request of KV", request))
}

func (o *Operations) finish(u *unaryCall, op *operation) (mem.BufferSlice, error) {
	answer, err := u.serve(op.handler)
	if err != nil {
		return nil, kverror.GRPC(err)
	}
	return o.s.codec.encode(answer)
}

// Place says who leads a key, if that is another node, as far as this one knows. The ends of a range are keys. So the span is cut
// to what the sender of the context may read, and to the key alone if that is nothing.
func (o *Operations) Place(ctx context.Context, key []byte) *pipepb.Place {
	if o.s.opts.Place == nil {
		return nil
	}
	span, leader, urls := o.s.opts.Place(key)
	if leader == 0 || leader == o.s.opts.Self {
		return nil
	}
	c, err := o.s.allowed(ctx, func(*auth.Caller) error { return nil })
	if err != nil {
		return nil
	}
	known, ok := c.Readable(key).Intersect(span)
	if !ok {
		return nil // a range of another key: a bug of Options.Place
	}
	p := &pipepb.Place{Node: uint64(leader), ClientUrls: urls, Key: known.Start, RangeEnd: known.End}
	switch {
	case known.IsSingle():
		p.RangeEnd = nil
	case len(known.End) == 0:
		p.RangeEnd = []byte{0}
	}
	return p
}

// Closing is closed when the server is about to stop. It serves on for a moment.
func (o *Operations) Closing() <-chan struct{} { return o.s.ending }

// Go runs what ends soon after the server has ended the streams. Stop waits for it.
func (o *Operations) Go(f func()) { o.s.wg.Go(f) }

// MaxMessageBytes is the size of the largest message that a client may send.
func (o *Operations) MaxMessageBytes() int { return o.s.opts.MaxRequestBytes + grpcOverheadBytes }
