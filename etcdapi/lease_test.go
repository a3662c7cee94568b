package etcdapi

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/kverror"
)

// fakeLeases answers with err, or about lease 5 alone. A keepalive of lease 6 waits for its
// context's end.
type fakeLeases struct {
	mu  sync.Mutex
	err error
}

func (f *fakeLeases) set(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *fakeLeases) answer() (*pb.ResponseHeader, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &pb.ResponseHeader{Revision: 7}, f.err
}

func (f *fakeLeases) Grant(_ context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	h, err := f.answer()
	return &pb.LeaseGrantResponse{Header: h, ID: 5, TTL: r.GetTTL()}, err
}

func (f *fakeLeases) Revoke(_ context.Context, _ *pb.LeaseRevokeRequest, check func([][]byte) error) (*pb.LeaseRevokeResponse, error) {
	if check != nil {
		if err := check(nil); err != nil {
			return nil, err
		}
	}
	h, err := f.answer()
	return &pb.LeaseRevokeResponse{Header: h}, err
}

func (f *fakeLeases) KeepAlive(ctx context.Context, r *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error) {
	h, err := f.answer()
	if r.GetID() == 6 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	resp := &pb.LeaseKeepAliveResponse{Header: h, ID: r.GetID()}
	if r.GetID() == 5 {
		resp.TTL = 60
	}
	return resp, err
}

func (f *fakeLeases) TimeToLive(_ context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	h, err := f.answer()
	return &pb.LeaseTimeToLiveResponse{Header: h, ID: r.GetID(), TTL: -1}, err
}

func (f *fakeLeases) Leases(context.Context, *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	h, err := f.answer()
	return &pb.LeaseLeasesResponse{Header: h, Leases: []*pb.LeaseStatus{{ID: 5}}}, err
}

func leaseRig(t *testing.T) (*rig, *fakeLeases, *clientv3.Client) {
	t.Helper()
	f := &fakeLeases{}
	r := newRig(t, "http", func(o *Options) {
		o.Leases, o.RequestTimeout, o.ElectionTimeout = f, 50*time.Millisecond, 20*time.Millisecond
	})
	return r, f, r.client(t, clientv3.Config{})
}

// TestLeaseService: clientv3 gets the answers of the leases, with complete headers and etcd's
// errors.
func TestLeaseService(t *testing.T) {
	_, f, c := leaseRig(t)
	g, err := c.Grant(t.Context(), 60)
	if err != nil || g.ID != 5 || g.TTL != 60 || g.Revision != 7 || g.MemberId != 0xb || g.RaftTerm != 5 {
		t.Errorf("grant: %+v, %v", g, err)
	}
	if k, err := c.KeepAliveOnce(t.Context(), 5); err != nil || k.TTL != 60 || k.Revision != 7 {
		t.Errorf("keepalive: %+v, %v", k, err)
	}
	if _, err := c.KeepAliveOnce(t.Context(), 4); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		t.Errorf("keepalive of an unknown one: %v", err)
	}
	if l, err := c.TimeToLive(t.Context(), 4); err != nil || l.TTL != -1 {
		t.Errorf("ttl: %+v, %v", l, err)
	}
	if l, err := c.Leases(t.Context()); err != nil || len(l.Leases) != 1 {
		t.Errorf("list: %+v, %v", l, err)
	}
	for kind, want := range map[kverror.Kind]error{
		kverror.LeaseExists: rpctypes.ErrLeaseExist, kverror.LeaseTTLTooLarge: rpctypes.ErrLeaseTTLTooLarge, kverror.LeaseNotFound: rpctypes.ErrLeaseNotFound,
	} {
		f.set(kind)
		if _, err := c.Grant(t.Context(), 60); !errors.Is(err, want) {
			t.Errorf("grant: %v, want %v", err, want)
		}
		if _, err := c.Revoke(t.Context(), 5); !errors.Is(err, want) {
			t.Errorf("revoke: %v, want %v", err, want)
		}
	}
}

// TestKeepAliveStreams: one stream renews many times and waits no longer than the request timeout.
// It ends with an error, with its client, without a leader, and when the node stops.
func TestKeepAliveStreams(t *testing.T) {
	r, f, c := leaseRig(t)
	open := func(ctx context.Context) pb.Lease_LeaseKeepAliveClient {
		t.Helper()
		s, err := pb.NewLeaseClient(c.ActiveConnection()).LeaseKeepAlive(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	ask := func(s pb.Lease_LeaseKeepAliveClient, id int64) (*pb.LeaseKeepAliveResponse, error) {
		if err := s.Send(&pb.LeaseKeepAliveRequest{ID: id}); err != nil {
			t.Fatal(err)
		}
		return s.Recv()
	}
	s := open(t.Context())
	for id := range int64(6) {
		if resp, err := ask(s, id); err != nil || resp.GetID() != id || (resp.GetTTL() == 60) != (id == 5) {
			t.Errorf("keepalive of %d: %v, %v", id, resp, err)
		}
	}
	if _, err := ask(s, 6); !errors.Is(rpctypes.Error(err), rpctypes.ErrTimeout) {
		t.Errorf("a keepalive that waits: %v", err)
	}
	f.set(kverror.NoLeader)
	if _, err := ask(open(t.Context()), 5); !errors.Is(rpctypes.Error(err), rpctypes.ErrNoLeader) {
		t.Errorf("a keepalive that fails: %v", err)
	}
	f.set(nil)
	ctx, cancel := context.WithCancel(t.Context())
	s = open(ctx)
	cancel()
	if _, err := s.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("a stream without its client: %v", err)
	}
	demanding, other := open(clientv3.WithRequireLeader(t.Context())), open(t.Context())
	for _, s := range []pb.Lease_LeaseKeepAliveClient{demanding, other} {
		if _, err := ask(s, 5); err != nil {
			t.Error(err)
		}
	}
	r.node.leader.Store(0)
	if _, err := demanding.Recv(); !errors.Is(rpctypes.Error(err), rpctypes.ErrNoLeader) {
		t.Errorf("a stream that demands a leader: %v", err)
	}
	if _, err := ask(other, 5); err != nil {
		t.Errorf("a stream that does not: %v", err)
	}
	r.Stop(t.Context()) // it would wait for a stream that does not end
	if _, err := other.Recv(); err == nil {
		t.Error("a stream of a node that stopped goes on")
	}
}
