package etcdapi

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc/codes"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/kverror"
)

// userMemory is a memory that notes for whom it serves.
type userMemory struct {
	*memory
	usersMu sync.Mutex
	// streams are the users of the watch and keepalive streams, and of writes.
	watches, renewals, writes map[string]int
}

func newUserMemory(leases ...int64) *userMemory {
	return &userMemory{memory: newMemory(leases...), watches: map[string]int{}, renewals: map[string]int{}, writes: map[string]int{}}
}

func (m *userMemory) note(ctx context.Context, what map[string]int) {
	user := "nobody"
	if c, ok := ctx.Value(actingKey{}).(*auth.Caller); ok {
		user = c.User
	}
	m.usersMu.Lock()
	defer m.usersMu.Unlock()
	what[user]++
}

func (m *userMemory) Watch(s pb.Watch_WatchServer) error {
	m.note(s.Context(), m.watches)
	return m.memory.Watch(s)
}

func (m *userMemory) LeaseKeepAlive(s pb.Lease_LeaseKeepAliveServer) error {
	m.note(s.Context(), m.renewals)
	return m.memory.LeaseKeepAlive(s)
}

func (m *userMemory) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	m.note(ctx, m.writes)
	return m.memory.Txn(ctx, r)
}

// calledBy is the context of a call whose caller was found to be a user.
func (r *records) calledBy(t *testing.T, user string) context.Context {
	t.Helper()
	c, err := r.gate.Identify(t.Context(), auth.Claim{Token: r.token(t, user), HasToken: user != ""})
	if err != nil {
		t.Fatal(err)
	}
	return context.WithValue(t.Context(), callerKey{}, c)
}

// Trap 98: the watch and the keepalive of a user's calls are that user's, whoever has called before. Two users share
// locks, and no stream.
func TestLocksOfTwoUsers(t *testing.T) {
	_, users := newUsers()
	users.setUp(t)
	users.do(t, "user v")
	m := newUserMemory(7, 8, 9)
	l := NewLocks(m, m, m, nil)
	locks := lockServer{l: l}
	held, err := locks.Lock(users.calledBy(t, "u"), &v3lockpb.LockRequest{Name: []byte("l"), Lease: 7})
	must(t, err)
	got := make(chan error, 2)
	for user, lease := range map[string]int64{"u": 8, "v": 9} {
		ctx := users.calledBy(t, user)
		go func() {
			_, err := locks.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("l"), Lease: lease})
			got <- err
		}()
		eventually(t, user+" waits", func() bool {
			m.usersMu.Lock()
			defer m.usersMu.Unlock()
			return m.watches[user] == 1
		})
	}
	if _, err := locks.Unlock(users.calledBy(t, "v"), &v3lockpb.UnlockRequest{Key: held.Key}); err != nil {
		t.Error(err)
	}
	must(t, <-got)
	m.usersMu.Lock()
	if fmt.Sprint(m.watches) != "map[u:1 v:1]" || m.renewals["u"] != 1 || m.renewals["v"] != 1 || len(m.renewals) != 2 || m.writes["nobody"] != 0 {
		t.Errorf("watches %v, keepalives %v, writes %v", m.watches, m.renewals, m.writes)
	}
	m.usersMu.Unlock()
	// One still waits, and has a key. The end ends it, and the key goes.
	l.Close(t.Context())
	wantStatus(t, "closed with several clients", <-got, codes.Unavailable, "server stopped")
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.kvs) != 1 {
		t.Errorf("%d keys are left, one is held", len(m.kvs))
	}
	if _, err := locks.Lock(users.calledBy(t, "u"), &v3lockpb.LockRequest{Name: []byte("x"), Lease: 7}); err == nil {
		t.Error("a call after the end")
	}
}

// Clients are bounded: the one goes that nobody uses, and nobody has used for longest. One that is used stays.
func TestLocksOfManyUsers(t *testing.T) {
	_, users := newUsers()
	users.setUp(t)
	m := newUserMemory()
	l := NewLocks(m, m, m, nil)
	defer l.Close(t.Context())
	const many = maxLockClients + 50
	callers := make([]*auth.Caller, many)
	for i := range callers {
		users.do(t, fmt.Sprint("user u", i))
		c, ok := users.calledBy(t, fmt.Sprint("u", i)).Value(callerKey{}).(*auth.Caller)
		if !ok {
			t.Fatal("no caller")
		}
		callers[i] = c
	}
	first, err := l.take(callers[0])
	must(t, err)
	second, err := l.take(callers[1])
	must(t, err)
	l.release(second)
	for _, c := range callers[2:] {
		used, err := l.take(c)
		must(t, err)
		l.release(used)
	}
	if n := len(l.clients); n != maxLockClients {
		t.Errorf("%d clients, at most %d", n, maxLockClients)
	}
	if first.Ctx().Err() != nil {
		t.Error("a client that is used was closed")
	}
	if second.Ctx().Err() == nil {
		t.Error("the client that was not used for longest was not closed")
	}
	l.release(first)
	// If all are used, further users are refused, until one is not used any more.
	var busy []*lockClient
	for _, c := range callers[:maxLockClients] {
		used, err := l.take(c)
		must(t, err)
		busy = append(busy, used)
	}
	_, err = l.take(callers[maxLockClients])
	wantError(t, "a user too many", err, rpctypes.ErrGRPCRequestTooManyRequests)
	again, err := l.take(callers[7])
	must(t, err)
	l.release(again)
	if n := len(l.clients); n != maxLockClients {
		t.Errorf("%d clients, at most %d", n, maxLockClients)
	}
	for _, c := range busy {
		if c.Ctx().Err() != nil {
			t.Fatal("a client that is used was closed")
		}
	}
	l.release(busy[0])
	last, err := l.take(callers[maxLockClients])
	must(t, err)
	if busy[0].Ctx().Err() == nil {
		t.Error("the client that nobody uses was not closed")
	}
	for _, c := range append(busy[1:], last) {
		l.release(c)
	}
}

// A user who was made anew, or has a new password, has another client. The old one's calls do nothing any more.
func TestLocksOfAUserMadeAnew(t *testing.T) {
	s, users := virtualServer(t, nil)
	defer s.Stop(t.Context())
	users.do(t, "user x")
	m := newUserMemory()
	l := NewLocks(m, m, m, nil)
	defer l.Close(t.Context())
	take := func() *lockClient {
		c, err := l.take(callerOf(users.calledBy(t, "u")))
		must(t, err)
		l.release(c)
		return c
	}
	old := take()
	users.do(t, "grant x own", "delete-user x", "permit own rw z")
	if take() != old {
		t.Error("another client for the same user")
	}
	users.do(t, "delete-user u", "user u", "grant u own")
	if take() == old {
		t.Error("the same client for another user of the name")
	}
	_, err := s.identify(old.Ctx())
	if kverror.Of(err).Kind != kverror.InvalidAuthToken {
		t.Errorf("the old client acts as somebody: %v", err)
	}
}

// The rights of a user who waits for a lock are taken away. The call ends with an error, and gets no lock.
func TestALockOfAUserWithoutRights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := virtualAuthRig(t, func(o *Options) {
			everyService(t)(o)
			o.RequestTimeout = time.Second
		})
		// A lock that u may not write is refused at once, whatever u did before.
		locks := v3lockpb.NewLockClient(r.conn)
		_, err := locks.Lock(r.users.as(t, "u"), &v3lockpb.LockRequest{Name: []byte("foreign"), Lease: 5})
		wantError(t, "a foreign lock", err, rpctypes.ErrGRPCPermissionDenied)
		_, err = locks.Lock(t.Context(), &v3lockpb.LockRequest{Name: []byte("k"), Lease: 5})
		wantError(t, "nobody's lock", err, rpctypes.ErrGRPCUserEmpty)
		ctx, cancel := context.WithCancel(r.users.as(t, "u"))
		defer cancel()
		var once sync.Once
		r.users.do(t, "permit own rw k/ l", "user x")
		r.kv.ask(func(context.Context) error {
			taken := false
			once.Do(func() {
				r.users.do(t, "forbid own k/ l")
				taken = true
			})
			if taken {
				return kverror.New(kverror.AccessChanged, "a test")
			}
			return nil
		})
		_, err = locks.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("k"), Lease: 5})
		wantError(t, "a lock whose right is taken away", err, rpctypes.ErrGRPCPermissionDenied)
		if n := r.kv.called(); n != 1 {
			t.Errorf("%d requests have come to the keys", n)
		}
	})
}
