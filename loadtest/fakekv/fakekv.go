// Package fakekv is a tiny etcd in memory for the tests of the load generator: puts,
// gets, transactions, watchers, leases, logins and status, over gRPC, by the pipe or called directly. Hooks make it slow,
// faulty or forgetful. It is no model of etcd: it supports only what the load generator uses.
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

	"github.com/skeindb/skein/loadtest/pipeserver"
)

// Store is the fake. Its zero value is ready. Set the hooks before use.
type Store struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedMaintenanceServer
	etcdserverpb.UnimplementedLeaseServer
	etcdserverpb.UnimplementedAuthServer
	etcdserverpb.UnimplementedWatchServer

	// User and Password are a login without which nothing is served; empty, everybody is.
	User, Password string
	// NoPipe has it serve no pipes, as an etcd.
	NoPipe bool
	// Before is called at the start of request n, counted from 1, and may wait. If it
	// returns an error, nothing is applied.
	Before func(ctx context.Context, n int64) error
	// After is called when request n was applied. If it returns an error, the client
	// gets the error instead of the answer.
	After func(ctx context.Context, n int64) error
	// Copies is how often a watcher gets an event.
	Copies func(*mvccpb.Event) int

	mu       sync.Mutex
	events   []*mvccpb.Event // all of them
	more     chan struct{}   // closed when there are more
	leases   map[int64]bool
	granted  int64
	requests int64
	txns     int64
	revision int64 // of the last change, less 1
	kvs      map[string]*mvccpb.KeyValue
}

// Put implements etcdserverpb.KVServer.
func (s *Store) Put(ctx context.Context, in *etcdserverpb.PutRequest) (*etcdserverpb.PutResponse, error) {
	answer, err := s.write(ctx, &etcdserverpb.TxnRequest{
		Success: []*etcdserverpb.RequestOp{{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: in}}},
	})
	if err != nil {
		return nil, err
	}
	return &etcdserverpb.PutResponse{Header: answer.Header}, nil
}

// Txn implements etcdserverpb.KVServer; apply says for which transactions.
func (s *Store) Txn(ctx context.Context, in *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	s.mu.Lock()
	s.txns++
	s.mu.Unlock()
	return s.write(ctx, in)
}

// write applies a transaction between the hooks.
func (s *Store) write(ctx context.Context, in *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	n := s.count()
	if s.Before != nil {
		if err := s.Before(ctx, n); err != nil {
			return nil, err
		}
	}
	answer, err := s.apply(in)
	if err != nil {
		return nil, err
	}
	if s.After != nil {
		if err := s.After(ctx, n); err != nil {
			return nil, err
		}
	}
	return answer, nil
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
	return s.read(in), nil
}

// read reads a key or a span. The caller holds the lock.
func (s *Store) read(in *etcdserverpb.RangeRequest) *etcdserverpb.RangeResponse {
	out := &etcdserverpb.RangeResponse{Header: &etcdserverpb.ResponseHeader{Revision: s.revision + 1}}
	kvs := s.kvs
	if in.Revision > 0 {
		kvs = s.at(in.Revision)
	}
	if len(in.RangeEnd) == 0 {
		if kv := kvs[string(in.Key)]; kv != nil {
			out.Kvs, out.Count = append(out.Kvs, kv), 1
		}
		return out
	}
	for _, key := range slices.Sorted(maps.Keys(kvs)) {
		if key < string(in.Key) || key >= string(in.RangeEnd) {
			continue
		}
		out.Count++
		if in.Limit > 0 && int64(len(out.Kvs)) == in.Limit {
			out.More = true
			continue
		}
		out.Kvs = append(out.Kvs, kvs[key])
	}
	return out
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
	checked := grpc.ChainUnaryInterceptor(func(ctx context.Context, in any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if info.FullMethod != etcdserverpb.Auth_Authenticate_FullMethodName {
			if err := s.allowed(ctx); err != nil {
				return nil, err
			}
		}
		return next(ctx, in)
	})
	streams := grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if err := s.allowed(stream.Context()); err != nil {
			return err
		}
		return next(srv, stream)
	})
	server := grpc.NewServer(append(options, checked, streams)...)
	etcdserverpb.RegisterKVServer(server, s)
	etcdserverpb.RegisterLeaseServer(server, s)
	etcdserverpb.RegisterWatchServer(server, s)
	etcdserverpb.RegisterAuthServer(server, s)
	etcdserverpb.RegisterMaintenanceServer(server, s)
	if !s.NoPipe {
		pipeserver.Register(server, s)
	}
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

// LeaseGrant calls Store.LeaseGrant.
func (d *Direct) LeaseGrant(ctx context.Context, in *etcdserverpb.LeaseGrantRequest, _ ...grpc.CallOption) (*etcdserverpb.LeaseGrantResponse, error) {
	return d.s.LeaseGrant(ctx, in)
}

// LeaseRevoke calls Store.LeaseRevoke.
func (d *Direct) LeaseRevoke(ctx context.Context, in *etcdserverpb.LeaseRevokeRequest, _ ...grpc.CallOption) (*etcdserverpb.LeaseRevokeResponse, error) {
	return d.s.LeaseRevoke(ctx, in)
}
