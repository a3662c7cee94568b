package node_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// lockers are clients of one node each.
type lockers struct {
	*processes
	all []*clientv3.Client
}

func newLockers(t *testing.T) *lockers {
	t.Helper()
	c := serving(t)
	l := &lockers{processes: c}
	for _, n := range c.nodes {
		l.all = append(l.all, c.clientOf(n))
	}
	return l
}

func (l *lockers) lease(i int) int64 {
	l.t.Helper()
	r, err := l.all[i].Grant(l.t.Context(), 60)
	if err != nil {
		l.t.Fatalf("grant: %v", err)
	}
	return int64(r.ID)
}

func (l *lockers) revoke(i int, lease int64) {
	l.t.Helper()
	if _, err := l.all[i].Revoke(l.t.Context(), clientv3.LeaseID(lease)); err != nil {
		l.t.Errorf("revoke: %v", err)
	}
}

// lock locks in the background, by the Lock service of a node.
func (l *lockers) lock(ctx context.Context, i int, lease int64) <-chan error {
	got := make(chan error, 1)
	go func() {
		_, err := v3lockpb.NewLockClient(l.all[i].ActiveConnection()).Lock(ctx, &v3lockpb.LockRequest{Name: []byte("l"), Lease: lease})
		got <- err
	}()
	return got
}

// waits waits until so many keys lie under the prefix, and checks that nobody has got
// what he waits for.
func (l *lockers) waits(prefix string, keys int64, got <-chan error) {
	l.t.Helper()
	l.keys(prefix, keys)
	select {
	case err := <-got:
		l.t.Fatalf("no waiting under %s: %v", prefix, err)
	default:
	}
}

func (l *lockers) keys(prefix string, want int64) {
	l.t.Helper()
	var have int64
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		r, err := l.all[0].Get(l.t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			l.t.Fatal(err)
		}
		if have = r.Count; have == want {
			return
		}
		<-time.After(20 * time.Millisecond)
	}
	l.t.Fatalf("%d keys under %s, want %d", have, prefix, want)
}

func (l *lockers) must(what string, got <-chan error) {
	l.t.Helper()
	select {
	case err := <-got:
		if err != nil {
			l.t.Fatalf("%s: %v", what, err)
		}
	case <-time.After(time.Minute):
		l.t.Fatalf("%s: not within a minute", what)
	}
}

// The service below `etcdctl lock`, at each of three nodes: two holders exclude each
// other. An unlock, the end of a lease, and a caller that gives up each let the next
// one in.
func TestLocksOfThreeNodes(t *testing.T) {
	l := newLockers(t)
	ctx := t.Context()
	a, b, c := l.lease(0), l.lease(1), l.lease(2)
	l.must("the first", l.lock(ctx, 0, a))
	second := l.lock(ctx, 1, b)
	l.waits("l/", 2, second)
	if _, err := v3lockpb.NewLockClient(l.all[2].ActiveConnection()).Unlock(ctx, &v3lockpb.UnlockRequest{Key: fmt.Appendf(nil, "l/%x", a)}); err != nil {
		t.Fatalf("unlock: %v", err)
	}
	l.must("the second", second)

	giving, giveUp := context.WithCancel(ctx)
	impatient := l.lock(giving, 2, c)
	l.waits("l/", 2, impatient)
	third := l.lock(ctx, 0, a)
	l.waits("l/", 3, third)
	giveUp()
	if err := <-impatient; status.Code(err) != codes.Canceled {
		t.Errorf("who gives up: %v", err)
	}
	l.waits("l/", 2, third)
	l.revoke(2, b)
	l.must("the third, after the holder's lease has ended", third)

	waiting := l.lock(ctx, 1, c)
	l.waits("l/", 2, waiting)
	l.revoke(0, c)
	l.revoke(0, a)
	if err := <-waiting; status.Convert(err).Message() != concurrency.ErrSessionExpired.Error() {
		t.Errorf("whose lease ends while he waits: %v", err)
	}
	if err := <-l.lock(ctx, 1, a); status.Code(err) != codes.Unknown || status.Convert(err).Message() != "etcdserver: requested lease not found" {
		t.Errorf("without a lease: %v", err)
	}
}

// What `etcdctl elect` rests on, each call at another node.
func TestElectionsOfThreeNodes(t *testing.T) {
	l := newLockers(t)
	ctx := t.Context()
	at := func(i int) v3electionpb.ElectionClient {
		return v3electionpb.NewElectionClient(l.all[i].ActiveConnection())
	}
	a, b, name := l.lease(0), l.lease(1), []byte("e")
	observed, err := at(2).Observe(ctx, &v3electionpb.LeaderRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	sees := func(value string) {
		t.Helper()
		if r, err := observed.Recv(); err != nil || string(r.GetKv().GetValue()) != value {
			t.Fatalf("observed %v, %v; want %s", r, err, value)
		}
	}
	first, err := at(0).Campaign(ctx, &v3electionpb.CampaignRequest{Name: name, Lease: a, Value: []byte("1")})
	if err != nil {
		t.Fatal(err)
	}
	sees("1")
	second := make(chan error, 1)
	go func() {
		_, err := at(1).Campaign(ctx, &v3electionpb.CampaignRequest{Name: name, Lease: b, Value: []byte("3")})
		second <- err
	}()
	l.waits("e/", 2, second)
	if _, err := at(2).Proclaim(ctx, &v3electionpb.ProclaimRequest{Leader: first.GetLeader(), Value: []byte("2")}); err != nil {
		t.Fatalf("proclaim: %v", err)
	}
	sees("2")
	if r, err := at(1).Leader(ctx, &v3electionpb.LeaderRequest{Name: name}); err != nil || string(r.GetKv().GetValue()) != "2" {
		t.Errorf("leader: %v, %v", r, err)
	}
	if _, err := at(1).Resign(ctx, &v3electionpb.ResignRequest{Leader: first.GetLeader()}); err != nil {
		t.Fatalf("resign: %v", err)
	}
	l.must("the second campaign", second)
	sees("3")
	l.revoke(0, b)
	if _, err := at(0).Leader(ctx, &v3electionpb.LeaderRequest{Name: name}); status.Convert(err).Message() != concurrency.ErrElectionNoLeader.Error() {
		t.Errorf("without a leader: %v", err)
	}
	if _, err := at(0).Proclaim(ctx, &v3electionpb.ProclaimRequest{Leader: first.GetLeader()}); status.Convert(err).Message() != concurrency.ErrElectionNotLeader.Error() {
		t.Errorf("the old leader proclaims: %v", err)
	}
}

// clientv3's mutex guards a counter that three clients, each of another node, read and
// write without a transaction.
func TestMutexOfClientV3(t *testing.T) {
	const each = 15
	l := newLockers(t)
	var wg sync.WaitGroup
	for _, cl := range l.all {
		wg.Go(func() {
			s, err := concurrency.NewSession(cl)
			if err != nil {
				t.Errorf("session: %v", err)
				return
			}
			defer s.Close()
			m := concurrency.NewMutex(s, "mutex")
			for range each {
				if err := count(t.Context(), cl, m); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	r, err := l.all[0].Get(t.Context(), "counter")
	if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != strconv.Itoa(each*len(l.all)) {
		t.Errorf("counted %v, %v", r, err)
	}
	l.keys("mutex/", 0)
}

func count(ctx context.Context, cl *clientv3.Client, m *concurrency.Mutex) error {
	if err := m.Lock(ctx); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	r, err := cl.Get(ctx, "counter")
	if err != nil {
		return err
	}
	n := 0
	for _, kv := range r.Kvs {
		if n, err = strconv.Atoi(string(kv.Value)); err != nil {
			return err
		}
	}
	if _, err := cl.Put(ctx, "counter", strconv.Itoa(n+1)); err != nil {
		return err
	}
	return m.Unlock(ctx)
}
