package adminapi

import (
	"context"
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/api/adminpb"
)

// login is the user in whose name a client calls.
type login struct {
	user, password string

	mu    sync.Mutex
	token string // guarded by mu; empty before the first call
}

// As has the client call in the name of a user.
func (c *Client) As(user, password string) { c.login.user, c.login.password = user, password }

// callAs makes one call in the name of the user, if there is one. A command may wait for longer than a token is
// valid, and then logs in anew. So it does with a JWT that is older than the last change of users.
func callAs[Q, A any](ctx context.Context, l *login, conn *grpc.ClientConn, req *Q, f func(adminpb.AdminClient, context.Context, *Q, ...grpc.CallOption) (*A, error)) (*A, error) {
	admin := adminpb.NewAdminClient(conn)
	if l.user == "" {
		return f(admin, ctx, req)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for anew := l.token == ""; ; anew = true {
		if anew {
			if err := l.logIn(ctx, conn); err != nil {
				return nil, err
			}
		}
		named := ctx
		if l.token != "" {
			named = metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, l.token)
		}
		a, err := f(admin, named, req)
		again := rpctypes.Error(err) == rpctypes.ErrInvalidAuthToken || rpctypes.Error(err) == rpctypes.ErrAuthOldRevision //nolint:errorlint // etcd's values, which Error returns unwrapped
		if anew || !again {
			return a, err
		}
	}
}

// logIn gets a token. Without checks of users there is none. Then the call goes on, as calls of etcd's clients do.
func (l *login) logIn(ctx context.Context, conn *grpc.ClientConn) error {
	l.token = ""
	a, err := etcdserverpb.NewAuthClient(conn).Authenticate(ctx, &etcdserverpb.AuthenticateRequest{Name: l.user, Password: l.password})
	if rpctypes.Error(err) == rpctypes.ErrAuthNotEnabled { //nolint:errorlint // as above
		return nil
	}
	if err == nil {
		l.token = a.GetToken()
	}
	return err
}

// whoMay says who may do what was refused for its user, or returns nil.
func whoMay(err error) *Refusal {
	const user = "give --user NAME:PASSWORD of a user with the role root, or a client's certificate with that common name; a node that joins shows its own certificate (--certs-dir)"
	switch rpctypes.Error(err) {
	case rpctypes.ErrUserEmpty: //nolint:errorlint // as above
		return &Refusal{Reason: "auth is on, and the request names no user", NextStep: user}
	case rpctypes.ErrUserNotFound:
		return &Refusal{Reason: "auth is on, and there is no such user", NextStep: user}
	case rpctypes.ErrPermissionDenied:
		return &Refusal{Reason: "the user may not do that", NextStep: user}
	case rpctypes.ErrAuthFailed:
		return &Refusal{Reason: "the login has failed", NextStep: "check the user's name and password; etcdctl user list shows the users to root"}
	}
	return nil
}
