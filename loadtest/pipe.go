package loadtest

import (
	"context"
	"errors"
	"fmt"
	"io"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	skein "github.com/skeindb/skein/client"
)

// pipeConn is a connection whose requests go by a pipe, apart from those of leases.
type pipeConn struct {
	pipe *skein.Client
	etcdserverpb.LeaseClient
}

// openPipe opens a pipe to one endpoint.
func (a *Access) openPipe(endpoint string) (kv, io.Closer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	pipe, err := skein.Open(ctx, skein.Config{Etcd: a.config(endpoint)})
	switch {
	case errors.Is(err, skein.ErrNoPipe):
		return nil, nil, fmt.Errorf("endpoint %s serves no pipe: it is an etcd, or a Skein before it had one; take --api etcd", endpoint)
	case err != nil:
		return nil, nil, a.notConnected(endpoint, err)
	}
	return pipeConn{pipe, clientv3.RetryLeaseClient(pipe.Etcd())}, pipe, nil
}

// Requests are copied: after a timeout the pipe may still be encoding what the caller uses for its next one.

func (c pipeConn) Put(ctx context.Context, in *etcdserverpb.PutRequest, _ ...grpc.CallOption) (*etcdserverpb.PutResponse, error) {
	answer, err := skein.Do(ctx, c.pipe, proto.CloneOf(in)).Put()
	return answer, statusOf(err)
}

func (c pipeConn) Range(ctx context.Context, in *etcdserverpb.RangeRequest, _ ...grpc.CallOption) (*etcdserverpb.RangeResponse, error) {
	answer, err := skein.Do(ctx, c.pipe, proto.CloneOf(in)).Range()
	return answer, statusOf(err)
}

func (c pipeConn) Txn(ctx context.Context, in *etcdserverpb.TxnRequest, _ ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	answer, err := skein.Do(ctx, c.pipe, proto.CloneOf(in)).Txn()
	return answer, statusOf(err)
}

// statusOf returns an error of the pipe as etcd's call would end with it. A change of unknown fate must not look like one that was
// refused, whatever its stream has ended with.
func statusOf(err error) error {
	var e rpctypes.EtcdError
	switch {
	case errors.Is(err, skein.ErrUnknownFate):
		return status.Error(codes.Unknown, err.Error())
	case errors.As(err, &e):
		return status.Error(e.Code(), e.Error())
	}
	return err
}
