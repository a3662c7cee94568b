package etcdapi

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/api/adminpb"
)

// authority makes certificates for clients with names and URIs.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, ca := certificate(t, nil, nil, "ca")
	cert, err := x509.ParseCertificate(ca.Certificate[0])
	must(t, err)
	a := &authority{t: t, key: key, cert: cert, pool: x509.NewCertPool()}
	a.pool.AddCert(cert)
	return a
}

func (a *authority) client(name, uri string) *tls.Config {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(a.t, err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if uri != "" {
		u, err := url.Parse(uri)
		must(a.t, err)
		c.URIs = []*url.URL{u}
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key)
	must(a.t, err)
	return &tls.Config{RootCAs: a.pool, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

// secureRig is an authRig with https. Certificates name users if auth says so.
func secureRig(t *testing.T, a *authority, auth bool, change func(*Options)) (*rig, *records) {
	t.Helper()
	users, records := newUsers()
	records.setUp(t)
	users.ClientCertAuth = auth
	_, server := certificate(t, a.cert, a.key, "server")
	r := newRig(t, "https", func(o *Options) {
		o.Users = users
		o.TLS = &tls.Config{Certificates: []tls.Certificate{server}, ClientCAs: a.pool, ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: []string{"h2", "http/1.1"}}
		if change != nil {
			change(o)
		}
	})
	return r, records
}

// secureConn is a connection with a certificate.
func secureConn(t *testing.T, r *rig, cfg *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+r.addr(), grpc.WithTransportCredentials(credentials.NewTLS(cfg.Clone())))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// A certificate's common name is a user with --client-cert-auth alone. A token wins over it, also a bad one. A node's
// certificate is no user's, whatever its name (trap 100), and lets a node join alone. Through the gateway and by a
// websocket a certificate is nobody's (trap 93, CVE-2018-16886).
func TestCertificatesOfUsers(t *testing.T) {
	a := newAuthority(t)
	o := everyService(t)
	r, users := secureRig(t, a, true, o)
	put := func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := pb.NewKVClient(conn).Put(ctx, &pb.PutRequest{Key: []byte("k")})
		return err
	}
	join := func(conn *grpc.ClientConn) error {
		_, err := adminpb.NewAdminClient(conn).NodeJoin(t.Context(), &adminpb.NodeJoinRequest{})
		if strings.Contains(rpctypes.ErrorDesc(err), "not implemented") {
			return nil // it has come to the service
		}
		return err
	}
	drain := func(conn *grpc.ClientConn) error {
		_, err := adminpb.NewAdminClient(conn).NodeDrain(t.Context(), &adminpb.NodeChangeRequest{})
		if strings.Contains(rpctypes.ErrorDesc(err), "not implemented") {
			return nil
		}
		return err
	}
	for _, tc := range []struct {
		name, uri        string
		put, join, drain error
	}{
		{"u", "", nil, rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCPermissionDenied},
		{"root", "", nil, nil, nil},
		{"gone", "", rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrUserNotFound, rpctypes.ErrUserNotFound},
		{"", "", rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCUserEmpty},
		{"root", "skein://node/n1", rpctypes.ErrGRPCUserEmpty, nil, rpctypes.ErrGRPCUserEmpty},
		{"root", "skein://nobody/n1", rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCUserEmpty},
		{"u", "https://a.test/x", nil, rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCPermissionDenied},
	} {
		conn := secureConn(t, r, a.client(tc.name, tc.uri))
		what := "the certificate of " + tc.name + " " + tc.uri
		wantError(t, "put with "+what, put(t.Context(), conn), tc.put)
		wantError(t, "NodeJoin with "+what, join(conn), tc.join)
		wantError(t, "NodeDrain with "+what, drain(conn), tc.drain)
		wantError(t, "with a token, beside "+what, put(users.as(t, "u"), conn), nil)
		wantError(t, "with a bad token, beside "+what, put(metadataToken(t.Context(), "bad"), conn), rpctypes.ErrGRPCInvalidAuthToken)
		wantError(t, "as a gateway says it, with "+what, put(metadata.AppendToOutgoingContext(t.Context(), "grpcgateway-accept", "*/*"), conn), rpctypes.ErrGRPCUserEmpty)
		_, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
		wantError(t, "health with "+what, err, nil)
	}
	tr := &http.Transport{TLSClientConfig: a.client("root", "")}
	defer tr.CloseIdleConnections()
	say := func(path, body, token string) string {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+r.addr()+path, strings.NewReader(body))
		must(t, err)
		if token != "" {
			q.Header.Set("Authorization", token)
		}
		resp, err := tr.RoundTrip(q)
		must(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		must(t, err)
		return string(b)
	}
	const empty = "user name is empty"
	for path, body := range map[string]string{
		"/v3/kv/put": `{"key":"aw=="}`, "/v3/kv/range": `{"key":"aw=="}`, "/v3/auth/disable": `{}`, "/v3/lease/leases": `{}`, "/v3beta/kv/put": `{"key":"aw=="}`,
		"/v3/lock/lock": `{"name":"aw=="}`,
	} {
		if got := say(path, body, ""); !strings.Contains(got, empty) {
			t.Errorf("%s with root's certificate: %s", path, got)
		}
	}
	if got := say("/v3/kv/put", `{"key":"aw=="}`, users.token(t, "u")); !strings.Contains(got, "revision") {
		t.Errorf("with a token: %s", got)
	}
	c, _, err := websocket.Dial(t.Context(), "wss://"+r.addr()+"/v3/watch", &websocket.DialOptions{HTTPClient: &http.Client{Transport: tr}})
	must(t, err)
	defer func() { _ = c.CloseNow() }()
	must(t, c.Write(t.Context(), websocket.MessageText, []byte(`{"create_request":{"key":"aw=="}}`)))
	if _, b, err := c.Read(t.Context()); err != nil || !strings.Contains(string(b), empty) {
		t.Errorf("by a websocket with root's certificate: %s, %v", b, err)
	}

	without, _ := secureRig(t, a, false, nil)
	wantError(t, "without --client-cert-auth", put(t.Context(), secureConn(t, without, a.client("root", ""))), rpctypes.ErrGRPCUserEmpty)
}

// Trap 94: passwords and tokens stand in no log line, no error and no page.
func TestPasswordsAreNowhere(t *testing.T) {
	lines, logs := observer.New(zap.DebugLevel)
	r := newAuthRig(t, func(o *Options) {
		o.Logger, o.WarnUnaryRequest, o.EnablePprof = zap.New(lines), time.Nanosecond, true // all calls are slow
	})
	const secret = "hunter2-hunter2"
	a := pb.NewAuthClient(r.conn)
	root := r.users.as(t, "root")
	var texts []string
	note := func(_ any, err error) {
		if err != nil {
			texts = append(texts, err.Error())
		}
	}
	note(a.UserAdd(root, &pb.AuthUserAddRequest{Name: "new", Password: secret}))
	note(a.UserAdd(root, &pb.AuthUserAddRequest{Name: "new", Password: secret}))
	note(a.UserAdd(root, &pb.AuthUserAddRequest{Name: "long", Password: strings.Repeat(secret, 9)}))
	note(a.UserAdd(root, &pb.AuthUserAddRequest{Name: "hash", HashedPassword: secret}))
	note(a.UserChangePassword(root, &pb.AuthUserChangePasswordRequest{Name: "nobody", Password: secret}))
	note(a.UserChangePassword(t.Context(), &pb.AuthUserChangePasswordRequest{Name: "u", Password: secret}))
	login, err := a.Authenticate(t.Context(), &pb.AuthenticateRequest{Name: "new", Password: secret})
	must(t, err)
	note(a.Authenticate(t.Context(), &pb.AuthenticateRequest{Name: "u", Password: secret}))
	note(pb.NewKVClient(r.conn).Put(metadataToken(t.Context(), login.Token), &pb.PutRequest{Key: []byte("other")}))
	note(pb.NewKVClient(r.conn).Put(metadataToken(t.Context(), secret+".1"), &pb.PutRequest{Key: []byte("k")}))
	if len(texts) < 7 {
		t.Errorf("only %d calls have failed: %q", len(texts), texts)
	}
	tr := &http.Transport{DisableKeepAlives: true}
	for _, path := range []string{"/debug/requests", "/debug/events", "/debug/vars", "/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2", "/metrics", "/health", "/version"} {
		_, page := get(t, tr, "http://"+r.addr()+path)
		texts = append(texts, page)
	}
	slow := 0
	for _, l := range logs.All() {
		line := l.Message
		for k, v := range l.ContextMap() {
			line += " " + k + "=" + fmt.Sprint(v)
		}
		if l.Message == "request took long" {
			slow++
		}
		texts = append(texts, line)
	}
	if slow < 10 {
		t.Errorf("only %d slow calls are logged", slow)
	}
	for _, text := range texts {
		for _, s := range []string{secret, login.Token, "$2a$"} {
			if strings.Contains(text, s) {
				t.Errorf("%q stands in %.200s", s, text)
			}
		}
	}
}
