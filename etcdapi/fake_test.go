package etcdapi

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeKV answers every request with err, or with an empty response at revision 7. It counts
// requests, and may wait for the end of the context.
type fakeKV struct {
	mu    sync.Mutex
	err   error
	calls int
	block bool
	// value, if any, is what reads find; RangeStream sends it parts times.
	value []byte
	parts int
	// answers is the server's.
	answers *budget.Bytes
	// hook, if set, is asked first in each call.
	hook func(ctx context.Context) error
	// entered gets a value for each blocked call.
	entered chan struct{}
}

func (f *fakeKV) set(err error, block bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err, f.block, f.calls = err, block, 0
}

// ask has each call ask the hook first.
func (f *fakeKV) ask(hook func(ctx context.Context) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = hook
}

func (f *fakeKV) called() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

func (f *fakeKV) answer(ctx context.Context) (*pb.ResponseHeader, error) {
	if _, ok := keyspace.PermitOf(ctx); !ok {
		panic("a request whose sender nobody has checked") // as package router does
	}
	f.mu.Lock()
	f.calls++
	err, block, hook := f.err, f.block, f.hook
	f.mu.Unlock()
	if hook != nil {
		if err := hook(ctx); err != nil {
			return nil, err
		}
	}
	if block {
		f.entered <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &pb.ResponseHeader{Revision: 7}, err
}

func (f *fakeKV) Range(ctx context.Context, _ *pb.RangeRequest) (*pb.RangeResponse, error) {
	h, err := f.answer(ctx)
	resp := &pb.RangeResponse{Header: h}
	if f.value != nil {
		resp.Kvs, resp.Count = []*mvccpb.KeyValue{{Key: []byte("k"), Value: f.value}}, 1
	}
	return resp, err
}

// RangeSpan implements KV. The value comes encoded, if there is one.
func (f *fakeKV) RangeSpan(ctx context.Context, req *pb.RangeRequest) ([][]byte, *pb.RangeResponse, *budget.Share, error) {
	share := f.answers.Share()
	resp, err := f.Range(ctx, req)
	if err != nil {
		return nil, nil, nil, err
	}
	var keys [][]byte
	if len(resp.Kvs) > 0 {
		k, _ := proto.Marshal(&pb.RangeResponse{Kvs: resp.Kvs})
		if err := share.Take(ctx, int64(len(k))); err != nil {
			share.Release()
			return nil, nil, nil, err
		}
		keys, resp.Kvs = [][]byte{k}, nil
	}
	share.Complete()
	return keys, resp, &share, nil
}

func (f *fakeKV) RangeStream(ctx context.Context, _ *pb.RangeRequest, send func([]byte, *pb.RangeResponse) error) error {
	h, err := f.answer(ctx)
	if err != nil {
		return err
	}
	keys, _ := proto.Marshal(&pb.RangeResponse{Kvs: []*mvccpb.KeyValue{{Key: []byte("k"), Value: f.value}}})
	for range f.parts {
		if err := send(keys, nil); err != nil {
			return err
		}
	}
	return send(keys, &pb.RangeResponse{Header: h, Count: int64(f.parts) + 1, More: true})
}

func (f *fakeKV) Put(ctx context.Context, _ *pb.PutRequest) (*pb.PutResponse, error) {
	h, err := f.answer(ctx)
	return &pb.PutResponse{Header: h}, err
}

func (f *fakeKV) DeleteRange(ctx context.Context, _ *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	h, err := f.answer(ctx)
	return &pb.DeleteRangeResponse{Header: h}, err
}

func (f *fakeKV) Txn(ctx context.Context, _ *pb.TxnRequest) (*pb.TxnResponse, error) {
	h, err := f.answer(ctx)
	return &pb.TxnResponse{Header: h}, err
}

func (f *fakeKV) Compact(ctx context.Context, _ *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	h, err := f.answer(ctx)
	return &pb.CompactionResponse{Header: h}, err
}

// HashKV answers as etcd does of a store at revision 7 that was never compacted, however long it takes.
func (f *fakeKV) HashKV(ctx context.Context, r *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	h, err := f.answer(ctx)
	if err != nil {
		return nil, err
	}
	return &pb.HashKVResponse{Header: h, Hash: 0xabc, CompactRevision: -1, HashRevision: max(r.GetRevision(), 1)}, nil
}

// fakeNode is a node and its cluster.
type fakeNode struct {
	leader  atomic.Uint64
	learner atomic.Bool
	behind  atomic.Int64 // how many revisions Status lags
	list    atomic.Pointer[error]
	change  atomic.Pointer[string] // the last one requested
}

func (f *fakeNode) Leader() keyspace.NodeID { return keyspace.NodeID(f.leader.Load()) }
func (f *fakeNode) Term() uint64            { return 5 }
func (f *fakeNode) Status() Status {
	return Status{Revision: keyspace.Revision(9 - f.behind.Load()), RaftIndex: 21, AppliedIndex: 20, DBSizeBytes: 1000, DBSizeInUseBytes: 600, Learner: f.learner.Load()}
}

func (f *fakeNode) MemberList(context.Context, bool) ([]*pb.Member, error) {
	if err := f.list.Load(); err != nil {
		return nil, *err
	}
	return []*pb.Member{{ID: 0xb, Name: "n1", ClientURLs: []string{"http://h:1"}, PeerURLs: []string{"http://h:2"}}}, nil
}

func (f *fakeNode) MemberAdd(_ context.Context, peerURLs []string, learner bool) (*pb.Member, []*pb.Member, error) {
	m := &pb.Member{ID: 0xd, PeerURLs: peerURLs, IsLearner: learner}
	all, err := f.changed("add", m.ID)
	return m, append(all, m), err
}

func (f *fakeNode) MemberRemove(_ context.Context, id keyspace.NodeID) ([]*pb.Member, error) {
	return f.changed("remove", uint64(id))
}

func (f *fakeNode) MemberUpdate(_ context.Context, id keyspace.NodeID, peerURLs []string) ([]*pb.Member, error) {
	return f.changed(fmt.Sprint("update ", peerURLs), uint64(id))
}

func (f *fakeNode) MemberPromote(_ context.Context, id keyspace.NodeID) ([]*pb.Member, error) {
	return f.changed("promote", uint64(id))
}

func (f *fakeNode) MoveLeader(_ context.Context, to keyspace.NodeID) error {
	_, err := f.changed("lead", uint64(to))
	return err
}

// changed notes a change, and returns the members unless there is an error.
func (f *fakeNode) changed(what string, id uint64) ([]*pb.Member, error) {
	text := fmt.Sprintf("%s %x", what, id)
	f.change.Store(&text)
	return f.MemberList(context.Background(), true)
}

// rig is a running server with fakes behind it.
type rig struct {
	*Server
	alarms *fakeAlarms
	kv     *fakeKV
	node   *fakeNode
	reg    *prometheus.Registry
}

// newRig serves on a free port, and on another one for metrics; scheme is for both.
func newRig(t testing.TB, scheme string, change func(*Options)) *rig {
	t.Helper()
	r := rigThatWaits(t, change)
	u := url.URL{Scheme: scheme, Host: "127.0.0.1:0"}
	if err := r.Bind([]url.URL{u}, []url.URL{u}); err != nil {
		t.Fatal(err)
	}
	r.serve(t)
	return r
}

// rigThatWaits has a server that does not serve yet.
func rigThatWaits(t testing.TB, change func(*Options)) *rig {
	t.Helper()
	r := &rig{alarms: &fakeAlarms{}, kv: &fakeKV{entered: make(chan struct{}, 16)}, node: &fakeNode{}, reg: prometheus.NewRegistry()}
	r.node.leader.Store(0xb)
	o := Options{Users: everybody(t), KV: r.kv, Alarms: r.alarms, Hashes: r.kv, Members: r.node, Node: r.node, Cluster: 0xc, Self: 0xb, Clock: clock.System(), Metrics: NewMetrics(r.reg), Gatherer: r.reg}
	if change != nil {
		change(&o)
	}
	r.Server = New(o)
	r.kv.answers = r.opts.Answers
	return r
}

// serve serves until the end of the test.
func (r *rig) serve(t testing.TB) {
	t.Helper()
	r.Start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		r.Stop(ctx)
	})
}

func (r *rig) addr() string { return r.ClientAddrs()[0].String() }

func (r *rig) client(t testing.TB, cfg clientv3.Config) *clientv3.Client {
	t.Helper()
	if cfg.Endpoints == nil {
		cfg.Endpoints = []string{r.addr()}
	}
	cfg.MaxUnaryRetries = 1 // retries would hide the errors under test
	c, err := clientv3.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func dial(t testing.TB, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
