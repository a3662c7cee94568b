package adminapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// Where TLS keeps a client from a node, or the want of it, the next step says what to give.
func TestAdviceAboutTLS(t *testing.T) {
	made := httptest.NewTLSServer(nil) // its certificate names 127.0.0.1, and not localhost
	certificates, authority := made.TLS.Certificates, x509.NewCertPool()
	authority.AddCert(made.Certificate())
	made.Close()
	serve := func(o ...grpc.ServerOption) (port string) {
		t.Helper()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s, done := grpc.NewServer(o...), make(chan struct{})
		Register(s, &fakeBackend{})
		go func() { defer close(done); _ = s.Serve(l) }()
		t.Cleanup(func() { s.Stop(); <-done })
		_, port, _ = net.SplitHostPort(l.Addr().String())
		return port
	}
	secure := func(ask tls.ClientAuthType) string {
		return serve(grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12, Certificates: certificates, ClientAuth: ask})))
	}
	open, closed, mutual := serve(), secure(tls.NoClientCert), secure(tls.RequireAnyClientCert)
	trusting := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: authority}
	for _, c := range []struct {
		what, endpoint string
		config         *tls.Config
		next           string // "" for a call that succeeds
	}{
		{"without TLS", "http://127.0.0.1:" + open, nil, ""},
		{"with TLS", "https://127.0.0.1:" + closed, trusting, ""},
		{"with a certificate", "https://127.0.0.1:" + mutual, &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: authority, Certificates: certificates}, ""},
		{"the node speaks TLS alone", "127.0.0.1:" + closed, nil, "has certificates, https://HOST:PORT"},
		{"the node speaks no TLS", "127.0.0.1:" + open, trusting, "no certificates, http://HOST:PORT"},
		{"nobody knows the authority", "https://127.0.0.1:" + closed, nil, "authority of the node's certificate to --cacert"},
		{"another name", "https://localhost:" + closed, trusting, "an address that the node's certificate names"},
		{"no client's certificate", "https://127.0.0.1:" + mutual, trusting, "give --cert and --key"},
		{"nobody is there", "https://127.0.0.1:1", trusting, "give the client URL of a running node"},
	} {
		client, err := NewClient([]string{c.endpoint}, c.config)
		if err != nil {
			t.Fatal(err)
		}
		client.DialWithin(30 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, err = client.RangeList(ctx)
		_, _, serr := client.Survey(ctx)
		cancel()
		for _, err := range []error{err, serr} {
			var r *Refusal
			if errors.As(err, &r) != (c.next != "") || r != nil && !strings.Contains(r.NextStep, c.next) {
				t.Errorf("%s: %v; next: %+v", c.what, err, r)
			}
		}
	}
	if next := tlsAdvice(true, "x509: certificate has expired or is not yet valid: current time"); !strings.Contains(next, "skein cert list") {
		t.Error(next)
	}
}
