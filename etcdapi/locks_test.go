package etcdapi

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/rights"
)

// memory is KV, Lease and Watch as far as locks need them, right by construction.
type memory struct {
	pb.UnimplementedKVServer
	pb.UnimplementedLeaseServer
	pb.UnimplementedWatchServer

	mu sync.Mutex
	// Guarded by mu. leases are the keys of each. changed is closed and replaced at every event.
	rev      int64
	kvs      map[string]*mvccpb.KeyValue
	leases   map[int64]map[string]bool
	events   []*mvccpb.Event
	changed  chan struct{}
	watchers int
	// stuck makes deletes wait for their context's end.
	stuck bool
}

func newMemory(leases ...int64) *memory {
	m := &memory{rev: 1, kvs: map[string]*mvccpb.KeyValue{}, leases: map[int64]map[string]bool{}, changed: make(chan struct{})}
	for _, l := range leases {
		m.leases[l] = map[string]bool{}
	}
	return m
}

func (m *memory) header() *pb.ResponseHeader { return &pb.ResponseHeader{Revision: m.rev} }

func (m *memory) event(t mvccpb.Event_EventType, kv *mvccpb.KeyValue) {
	m.events = append(m.events, &mvccpb.Event{Type: t, Kv: kv})
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *memory) put(r *pb.PutRequest) {
	kv := &mvccpb.KeyValue{Key: r.Key, Value: r.Value, Lease: r.Lease, CreateRevision: m.rev, ModRevision: m.rev}
	if old := m.kvs[string(r.Key)]; old != nil {
		kv.CreateRevision = old.CreateRevision
	}
	m.kvs[string(r.Key)] = kv
	m.leases[r.Lease][string(r.Key)] = true
	m.event(mvccpb.Event_PUT, kv)
}

func (m *memory) remove(key string) {
	delete(m.kvs, key)
	m.event(mvccpb.Event_DELETE, &mvccpb.KeyValue{Key: []byte(key), ModRevision: m.rev})
}

func (m *memory) find(r *pb.RangeRequest) *pb.RangeResponse {
	var kvs []*mvccpb.KeyValue
	for k, kv := range m.kvs {
		in := k == string(r.Key) || len(r.RangeEnd) > 0 && k >= string(r.Key) && k < string(r.RangeEnd)
		if in && (r.MaxCreateRevision == 0 || kv.CreateRevision <= r.MaxCreateRevision) {
			kvs = append(kvs, kv)
		}
	}
	slices.SortFunc(kvs, func(a, b *mvccpb.KeyValue) int {
		if r.SortOrder == pb.RangeRequest_DESCEND {
			a, b = b, a
		}
		return int(a.CreateRevision - b.CreateRevision)
	})
	if r.Limit > 0 && len(kvs) > int(r.Limit) {
		kvs = kvs[:r.Limit]
	}
	return &pb.RangeResponse{Header: m.header(), Kvs: kvs}
}

func (m *memory) Range(_ context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.find(r), nil
}

func (m *memory) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stuck {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if m.kvs[string(r.Key)] != nil {
		m.rev++
		m.remove(string(r.Key))
	}
	return &pb.DeleteRangeResponse{Header: m.header()}, nil
}

func (m *memory) Txn(_ context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := r.Compare[0]
	create := int64(0)
	if kv := m.kvs[string(c.Key)]; kv != nil {
		create = kv.CreateRevision
	}
	resp := &pb.TxnResponse{Succeeded: create == c.GetCreateRevision()}
	ops := r.Failure
	if resp.Succeeded {
		ops = r.Success
	}
	for _, op := range ops {
		if p := op.GetRequestPut(); p != nil && m.leases[p.Lease] == nil {
			return nil, rpctypes.ErrGRPCLeaseNotFound
		}
	}
	for _, op := range ops {
		out := &pb.ResponseOp{}
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestPut:
			m.rev++
			m.put(o.RequestPut)
			out.Response = &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{}}
		case *pb.RequestOp_RequestDeleteRange:
			m.rev++
			m.remove(string(o.RequestDeleteRange.Key))
			out.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: &pb.DeleteRangeResponse{}}
		case *pb.RequestOp_RequestRange:
			out.Response = &pb.ResponseOp_ResponseRange{ResponseRange: m.find(o.RequestRange)}
		}
		resp.Responses = append(resp.Responses, out)
	}
	resp.Header = m.header()
	return resp, nil
}

func (m *memory) LeaseGrant(_ context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	id := int64(1000 + len(m.leases))
	m.leases[id] = map[string]bool{}
	return &pb.LeaseGrantResponse{Header: m.header(), ID: id, TTL: r.TTL}, nil
}

// expire ends a lease.
func (m *memory) expire(id int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rev++
	for k := range m.leases[id] {
		m.remove(k)
	}
	delete(m.leases, id)
}

func (m *memory) LeaseKeepAlive(s pb.Lease_LeaseKeepAliveServer) error {
	for {
		r, err := s.Recv()
		if err != nil {
			return err
		}
		m.mu.Lock()
		a := &pb.LeaseKeepAliveResponse{Header: m.header(), ID: r.ID}
		if m.leases[r.ID] != nil {
			a.TTL = 10
		}
		m.mu.Unlock()
		if err := s.Send(a); err != nil {
			return err
		}
	}
}

func (m *memory) Watch(s pb.Watch_WatchServer) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() {
		m.mu.Lock()
		m.watchers = 0 // there is one stream
		m.mu.Unlock()
	}()
	ctx, cancel := context.WithCancel(s.Context())
	defer cancel()
	requests := make(chan *pb.WatchRequest)
	wg.Go(func() {
		defer cancel()
		for {
			r, err := s.Recv()
			if err != nil {
				return
			}
			select {
			case requests <- r:
			case <-ctx.Done():
				return
			}
		}
	})
	type watcher struct {
		*pb.WatchCreateRequest
		next int
	}
	watchers, id := map[int64]*watcher{}, int64(0)
	for {
		m.mu.Lock()
		changed := m.changed
		var out []*pb.WatchResponse
		for id, w := range watchers {
			for ; w.next < len(m.events); w.next++ {
				e := m.events[w.next]
				in := bytes.Equal(e.Kv.Key, w.Key) || bytes.Compare(e.Kv.Key, w.Key) > 0 && bytes.Compare(e.Kv.Key, w.RangeEnd) < 0
				if in && e.Kv.ModRevision >= w.StartRevision {
					out = append(out, &pb.WatchResponse{Header: m.header(), WatchId: id, Events: []*mvccpb.Event{e}})
				}
			}
		}
		m.watchers = len(watchers)
		m.mu.Unlock()
		for _, r := range out {
			if err := s.Send(r); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case r := <-requests:
			answer := &pb.WatchResponse{Header: &pb.ResponseHeader{Revision: 1}}
			switch {
			case r.GetCreateRequest() != nil:
				id++
				watchers[id] = &watcher{WatchCreateRequest: r.GetCreateRequest()}
				answer.WatchId, answer.Created = id, true
			case r.GetCancelRequest() != nil:
				delete(watchers, r.GetCancelRequest().WatchId)
				answer.WatchId, answer.Canceled = r.GetCancelRequest().WatchId, true
			default:
				continue
			}
			if err := s.Send(answer); err != nil {
				return err
			}
		}
	}
}

// await waits until cond holds.
func (m *memory) await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for range 2000 {
		m.mu.Lock()
		ok := cond()
		m.mu.Unlock()
		if ok {
			return
		}
		<-time.After(5 * time.Millisecond)
	}
	t.Fatalf("not within 10 s: %s", what)
}

// lockRig serves locks on a memory.
func lockRig(t *testing.T, m *memory) (*Locks, v3lockpb.LockClient, v3electionpb.ElectionClient) {
	t.Helper()
	l := NewLocks(m, m, m, nil)
	r := newRig(t, "http", func(o *Options) { o.Register = l.Register })
	t.Cleanup(func() { l.Close(context.Background()) })
	c := r.client(t, clientv3.Config{}).ActiveConnection()
	return l, v3lockpb.NewLockClient(c), v3electionpb.NewElectionClient(c)
}

// wantStatus checks a client's error, which is etcd's.
func wantStatus(t *testing.T, what string, err error, code codes.Code, text string) {
	t.Helper()
	if s := status.Convert(err); s.Code() != code || !strings.Contains(s.Message(), text) {
		t.Errorf("%s: %v, want %s %q", what, err, code, text)
	}
}

// TestLocksRefuseNobody: who has no user gets etcd's text, with the code of an error that went through etcd's client.
func TestLocksRefuseNobody(t *testing.T) {
	users, records := newUsers()
	for _, c := range []rights.Change{
		{Kind: rights.AddRole, Role: rights.Root},
		{Kind: rights.AddUser, User: rights.Root, Hash: []byte("x")},
		{Kind: rights.GrantRole, User: rights.Root, Role: rights.Root},
		{Kind: rights.Enable},
	} {
		must(t, records.ChangeAccess(t.Context(), rights.Root, c))
	}
	m := newMemory(7)
	l := NewLocks(m, m, m, nil)
	r := newRig(t, "http", func(o *Options) { o.Users, o.Register = users, l.Register })
	t.Cleanup(func() { l.Close(context.Background()) })
	c := r.client(t, clientv3.Config{}).ActiveConnection()
	_, err := v3lockpb.NewLockClient(c).Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 7})
	wantStatus(t, "lock", err, codes.Unknown, "etcdserver: user name is empty")
}

// Two lockers exclude each other, a lease may lock again, and its end unlocks.
func TestLock(t *testing.T) {
	m := newMemory(7, 8)
	_, locks, _ := lockRig(t, m)
	first, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 7})
	if err != nil || string(first.Key) != "l/7" {
		t.Fatalf("lock: %v, %v", first, err)
	}
	again, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 7})
	if err != nil || !bytes.Equal(again.Key, first.Key) {
		t.Errorf("lock again: %v, %v", again, err)
	}
	got := make(chan error, 1)
	lock := func(ctx context.Context, lease int64) {
		_, err := locks.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("l"), Lease: lease})
		got <- err
	}
	go lock(t.Context(), 8)
	m.await(t, "the second waits", func() bool { return m.kvs["l/8"] != nil && m.watchers == 1 })
	select {
	case err := <-got:
		t.Fatalf("both hold the lock: %v", err)
	default:
	}
	if _, err := locks.Unlock(t.Context(), &v3lockpb.UnlockRequest{Key: first.Key}); err != nil {
		t.Fatalf("unlock: %v", err)
	}
	if err := <-got; err != nil {
		t.Fatalf("the second: %v", err)
	}
	go lock(t.Context(), 7)
	m.await(t, "the first waits", func() bool { return m.kvs["l/7"] != nil })
	m.expire(8)
	if err := <-got; err != nil {
		t.Fatalf("after the holder's lease has expired: %v", err)
	}
}

// A caller that gives up waiting leaves no key behind. A waiting caller whose lease ends gets an
// error.
func TestLockersThatGiveUp(t *testing.T) {
	m := newMemory(7, 8)
	_, locks, elections := lockRig(t, m)
	if _, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 7}); err != nil {
		t.Fatal(err)
	}
	if _, err := elections.Campaign(t.Context(), &v3electionpb.CampaignRequest{Name: []byte("e"), Lease: 7}); err != nil {
		t.Fatal(err)
	}
	waits := map[string]func(context.Context) error{
		"l/8": func(ctx context.Context) error {
			_, err := locks.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("l"), Lease: 8})
			return err
		},
		"e/8": func(ctx context.Context) error {
			_, err := elections.Campaign(ctx, &v3electionpb.CampaignRequest{Name: []byte("e"), Lease: 8})
			return err
		},
	}
	for key, wait := range waits {
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan error, 1)
		go func() { got <- wait(ctx) }()
		m.await(t, "it waits", func() bool { return m.kvs[key] != nil && m.watchers > 0 })
		cancel()
		wantStatus(t, "give up "+key, <-got, codes.Canceled, "")
		m.await(t, "its key is gone", func() bool { return m.kvs[key] == nil && m.watchers == 0 })
	}
	got := make(chan error, 1)
	go func() { got <- waits["l/8"](t.Context()) }()
	m.await(t, "it waits", func() bool { return m.kvs["l/8"] != nil && m.watchers > 0 })
	m.expire(8)
	m.expire(7)
	wantStatus(t, "the lease expired", <-got, codes.Unknown, "mutex: session is expired")
}

func TestLockErrors(t *testing.T) {
	m := newMemory(7)
	_, locks, elections := lockRig(t, m)
	_, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 99})
	wantStatus(t, "lock without a lease", err, codes.Unknown, "etcdserver: requested lease not found")
	_, err = elections.Campaign(t.Context(), &v3electionpb.CampaignRequest{Name: []byte("l"), Lease: 99})
	wantStatus(t, "campaign without a lease", err, codes.Unknown, "etcdserver: requested lease not found")
	_, err = elections.Proclaim(t.Context(), &v3electionpb.ProclaimRequest{})
	wantStatus(t, "proclaim for nobody", err, codes.Unknown, `"leader" field must be provided`)
	_, err = elections.Resign(t.Context(), &v3electionpb.ResignRequest{})
	wantStatus(t, "resign for nobody", err, codes.Unknown, `"leader" field must be provided`)
	_, err = elections.Leader(t.Context(), &v3electionpb.LeaderRequest{Name: []byte("l")})
	wantStatus(t, "no leader", err, codes.Unknown, "election: no leader")
	stranger := &v3electionpb.LeaderKey{Name: []byte("l"), Key: []byte("l/7"), Rev: 5, Lease: 7}
	_, err = elections.Proclaim(t.Context(), &v3electionpb.ProclaimRequest{Leader: stranger})
	wantStatus(t, "proclaim as nobody", err, codes.Unknown, "election: not leader")
	if _, err = elections.Resign(t.Context(), &v3electionpb.ResignRequest{Leader: stranger}); err != nil {
		t.Errorf("resign as nobody: %v", err)
	}
	granted, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("own")})
	if err != nil || string(granted.Key) != fmt.Sprintf("own/%x", 1001) {
		t.Errorf("without a lease the service grants one: %v, %v", granted, err)
	}
}

// An election from the first campaign to the last resignation, as an observer sees it.
func TestElection(t *testing.T) {
	m := newMemory(7, 8)
	_, _, e := lockRig(t, m)
	name := []byte("e")
	observed, err := e.Observe(t.Context(), &v3electionpb.LeaderRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	sees := func(value string) {
		t.Helper()
		if r, err := observed.Recv(); err != nil || string(r.GetKv().GetValue()) != value {
			t.Errorf("observed %v, %v; want %s", r, err, value)
		}
	}
	m.await(t, "the observer is there", func() bool { return m.watchers == 1 })
	first, err := e.Campaign(t.Context(), &v3electionpb.CampaignRequest{Name: name, Lease: 7, Value: []byte("a")})
	if err != nil || string(first.Leader.Key) != "e/7" || first.Leader.Lease != 7 || first.Leader.Rev != 2 {
		t.Fatalf("campaign: %v, %v", first, err)
	}
	sees("a")
	second := make(chan *v3electionpb.CampaignResponse, 1)
	go func() {
		r, err := e.Campaign(t.Context(), &v3electionpb.CampaignRequest{Name: name, Lease: 8, Value: []byte("c")})
		if err != nil {
			t.Errorf("the second campaign: %v", err)
		}
		second <- r
	}()
	m.await(t, "the second waits", func() bool { return m.kvs["e/8"] != nil })
	if _, err := e.Proclaim(t.Context(), &v3electionpb.ProclaimRequest{Leader: first.Leader, Value: []byte("b")}); err != nil {
		t.Errorf("proclaim: %v", err)
	}
	sees("b")
	if l, err := e.Leader(t.Context(), &v3electionpb.LeaderRequest{Name: name}); err != nil || string(l.GetKv().GetValue()) != "b" {
		t.Errorf("leader: %v, %v", l, err)
	}
	if _, err := e.Resign(t.Context(), &v3electionpb.ResignRequest{Leader: first.Leader}); err != nil {
		t.Errorf("resign: %v", err)
	}
	if r := <-second; string(r.GetLeader().GetKey()) != "e/8" {
		t.Errorf("the second campaign: %v", r)
	}
	sees("c")
	m.expire(8)
	_, err = e.Leader(t.Context(), &v3electionpb.LeaderRequest{Name: name})
	wantStatus(t, "after all", err, codes.Unknown, "election: no leader")
}

// A stop ends all waiting, and no key comes to hold a lock that nobody knows of.
func TestLocksClose(t *testing.T) {
	m := newMemory(7, 8)
	l, locks, elections := lockRig(t, m)
	if _, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 7}); err != nil {
		t.Fatal(err)
	}
	lock := func() error {
		_, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 8})
		return err
	}
	got := make(chan error, 2)
	go func() { got <- lock() }()
	observed, err := elections.Observe(t.Context(), &v3electionpb.LeaderRequest{Name: []byte("e")})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, err := observed.Recv()
		got <- err
	}()
	m.await(t, "both wait", func() bool { return m.watchers == 2 })
	l.Close(t.Context())
	for range 2 {
		wantStatus(t, "waiting at the stop", <-got, codes.Unavailable, "etcdserver: server stopped")
	}
	m.await(t, "the key that waited is gone, the other is not", func() bool { return m.kvs["l/7"] != nil && m.kvs["l/8"] == nil })
	wantStatus(t, "after the stop", lock(), codes.Unavailable, "etcdserver: server stopped")
}

// A stop does not wait for a store that does not answer.
func TestLocksCloseInTime(t *testing.T) {
	m := newMemory(7, 8)
	l, locks, _ := lockRig(t, m)
	if _, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 7}); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		_, err := locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 8})
		got <- err
	}()
	m.await(t, "it waits", func() bool { return m.watchers == 1 })
	m.mu.Lock()
	m.stuck = true
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	l.Close(ctx)
	wantStatus(t, "waiting at the stop", <-got, codes.Unavailable, "etcdserver: server stopped")
}
