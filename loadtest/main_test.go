package loadtest

import (
	"context"
	"sync/atomic"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// foreignPut is a put by another client between the keys of a run.
func foreignPut() *etcdserverpb.PutRequest {
	return &etcdserverpb.PutRequest{Key: []byte("mine"), Value: []byte("a value without a stamp")}
}

// instant answers at once, with a revision higher than the last.
type instant struct{ kv }

var instantRevision atomic.Int64

func (instant) Put(context.Context, *etcdserverpb.PutRequest, ...grpc.CallOption) (*etcdserverpb.PutResponse, error) {
	return &etcdserverpb.PutResponse{Header: &etcdserverpb.ResponseHeader{Revision: instantRevision.Add(1)}}, nil
}

func (instant) Txn(context.Context, *etcdserverpb.TxnRequest, ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	return &etcdserverpb.TxnResponse{Header: &etcdserverpb.ResponseHeader{Revision: instantRevision.Add(1)}, Succeeded: true}, nil
}

func (instant) Range(context.Context, *etcdserverpb.RangeRequest, ...grpc.CallOption) (*etcdserverpb.RangeResponse, error) {
	return &etcdserverpb.RangeResponse{Header: &etcdserverpb.ResponseHeader{Revision: instantRevision.Load()}}, nil
}
