package transport_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

const cluster keyspace.ClusterID = 0xabc

// authority issues certificates.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  crypto.Signer
	next int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir(), next: 1}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	a.cert, a.key = a.sign("ca", template)
	return a
}

// sign makes a key and a certificate, self-signed if there is no authority yet, and
// writes NAME.crt and NAME.key.
func (a *authority) sign(name string, template *x509.Certificate) (*x509.Certificate, crypto.Signer) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(a.next)
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	a.next++
	parent, signer := template, crypto.Signer(key)
	if a.cert != nil {
		parent, signer = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name+".crt", "CERTIFICATE", der)
	a.write(name+".key", "PRIVATE KEY", keyDER)
	return cert, key
}

func (a *authority) write(name, kind string, der []byte) string {
	a.t.Helper()
	path := a.path(name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// leaf describes a node's certificate.
type leaf struct {
	uri  string
	more string // another URI
	host string // a DNS name or an address; empty is possible
	cn   string
}

// security issues a certificate and returns the settings that use and demand it.
func (a *authority) security(name string, l leaf) transport.Security {
	a.t.Helper()
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: l.cn},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, text := range []string{l.uri, l.more} {
		if text == "" {
			continue
		}
		u, err := url.Parse(text)
		if err != nil {
			a.t.Fatal(err)
		}
		template.URIs = append(template.URIs, u)
	}
	if ip := net.ParseIP(l.host); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else if l.host != "" {
		template.DNSNames = []string{l.host}
	}
	a.sign(name, template)
	return transport.Security{
		CertFile: a.path(name + ".crt"), KeyFile: a.path(name + ".key"),
		TrustedCAFile: a.path("ca.crt"),
	}
}

// trial is two nodes that must or must not find each other. The first one dials; the
// second has no address of it.
type trial struct {
	t       *testing.T
	a, b    *transport.QUIC
	entries chan zapcore.Entry
	up      chan transport.PeerState
}

func newTrial(t *testing.T, optsA, optsB transport.Options) *trial {
	t.Helper()
	tr := &trial{t: t, entries: make(chan zapcore.Entry, 10000), up: make(chan transport.PeerState, 100)}
	h := newQUICHarness()
	logger := func() *zap.Logger {
		core := zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(discard{}), zap.DebugLevel)
		return zap.New(core, zap.Hooks(func(e zapcore.Entry) error {
			select {
			case tr.entries <- e:
			default:
			}
			return nil
		}))
	}
	optsA.Logger, optsB.Logger = logger(), logger()
	tr.a, tr.b = h.new(t, optsA), h.new(t, optsB)
	tr.a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) { tr.up <- s })
	tr.a.SetPeer(2, tr.b.Addrs())
	tr.b.SetPeer(1, nil)
	for _, q := range []*transport.QUIC{tr.a, tr.b} {
		if err := q.Start(); err != nil {
			t.Fatal(err)
		}
	}
	return tr
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

func (tr *trial) wantUp() {
	tr.t.Helper()
	select {
	case s := <-tr.up:
		if !s.Up {
			tr.t.Fatalf("peer is %+v", s)
		}
	case <-time.After(10 * time.Second):
		tr.t.Fatal("the nodes did not find each other")
	}
}

// wantLog waits for a log line with the text, and checks that no session was made.
func (tr *trial) wantLog(text string, up bool) {
	tr.t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case e := <-tr.entries:
			if !strings.Contains(e.Message, text) {
				continue
			}
			if got := tr.a.Peer(2).Up; got != up {
				tr.t.Errorf("peer up: %t", got)
			}
			return
		case <-timeout:
			tr.t.Fatalf("no log line with %q", text)
		}
	}
}

// options are those of a node of which all others know that node 1 is n1, and so on.
func options(node keyspace.NodeID, s transport.Security) transport.Options {
	named := func(id keyspace.NodeID, name string) bool { return name == fmt.Sprint("n", uint64(id)) }
	return transport.Options{Config: transport.Config{Cluster: cluster, Node: node, Named: named}, Security: s}
}

func selfMade(node keyspace.NodeID) transport.Options {
	return options(node, transport.Security{SelfMade: true})
}

func TestIdentity(t *testing.T) {
	ca, otherCA := newAuthority(t), newAuthority(t)
	uri := func(node keyspace.NodeID) string { return transport.IdentityURI(cluster, node) }
	proven1, proven2 := ca.security("p1", leaf{uri: uri(1)}), ca.security("p2", leaf{uri: uri(2)})
	named1, named2 := ca.security("n1", leaf{host: "127.0.0.1", cn: "good"}), ca.security("n2", leaf{host: "127.0.0.1", cn: "good"})
	role1, role2 := ca.security("r1", leaf{uri: "skein://node/n1"}), ca.security("r2", leaf{uri: "skein://node/n2"})
	foreign1 := otherCA.security("f1", leaf{uri: uri(1)})
	noCert := func(s transport.Security) transport.Security {
		// A server that requires no certificate and a dialler that shows a bad one.
		s.CertFile, s.KeyFile = otherCA.path("f1.crt"), otherCA.path("f1.key")
		return s
	}
	with := func(s transport.Security, change func(*transport.Security)) transport.Security {
		change(&s)
		return s
	}
	const (
		misfit  = "a peer does not fit"
		tlsFail = "the TLS handshake with a peer failed"
		refused = "refused a node"
	)
	for _, test := range []struct {
		name string
		a, b transport.Options
		log  string
		up   bool
	}{
		{"proven", options(1, proven1), options(2, proven2), "session with peer", true},
		{"trusted", options(1, named1), options(2, named2), "NOT PROVEN", true},
		{"self-made", selfMade(1), selfMade(2), "NOT AUTHENTICATED", true},
		// A node with a role has no session with a peer that has none. A client's certificate
		// of the same authority is such a peer.
		{"dialler without a role", options(1, named1), options(2, proven2), tlsFail, false},
		{"dialled node without a role", options(1, proven1), options(2, named2), misfit, false},
		{"roles", options(1, role1), options(2, role2), "session with peer", true},
		{"a role and a proven id", options(1, role1), options(2, proven2), "session with peer", true},
		{"dialler without a role, dialled node with a name", options(1, named1), options(2, role2), tlsFail, false},
		{"role of another node's name", options(1, ca.security("r3", leaf{uri: "skein://node/n2"})), options(2, role2), refused, false},
		{"dialled node has the role of another", options(1, role1), options(2, ca.security("r4", leaf{uri: "skein://node/n1"})), misfit, false},
		{"other cluster", transport.Options{Config: transport.Config{Cluster: 1, Node: 1}, Security: transport.Security{SelfMade: true}}, selfMade(2), refused, false},
		{"other node answers", selfMade(1), selfMade(3), refused, false},
		{"dialler's certificate names another node", options(1, ca.security("c5", leaf{uri: uri(5)})), options(2, proven2), refused, false},
		{"dialled node's certificate names another node", options(1, proven1), options(2, ca.security("c6", leaf{uri: uri(6)})), misfit, false},
		{"certificate of another cluster", options(1, ca.security("c7", leaf{uri: "skein://1/1"})), options(2, proven2), tlsFail, false},
		{"dialled host name", options(1, named1), options(2, ca.security("c9", leaf{host: "example.com"})), tlsFail, false},
		{"server name", options(1, with(named1, func(s *transport.Security) { s.ServerName = "example.com" })), options(2, ca.security("c10", leaf{host: "example.com"})), "NOT PROVEN", true},
		{"dialler of another authority", options(1, with(foreign1, func(s *transport.Security) { s.TrustedCAFile = ca.path("ca.crt") })), options(2, proven2), tlsFail, false},
		{"dialled node of another authority", options(1, proven1), options(2, noCert(proven2)), tlsFail, false},
		{"dialler without certificate", selfMade(1), options(2, proven2), tlsFail, false},
		{"dialled node without certificate", options(1, proven1), selfMade(2), tlsFail, false},
		{"allowed name", options(1, named1), options(2, with(named2, func(s *transport.Security) { s.AllowedCNs = []string{"good"} })), "session with peer", true},
		{"name not allowed", options(1, named1), options(2, with(named2, func(s *transport.Security) { s.AllowedCNs = []string{"better"} })), tlsFail, false},
		{"host allowed", options(1, named1), options(2, with(named2, func(s *transport.Security) { s.AllowedHostnames = []string{"127.0.0.1"} })), "session with peer", true},
		{"host not allowed", options(1, named1), options(2, with(named2, func(s *transport.Security) { s.AllowedHostnames = []string{"10.0.0.1"} })), tlsFail, false},
		{"revoked", options(1, named1), options(2, with(named2, func(s *transport.Security) { s.CRLFile = ca.revoke("n1") })), tlsFail, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			tr := newTrial(t, test.a, test.b)
			if test.up {
				tr.wantUp()
			}
			tr.wantLog(test.log, test.up)
		})
	}
}

// revoke writes a list that revokes one certificate and returns its path.
func (a *authority) revoke(name string) string {
	a.t.Helper()
	pair, err := tls.LoadX509KeyPair(a.path(name+".crt"), a.path(name+".key"))
	if err != nil {
		a.t.Fatal(err)
	}
	der, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour),
		RevokedCertificateEntries: []x509.RevocationListEntry{{SerialNumber: pair.Leaf.SerialNumber, RevocationTime: time.Now()}},
	}, a.cert, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.write("crl.pem", "X509 CRL", der)
}

// TestBrokenFiles: the start reports an error in a node's files.
func TestBrokenFiles(t *testing.T) {
	ca := newAuthority(t)
	good := ca.security("n1", leaf{host: "127.0.0.1"})
	for _, test := range []struct {
		name   string
		change func(*transport.Security)
		want   string
	}{
		{"no certificate", func(s *transport.Security) { s.CertFile = "" }, "peer certificate"},
		{"no authority given", func(s *transport.Security) { s.TrustedCAFile = "" }, "need a trusted CA file"},
		{"no authority", func(s *transport.Security) { s.TrustedCAFile = ca.path("none") }, "trusted CA file"},
		{"empty authority", func(s *transport.Security) { s.TrustedCAFile = ca.path("n1.key") }, "has no certificate"},
		{"broken list", func(s *transport.Security) { s.CRLFile = ca.path("n1.crt") }, "revocation list"},
		{"role of another name", func(s *transport.Security) {
			*s = ca.security("role", leaf{uri: "skein://node/n2"})
			s.Name = "n1"
		}, "is of the node n2, and this node is n1"},
		{"malformed ids", func(s *transport.Security) { *s = ca.security("role", leaf{uri: "skein://abc/01"}) }, "is neither skein://node/NAME nor"},
		{"malformed role", func(s *transport.Security) { *s = ca.security("role", leaf{uri: "skein://node/n1/x"}) }, "is not skein://node/NAME"},
		{"both kinds of names", func(s *transport.Security) { s.AllowedCNs, s.AllowedHostnames = []string{"a"}, []string{"b"} }, "exclude each other"},
	} {
		t.Run(test.name, func(t *testing.T) {
			sec := good
			test.change(&sec)
			opts := options(1, sec)
			opts.Listen = []string{"127.0.0.1:0"}
			opts.Clock = wallClock{}
			q, err := transport.NewQUIC(opts)
			if err == nil {
				_ = q.Close()
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

// TestRotation: replaced files take effect with the next connection.
func TestRotation(t *testing.T) {
	ca := newAuthority(t)
	tr := newTrial(t, options(1, ca.security("n1", leaf{uri: transport.IdentityURI(cluster, 5)})),
		options(2, ca.security("n2", leaf{uri: transport.IdentityURI(cluster, 2)})))
	tr.wantLog("refused a node", false)
	ca.security("n1", leaf{uri: transport.IdentityURI(cluster, 1)})
	tr.a.SetPeer(2, tr.b.Addrs()) // shortens the long wait after a refusal
	tr.wantUp()
}

// rawDial connects to a node as a foreign program would.
func rawDial(t *testing.T, to string, alpn string) (*quic.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return quic.DialAddr(ctx, to, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}}, nil)
}

func TestOtherProtocolVersion(t *testing.T) {
	tr := newTrial(t, selfMade(1), selfMade(2))
	_, err := rawDial(t, tr.b.Addrs()[0], "skein-bus/0")
	te, ok := errors.AsType[*quic.TransportError](err)
	if !ok || !te.ErrorCode.IsCryptoError() {
		t.Errorf("dial with another version: %v", err)
	}
	tr.wantUp()
}

// TestForeignBytes: a client that sends anything but a Hello is cut off, and the bus
// goes on.
func TestForeignBytes(t *testing.T) {
	tr := newTrial(t, selfMade(1), selfMade(2))
	tr.wantUp()
	for _, bytes := range []string{"GET / HTTP/1.1\r\n\r\n", "\x00\x00\x00\x01\x10", "\xff\xff\xff\xff", "\x00\x00\x00\x00"} {
		conn, err := rawDial(t, tr.b.Addrs()[0], transport.ALPN)
		if err != nil {
			t.Fatal(err)
		}
		s, err := conn.OpenStream()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write([]byte(bytes)); err != nil {
			t.Fatal(err)
		}
		if bytes == "\x00\x00\x00\x01\x10" {
			// This much of a Hello gets an answer; then the sender closes.
			if _, err := s.Read(make([]byte, 1)); err != nil {
				t.Error(err)
			}
			_ = conn.CloseWithError(0, "")
		}
		<-conn.Context().Done()
	}
	if !tr.a.Peer(2).Up {
		t.Error("foreign bytes ended a session")
	}
}

// TestUnauthenticatedWarning: the warning names the setting that caused it.
func TestUnauthenticatedWarning(t *testing.T) {
	for _, c := range []struct{ why, want string }{
		{"--peer-auto-tls makes certificates that no peer checks", "NOT AUTHENTICATED: --peer-auto-tls makes"},
		{"", "NOT AUTHENTICATED: certificates are self-made"},
	} {
		lines, logs := observer.New(zap.WarnLevel)
		opts := options(1, transport.Security{SelfMade: true, Why: c.why})
		opts.Logger, opts.Clock, opts.Listen = zap.New(lines), clock.System(), []string{"127.0.0.1:0"}
		q, err := transport.NewQUIC(opts)
		if err != nil {
			t.Fatal(err)
		}
		if err := q.Close(); err != nil {
			t.Error(err)
		}
		if all := logs.All(); len(all) != 1 || !strings.Contains(all[0].Message, c.want) {
			t.Errorf("got %v, want one line with %q", all, c.want)
		}
	}
}
