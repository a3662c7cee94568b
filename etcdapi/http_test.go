package etcdapi

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/coder/websocket"
	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
)

// TestHTTPStories walks testdata/http. Commands:
//
//	get PATH [metrics] [method=M] [state…]
//
// states: no-leader, learner, nospace, corrupt (this node's), others-nospace, others-corrupt, sticky-nospace,
// sticky-corrupt (both another's), strange (an unknown alarm), leaderless (reads find no leader),
// rotten (reads find rot).
func TestHTTPStories(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.EnablePprof = true })
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	datadriven.RunTest(t, "testdata/http", func(t *testing.T, d *datadriven.TestData) string {
		r.node.leader.Store(0xb)
		r.node.learner.Store(d.HasArg("learner"))
		r.alarms.set()
		r.kv.set(nil, false)
		switch {
		case d.HasArg("no-leader"):
			r.node.leader.Store(0)
			r.kv.set(kverror.Timeout, false)
		case d.HasArg("nospace"):
			r.alarms.set(Alarm{Type: pb.AlarmType_NOSPACE, Member: 0xb})
		case d.HasArg("corrupt"):
			r.alarms.set(Alarm{Type: pb.AlarmType_CORRUPT, Member: 0xb})
		case d.HasArg("others-nospace"):
			r.alarms.set(Alarm{Type: pb.AlarmType_NOSPACE, Member: 0xd})
		case d.HasArg("others-corrupt"):
			r.alarms.set(Alarm{Type: pb.AlarmType_CORRUPT, Member: 0xd})
		case d.HasArg("sticky-nospace"):
			r.alarms.set(Alarm{Type: pb.AlarmType_NOSPACE, Member: 0xd, Sticky: true})
		case d.HasArg("sticky-corrupt"):
			r.alarms.set(Alarm{Type: pb.AlarmType_CORRUPT, Sticky: true})
		case d.HasArg("strange"):
			r.alarms.set(Alarm{Type: 9, Member: 0xd, Sticky: true})
		case d.HasArg("leaderless"):
			r.kv.set(kverror.NoLeader, false)
		case d.HasArg("rotten"):
			r.kv.set(kverror.Corrupt, false)
		}
		addr, method := r.addr(), http.MethodGet
		if d.HasArg("metrics") {
			addr = r.MetricsAddrs()[0].String()
		}
		d.MaybeScanArgs(t, "method", &method)
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+addr+strings.TrimSpace(d.Input), nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err.Error()
		}
		if d.HasArg("grep") {
			var word string
			d.ScanArgs(t, "grep", &word)
			return fmt.Sprintf("%d\ncontains %q: %v\n", resp.StatusCode, word, bytes.Contains(body, []byte(word)))
		}
		out := fmt.Sprintf("%d %s\n%s", resp.StatusCode, resp.Header.Get("Content-Type"), body)
		return strings.TrimRight(out, "\n") + "\n"
	})
}

func TestNoPprof(t *testing.T) {
	r := newRig(t, "http", nil)
	if code, _ := get(t, &http.Transport{}, "http://"+r.addr()+"/debug/pprof/"); code != http.StatusNotFound {
		t.Error(code)
	}
}

// get fetches a URL on a connection of its own.
func get(t *testing.T, tr *http.Transport, url string) (int, string) {
	t.Helper()
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// pki is an authority with a certificate for the server and one for a client.
type pki struct {
	server, client tls.Certificate
	pool           *x509.CertPool
}

func newPKI(t *testing.T) *pki {
	t.Helper()
	caKey, ca := certificate(t, nil, nil, "ca")
	parent, err := x509.ParseCertificate(ca.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	p := &pki{pool: x509.NewCertPool()}
	p.pool.AddCert(parent)
	_, p.server = certificate(t, parent, caKey, "server")
	_, p.client = certificate(t, parent, caKey, "client")
	return p
}

func certificate(t *testing.T, parent *x509.Certificate, parentKey *ecdsa.PrivateKey, name string) (*ecdsa.PrivateKey, tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: parent == nil, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if parent == nil {
		parent, parentKey = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, parentKey)
	if err != nil {
		t.Fatal(err)
	}
	return key, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// TestTLS: one secure port serves both protocols, told apart by ALPN or by the first bytes. Clients
// without a certificate are refused.
func TestTLS(t *testing.T) {
	p := newPKI(t)
	r := newRig(t, "https", func(o *Options) {
		o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}, ClientCAs: p.pool, ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: []string{"h2"}}
	})
	good := &tls.Config{RootCAs: p.pool, Certificates: []tls.Certificate{p.client}}
	c := r.client(t, clientv3.Config{Endpoints: []string{"https://" + r.addr()}, TLS: good.Clone()})
	if _, err := c.Put(t.Context(), "k", "v"); err != nil {
		t.Error("gRPC:", err)
	}
	for _, protos := range [][]string{nil, {"http/1.1"}, {"h2", "http/1.1"}} {
		cfg := good.Clone()
		cfg.NextProtos = protos
		for _, addr := range []string{r.addr(), r.MetricsAddrs()[0].String()} {
			if code, body := get(t, &http.Transport{TLSClientConfig: cfg}, "https://"+addr+"/health"); code != 200 || body != `{"health":"true","reason":""}` {
				t.Errorf("HTTP with ALPN %v: %d %s", protos, code, body)
			}
		}
	}
	// The preface identifies an old gRPC client without ALPN.
	conn, err := tls.Dial("tcp", r.addr(), good)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	expectHTTP2(t, conn)

	anonymous := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.pool}}
	defer anonymous.CloseIdleConnections()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+r.addr()+"/health", nil)
	if resp, err := anonymous.RoundTrip(req); err == nil {
		resp.Body.Close()
		t.Error("a client without a certificate was served")
	}
	// A plain HTTP request to the secure port gets a clear answer.
	plain := dial(t, r.addr())
	_, _ = io.WriteString(plain, "GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
	if b, _ := io.ReadAll(plain); !strings.Contains(string(b), "HTTP request to an HTTPS server") {
		t.Errorf("%q", b)
	}
}

// A browser attaches its user's certificate to the requests and sockets of any page. Pages of other
// origins may neither read nor write with it. The user's own pages, and clients that are no
// browsers, may.
func TestPagesOfOtherOriginsHaveNoCertificate(t *testing.T) {
	p := newPKI(t)
	for _, auth := range []tls.ClientAuthType{tls.RequireAndVerifyClientCert, tls.VerifyClientCertIfGiven} {
		r := newRig(t, "https", func(o *Options) {
			o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}, ClientCAs: p.pool, ClientAuth: auth}
		})
		own := "https://" + r.addr()
		for _, c := range []struct {
			name    string
			header  http.Header
			foreign bool
		}{
			{"no browser", nil, false},
			{"its own page", http.Header{"Origin": {own}}, false},
			{"its own page, in capitals", http.Header{"Origin": {strings.ToUpper(own)}}, false},
			{"its own page, as the browser says", http.Header{"Sec-Fetch-Site": {"same-origin"}}, false},
			{"typed in", http.Header{"Sec-Fetch-Site": {"none"}}, false},
			{"another page", http.Header{"Origin": {"https://elsewhere"}}, true},
			{"another port", http.Header{"Origin": {"https://127.0.0.1:1"}}, true},
			{"a sandbox", http.Header{"Origin": {"null"}}, true},
			{"another page, as the browser says", http.Header{"Sec-Fetch-Site": {"cross-site"}}, true},
			{"a neighbour", http.Header{"Sec-Fetch-Site": {"same-site"}, "Origin": {"https://b.example"}}, true},
		} {
			for _, by := range []struct{ certified, http2 bool }{{true, false}, {true, true}, {false, false}} {
				certified := by.certified
				if !certified && auth == tls.RequireAndVerifyClientCert {
					continue
				}
				cfg := &tls.Config{RootCAs: p.pool}
				if certified {
					cfg.Certificates = []tls.Certificate{p.client}
				}
				client := &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true, ForceAttemptHTTP2: by.http2}}
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, own+"/v3/kv/range", strings.NewReader(`{"key":"aw=="}`))
				must(t, err)
				req.Header = c.header.Clone()
				resp, err := client.Do(req)
				must(t, err)
				resp.Body.Close()
				if refused := resp.StatusCode == http.StatusForbidden; refused != (c.foreign && certified) || (resp.ProtoMajor == 2) != by.http2 {
					t.Errorf("%s, certificate %t: status %d by %s", c.name, certified, resp.StatusCode, resp.Proto)
				}
				conn, resp, err := websocket.Dial(t.Context(), "wss://"+r.addr()+"/v3/watch", &websocket.DialOptions{HTTPClient: client, HTTPHeader: c.header})
				if refused := err != nil && resp != nil && resp.StatusCode == http.StatusForbidden; refused != (c.foreign && certified) || err != nil && !refused {
					t.Errorf("%s, certificate %t: a socket: %v", c.name, certified, err)
				}
				if err == nil {
					_ = conn.CloseNow()
				}
			}
		}
	}
}

// expectHTTP2 sends a preface, one byte at a time, and wants a SETTINGS frame.
func expectHTTP2(t *testing.T, conn net.Conn) {
	t.Helper()
	for i := range preface {
		if _, err := conn.Write([]byte{preface[i]}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 9)
	if _, err := io.ReadFull(conn, head); err != nil || head[3] != 4 {
		t.Errorf("%x, %v: no SETTINGS", head, err)
	}
}

// TestSniffPlain: the first bytes decide, however they are split, and nothing is lost.
func TestSniffPlain(t *testing.T) {
	r := newRig(t, "http", nil)
	expectHTTP2(t, dial(t, r.addr()))
	for _, request := range []string{"GET /version HTTP/1.1\r\nHost: h\r\n\r\n", "PRINT / HTTP/1.1\r\nHost: h\r\n\r\n", "PRI * HTTP/1.1\r\nHost: h\r\n\r\n"} {
		conn := dial(t, r.addr())
		for i := range request {
			if _, err := conn.Write([]byte{request[i]}); err != nil {
				t.Fatal(err)
			}
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%q: %v", request, err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if strings.HasPrefix(request, "GET") && string(b) != `{"etcdserver":"3.7.3","etcdcluster":"3.7.0","storage":"3.7.0"}` {
			t.Errorf("%s", b)
		}
	}
	conn := dial(t, r.addr())
	_, _ = conn.Write([]byte("PRI * HT"))
	_ = conn.(*net.TCPConn).CloseWrite()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if got := testutil.ToFloat64(r.metrics.RejectedConnections.WithLabelValues("silent")); got != 1 {
		t.Errorf("%v silent connections", got)
	}
}

// lateClock shows an old wall clock, so that every deadline has passed.
type lateClock struct{ clock.Clock }

func (lateClock) Wall() time.Time { return time.Now().Add(-time.Hour) }

// TestSilentConnection: the deadline cuts a silent client off.
func TestSilentConnection(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.Clock = lateClock{clock.System()} })
	if _, err := dial(t, r.addr()).Read(make([]byte, 1)); err == nil {
		t.Error("a silent connection was answered")
	}
}

// TestMaxConnections: a connection beyond the bound is refused, and log and metrics say so. Once
// another one has ended, the next is served. The metrics have a bound of their own.
func TestMaxConnections(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	r := newRig(t, "http", func(o *Options) { o.MaxConnections, o.ConnectionsWhy, o.Logger = 2, "raise it", zap.New(core) })
	first, second := dial(t, r.addr()), dial(t, r.addr())
	expectHTTP2(t, first)
	expectHTTP2(t, second)
	for range 20 {
		refused := dial(t, r.addr())
		_ = refused.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := refused.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%d, %v: a third connection was served", n, err)
		}
	}
	if n := testutil.ToFloat64(r.metrics.RejectedConnections.WithLabelValues("limit")); n != 20 {
		t.Errorf("%v connections were counted as refused", n)
	}
	if n := testutil.ToFloat64(r.metrics.OpenConnections); n != 2 {
		t.Errorf("%v connections are open", n)
	}
	if all := logs.FilterMessageSnippet("refused client connections: raise it").All(); len(all) != 1 || all[0].ContextMap()["limit"] != int64(2) {
		t.Errorf("the log has %v", all)
	}
	metrics, err := http.Get("http://" + r.MetricsAddrs()[0].String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(metrics.Body); err != nil || !bytes.Contains(b, []byte(`skein_etcdapi_rejected_connections_total{cause="limit"} 20`)) {
		t.Errorf("the metrics do not say it: %v", err)
	}
	metrics.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	first.Close()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		third := dial(t, r.addr())
		_, _ = io.WriteString(third, "GET /version HTTP/1.0\r\n\r\n")
		b, err := io.ReadAll(third)
		if err == nil && bytes.Contains(b, []byte("etcdserver")) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("after one has ended: %s, %v", b, err)
		}
	}
}

func TestUnixSocket(t *testing.T) {
	r := newRig(t, "http", nil)
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	s := New(Options{Users: everybody(t), KV: r.kv, Members: r.node, Node: r.node, Clock: clock.System(), Gatherer: r.reg})
	u, err := url.Parse("unix://" + path)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Bind([]url.URL{*u}, nil); err != nil {
		t.Fatal(err)
	}
	s.Start()
	defer s.Stop(t.Context())
	c := r.client(t, clientv3.Config{Endpoints: []string{u.String()}})
	if _, err := c.Get(t.Context(), "k"); err != nil {
		t.Error(err)
	}
}

// TestBindErrors: the error names the URL, and neither listeners nor goroutines are left. A file
// that is no socket stays.
func TestBindErrors(t *testing.T) {
	r := newRig(t, "http", nil)
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ url, want string }{
		{"http://" + r.addr(), "address already in use"},
		{"https://127.0.0.1:0", "no certificate"},
		{"unix://" + file, "address already in use"},
	} {
		u, err := url.Parse(tc.url)
		if err != nil {
			t.Fatal(err)
		}
		s := New(Options{Users: everybody(t), KV: r.kv, Members: r.node, Node: r.node, Clock: clock.System(), Gatherer: r.reg})
		err = s.Bind([]url.URL{{Scheme: "http", Host: "127.0.0.1:0"}, *u}, nil)
		if err == nil || !strings.Contains(err.Error(), tc.url) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.url, err)
		}
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Error("the file is gone")
	}
}

// TestMixedLoad: HTTP and gRPC do not disturb each other on one port.
func TestMixedLoad(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	done := make(chan error)
	go func() {
		for range 200 {
			if _, err := c.Put(t.Context(), "k", "v"); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for range 20 {
		if code, _ := get(t, &http.Transport{}, "http://"+r.addr()+"/readyz"); code != 200 {
			t.Error(code)
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	r.kv.set(kverror.Compacted, false)
	if _, err := c.Get(t.Context(), "k"); !errors.Is(err, rpctypes.ErrCompacted) {
		t.Error(err)
	}
}

// A node that is to stop serves on, and says so to those who ask whether it is ready.
func TestStopping(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	if _, err := c.Put(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	r.Stopping()
	if code, body := get(t, &http.Transport{}, "http://"+r.addr()+"/readyz"); code != http.StatusServiceUnavailable || !strings.HasPrefix(body, "[-]stopping failed: the node stops\n[+]") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	if code, body := get(t, &http.Transport{}, "http://"+r.MetricsAddrs()[0].String()+"/livez"); code != http.StatusOK {
		t.Errorf("/livez: %d %s", code, body)
	}
	health := grpc_health_v1.NewHealthClient(c.ActiveConnection())
	if s, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil || s.Status != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("gRPC: %v, %v", s, err)
	}
	if _, err := c.Put(t.Context(), "k", "v"); err != nil {
		t.Errorf("it does not serve on: %v", err)
	}
}
