// Package fakekv is a tiny etcd in memory for the tests of the load generator: puts,
// gets, transactions and status, over gRPC or called directly. Hooks make it slow, faulty or
// forgetful. It is no model of etcd: it supports only what the load generator uses.
package fakekv

import (
	"context"
	"maps"
	"net"
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Store is the fake. Its zero value is ready. Set the hooks before use.
type Store struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedMaintenanceServer

	// Before is called at the start of request n, counted from 1, and may wait. If it
	// returns an error, nothing is applied.
	Before func(ctx context.Context, n int64) error
	// After is called when request n was applied. If it returns an error, the client
	// gets the error instead of the answer.
	After func(ctx context.Context, n int64) error

	mu       sync.Mutex
	requests int64
	txns     int64
	revision int64 // of the last change, less 1
	kvs      map[string]*mvccpb.KeyValue
}

// Put implements etcdserverpb.KVServer.
func (s *Store) Put(ctx context.Context, in *etcdserverpb.PutRequest) (*etcdserverpb.PutResponse, error) {
	n := s.count()
	if s.Before != nil {
		if err := s.Before(ctx, n); err != nil {
			return nil, err
		}
	}
	answer := &etcdserverpb.PutResponse{Header: &etcdserverpb.ResponseHeader{Revision: s.set(in.Key, in.Value)}}
	if s.After != nil {
		if err := s.After(ctx, n); err != nil {
			return nil, err
		}
	}
	return answer, nil
}

// Txn implements etcdserverpb.KVServer for one compare, of a version above -1, and one put.
func (s *Store) Txn(ctx context.Context, in *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	if len(in.Compare) != 1 || in.Compare[0].GetVersion() != -1 || len(in.Success) != 1 || len(in.Failure) != 0 {
		return nil, status.Errorf(codes.Unimplemented, "transaction of %d compares, %d and %d operations", len(in.Compare), len(in.Success), len(in.Failure))
	}
	s.mu.Lock()
	s.txns++
	s.mu.Unlock()
	put, err := s.Put(ctx, in.Success[0].GetRequestPut())
	return &etcdserverpb.TxnResponse{Header: put.GetHeader(), Succeeded: true}, err
}

// Range implements etcdserverpb.KVServer for a key or a span, with a limit.
func (s *Store) Range(ctx context.Context, in *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	n := s.count()
	if s.Before != nil {
		if err := s.Before(ctx, n); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &etcdserverpb.RangeResponse{Header: &etcdserverpb.ResponseHeader{Revision: s.revision + 1}}
	if len(in.RangeEnd) == 0 {
		if kv := s.kvs[string(in.Key)]; kv != nil {
			out.Kvs = append(out.Kvs, kv)
		}
		return out, nil
	}
	for _, key := range slices.Sorted(maps.Keys(s.kvs)) {
		if key < string(in.Key) || key >= string(in.RangeEnd) {
			continue
		}
		if in.Limit > 0 && int64(len(out.Kvs)) == in.Limit {
			out.More = true
			break
		}
		out.Kvs = append(out.Kvs, s.kvs[key])
	}
	return out, nil
}

// Status implements etcdserverpb.MaintenanceServer.
func (s *Store) Status(context.Context, *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	return &etcdserverpb.StatusResponse{Header: &etcdserverpb.ResponseHeader{}, Version: "3.7.3"}, nil
}

func (s *Store) count() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests++
	return s.requests
}

func (s *Store) set(key, value []byte) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	if s.kvs == nil {
		s.kvs = map[string]*mvccpb.KeyValue{}
	}
	s.kvs[string(key)] = &mvccpb.KeyValue{Key: slices.Clone(key), Value: slices.Clone(value), ModRevision: s.revision + 1}
	return s.revision + 1
}

// Txns returns how many transactions came.
func (s *Store) Txns() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.txns
}

// Len returns the number of keys.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.kvs)
}

// Edit hands the stored keys, by name, to f, which may change them behind the
// clients' backs.
func (s *Store) Edit(f func(kvs map[string]*mvccpb.KeyValue)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.kvs)
}

// Serve serves the store on a port of its own until stop is called.
func (s *Store) Serve(options ...grpc.ServerOption) (endpoint string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := grpc.NewServer(options...)
	etcdserverpb.RegisterKVServer(server, s)
	etcdserverpb.RegisterMaintenanceServer(server, s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The clients notice an early end.
		_ = server.Serve(l)
	}()
	return l.Addr().String(), func() { server.Stop(); <-done }, nil
}

// Direct returns the store as a client sees it, without a network.
func (s *Store) Direct() *Direct { return &Direct{s} }

// Direct calls a Store without a network. It ends a call whose context is done, as gRPC
// does.
type Direct struct{ s *Store }

// Put calls Store.Put.
func (d *Direct) Put(ctx context.Context, in *etcdserverpb.PutRequest, _ ...grpc.CallOption) (*etcdserverpb.PutResponse, error) {
	return d.s.Put(ctx, in)
}

// Txn calls Store.Txn.
func (d *Direct) Txn(ctx context.Context, in *etcdserverpb.TxnRequest, _ ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	return d.s.Txn(ctx, in)
}

// Range calls Store.Range.
func (d *Direct) Range(ctx context.Context, in *etcdserverpb.RangeRequest, _ ...grpc.CallOption) (*etcdserverpb.RangeResponse, error) {
	return d.s.Range(ctx, in)
}
