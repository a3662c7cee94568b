package router

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
)

// Own is a Router for the process's own requests, which no user's rights bound.
type Own struct{ *Router }

func own(ctx context.Context) context.Context {
	return keyspace.WithPermit(ctx, keyspace.Internal)
}

// Range is Router's.
func (o Own) Range(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	return o.Router.Range(own(ctx), req)
}

// RangeSpan is Router's.
func (o Own) RangeSpan(ctx context.Context, req *pb.RangeRequest) (keys [][]byte, resp *pb.RangeResponse, share *budget.Share, err error) {
	return o.Router.RangeSpan(own(ctx), req)
}

// RangeStream is Router's.
func (o Own) RangeStream(ctx context.Context, req *pb.RangeRequest, send func(keys []byte, last *pb.RangeResponse) error) error {
	return o.Router.RangeStream(own(ctx), req, send)
}

// Put is Router's.
func (o Own) Put(ctx context.Context, req *pb.PutRequest) (*pb.PutResponse, error) {
	return o.Router.Put(own(ctx), req)
}

// DeleteRange is Router's.
func (o Own) DeleteRange(ctx context.Context, req *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	return o.Router.DeleteRange(own(ctx), req)
}

// Txn is Router's.
func (o Own) Txn(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	return o.Router.Txn(own(ctx), req)
}
