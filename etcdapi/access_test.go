package etcdapi

import (
	"context"
	"crypto/rand"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// records are users and roles in memory, and the gate of one node that hears of them.
type records struct {
	gate   *auth.Gate
	tokens auth.Tokens

	mu    sync.Mutex
	state *rights.State
	index uint64
	key   auth.Key
	// deaf keeps the gate from hearing of changes.
	deaf bool
	// asked counts the questions for credentials. They wait until stuck is closed, if there is one.
	asked int
	stuck chan struct{}
	// taken, if set, is told of changes that the gate has heard of, as the node tells the server.
	taken func()
}

// everybody are Users of whom nobody is asked who they are.
func everybody(testing.TB) *Users { u, _ := newUsers(); return u }

// newUsers returns Users without any user, and their records.
func newUsers() (*Users, *records) {
	tokens := auth.NewSimple(clock.System(), rand.Reader, 5*time.Minute)
	passwords, err := auth.NewPasswords(auth.MinCost)
	if err != nil {
		panic(err)
	}
	r := &records{gate: auth.NewGate(clock.System(), tokens), state: rights.New()}
	if r.key, err = auth.NewKey(1, make([]byte, auth.MinKeyBytes)); err != nil {
		panic(err)
	}
	r.tellLocked()
	r.tokens = tokens
	return &Users{Gate: r.gate, Tokens: tokens, Passwords: passwords, Records: r}, r
}

func (r *records) tellLocked() {
	if !r.deaf {
		r.gate.Update(&auth.View{Rights: r.state.Clone(), Index: r.index, Keys: auth.Keys{Current: r.key}, Permits: true})
	}
}

// hear has the gate hear of changes, or not.
func (r *records) hear(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deaf = !yes
	r.tellLocked()
}

func (r *records) Credential(ctx context.Context, user string) (rights.Credential, error) {
	r.mu.Lock()
	r.asked++
	stuck := r.stuck
	r.mu.Unlock()
	if stuck != nil {
		select {
		case <-stuck:
		case <-ctx.Done():
			return rights.Credential{}, ctx.Err()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state.Credential(user, r.index), nil
}

func (r *records) ChangeAccess(_ context.Context, caller string, c rights.Change) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.state.Apply(r.index+1, caller, &c); err != nil {
		return kverror.Of(err)
	}
	r.index++
	r.tellLocked()
	if r.taken != nil && !r.deaf {
		r.taken()
	}
	return nil
}

// stick has questions for credentials wait for unstick.
func (r *records) stick() (unstick func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	stuck := make(chan struct{})
	r.stuck = stuck
	return sync.OnceFunc(func() { close(stuck) })
}

func (r *records) questions() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked
}

// do makes changes as root. A user's password is the name, and a 0 at the end of END is the byte 0. The lines are:
//
//	user NAME | delete-user NAME | password NAME
//	role NAME | delete-role NAME
//	permit ROLE r|w|rw KEY [END] | forbid ROLE KEY [END]
//	grant USER ROLE | revoke USER ROLE
//	enable | disable
func (r *records) do(t testing.TB, lines ...string) {
	t.Helper()
	for _, line := range lines {
		f := append(strings.Fields(line), "", "", "", "")
		c := rights.Change{User: f[1]}
		span := func(at int) (p rights.Permission) {
			p.Key = []byte(f[at])
			if end, ok := strings.CutSuffix(f[at+1], "0"); ok {
				p.RangeEnd = []byte(end + "\x00")
			} else if end != "" {
				p.RangeEnd = []byte(end)
			}
			return p
		}
		switch f[0] {
		case "user", "password":
			c.Kind = map[string]rights.Kind{"user": rights.AddUser, "password": rights.ChangePassword}[f[0]]
			hash, err := bcrypt.GenerateFromPassword([]byte(f[1]), bcrypt.MinCost)
			if err != nil {
				t.Fatal(err)
			}
			c.Hash = hash
		case "delete-user":
			c.Kind = rights.DeleteUser
		case "role":
			c = rights.Change{Kind: rights.AddRole, Role: f[1]}
		case "delete-role":
			c = rights.Change{Kind: rights.DeleteRole, Role: f[1]}
		case "grant":
			c.Kind, c.Role = rights.GrantRole, f[2]
		case "revoke":
			c.Kind, c.Role = rights.RevokeRole, f[2]
		case "permit":
			p := span(3)
			p.Type = map[string]rights.Type{"r": rights.Read, "w": rights.Write, "rw": rights.ReadWrite}[f[2]]
			c = rights.Change{Kind: rights.GrantPermission, Role: f[1], Permission: p}
		case "forbid":
			c = rights.Change{Kind: rights.RevokePermission, Role: f[1], Permission: span(2)}
		case "enable":
			c = rights.Change{Kind: rights.Enable}
		case "disable":
			c = rights.Change{Kind: rights.Disable}
		default:
			t.Fatalf("no change %q", line)
		}
		if err := r.ChangeAccess(context.Background(), "root", c); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	}
}

// setUp makes root, and user u, who may read and write k, read r to s and write w; and switches checks on.
func (r *records) setUp(t testing.TB) {
	t.Helper()
	r.do(t, "user root", "role root", "grant root root", "user u", "role own", "permit own rw k", "permit own r r s", "permit own w w", "grant u own", "enable")
}

// token returns a token of a user.
func (r *records) token(t testing.TB, user string) string {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	token, err := r.tokens.Issue(auth.Keys{Current: r.key}, auth.Proof{User: user, Index: r.index, Revision: r.state.Revision})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// as returns the context of a client that is a user; "" is nobody.
func (r *records) as(t testing.TB, user string) context.Context {
	t.Helper()
	if user == "" {
		return t.Context()
	}
	return metadataToken(t.Context(), r.token(t, user))
}

func metadataToken(ctx context.Context, token string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, token)
}

// authRig is a rig with users.
type authRig struct {
	*rig
	users *records
	conn  *grpc.ClientConn
	// dial connects with the server, whatever the address. Nil is TCP.
	dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// stale says that the node's view of the rights is too old.
	stale atomic.Bool
}

// newAuthRig serves with users, as setUp makes them.
func newAuthRig(t testing.TB, change func(*Options)) *authRig {
	t.Helper()
	r, withUsers := newUsersRig(t, change)
	r.rig = newRig(t, "http", withUsers)
	r.connect(t, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return r
}

// virtualAuthRig is newAuthRig within a synctest bubble, for what depends on the request timeout: a slow machine uses up none of it.
func virtualAuthRig(t testing.TB, change func(*Options)) *authRig {
	t.Helper()
	r, withUsers := newUsersRig(t, change)
	r.rig, r.dial = virtualRig(t, withUsers)
	r.connect(t, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return r.dial(ctx, "tcp", addr) }))
	return r
}

// virtualRig serves within a synctest bubble. dial connects with it, whatever the address.
func virtualRig(t testing.TB, change func(*Options)) (r *rig, dial func(ctx context.Context, network, addr string) (net.Conn, error)) {
	t.Helper()
	r = rigThatWaits(t, func(o *Options) {
		o.Clock = clock.Virtual()
		change(o)
	})
	l := newQueueListener()
	r.clients = []boundListener{{Listener: l}}
	r.serve(t)
	return r, func(context.Context, string, string) (net.Conn, error) { return l.dial(), nil }
}

// newUsersRig returns a rig without its server, and what gives a server its users.
func newUsersRig(t testing.TB, change func(*Options)) (*authRig, func(*Options)) {
	t.Helper()
	users, records := newUsers()
	records.setUp(t)
	r := &authRig{users: records}
	users.Holds = func() bool { return !r.stale.Load() }
	return r, func(o *Options) {
		o.Users = users
		if change != nil {
			change(o)
		}
	}
}

// connect opens a connection to the server, which tells the users' records what it must know.
func (r *authRig) connect(t testing.TB, opts ...grpc.DialOption) {
	t.Helper()
	r.users.mu.Lock()
	r.users.taken = r.RightsTaken
	r.users.mu.Unlock()
	var err error
	if r.conn, err = grpc.NewClient("passthrough:///"+r.addr(), opts...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.conn.Close() })
}
