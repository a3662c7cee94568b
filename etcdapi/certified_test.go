package etcdapi

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
)

// queueListener accepts the other ends of pipes, which work in virtual time.
type queueListener struct{ *connQueue }

func newQueueListener() queueListener { return queueListener{newConnQueue()} }

// dial returns a connection that is accepted at once.
func (l queueListener) dial() net.Conn {
	ours, theirs := net.Pipe()
	l.offer(theirs)
	return ours
}

// certifiedRig is a server with a secure port for clients and one for metrics, in virtual time.
type certifiedRig struct {
	*Server
	t                *testing.T
	pki              *pki
	clients, metrics queueListener
	logs             *observer.ObservedLogs
	// refusal is why no certificate holds any more.
	refusal atomic.Pointer[string]
}

func newCertifiedRig(t *testing.T) *certifiedRig {
	t.Helper()
	r := &certifiedRig{t: t, pki: newPKI(t), clients: newQueueListener(), metrics: newQueueListener()}
	lines, logs := observer.New(zap.InfoLevel)
	r.logs = logs
	verify := func([]*x509.Certificate) error {
		if why := r.refusal.Load(); why != nil {
			return errors.New(*why)
		}
		return nil
	}
	node := &fakeNode{}
	node.leader.Store(0xb)
	reg := prometheus.NewRegistry()
	r.Server = New(Options{
		Users: everybody(t), KV: &fakeKV{}, Members: node, Node: node, Cluster: 0xc, Self: 0xb, Clock: clock.Virtual(), Metrics: NewMetrics(reg), Gatherer: reg,
		Logger: zap.New(lines), Verify: verify,
		// As config makes them: each handshake has settings of its own.
		TLS: &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return &tls.Config{
				Certificates: []tls.Certificate{r.pki.server}, ClientCAs: r.pki.pool, ClientAuth: tls.RequireAndVerifyClientCert, SessionTicketsDisabled: true,
				VerifyConnection: func(st tls.ConnectionState) error { return verify(st.PeerCertificates) },
			}, nil
		}},
	})
	r.Server.clients = []boundListener{{Listener: r.clients, secure: true}}
	r.extra = []boundListener{{Listener: r.metrics, secure: true}}
	r.Start()
	return r
}

func (r *certifiedRig) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	r.Stop(ctx)
}

// connect does the handshake of a client that offers these protocols.
func (r *certifiedRig) connect(l queueListener, protos ...string) (*tls.Conn, error) {
	c := tls.Client(l.dial(), &tls.Config{RootCAs: r.pki.pool, Certificates: []tls.Certificate{r.pki.client}, ServerName: "127.0.0.1", NextProtos: protos})
	return c, c.Handshake()
}

// health asks over a connection, which stays open.
func (r *certifiedRig) health(c net.Conn) error {
	if _, err := io.WriteString(c, "GET /health HTTP/1.1\r\nHost: h\r\n\r\n"); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// A connection whose certificate does not hold any more is closed within a minute, whatever it speaks and
// however long ago it was made.
func TestOpenConnectionsAreChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newCertifiedRig(t)
		defer r.stop()
		speaking := func(c *tls.Conn, err error) *tls.Conn {
			must(t, err)
			return c
		}
		open := map[string]*tls.Conn{
			"gRPC":    speaking(r.connect(r.clients, "h2")),
			"HTTP":    speaking(r.connect(r.clients, "http/1.1")),
			"metrics": speaking(r.connect(r.metrics, "http/1.1")),
		}
		ended := make(chan struct{})
		go func() { // a pipe has room for nothing, and the server begins
			defer close(ended)
			_, _ = io.Copy(io.Discard, open["gRPC"])
		}()
		_, err := io.WriteString(open["gRPC"], preface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
		must(t, err)
		must(t, r.health(open["HTTP"]))
		must(t, r.health(open["metrics"]))
		for minute := range 3 {
			time.Sleep(certificateCheckInterval)
			for _, name := range []string{"HTTP", "metrics"} {
				if err := r.health(open[name]); err != nil {
					t.Fatalf("%s, minute %d: %v", name, minute, err)
				}
			}
		}
		why := "it is revoked"
		r.refusal.Store(&why)
		time.Sleep(certificateCheckInterval)
		synctest.Wait()
		told := r.logs.FilterMessageSnippet("does not hold any more").All()
		if len(told) != len(open) {
			t.Errorf("%d connections were told of, want %d", len(told), len(open))
		}
		for _, line := range told {
			if m := line.ContextMap(); m["subject"] != "CN=client" || m["error"] != why {
				t.Errorf("the log says %v", m)
			}
		}
		select {
		case <-ended:
		default:
			t.Error("the gRPC connection is still open")
		}
		for _, name := range []string{"HTTP", "metrics"} {
			if err := r.health(open[name]); err == nil {
				t.Errorf("the %s connection is still open", name)
			}
		}
		for _, c := range open {
			_ = c.NetConn().Close()
		}
		synctest.Wait()
		if n := len(r.certified.conns); n != 0 {
			t.Errorf("%d connections are remembered", n)
		}
	})
}

// Connections that their clients close are forgotten.
func TestClosedConnectionsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newCertifiedRig(t)
		defer r.stop()
		for _, l := range []queueListener{r.clients, r.metrics} {
			c, err := r.connect(l, "http/1.1")
			must(t, err)
			must(t, r.health(c))
			r.certified.mu.Lock()
			n := len(r.certified.conns)
			r.certified.mu.Unlock()
			if n != 1 {
				t.Errorf("%d connections are known", n)
			}
			_ = c.NetConn().Close()
			synctest.Wait()
			r.certified.mu.Lock()
			n = len(r.certified.conns)
			r.certified.mu.Unlock()
			if n != 0 {
				t.Errorf("%d connections are remembered", n)
			}
		}
	})
}

// Trap 95 (GHSA-3wh4-j44w-pg92): etcd checked the revocation list for gRPC, and not for HTTP on the same port.
func TestARevokedClientIsRefusedByEveryProtocol(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newCertifiedRig(t)
		defer r.stop()
		why := "it is revoked"
		r.refusal.Store(&why)
		for _, protos := range [][]string{nil, {"h2"}, {"http/1.1"}, {"h2", "http/1.1"}} {
			for _, l := range []queueListener{r.clients, r.metrics} {
				if l == r.metrics && len(protos) == 1 && protos[0] == "h2" {
					continue // it speaks no HTTP/2
				}
				c, err := r.connect(l, protos...)
				if err == nil {
					_, err = c.Read(make([]byte, 1)) // TLS 1.3 refuses behind the client's part of the handshake
				}
				if err == nil || !strings.Contains(err.Error(), "bad certificate") {
					t.Errorf("ALPN %v: error %v", protos, err)
				}
				_ = c.NetConn().Close()
			}
		}
	})
}

// Trap 96 (GHSA-6vch-q96h-7gc3): handshakes that hang end within a bounded time, and hold nobody up.
func TestHandshakesThatHang(t *testing.T) {
	for _, sent := range []string{"", "\x16\x03\x01\x02\x00\x01"} {
		synctest.Test(t, func(t *testing.T) {
			r := newCertifiedRig(t)
			defer r.stop()
			began := time.Now()
			var hanging []net.Conn
			for range 20 {
				for _, l := range []queueListener{r.clients, r.metrics} {
					c := l.dial()
					hanging = append(hanging, c)
					if sent != "" {
						_, err := io.WriteString(c, sent)
						must(t, err)
					}
				}
			}
			for _, l := range []queueListener{r.clients, r.metrics} {
				c, err := r.connect(l, "http/1.1")
				must(t, err)
				must(t, r.health(c))
				_ = c.NetConn().Close()
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("a good client waited for %v", took)
			}
			for _, c := range hanging {
				_ = c.SetReadDeadline(began.Add(sniffTimeout + time.Second))
				if _, err := io.Copy(io.Discard, c); err != nil {
					t.Errorf("a handshake that hangs is not ended: %v", err)
				}
				_ = c.Close()
			}
			if took := time.Since(began); took > sniffTimeout+time.Second {
				t.Errorf("ended after %v", took)
			}
		})
	}
}
