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

	"github.com/skeindb/skein/auth"
)

// keepAliveTimeout is how long etcd's client waits for the first answer to a session's keepalive,
// as etcd sets it for its own services.
const keepAliveTimeout = time.Second

// Locks are etcd's Lock and Election services: etcd's own code, as a client of the KV, Lease and
// Watch services. It calls them as functions of this process. So a lock is as good as a put with a
// lease, a read and a watch, without other code. One watch stream and one keepalive stream serve
// all callers of one user: the services act on them for that user. Without users there is one client.
type Locks struct {
	services services
	// ending ends the calls that wait; calls are those that may wait.
	ending context.Context
	end    context.CancelFunc

	mu      sync.Mutex
	ended   bool                     // guarded by mu; no call begins then
	clients map[lockUser]*lockClient // guarded by mu
	uses    uint64                   // guarded by mu; counts the calls
	calls   sync.WaitGroup
}

// services are what locks are made of.
type services struct {
	kv      pb.KVServer
	leases  pb.LeaseServer
	watches pb.WatchServer
	log     *zap.Logger
}

// lockUser is a user as long as that is the same one; the zero value is everybody while checks are off.
type lockUser struct {
	name  string
	since uint64
}

// lockClient is the client of one user.
type lockClient struct {
	*clientv3.Client
	lock     v3lockpb.LockServer
	election v3electionpb.ElectionServer
	// Guarded by Locks.mu. calls are under way, and used is the number of the last one.
	calls int
	used  uint64
}

// maxLockClients bounds the clients. Beyond it the one goes that nobody uses, and nobody has used for longest. If all are
// used, further users are refused.
const maxLockClients = 256

// NewLocks makes the services. Close ends their goroutines; log may be nil.
func NewLocks(kv pb.KVServer, leases pb.LeaseServer, watches pb.WatchServer, log *zap.Logger) *Locks {
	if log == nil {
		log = zap.NewNop()
	}
	l := &Locks{services: services{kv, leases, watches, log}, clients: map[lockUser]*lockClient{}}
	l.ending, l.end = context.WithCancel(context.Background())
	return l
}

// client makes the client of a caller.
func (s *services) client(caller *auth.Caller) *lockClient {
	c := clientv3.NewCtxClient(acting(context.Background(), caller), clientv3.WithZapLogger(s.log))
	c.KV = clientv3.NewKVFromKVClient(adapter.KvServerToKvClient(s.kv), c)
	c.Lease = clientv3.NewLeaseFromLeaseClient(adapter.LeaseServerToLeaseClient(actingLeases{s.leases, caller}), c, keepAliveTimeout)
	c.Watcher = quietWatcher{clientv3.NewWatchFromWatchClient(adapter.WatchServerToWatchClient(s.watches), c)}
	return &lockClient{Client: c, lock: v3lock.NewLockServer(c), election: v3election.NewElectionServer(c)}
}

// Register adds the services to a server.
func (l *Locks) Register(r grpc.ServiceRegistrar) {
	v3lockpb.RegisterLockServer(r, lockServer{l: l})
	v3electionpb.RegisterElectionServer(r, electionServer{l: l})
}

// Close ends all waiting, as if the callers had given up. A key that stayed behind would come to
// hold a lock that nobody knows of. Close takes as long as deleting those keys, but leaves them to
// their leases once ctx is done. It comes before the services that it uses stop.
func (l *Locks) Close(ctx context.Context) {
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.end()
	// The clients' contexts cover the deletion of the keys.
	cut := context.AfterFunc(ctx, l.closeClients)
	l.calls.Wait()
	if cut() {
		l.closeClients()
	}
}

func (l *Locks) closeClients() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.clients {
		_ = c.Close() // it returns the end of its own context
	}
}

// call runs a call of the context's caller with that user's client, until Close.
func (l *Locks) call(ctx context.Context, run func(context.Context, *lockClient) error) error {
	c, err := l.take(callerOf(ctx))
	if err != nil {
		return err
	}
	defer l.release(c)
	inner, cancel := context.WithCancel(acting(ctx, callerOf(ctx)))
	defer cancel()
	stop := context.AfterFunc(l.ending, cancel)
	defer stop()
	err = run(inner, c)
	if err != nil && ctx.Err() == nil && l.ending.Err() != nil {
		return rpctypes.ErrGRPCStopped
	}
	return err
}

// take returns the client of a caller for one call.
func (l *Locks) take(caller *auth.Caller) (*lockClient, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return nil, rpctypes.ErrGRPCStopped
	}
	var u lockUser
	u.name, u.since = caller.Incarnation()
	c := l.clients[u]
	if c == nil {
		if err := l.makeRoomLocked(); err != nil {
			return nil, err
		}
		c = l.services.client(caller)
		l.clients[u] = c
	}
	l.calls.Add(1)
	l.uses++
	c.calls, c.used = c.calls+1, l.uses
	return c, nil
}

func (l *Locks) release(c *lockClient) {
	l.mu.Lock()
	c.calls--
	l.mu.Unlock()
	l.calls.Done()
}

// makeRoomLocked closes the client that was not used for longest, if there are many.
func (l *Locks) makeRoomLocked() error {
	if len(l.clients) < maxLockClients {
		return nil
	}
	var oldest lockUser
	var found *lockClient
	for u, c := range l.clients {
		if c.calls == 0 && (found == nil || c.used < found.used) {
			oldest, found = u, c
		}
	}
	if found == nil {
		return rpctypes.ErrGRPCRequestTooManyRequests
	}
	delete(l.clients, oldest)
	_ = found.Close()
	return nil
}

// lockServer is etcd's, for the caller of each call.
type lockServer struct {
	v3lockpb.UnsafeLockServer
	l *Locks
}

// Lock waits for a lock.
func (s lockServer) Lock(ctx context.Context, r *v3lockpb.LockRequest) (resp *v3lockpb.LockResponse, err error) {
	err = s.l.call(ctx, func(ctx context.Context, c *lockClient) (err error) {
		resp, err = c.lock.Lock(ctx, r)
		return err
	})
	return resp, err
}

// Unlock gives a lock back.
func (s lockServer) Unlock(ctx context.Context, r *v3lockpb.UnlockRequest) (resp *v3lockpb.UnlockResponse, err error) {
	err = s.l.call(ctx, func(ctx context.Context, c *lockClient) (err error) {
		resp, err = c.lock.Unlock(ctx, r)
		return err
	})
	return resp, err
}

// electionServer is etcd's, for the caller of each call.
type electionServer struct {
	v3electionpb.UnsafeElectionServer
	l *Locks
}

// Campaign waits for the leadership.
func (s electionServer) Campaign(ctx context.Context, r *v3electionpb.CampaignRequest) (resp *v3electionpb.CampaignResponse, err error) {
	err = s.l.call(ctx, func(ctx context.Context, c *lockClient) (err error) {
		resp, err = c.election.Campaign(ctx, r)
		return err
	})
	return resp, err
}

// Proclaim changes what the leader says.
func (s electionServer) Proclaim(ctx context.Context, r *v3electionpb.ProclaimRequest) (resp *v3electionpb.ProclaimResponse, err error) {
	err = s.l.call(ctx, func(ctx context.Context, c *lockClient) (err error) {
		resp, err = c.election.Proclaim(ctx, r)
		return err
	})
	return resp, err
}

// Leader returns the leader.
func (s electionServer) Leader(ctx context.Context, r *v3electionpb.LeaderRequest) (resp *v3electionpb.LeaderResponse, err error) {
	err = s.l.call(ctx, func(ctx context.Context, c *lockClient) (err error) {
		resp, err = c.election.Leader(ctx, r)
		return err
	})
	return resp, err
}

// Resign gives the leadership up.
func (s electionServer) Resign(ctx context.Context, r *v3electionpb.ResignRequest) (resp *v3electionpb.ResignResponse, err error) {
	err = s.l.call(ctx, func(ctx context.Context, c *lockClient) (err error) {
		resp, err = c.election.Resign(ctx, r)
		return err
	})
	return resp, err
}

// Observe streams the proclamations of leaders.
func (s electionServer) Observe(r *v3electionpb.LeaderRequest, stream v3electionpb.Election_ObserveServer) error {
	return s.l.call(stream.Context(), func(ctx context.Context, c *lockClient) error {
		return c.election.Observe(r, observeStream{stream, ctx})
	})
}

// observeStream is an observer's stream that ends with Close.
type observeStream struct {
	v3electionpb.Election_ObserveServer
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s observeStream) Context() context.Context { return s.ctx }

// lockKV is the KV service for calls that come through no interceptor.
type lockKV struct{ kvServer }

// Range implements etcd's KV service.
func (k *lockKV) Range(ctx context.Context, r *pb.RangeRequest) (resp *pb.RangeResponse, err error) {
	err = k.s.again(ctx, func(ctx context.Context) (err error) {
		resp, err = k.kvServer.Range(ctx, r)
		return err
	})
	return resp, err
}

// Put implements etcd's KV service.
func (k *lockKV) Put(ctx context.Context, r *pb.PutRequest) (resp *pb.PutResponse, err error) {
	err = k.s.again(ctx, func(ctx context.Context) (err error) {
		resp, err = k.kvServer.Put(ctx, r)
		return err
	})
	return resp, err
}

// DeleteRange implements etcd's KV service.
func (k *lockKV) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (resp *pb.DeleteRangeResponse, err error) {
	err = k.s.again(ctx, func(ctx context.Context) (err error) {
		resp, err = k.kvServer.DeleteRange(ctx, r)
		return err
	})
	return resp, err
}

// Txn implements etcd's KV service.
func (k *lockKV) Txn(ctx context.Context, r *pb.TxnRequest) (resp *pb.TxnResponse, err error) {
	err = k.s.again(ctx, func(ctx context.Context) (err error) {
		resp, err = k.kvServer.Txn(ctx, r)
		return err
	})
	return resp, err
}

// actingLeases have a caller's leases renewed in that user's name: etcd's client renews in a context of its own.
type actingLeases struct {
	pb.LeaseServer
	caller *auth.Caller
}

// LeaseKeepAlive implements etcd's Lease service.
func (l actingLeases) LeaseKeepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	return l.LeaseServer.LeaseKeepAlive(actingStream{stream, acting(stream.Context(), l.caller)})
}

type actingStream struct {
	pb.Lease_LeaseKeepAliveServer
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s actingStream) Context() context.Context { return s.ctx }

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
