package etcdapi

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rights"
)

// adminService answers every method of the admin service.
type adminService struct {
	adminpb.UnimplementedAdminServer
}

// Bundle implements adminpb.AdminServer.
func (adminService) Bundle(*adminpb.BundleRequest, grpc.ServerStreamingServer[adminpb.BundleResponse]) error {
	return nil
}

// adminMethods are the names of all methods of the admin service; streams says which answer with a stream.
func adminMethods() (names []string, streams map[string]bool) {
	streams = map[string]bool{}
	for _, m := range adminpb.Admin_ServiceDesc.Methods {
		names = append(names, m.MethodName)
	}
	for _, s := range adminpb.Admin_ServiceDesc.Streams {
		names, streams[s.StreamName] = append(names, s.StreamName), true
	}
	return names, streams
}

// registerAdmin adds an admin service that answers everything with an empty message.
func registerAdmin(r grpc.ServiceRegistrar) {
	desc := adminpb.Admin_ServiceDesc
	desc.Methods = append([]grpc.MethodDesc(nil), desc.Methods...)
	for i, m := range desc.Methods {
		desc.Methods[i].Handler = func(_ any, ctx context.Context, decode func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
			q := &emptypb.Empty{}
			if err := decode(q); err != nil {
				return nil, err
			}
			info := &grpc.UnaryServerInfo{FullMethod: "/" + adminpb.Admin_ServiceDesc.ServiceName + "/" + m.MethodName}
			return in(ctx, q, info, func(context.Context, any) (any, error) { return &emptypb.Empty{}, nil })
		}
	}
	r.RegisterService(&desc, adminService{})
}

// fromListener has all connections come from an address.
type fromListener struct {
	net.Listener
	from net.Addr
}

func (l fromListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return fromConn{c, l.from}, nil
}

type fromConn struct {
	net.Conn
	from net.Addr
}

func (c fromConn) RemoteAddr() net.Addr { return c.from }

// hereRig serves clients that come from an address at one port, and over a unix socket.
func hereRig(t *testing.T, from net.Addr, users *Users, secure *tls.Config) (s *Server, socket string) {
	t.Helper()
	node := &fakeNode{}
	node.leader.Store(0xb)
	s = New(Options{Users: users, KV: &fakeKV{}, Members: node, Node: node, Clock: clock.System(), Metrics: NewMetrics(nil), Register: registerAdmin, TLS: secure})
	socket = filepath.Join(t.TempDir(), "s")
	scheme := "http"
	if secure != nil {
		scheme = "https"
	}
	must(t, s.Bind([]url.URL{{Scheme: scheme, Host: "127.0.0.1:0"}, {Scheme: "unix", Path: socket}}, nil))
	s.clients[0].Listener = fromListener{s.clients[0].Listener, from}
	s.Start()
	t.Cleanup(func() { s.Stop(context.Background()) })
	return s, socket
}

// command calls a method of the admin service.
func command(t *testing.T, target string, creds credentials.TransportCredentials, method string, meta ...string) error {
	t.Helper()
	return commandBy(t, target, creds, nil, method, meta...)
}

// commandBy is command with options of the connection.
func commandBy(t *testing.T, target string, creds credentials.TransportCredentials, dial []grpc.DialOption, method string, meta ...string) error {
	t.Helper()
	conn, err := grpc.NewClient(target, append(dial, grpc.WithTransportCredentials(creds))...)
	must(t, err)
	defer conn.Close()
	ctx := metadata.AppendToOutgoingContext(t.Context(), meta...)
	if _, streams := adminMethods(); !streams[method] {
		return conn.Invoke(ctx, "/skein.admin.v1.Admin/"+method, &emptypb.Empty{}, &emptypb.Empty{})
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/skein.admin.v1.Admin/"+method)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&emptypb.Empty{}); err != nil && !errors.Is(err, io.EOF) { // the status comes by RecvMsg
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if err := stream.RecvMsg(&emptypb.Empty{}); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

var (
	faraway  = &net.TCPAddr{IP: net.IPv4(192, 0, 2, 7), Port: 4711}
	loopback = &net.TCPAddr{IP: net.IPv6loopback, Port: 4711}
)

// With checks off, what changes the cluster may be asked for from here alone: what reads may be asked for from everywhere.
func TestCommandsComeFromHere(t *testing.T) {
	p := newPKI(t)
	secure := &tls.Config{Certificates: []tls.Certificate{p.server}, ClientCAs: p.pool, ClientAuth: tls.VerifyClientCertIfGiven}
	withCert := credentials.NewTLS(&tls.Config{RootCAs: p.pool, Certificates: []tls.Certificate{p.client}})
	without := credentials.NewTLS(&tls.Config{RootCAs: p.pool})
	plain := insecure.NewCredentials()
	methods := map[bool][]string{}
	names, _ := adminMethods()
	for _, m := range names {
		reads := strings.HasSuffix(m, "List") || strings.HasSuffix(m, "Show") || m == "Survey" || m == "Heat" || m == "Series" || m == "Slow"
		methods[reads] = append(methods[reads], m)
	}
	if !slices.Contains(methods[false], "Bundle") || len(methods[true]) < 6 || len(methods[false]) < 15 {
		t.Fatalf("%v", methods)
	}
	for _, c := range []struct {
		name    string
		from    net.Addr
		secure  *tls.Config
		creds   credentials.TransportCredentials
		socket  bool
		inside  bool
		anyhow  bool // --insecure-admin
		allowed bool
	}{
		{name: "far away", from: faraway, creds: plain},
		{name: "far away with TLS", from: faraway, secure: secure, creds: without},
		{name: "no address of IP", from: bufAddr{}, creds: plain},
		{name: "far away with a certificate", from: faraway, secure: secure, creds: withCert, allowed: true},
		{name: "loopback", from: loopback, creds: plain, allowed: true},
		{name: "mapped loopback", from: &net.TCPAddr{IP: net.ParseIP("::ffff:127.0.0.1")}, creds: plain, allowed: true},
		{name: "unix socket", from: faraway, creds: plain, socket: true, allowed: true},
		{name: "this process", from: faraway, creds: plain, inside: true, allowed: true},
		{name: "--insecure-admin", from: faraway, creds: plain, anyhow: true, allowed: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			users := everybody(t)
			users.InsecureAdmin = c.anyhow
			s, socket := hereRig(t, c.from, users, c.secure)
			target := s.ClientAddrs()[0].String()
			if c.socket {
				target = "unix:" + socket
			}
			var dial []grpc.DialOption
			if c.inside {
				target = "passthrough:///nowhere"
				dial = append(dial, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return s.DialInside(ctx) }))
			}
			for reads, names := range methods {
				for _, m := range names {
					err := commandBy(t, target, c.creds, dial, m)
					if reads || c.allowed {
						if err != nil {
							t.Errorf("%s: %v", m, err)
						}
						continue
					}
					text := status.Convert(err).Message()
					if status.Code(err) != codes.PermissionDenied || !strings.Contains(text, "auth enable") || !strings.Contains(text, "--insecure-admin") {
						t.Errorf("%s: %v", m, err)
					}
				}
			}
		})
	}
}

type bufAddr struct{}

func (bufAddr) Network() string { return "bufconn" }
func (bufAddr) String() string  { return "127.0.0.1:1" }

// With checks on it does not matter where a command comes from: root may, and nobody else.
func TestCommandsOfRoot(t *testing.T) {
	for _, from := range []net.Addr{faraway, loopback} {
		users, r := newUsers()
		users.InsecureAdmin = true
		addUsers(t, users, r)
		s, _ := hereRig(t, from, users, nil)
		target, plain := s.ClientAddrs()[0].String(), insecure.NewCredentials()
		names, _ := adminMethods()
		for _, m := range names {
			if err := command(t, target, plain, m); status.Code(err) != codes.InvalidArgument {
				t.Errorf("%v, nobody: %s: %v", from, m, err)
			}
			if err := command(t, target, plain, m, "token", tokenOf(t, users, r, "u")); status.Code(err) != codes.PermissionDenied {
				t.Errorf("%v, a user: %s: %v", from, m, err)
			}
			if err := command(t, target, plain, m, "token", tokenOf(t, users, r, "root")); err != nil {
				t.Errorf("%v, root: %s: %v", from, m, err)
			}
		}
	}
}

// addUsers adds root and u, and has requests checked.
func addUsers(t *testing.T, users *Users, r *records) {
	t.Helper()
	hash, err := users.Passwords.Hash(t.Context(), "secret")
	must(t, err)
	for _, c := range []rights.Change{
		{Kind: rights.AddUser, User: "root", Hash: hash},
		{Kind: rights.AddUser, User: "u", Hash: hash},
		{Kind: rights.AddRole, Role: "root"},
		{Kind: rights.GrantRole, User: "root", Role: "root"},
		{Kind: rights.Enable},
	} {
		must(t, r.ChangeAccess(t.Context(), "root", c))
	}
}

func tokenOf(t *testing.T, users *Users, r *records, user string) string {
	t.Helper()
	c, err := r.Credential(t.Context(), user)
	must(t, err)
	token, err := users.Tokens.Issue(auth.Keys{Current: r.key}, auth.Proof{User: user, Index: c.Index, Revision: c.Revision})
	must(t, err)
	return token
}

// The admin service has no paths at the JSON gateway, whose calls come from within the process.
func TestNoCommandsByTheGateway(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.Register = registerAdmin })
	conn := r.gateway.conn
	err := conn.Invoke(t.Context(), "/skein.admin.v1.Admin/NodeDrain", &emptypb.Empty{}, &emptypb.Empty{})
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("a command over the gateway's own connection: %v", err)
	}
	for _, path := range []string{"/v3/admin/nodedrain", "/v3/skein/node/drain", "/skein.admin.v1.Admin/NodeDrain"} {
		if code, body := post(t, r, path, "{}"); code != http.StatusNotFound {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}
