package mirror

import (
	"cmp"
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// TestEndOfWatch: what ends a watch at a source is waited out only if it goes away by itself.
func TestEndOfWatch(t *testing.T) {
	for _, c := range []struct {
		reason string
		again  bool
	}{
		{rpctypes.ErrGRPCNoLeader.Error(), true},
		{"etcdserver: no leader", true},
		{rpctypes.ErrGRPCInvalidAuthToken.Error(), true},
		{rpctypes.ErrGRPCPermissionDenied.Error(), false},
		{"", false},
	} {
		err := canceled(&etcdserverpb.WatchResponse{Canceled: true, CancelReason: c.reason})
		if err == nil || transient(err) != c.again {
			t.Errorf("%q: %v, again: %v", c.reason, err, err != nil && transient(err))
		}
	}
	var compacted *CompactedError
	if err := canceled(&etcdserverpb.WatchResponse{Canceled: true, CompactRevision: 9}); !errors.As(err, &compacted) || compacted.Compacted != 9 || transient(err) {
		t.Errorf("%v", err)
	}
	if err := canceled(&etcdserverpb.WatchResponse{}); err != nil {
		t.Errorf("%v", err)
	}
	for err, again := range map[error]bool{
		rpctypes.ErrLeaderChanged:                          true,
		rpctypes.ErrTooManyRequests:                        true,
		status.Error(codes.Unavailable, "connection lost"): true,
		rpctypes.ErrPermissionDenied:                       false,
		rpctypes.ErrAuthFailed:                             false,
		errors.New("checksum"):                             false,
	} {
		if transient(err) != again {
			t.Errorf("%v: again %v", err, !again)
		}
	}
}

// fakeMember is a member of a source that lists leases.
type fakeMember struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedLeaseServer
	etcdserverpb.UnimplementedWatchServer
	// cluster is its cluster id, 7 if it is 0.
	cluster uint64
	cutOff  bool
	leases  []int64
}

func (m *fakeMember) header() *etcdserverpb.ResponseHeader {
	return &etcdserverpb.ResponseHeader{ClusterId: cmp.Or(m.cluster, 7), Revision: 9}
}

func (m *fakeMember) Range(context.Context, *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	if m.cutOff {
		return nil, status.Error(codes.Internal, "cut off from the others")
	}
	return &etcdserverpb.RangeResponse{Header: m.header()}, nil
}

// Txn takes at most three operations. Of the keys that are read, those of one byte are there.
func (m *fakeMember) Txn(_ context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	if len(r.Success) > 3 {
		return nil, rpctypes.ErrGRPCTooManyOps
	}
	answer := &etcdserverpb.TxnResponse{Header: m.header()}
	for _, op := range r.Success {
		found := &etcdserverpb.RangeResponse{}
		if key := op.GetRequestRange().GetKey(); len(key) == 1 && op.GetRequestRange().GetKeysOnly() {
			found.Kvs = []*mvccpb.KeyValue{{Key: key, ModRevision: int64(key[0])}}
		}
		answer.Responses = append(answer.Responses, &etcdserverpb.ResponseOp{Response: &etcdserverpb.ResponseOp_ResponseRange{ResponseRange: found}})
	}
	return answer, nil
}

// TestWrittenBySmallTransactions: keys are looked up at a source whatever the operations that it takes in a transaction.
func TestWrittenBySmallTransactions(t *testing.T) {
	e := sourceAt(t, clock.System(), (&fakeMember{}).serves(t))
	var keys [][]byte
	var want []keyspace.Revision
	for i := range 26 {
		keys, want = append(keys, []byte{byte('a' + i)}, []byte("none")), append(want, keyspace.Revision('a'+i), 0)
		if got, err := e.Data().Written(t.Context(), keys); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%v, %v, want %v", got, err, want)
		}
	}
}

// Watch says that everything up to revision 5 is compacted.
func (m *fakeMember) Watch(st etcdserverpb.Watch_WatchServer) error {
	if _, err := st.Recv(); err != nil {
		return err
	}
	if err := st.Send(&etcdserverpb.WatchResponse{Header: m.header(), Created: true}); err != nil {
		return err
	}
	return st.Send(&etcdserverpb.WatchResponse{Header: &etcdserverpb.ResponseHeader{ClusterId: cmp.Or(m.cluster, 7)}, Canceled: true, CompactRevision: 5})
}

func (m *fakeMember) LeaseTimeToLive(context.Context, *etcdserverpb.LeaseTimeToLiveRequest) (*etcdserverpb.LeaseTimeToLiveResponse, error) {
	return &etcdserverpb.LeaseTimeToLiveResponse{Header: m.header(), TTL: -1}, nil
}

func (m *fakeMember) LeaseLeases(context.Context, *etcdserverpb.LeaseLeasesRequest) (*etcdserverpb.LeaseLeasesResponse, error) {
	r := &etcdserverpb.LeaseLeasesResponse{Header: m.header()}
	for _, id := range m.leases {
		r.Leases = append(r.Leases, &etcdserverpb.LeaseStatus{ID: id})
	}
	return r, nil
}

// serves serves a member until the test ends.
func (m *fakeMember) serves(t *testing.T) (endpoint string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	etcdserverpb.RegisterKVServer(s, m)
	etcdserverpb.RegisterLeaseServer(s, m)
	etcdserverpb.RegisterWatchServer(s, m)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr().String()
}

// silentMember takes connections and never answers.
func silentMember(t *testing.T) (endpoint string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return "http://" + l.Addr().String()
}

// sourceAt is the source at endpoints. It is of cluster 7.
func sourceAt(t *testing.T, clk clock.Clock, endpoints ...string) *Etcd {
	t.Helper()
	e, err := NewEtcd(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()}, clk)
	if err != nil {
		t.Fatal(err)
	}
	e.cluster.Store(7)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// TestLeasesOfAMemberThatIsCutOff: such a member lists what it knew last, and is not believed: a lease that it leaves out lives.
func TestLeasesOfAMemberThatIsCutOff(t *testing.T) {
	e := sourceAt(t, clock.System(), (&fakeMember{cutOff: true, leases: []int64{1}}).serves(t), (&fakeMember{leases: []int64{1, 2}}).serves(t))
	for range 4 {
		if ids, err := e.Data().Leases(t.Context()); err != nil || !slices.Equal(ids, []keyspace.LeaseID{1, 2}) {
			t.Errorf("%v, %v", ids, err)
		}
	}
}

// TestLeasesOfAnotherCluster: at an address of a member that is gone, one of another cluster may listen. Its leases are not
// the source's.
func TestLeasesOfAnotherCluster(t *testing.T) {
	other, own := (&fakeMember{cluster: 8, leases: []int64{3}}).serves(t), (&fakeMember{leases: []int64{1, 2}}).serves(t)
	e := sourceAt(t, clock.System(), other, own)
	for range 4 {
		if ids, err := e.Data().Leases(t.Context()); err != nil || !slices.Equal(ids, []keyspace.LeaseID{1, 2}) {
			t.Errorf("%v, %v", ids, err)
		}
	}
	e = sourceAt(t, clock.System(), other)
	const want = "a member of cluster 8 answers for the source, which is cluster 7"
	if ids, err := e.Data().Leases(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, %v", ids, err)
	}
	if _, _, err := e.Now(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v", err)
	}
}

// TestAnotherCluster: no answer of a member of another cluster is taken for the source's. It ends the mirror for now and not for good.
func TestAnotherCluster(t *testing.T) {
	e, err := NewEtcd(clientv3.Config{Endpoints: []string{(&fakeMember{cluster: 8}).serves(t)}, Logger: zap.NewNop()}, clock.System())
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	e.Expect(7)
	d, ctx := e.Data(), t.Context()
	for name, ask := range map[string]func() error{
		"now":       func() error { _, _, err := e.Now(ctx); return err },
		"page":      func() error { _, err := d.Page(ctx, nil, nil, 0, 10); return err },
		"count":     func() error { _, _, err := d.Count(ctx, nil, nil, 3); return err },
		"written":   func() error { _, err := d.Written(ctx, [][]byte{[]byte("a")}); return err },
		"leases":    func() error { _, err := d.Leases(ctx); return err },
		"ttl":       func() error { _, _, err := d.TTL(ctx, 3); return err },
		"compacted": func() error { _, err := e.Compacted(ctx); return err },
		"watch":     func() error { return e.Watch(ctx, 3, make(chan Part, 10)) },
		"kind":      func() error { _, err := e.sparse(ctx); return err },
	} {
		var stop *Stop
		const want = "a member of cluster 8 answers for the source, which is cluster 7: leave its address out of --source-endpoints"
		if err := ask(); err == nil || !strings.Contains(err.Error(), want) || errors.As(err, &stop) || transient(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWatchOfAnotherCluster: a source whose watch tells of another cluster is left out, and the mirror can go on afterwards.
func TestWatchOfAnotherCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d := newSource(1), newTarget()
		s.txn(op{"a", "1", 0})
		o := options(s, d, simdisk.New())
		o.Source = watchedElsewhere{s}
		var stop *Stop
		if err := Run(t.Context(), o); err == nil || errors.As(err, &stop) || !strings.Contains(err.Error(), "a member of cluster 8 answers for the source, which is cluster 7") {
			t.Fatalf("%v", err)
		}
		if s.expected.Load() != 7 {
			t.Errorf("the source is to be cluster %x", s.expected.Load())
		}
		o.Source = s
		ended := following(t, s, d, o)
		caughtUp(t, s, d, ended)
		if err := RequestAbandon(o.FS, "m"); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "abandoned") {
			t.Error(err)
		}
	})
}

// watchedElsewhere is a source whose watches are those of cluster 8.
type watchedElsewhere struct{ *source }

func (watchedElsewhere) Watch(ctx context.Context, _ keyspace.Revision, out chan<- Part) error {
	select {
	case out <- Part{Cluster: 8, Revision: 9}:
	case <-ctx.Done():
	}
	<-ctx.Done()
	return ctx.Err()
}

// patient is a clock by which nobody gives up.
type patient struct{ clock.Clock }

func (p patient) AfterFunc(d time.Duration, f func()) clock.Timer {
	return p.Clock.AfterFunc(d+time.Hour, f)
}

// TestSilentMembers: members that take connections and do not answer keep nobody waiting, however long they have for an answer.
func TestSilentMembers(t *testing.T) {
	e := sourceAt(t, patient{clock.System()}, silentMember(t), (&fakeMember{leases: []int64{1, 2}}).serves(t), silentMember(t))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if ids, err := e.Data().Leases(ctx); err != nil || !slices.Equal(ids, []keyspace.LeaseID{1, 2}) {
		t.Errorf("%v, %v", ids, err)
	}
}

// hasty is a clock by which there is little time for an answer.
type hasty struct{ clock.Clock }

func (h hasty) AfterFunc(d time.Duration, f func()) clock.Timer { return h.Clock.AfterFunc(d/100, f) }

// TestSilentMembersWithUsers: if no member answers a login in time, a mirror does not end. It asks again.
func TestSilentMembersWithUsers(t *testing.T) {
	e := sourceAt(t, hasty{clock.System()}, silentMember(t), silentMember(t))
	e.cfg.Username, e.cfg.Password = "root", "p"
	if err := e.Watch(t.Context(), 1, make(chan Part)); err == nil || !transient(err) {
		t.Errorf("%v", err)
	}
}

// compactions is a source that says what is compacted.
type compactions struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedWatchServer
	upTo    int64
	watches atomic.Int64
}

func (c *compactions) Range(_ context.Context, q *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	if q.Revision > 0 && q.Revision < c.upTo {
		return nil, rpctypes.ErrGRPCCompacted
	}
	return &etcdserverpb.RangeResponse{Header: &etcdserverpb.ResponseHeader{Revision: 20}}, nil
}

func (c *compactions) Watch(st etcdserverpb.Watch_WatchServer) error {
	c.watches.Add(1)
	q, err := st.Recv()
	if err != nil {
		return err
	}
	if err := st.Send(&etcdserverpb.WatchResponse{Created: true}); err != nil {
		return err
	}
	if q.GetCreateRequest().GetStartRevision() < c.upTo {
		return st.Send(&etcdserverpb.WatchResponse{Canceled: true, CompactRevision: c.upTo})
	}
	<-st.Context().Done()
	return st.Context().Err()
}

// TestCompacted: a source that has compacted nothing is not made to read its history. It would be read into the
// source's memory while its clients wait.
func TestCompacted(t *testing.T) {
	for _, c := range []struct{ upTo, watches int64 }{{0, 0}, {9, 1}} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		source, server := &compactions{upTo: c.upTo}, grpc.NewServer()
		etcdserverpb.RegisterKVServer(server, source)
		etcdserverpb.RegisterWatchServer(server, source)
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		e, err := NewEtcd(clientv3.Config{Endpoints: []string{listener.Addr().String()}, Logger: zap.NewNop()}, clock.System())
		if err != nil {
			t.Fatal(err)
		}
		got, err := e.Compacted(t.Context())
		if err != nil || int64(got) != c.upTo || source.watches.Load() != c.watches {
			t.Errorf("compacted %d, %v, %d watches; want %d and %d", got, err, source.watches.Load(), c.upTo, c.watches)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}
