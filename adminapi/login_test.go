package adminapi

import (
	"context"
	"net"
	"strconv"
	"sync"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// logins give tokens away, each of which is taken once.
type logins struct {
	etcdserverpb.UnimplementedAuthServer
	off   bool
	old   bool // tokens that were taken are JWTs before the last change of users
	mu    sync.Mutex
	given int // guarded by mu: several may log in at a time
	taken map[string]bool
	calls int
}

func (l *logins) Authenticate(_ context.Context, q *etcdserverpb.AuthenticateRequest) (*etcdserverpb.AuthenticateResponse, error) {
	switch {
	case l.off:
		return nil, rpctypes.ErrGRPCAuthNotEnabled
	case q.GetName() != "root" || q.GetPassword() != "secret":
		return nil, rpctypes.ErrGRPCAuthFailed
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given++
	return &etcdserverpb.AuthenticateResponse{Token: strconv.Itoa(l.given)}, nil
}

func (l *logins) check(ctx context.Context, q any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if info.FullMethod == "/skein.admin.v1.Admin/PlacementPause" {
		l.calls++
		token := metadata.ValueFromIncomingContext(ctx, "token")
		switch {
		case l.off && len(token) == 0:
		case len(token) == 0:
			return nil, rpctypes.ErrGRPCUserEmpty
		case l.taken[token[0]] && l.old:
			return nil, rpctypes.ErrGRPCAuthOldRevision
		case l.taken[token[0]]:
			return nil, rpctypes.ErrGRPCInvalidAuthToken
		default:
			l.taken[token[0]] = true
		}
	}
	return handle(ctx, q)
}

// A client logs in once, anew when its token is not taken any more, and without checks of users goes on without.
func TestLogin(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	users := &logins{taken: map[string]bool{}}
	s := grpc.NewServer(grpc.UnaryInterceptor(users.check))
	Register(s, &fakeBackend{})
	etcdserverpb.RegisterAuthServer(s, users)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	defer func() { s.Stop(); <-done }()
	c, err := NewClient([]string{l.Addr().String()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.PlacementPause(t.Context(), true); err == nil {
		t.Error("a call without a user is served")
	}
	c.As("root", "secret")
	for i := range 3 { // each but the first with a token that was taken already
		users.old = i == 2
		if err := c.PlacementPause(t.Context(), true); err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if users.given != 3 || users.calls != 6 {
		t.Errorf("%d logins, %d calls", users.given, users.calls)
	}
	users.taken["4"] = true // a token that is bad at once is not asked for for ever
	if err := c.PlacementPause(t.Context(), true); err == nil {
		t.Error("a bad token is taken")
	}
	users.off = true
	if err := c.PlacementPause(t.Context(), true); err != nil {
		t.Errorf("users are not checked: %v", err)
	}
	if err := c.PlacementPause(t.Context(), true); err != nil {
		t.Errorf("users are not checked: %v", err)
	}
}
