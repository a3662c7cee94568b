package chaos

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/sim"
)

const (
	// stormUsers is how many users a storm has whose rights change.
	stormUsers = 3
	// everything is the user in whose name the other clients call. It may read and write every key, and is not root.
	everything         = "everything"
	everythingPassword = "every key"
	// userPace is how many times longer users wait than in the simulation.
	userPace = 2
)

// hasUsers says whether a storm has users: two of four do, with clocks that pause and with others.
func hasUsers(seed uint64) bool { return seed%4 < 2 }

// hasJWTs says whether tokens in a storm with users are JWTs.
func hasJWTs(seed uint64) bool { return seed/4%2 == 1 }

// login is a user with a token, which all clients in its name share.
type login struct {
	name, password string

	mu    sync.Mutex
	token string // guarded by mu
}

// named adds the token to a call that has none.
func (l *login) named(ctx context.Context) context.Context {
	if out, _ := metadata.FromOutgoingContext(ctx); len(out.Get(rpctypes.TokenFieldNameGRPC)) > 0 {
		return ctx
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, l.token)
}

// renew gets another token. Nobody waits for anybody else, whose node may be cut off.
func (l *login) renew(ctx context.Context, cc *grpc.ClientConn) error {
	resp, err := etcdserverpb.NewAuthClient(cc).Authenticate(ctx, &etcdserverpb.AuthenticateRequest{Name: l.name, Password: l.password})
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.token = resp.GetToken()
	return nil
}

// unary repeats a call, of which nothing was done, with another token.
func (l *login) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if method == etcdserverpb.Auth_Authenticate_FullMethodName {
		return call(ctx, method, req, reply, cc, opts...)
	}
	err := call(l.named(ctx), method, req, reply, cc, opts...)
	old := []error{rpctypes.ErrGRPCInvalidAuthToken, rpctypes.ErrGRPCAuthOldRevision, rpctypes.ErrGRPCUserEmpty}
	if err == nil || !slices.ContainsFunc(old, func(e error) bool { return message(e) == message(err) }) || l.renew(ctx, cc) != nil {
		return err
	}
	return call(l.named(ctx), method, req, reply, cc, opts...)
}

// stream opens a stream with the present token. Whoever is refused opens another one, after a unary call has renewed it.
// So streams are for a user in whose name there are such calls, as for the one of all keys.
func (l *login) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return open(l.named(ctx), desc, cc, method, opts...)
}

// options are those of a client that calls in the name of a user; nobody is nil.
func (l *login) options() []grpc.DialOption {
	if l == nil {
		return nil
	}
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(l.unary), grpc.WithChainStreamInterceptor(l.stream)}
}

// venue is where a storm's users work: its machines.
type venue struct {
	l     *load
	conns []*grpc.ClientConn
}

func (v *venue) Elapsed() time.Duration { return time.Since(v.l.began) }
func (v *venue) Sleep(d time.Duration)  { time.Sleep(userPace * d) }
func (v *venue) Places() int            { return len(v.conns) }

func (v *venue) Enter(place int) *sim.Gateway {
	if v.l.c.nodes[place].away.Load() {
		return nil
	}
	return &sim.Gateway{Node: keyspace.NodeID(place + 1), Conn: v.conns[place], Ctx: context.Background(), Leave: func() {}}
}

// startUsers makes the users, has requests checked from now on, and begins the users' work.
func (l *load) startUsers(ctx context.Context, s *storm, pausedClocks bool) {
	start := time.Now()
	ctx, cancel := s.c.still.term(stormPatience, "making users").context(ctx)
	defer cancel()
	if err := makeEverything(ctx, l.all); err != nil {
		s.c.late("users: the user of all keys is not made: %v", err)
		return
	}
	v := &venue{l: l}
	for _, n := range s.c.nodes {
		conn, err := grpc.NewClient(strings.TrimPrefix(n.url, "http://"), append(dialling(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { _ = conn.Close() })
		v.conns = append(v.conns, conn)
	}
	var ready <-chan struct{}
	l.users, ready = l.workload.StartUsers(v, l.h, pausedClocks, s.note)
	select {
	case <-ready:
		s.measure("users are made in", time.Since(start))
	case <-ctx.Done():
		s.c.late("users: they are not made in %v", stormPatience)
	}
}

// makeEverything makes the user of all keys, while nothing is checked.
func makeEverything(ctx context.Context, cl *clientv3.Client) error {
	for {
		_, err := cl.UserAdd(ctx, everything, everythingPassword)
		_, err1 := cl.RoleAdd(ctx, everything)
		_, err2 := cl.RoleGrantPermission(ctx, everything, "\x00", "\x00", clientv3.PermissionType(clientv3.PermReadWrite))
		if _, err3 := cl.UserGrantRole(ctx, everything, everything); err3 == nil && err2 == nil || ctx.Err() != nil {
			return cmp.Or(ctx.Err(), err2, err3)
		}
		_, _ = err, err1 // the user and the role may be there already, and without them the others fail
		wait(ctx, 100*time.Millisecond)
	}
}

// tokensOf are the flags of the nodes of a storm with users. A hash of a low cost leaves the machine's time to the nodes.
func tokensOf(seed uint64) (flags []string, err error) {
	flags = []string{"--bcrypt-cost", "4"}
	if !hasJWTs(seed) {
		return flags, nil
	}
	dir := os.Getenv(inside) // a test's own directory has its name, with the "=" that such options cannot have
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	priv, pub := filepath.Join(dir, "jwt.key"), filepath.Join(dir, "jwt.pub")
	if err := os.WriteFile(priv, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(pub, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o600); err != nil {
		return nil, err
	}
	return append(flags, "--auth-token", "jwt,sign-method=ES256,pub-key="+pub+",priv-key="+priv+",ttl=10m"), nil
}
