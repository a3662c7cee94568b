package etcdapi

import (
	"context"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy/adapter"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

// keepAliveTimeout is how long etcd's client waits for the first answer to a session's keepalive,
// as etcd sets it for its own services.
const keepAliveTimeout = time.Second

// Locks are etcd's Lock and Election services: etcd's own code, as a client of the KV, Lease and
// Watch services. It calls them as functions of this process. So a lock is as good as a put with a
// lease, a read and a watch, without other code. One watch stream and one keepalive stream serve
// all callers.
type Locks struct {
	client *clientv3.Client
	// ending ends the calls that wait; calls are those that may wait.
	ending context.Context
	end    context.CancelFunc

	mu    sync.Mutex
	ended bool // guarded by mu; no call begins then
	calls sync.WaitGroup
}

// NewLocks makes the services. Close ends their goroutines; log may be nil.
func NewLocks(kv pb.KVServer, leases pb.LeaseServer, watches pb.WatchServer, log *zap.Logger) *Locks {
	if log == nil {
		log = zap.NewNop()
	}
	c := clientv3.NewCtxClient(context.Background(), clientv3.WithZapLogger(log))
	c.KV = clientv3.NewKVFromKVClient(adapter.KvServerToKvClient(kv), c)
	c.Lease = clientv3.NewLeaseFromLeaseClient(adapter.LeaseServerToLeaseClient(leases), c, keepAliveTimeout)
	c.Watcher = quietWatcher{clientv3.NewWatchFromWatchClient(adapter.WatchServerToWatchClient(watches), c)}
	l := &Locks{client: c}
	l.ending, l.end = context.WithCancel(context.Background())
	return l
}

// Register adds the services to a server.
func (l *Locks) Register(r grpc.ServiceRegistrar) {
	v3lockpb.RegisterLockServer(r, lockServer{v3lock.NewLockServer(l.client), l})
	v3electionpb.RegisterElectionServer(r, electionServer{v3election.NewElectionServer(l.client), l})
}

// Close ends all waiting, as if the callers had given up. A key that stayed behind would come to
// hold a lock that nobody knows of. Close takes as long as deleting those keys, but leaves them to
// their leases once ctx is done. It comes before the services that it uses stop.
func (l *Locks) Close(ctx context.Context) {
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.end()
	// The client's context covers the deletion of the keys.
	cut := context.AfterFunc(ctx, func() { _ = l.client.Close() })
	l.calls.Wait()
	if cut() {
		_ = l.client.Close() // it returns the end of its own context
	}
}

// waiting runs a call that may wait, until Close.
func (l *Locks) waiting(ctx context.Context, call func(context.Context) error) error {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return rpctypes.ErrGRPCStopped
	}
	l.calls.Add(1)
	l.mu.Unlock()
	defer l.calls.Done()
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(l.ending, cancel)
	defer stop()
	err := call(inner)
	if err != nil && ctx.Err() == nil && l.ending.Err() != nil {
		return rpctypes.ErrGRPCStopped
	}
	return err
}

// lockServer is etcd's, but Close ends its waiting.
type lockServer struct {
	v3lockpb.LockServer
	l *Locks
}

// Lock waits for a lock.
func (s lockServer) Lock(ctx context.Context, r *v3lockpb.LockRequest) (resp *v3lockpb.LockResponse, err error) {
	err = s.l.waiting(ctx, func(ctx context.Context) (err error) {
		resp, err = s.LockServer.Lock(ctx, r)
		return err
	})
	return resp, err
}

// electionServer is etcd's, but Close ends its waiting.
type electionServer struct {
	v3electionpb.ElectionServer
	l *Locks
}

// Campaign waits for the leadership.
func (s electionServer) Campaign(ctx context.Context, r *v3electionpb.CampaignRequest) (resp *v3electionpb.CampaignResponse, err error) {
	err = s.l.waiting(ctx, func(ctx context.Context) (err error) {
		resp, err = s.ElectionServer.Campaign(ctx, r)
		return err
	})
	return resp, err
}

// Observe streams the proclamations of leaders.
func (s electionServer) Observe(r *v3electionpb.LeaderRequest, stream v3electionpb.Election_ObserveServer) error {
	return s.l.waiting(stream.Context(), func(ctx context.Context) error {
		return s.ElectionServer.Observe(r, observeStream{stream, ctx})
	})
}

// observeStream is an observer's stream that ends with Close.
type observeStream struct {
	v3electionpb.Election_ObserveServer
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s observeStream) Context() context.Context { return s.ctx }

// quietWatcher keeps a context's values from being printed. etcd's client prints them for its logs,
// while gRPC may write to them.
type quietWatcher struct{ clientv3.Watcher }

// Watch implements clientv3.Watcher.
func (w quietWatcher) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	return w.Watcher.Watch(quietContext{ctx}, key, opts...)
}

type quietContext struct{ context.Context }

// String implements fmt.Stringer.
func (quietContext) String() string { return "context of a call" }
