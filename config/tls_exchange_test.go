package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/certs"
)

// exchange is a node's side towards clients whose files change while it runs.
type exchange struct {
	t    *testing.T
	dir  string
	logs *observer.ObservedLogs
	tls  *tls.Config
	// unusable counts the changes that could not be taken.
	unusable counter
}

type counter struct{ atomic.Int64 }

func (c *counter) Inc() { c.Add(1) }

func newExchange(t *testing.T, args ...string) *exchange {
	t.Helper()
	e := &exchange{t: t, dir: t.TempDir()}
	e.authority("a")
	e.authority("b")
	e.install("a")
	args = append([]string{
		"--name=n", "--listen-client-urls=https://127.0.0.1:0", "--advertise-client-urls=https://127.0.0.1:1",
		"--cert-file=" + e.path("n/node.crt"), "--key-file=" + e.path("n/node.key"), "--trusted-ca-file=" + e.path("n/ca.crt"), "--client-crl-file=" + e.path("n/ca.crl"),
	}, args...)
	c, _ := mustLoad(t, args)
	lines, logs := observer.New(zap.InfoLevel)
	e.logs = logs
	side, err := c.ClientSide(time.Now, zap.New(lines), &e.unusable)
	e.must(err)
	e.tls = side.TLS
	return e
}

func (e *exchange) path(name string) string { return filepath.Join(e.dir, name) }

func (e *exchange) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *exchange) at(name string) *certs.Dir { return certs.At(e.path(name), time.Now) }

// authority makes an authority, a node's files and those of the client root.
func (e *exchange) authority(name string) {
	e.t.Helper()
	_, err := e.at(name).CreateCA(10, false)
	e.must(err)
	_, err = e.at(name).CreateNode("n", []string{"127.0.0.1"}, certs.Issue{Days: 5, Out: e.path(name + "/out")})
	e.must(err)
	_, err = e.at(name).CreateClient("root", certs.Issue{Days: 5})
	e.must(err)
}

// install gives the node the files that an authority has made for it.
func (e *exchange) install(name string) {
	e.t.Helper()
	for _, f := range []string{certs.NodeFile, certs.NodeKey, certs.CAFile, certs.CRLFile} {
		b, err := os.ReadFile(e.path(name + "/out/" + f))
		e.must(err)
		e.write(f, b)
	}
}

func (e *exchange) write(name string, b []byte) {
	e.t.Helper()
	e.must(os.MkdirAll(e.path("n"), 0o700))
	e.must(os.WriteFile(e.path("n/"+name), b, 0o600))
}

// client is the client root of an authority, which trusts that authority and keeps sessions.
func (e *exchange) client(name string) *tls.Config {
	e.t.Helper()
	pair, err := tls.LoadX509KeyPair(e.path(name+"/client.root.crt"), e.path(name+"/client.root.key"))
	e.must(err)
	pem, err := os.ReadFile(e.path(name + "/ca.crt"))
	e.must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	return &tls.Config{RootCAs: roots, ServerName: "127.0.0.1", Certificates: []tls.Certificate{pair}, ClientSessionCache: tls.NewLRUClientSessionCache(4), MinVersion: tls.VersionTLS12}
}

// connect does a handshake and exchanges a byte, behind which a client has its session ticket.
func (e *exchange) connect(client *tls.Config) (tls.ConnectionState, error) {
	e.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	e.must(err)
	defer ln.Close()
	served := make(chan error, 1)
	go func() {
		conn, err := ln.Accept()
		if err == nil {
			defer conn.Close()
			server := tls.Server(conn, e.tls)
			if err = server.Handshake(); err == nil {
				_, err = server.Write([]byte{1})
			}
		}
		served <- err
	}()
	conn, err := tls.Dial("tcp", ln.Addr().String(), client)
	if err != nil {
		return tls.ConnectionState{}, errors.Join(err, <-served)
	}
	defer conn.Close()
	_, err = conn.Read(make([]byte, 1))
	return conn.ConnectionState(), errors.Join(err, <-served)
}

func (e *exchange) wantServed(what string, client *tls.Config) tls.ConnectionState {
	e.t.Helper()
	state, err := e.connect(client)
	if err != nil {
		e.t.Errorf("%s: %v", what, err)
	}
	return state
}

func (e *exchange) wantRefused(what string, client *tls.Config, why string) {
	e.t.Helper()
	if _, err := e.connect(client); err == nil || !strings.Contains(err.Error(), why) {
		e.t.Errorf("%s: error %v, want %q", what, err, why)
	}
}

// Certificate, key, authorities and revocation list of the clients' side are exchanged while the node runs.
func TestClientFilesAreExchanged(t *testing.T) {
	e := newExchange(t)
	a, b := e.client("a"), e.client("b")
	e.wantServed("client of a", a)
	e.wantRefused("client of b", b, "unknown authority")
	e.install("b")
	e.wantServed("client of b after the exchange", b)
	e.wantRefused("client of a after the exchange", a, "unknown authority")
}

// Trap 101: a client that has connected before shows no certificate when it resumes its session.
func TestRevokedClientHasNoSession(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		e := newExchange(t)
		client := e.client("a")
		client.MaxVersion = version
		e.wantServed("first", client)
		if e.wantServed("second", client).DidResume {
			t.Errorf("%s: the session was resumed", tls.VersionName(version))
		}
		_, _, err := e.at("a").Revoke(e.path("a/client.root.crt"))
		e.must(err)
		crl, err := os.ReadFile(e.path("a/ca.crl"))
		e.must(err)
		e.write(certs.CRLFile, crl)
		e.wantRefused(tls.VersionName(version)+" revoked", client, "revoked")
	}
}

// Sessions of clients without certificates may be resumed: nothing is checked of them.
func TestAnonymousClientsResume(t *testing.T) {
	e := newExchange(t, "--trusted-ca-file=", "--client-crl-file=")
	client := e.client("a")
	client.Certificates = nil
	e.wantServed("first", client)
	if !e.wantServed("second", client).DidResume {
		t.Error("the session was not resumed")
	}
}

func TestClientHostnameNotAllowed(t *testing.T) {
	e := newExchange(t, "--client-cert-allowed-hostname=other.example.com")
	e.wantRefused("client without the host name", e.client("a"), "host name")
}

// A file that cannot be read keeps the last good one. The log says so once per change, and nothing falls open.
func TestBrokenClientFilesKeepTheLastGoodOnes(t *testing.T) {
	e := newExchange(t)
	_, _, err := e.at("a").Revoke(e.path("a/client.root.crt"))
	e.must(err)
	crl, err := os.ReadFile(e.path("a/ca.crl"))
	e.must(err)
	e.write(certs.CRLFile, crl)
	revoked, stranger := e.client("a"), e.client("b")
	e.wantRefused("revoked", revoked, "revoked")
	_, err = e.at("a").CreateClient("good", certs.Issue{Days: 5})
	e.must(err)
	good := e.client("a")
	pair, err := tls.LoadX509KeyPair(e.path("a/client.good.crt"), e.path("a/client.good.key"))
	e.must(err)
	good.Certificates = []tls.Certificate{pair}
	for _, name := range []string{certs.NodeFile, certs.NodeKey, certs.CAFile, certs.CRLFile} {
		for _, how := range []string{"broken", "gone"} {
			if how == "gone" {
				e.must(os.Remove(e.path("n/" + name)))
			} else {
				e.write(name, []byte("broken"))
			}
			e.logs.TakeAll() // of both before
			for range 3 {
				e.wantServed(name+" "+how+", good client", good)
				e.wantRefused(name+" "+how+", revoked client", revoked, "revoked")
				e.wantRefused(name+" "+how+", stranger", stranger, "unknown authority")
			}
			if n := e.logs.FilterMessageSnippet("stays in use").Len(); n != 1 {
				t.Errorf("%s %s: logged %d times", name, how, n)
			}
			if n := e.unusable.Swap(0); n != 1 {
				t.Errorf("%s %s: counted %d times", name, how, n)
			}
		}
	}
	e.install("b")
	e.wantServed("after the mend", stranger)
}
