package etcdapi

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// keyedLeases are leases with keys: 1 has k, 2 has x, which is another's, 3 has k and x, and 4 has none. 5 lasts three
// seconds, and has k. There are no others.
type keyedLeases struct {
	fakeLeases
	mu   sync.Mutex
	keys map[int64][]string
	// asked counts the looks at keys. done are the leases that were revoked or renewed.
	asked int
	done  []string
	// slow is how long a look takes, and most how many there were at a time.
	slow          time.Duration
	looking, most int
	// late is attached to a lease behind the first check of its revoke.
	late string
	// permit is that of the last look.
	permit keyspace.Permit
}

func newKeyedLeases() *keyedLeases {
	return &keyedLeases{keys: map[int64][]string{1: {"k"}, 2: {"x"}, 3: {"k", "x"}, 4: {}, 5: {"k"}}}
}

func (l *keyedLeases) TimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looking++
	l.most = max(l.most, l.looking)
	l.mu.Unlock()
	time.Sleep(l.slow)
	l.mu.Lock()
	l.looking--
	resp := &pb.LeaseTimeToLiveResponse{Header: &pb.ResponseHeader{Revision: 7}, ID: r.GetID(), TTL: 60, GrantedTTL: 60}
	keys, ok := l.keys[r.GetID()]
	if !ok {
		resp.TTL, resp.GrantedTTL = -1, 0
	}
	if r.GetID() == 5 {
		resp.TTL, resp.GrantedTTL = 3, 3
	}
	if r.GetKeys() {
		l.asked++
		l.permit, _ = keyspace.PermitOf(ctx)
		for _, k := range keys {
			resp.Keys = append(resp.Keys, []byte(k))
		}
	}
	return resp, nil
}

func (l *keyedLeases) Revoke(ctx context.Context, r *pb.LeaseRevokeRequest, check func([][]byte) error) (*pb.LeaseRevokeResponse, error) {
	for again := check != nil; again; {
		resp, _ := l.TimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: r.GetID(), Keys: true})
		if err := check(resp.GetKeys()); err != nil {
			return nil, err
		}
		l.mu.Lock()
		if again = l.late != ""; again {
			l.keys[r.GetID()] = append(l.keys[r.GetID()], l.late)
			l.late = ""
		}
		l.mu.Unlock()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, fmt.Sprint("revoke ", r.GetID()))
	return &pb.LeaseRevokeResponse{Header: &pb.ResponseHeader{Revision: 7}}, nil
}

func (l *keyedLeases) KeepAlive(_ context.Context, r *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, fmt.Sprint("renew ", r.GetID()))
	return &pb.LeaseKeepAliveResponse{Header: &pb.ResponseHeader{Revision: 7}, ID: r.GetID(), TTL: 60}, nil
}

func (l *keyedLeases) Leases(context.Context, *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	resp := &pb.LeaseLeasesResponse{Header: &pb.ResponseHeader{Revision: 7}}
	for id := range l.keys {
		resp.Leases = append(resp.Leases, &pb.LeaseStatus{ID: id})
	}
	return resp, nil
}

// looks returns how often keys were looked at since the last call.
func (l *keyedLeases) looks() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.asked
	l.asked = 0
	return n
}

// leaseCalls are the requests of a client that name a lease.
type leaseCalls struct {
	s   *Server
	ctx context.Context //nolint:containedctx // the client's
}

func (c leaseCalls) put(lease int64) error {
	_, err := (&kvServer{s: c.s}).Put(c.ctx, &pb.PutRequest{Key: []byte("k"), Lease: lease})
	return err
}

// txn puts with the lease in a nested transaction, in the branch that is not taken.
func (c leaseCalls) txn(lease int64) error {
	put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k"), Lease: lease}}}
	inner := &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Failure: []*pb.RequestOp{put}}}}
	_, err := (&kvServer{s: c.s}).Txn(c.ctx, &pb.TxnRequest{Failure: []*pb.RequestOp{inner}})
	return err
}

// begun is the context of a call of the service Lease, as the interceptor makes it.
func (c leaseCalls) begun() (context.Context, error) { return c.s.begin(c.ctx, auth.ByLease) }

func (c leaseCalls) revoke(lease int64) error {
	ctx, err := c.begun()
	if err == nil {
		_, err = (&leaseServer{s: c.s}).LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: lease})
	}
	return err
}

func (c leaseCalls) keys(lease int64) error {
	ctx, err := c.begun()
	if err != nil {
		return err
	}
	resp, err := (&leaseServer{s: c.s}).LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: lease, Keys: true})
	if err != nil && resp != nil {
		return fmt.Errorf("%w, and %v", err, resp)
	}
	return err
}

func (c leaseCalls) ttl(lease int64) error {
	ctx, err := c.begun()
	if err != nil {
		return err
	}
	resp, err := (&leaseServer{s: c.s}).LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: lease})
	if len(resp.GetKeys()) > 0 {
		return fmt.Errorf("told the keys: %v", resp)
	}
	return err
}

func (c leaseCalls) renew(lease int64) error {
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	_, err := (&leaseServer{s: c.s}).renew(ctx, &pb.LeaseKeepAliveRequest{ID: lease})
	return kverror.GRPC(err)
}

func (c leaseCalls) leases() error {
	ctx, err := c.begun()
	if err == nil {
		_, err = (&leaseServer{s: c.s}).LeaseLeases(ctx, &pb.LeaseLeasesRequest{})
	}
	return err
}

func withLeases(t *testing.T, f func(t *testing.T, l *keyedLeases, users *records, as func(string) leaseCalls)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := newKeyedLeases()
		s, users := virtualServer(t, func(o *Options) { o.Leases = l })
		defer s.Stop(t.Context())
		f(t, l, users, func(user string) leaseCalls {
			if user == "" {
				return leaseCalls{s, metadata.NewIncomingContext(t.Context(), nil)}
			}
			return leaseCalls{s, users.incoming(t, user)}
		})
	})
}

// Traps 88, 89 (CVE-2026-44283), 90 (CVE-2023-32082): whoever uses a lease may write all its keys, and whoever is told
// them may read all of them. Root may everything, without a look at the keys.
func TestLeasesByTheirKeys(t *testing.T) {
	withLeases(t, func(t *testing.T, l *keyedLeases, users *records, as func(string) leaseCalls) {
		users.do(t, "user reader", "role reads", "permit reads r a z", "grant reader reads")
		const k, x, both, none, unknown = 1, 2, 3, 4, 99
		type denied map[int64]bool
		for user, want := range map[string]struct{ write, read denied }{
			"root":   {denied{}, denied{}},
			"u":      {denied{x: true, both: true}, denied{x: true, both: true}},
			"reader": {denied{k: true, x: true, both: true}, denied{}},
		} {
			c := as(user)
			for _, lease := range []int64{k, x, both, none, unknown} {
				check := func(what string, err error, isDenied bool) {
					t.Helper()
					var want error
					if isDenied {
						want = rpctypes.ErrGRPCPermissionDenied
					}
					wantError(t, fmt.Sprintf("%s by %s of lease %d", what, user, lease), err, want)
				}
				// The keys of the requests themselves are u's.
				check("put", c.put(lease), user == "reader" || want.write[lease])
				check("txn", c.txn(lease), user == "reader" || want.write[lease])
				check("renew", c.renew(lease), want.write[lease])
				check("revoke", c.revoke(lease), want.write[lease])
				check("its keys", c.keys(lease), want.read[lease])
				check("its TTL", c.ttl(lease), false)
				if user == "root" {
					l.keys[k] = l.keys[k][:1]
				}
			}
			var leases error
			if user == "u" {
				leases = rpctypes.ErrGRPCPermissionDenied
			}
			wantError(t, "all leases by "+user, c.leases(), leases)
			l.looks()
		}
		root := as("root")
		for _, call := range []func(int64) error{root.put, root.txn, root.renew, root.revoke} {
			must(t, call(both))
		}
		if n := l.looks(); n != 0 {
			t.Errorf("%d looks at keys for root", n)
		}
		nobody := as("")
		for what, call := range map[string]func(int64) error{
			"put": nobody.put, "txn": nobody.txn, "renew": nobody.renew, "revoke": nobody.revoke, "its keys": nobody.keys, "its TTL": nobody.ttl,
		} {
			wantError(t, what+" by nobody", call(none), rpctypes.ErrGRPCUserEmpty)
		}
		wantError(t, "all leases by nobody", nobody.leases(), rpctypes.ErrGRPCUserEmpty)
	})
}

// Trap 110: each look at the keys of a lease that is revoked goes by the rights of then.
func TestARevokeIsChecked(t *testing.T) {
	withLeases(t, func(t *testing.T, l *keyedLeases, _ *records, as func(string) leaseCalls) {
		c := as("u")
		l.late = "x"
		wantError(t, "revoke of a lease that gets another's key meanwhile", c.revoke(1), rpctypes.ErrGRPCPermissionDenied)
		l.late = "k"
		must(t, c.revoke(4))
		if n := l.looks(); n < 4 || !slices.Equal(l.done, []string{"revoke 4"}) {
			t.Errorf("%d looks at keys, and then %v", n, l.done)
		}
	})
}

// Nothing is looked at while nothing is checked.
func TestLeasesWithoutChecks(t *testing.T) {
	withLeases(t, func(t *testing.T, l *keyedLeases, users *records, as func(string) leaseCalls) {
		users.do(t, "disable")
		c := as("")
		for _, call := range []func(int64) error{c.put, c.txn, c.renew, c.revoke} {
			must(t, call(3))
		}
		must(t, c.leases())
		if n := l.looks(); n != 0 {
			t.Errorf("%d looks at keys", n)
		}
	})
}

// A yes counts for a second to attach keys, and for five to renew, but for no more than a third of the lease's time. It
// never counts to revoke, and ends when rights are taken away. A no counts for a second, and ends when rights are given.
func TestHowLongAVerdictCounts(t *testing.T) {
	withLeases(t, func(t *testing.T, l *keyedLeases, users *records, as func(string) leaseCalls) {
		c := as("u")
		looks := func(what string, want int) {
			t.Helper()
			if n := l.looks(); n != want {
				t.Errorf("%s: %d looks at keys, want %d", what, n, want)
			}
		}
		must(t, c.put(1))
		looks("the first put", 1)
		time.Sleep(time.Second)
		must(t, c.put(1))
		must(t, c.txn(1))
		must(t, c.renew(1))
		looks("after a second", 0)
		time.Sleep(time.Millisecond)
		must(t, c.put(1))
		looks("after more", 1)
		time.Sleep(5 * time.Second)
		must(t, c.renew(1))
		looks("renewed after five seconds", 0)
		time.Sleep(time.Millisecond)
		must(t, c.renew(1))
		looks("renewed after more", 1)
		must(t, c.revoke(1))
		looks("revoked", 1)

		must(t, c.renew(5))
		looks("a short one", 1)
		time.Sleep(time.Second)
		must(t, c.renew(5))
		looks("a short one after a third", 0)
		time.Sleep(time.Millisecond)
		must(t, c.renew(5))
		looks("a short one after more", 1)

		must(t, c.renew(1))
		l.looks()
		users.do(t, "forbid own k", "permit own rw k")
		must(t, c.renew(1))
		looks("once rights have changed", 1)
		users.do(t, "forbid own k")
		wantError(t, "once its right is gone", c.renew(1), rpctypes.ErrGRPCPermissionDenied)
		wantError(t, "once its right is gone, again", c.renew(1), rpctypes.ErrGRPCPermissionDenied)
		l.looks()
		time.Sleep(time.Second)
		wantError(t, "a second later", c.renew(1), rpctypes.ErrGRPCPermissionDenied)
		wantError(t, "put a second later", c.put(1), rpctypes.ErrGRPCPermissionDenied)
		looks("after a no", 0)
		time.Sleep(time.Millisecond)
		l.mu.Lock()
		l.keys[1] = nil
		l.mu.Unlock()
		must(t, c.renew(1))
		l.mu.Lock()
		l.keys[4] = []string{"x"}
		l.mu.Unlock()
		wantError(t, "another's key", c.renew(4), rpctypes.ErrGRPCPermissionDenied)
		users.do(t, "permit own rw x")
		must(t, c.renew(4))
	})
}

// A list looks at the keys of many leases at a time, but not of all. What it finds counts for a second.
func TestAListOfManyLeases(t *testing.T) {
	withLeases(t, func(t *testing.T, l *keyedLeases, _ *records, as func(string) leaseCalls) {
		clear(l.keys)
		for id := range int64(200) {
			l.keys[100+id] = []string{"k"}
		}
		l.slow = 10 * time.Millisecond
		c, begin := as("u"), time.Now()
		must(t, c.leases())
		if took := time.Since(begin); l.most != parallelLooks || took > 200*l.slow/parallelLooks+2*l.slow {
			t.Errorf("%d looks at a time, all after %v", l.most, took)
		}
		l.looks()
		must(t, c.leases())
		if n := l.looks(); n != 0 {
			t.Errorf("%d looks for a second list", n)
		}
		l.keys[150] = []string{"k", "x"}
		time.Sleep(listFor + time.Millisecond)
		wantError(t, "a list with another's key", c.leases(), rpctypes.ErrGRPCPermissionDenied)
		l.looks()
		wantError(t, "a list with another's key, again", c.leases(), rpctypes.ErrGRPCPermissionDenied)
		if n := l.looks(); n > 0 {
			t.Errorf("%d looks for a list that was denied", n)
		}
		must(t, c.ttl(150))
		wantError(t, "the keys themselves", c.keys(150), rpctypes.ErrGRPCPermissionDenied)
	})
}

// A keepalive stream outlives the rights by which it began. Each look at the keys goes by the permit of then.
func TestAKeepAliveHasThePermitOfNow(t *testing.T) {
	withLeases(t, func(t *testing.T, l *keyedLeases, users *records, as func(string) leaseCalls) {
		c := as("u")
		begun, err := c.begun()
		must(t, err)
		old, _ := keyspace.PermitOf(begun)
		users.do(t, "user x", "delete-user x")
		c.ctx = begun
		must(t, c.renew(1))
		if now := l.permit; now == old || now != keyspace.PermitAt(keyspace.AccessIndex(users.state.Access)) {
			t.Errorf("the keys are looked at by the permit %d, the stream began with %d", now, old)
		}
	})
}

// Trap 83 for leases: also a denial for the keys of a lease waits for what this node has not heard of.
func TestADenialByALeaseIsConfirmed(t *testing.T) {
	calls := map[string]func(leaseCalls) error{
		"put": func(c leaseCalls) error { return c.put(2) }, "txn": func(c leaseCalls) error { return c.txn(2) },
		"renew": func(c leaseCalls) error { return c.renew(2) }, "revoke": func(c leaseCalls) error { return c.revoke(2) },
		"its keys": func(c leaseCalls) error { return c.keys(2) }, "all leases": leaseCalls.leases,
	}
	for name, call := range calls {
		withLeases(t, func(t *testing.T, _ *keyedLeases, users *records, as func(string) leaseCalls) {
			c := as("u")
			users.hear(false)
			users.do(t, "permit own rw x")
			got := make(chan error, 1)
			go func() { got <- call(c) }()
			synctest.Wait()
			users.hear(true)
			wantError(t, name+" with a right of which this node heard late", <-got, nil)
			users.do(t, "forbid own x")
			wantError(t, name+" without it", call(c), rpctypes.ErrGRPCPermissionDenied)
			unstick := users.stick()
			defer unstick()
			begin := time.Now()
			err := call(c)
			if code := status.Code(err); code != codes.Unavailable || time.Since(begin) > time.Second {
				t.Errorf("%s while placement does not answer: %v after %v", name, err, time.Since(begin))
			}
		})
	}
}
