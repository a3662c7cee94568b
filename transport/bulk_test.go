package transport_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// echo serves a stream by sending back each message.
func echo(ctx context.Context, _ keyspace.NodeID, first []byte, s transport.Stream) error {
	for m, err := first, error(nil); ; m, err = s.Recv(ctx) {
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = s.Send(ctx, m)
		}
		if err != nil {
			return err
		}
	}
}

// echoes says whether a message on a bulk stream reaches the peer and returns.
func echoes(t *testing.T, q *transport.QUIC, to keyspace.NodeID) error {
	t.Helper()
	s, err := q.OpenStream(t.Context(), to, transport.MethodRaftSnapshot, []byte("there"))
	if err != nil {
		return err
	}
	defer s.Close(nil)
	m, err := s.Recv(t.Context())
	if err == nil && string(m) != "there" {
		t.Errorf("%q came back", m)
	}
	return err
}

// until waits for what both ends of a connection do by themselves.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal(what)
		}
	}
}

// bulkPair is two nodes with a bulk session.
func bulkPair(t *testing.T) (a, b *transport.QUIC) {
	t.Helper()
	h := newQUICHarness()
	a, b = h.new(t, selfMade(1)), h.new(t, selfMade(2))
	for _, q := range []*transport.QUIC{a, b} {
		q.HandleStream(transport.MethodRaftSnapshot, transport.ClassBulk, echo)
	}
	connect(a, b)
	start(t, a, b)
	until(t, "no bulk session", func() bool { return a.BulkSession(2) != nil && b.BulkSession(1) != nil })
	return a, b
}

// A bulk session that is lost alone takes its streams with it. The main session and
// later streams live on.
func TestBulkSessionComesBack(t *testing.T) {
	a, b := bulkPair(t)
	if err := echoes(t, a, 2); err != nil {
		t.Fatal(err)
	}
	main, bulk := a.MainSession(2), b.BulkSession(1)
	s, err := a.OpenStream(t.Context(), 2, transport.MethodRaftSnapshot, []byte("there"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(nil)
	if _, err := s.Recv(t.Context()); err != nil {
		t.Fatal(err)
	}
	bulk.End(errors.New("cut"))
	if _, err := s.Recv(t.Context()); !errors.Is(err, transport.ErrUnreachable) {
		t.Errorf("the stream ended by %v", err)
	}
	until(t, "no bulk session again", func() bool { return echoes(t, a, 2) == nil })
	if a.MainSession(2) != main {
		t.Error("the main session was lost with the bulk one")
	}
}

// tlsTo makes a connection to the TCP port of a node as a foreign program would.
func tlsTo(t *testing.T, q *transport.QUIC, tc *tls.Config) *tls.Conn {
	t.Helper()
	tc.InsecureSkipVerify = true
	conn, err := tls.Dial("tcp", q.Addrs()[0], tc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// A bulk session is accepted over TCP only.
func TestSessionOnTheWrongCarrier(t *testing.T) {
	a, b := bulkPair(t)
	qc, err := rawDial(t, b.Addrs()[0], transport.ALPN)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = qc.CloseWithError(0, "") }()
	ctl, err := qc.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ctl.Write(a.Hello(transport.KindBulk, 2)); err != nil {
		t.Fatal(err)
	}
	if why, err := transport.Refusal(ctl); err != nil || why != "malformed" {
		t.Errorf("a bulk session over QUIC is answered by %q, %v", why, err)
	}
	if err := echoes(t, a, 2); err != nil {
		t.Errorf("the session that stood: %v", err)
	}
}

// A client that speaks another protocol, or none, gets no TCP session and cannot hold a
// connection for long.
func TestStrangeTCP(t *testing.T) {
	h := newQUICHarness()
	opts := selfMade(1)
	opts.HandshakeTimeout = 2 * time.Second // in which handshakes of the test's own have to be made too
	q := h.new(t, opts)
	start(t, q)
	closed := func(what string, conn net.Conn) {
		t.Helper()
		if _, err := io.Copy(io.Discard, conn); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: the connection ends by %v", what, err)
		}
	}
	raw := func() net.Conn {
		conn, err := net.Dial("tcp", q.Addrs()[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	closed("silence", raw())
	http := raw()
	if _, err := io.WriteString(http, "GET / HTTP/1.1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	closed("HTTP", http)
	closed("TLS without the protocol's name", tlsTo(t, q, &tls.Config{}).NetConn())
	closed("TLS without a hello", tlsTo(t, q, &tls.Config{NextProtos: []string{transport.ALPN}}).NetConn())
	conn := tlsTo(t, q, &tls.Config{NextProtos: []string{transport.ALPN}})
	if _, err := conn.Write([]byte("\x00\x00\x00\x05hello")); err != nil {
		t.Fatal(err)
	}
	closed("garbage", conn.NetConn())
}

// Where certificates are required, TCP requires them too.
func TestTCPAsksForACertificate(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	h := newQUICHarness()
	q := h.new(t, options(1, ca.security("n1", leaf{uri: transport.IdentityURI(cluster, 1)})))
	start(t, q)
	foreign := other.security("n2", leaf{uri: transport.IdentityURI(cluster, 2)})
	cert, err := tls.LoadX509KeyPair(foreign.CertFile, foreign.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	shown := map[string][]tls.Certificate{"none": nil, "another authority's": {cert}}
	for name, l := range map[string]leaf{
		"a client's": {cn: "root"}, "malformed ids": {uri: "skein://abc/01"}, "malformed role": {uri: "skein://node/n2/x"},
		"two roles": {uri: "skein://node/n2", more: "skein://node/n3"}, "another cluster's": {uri: "skein://1/2"},
	} {
		sec := ca.security("other", l)
		cert, err := tls.LoadX509KeyPair(sec.CertFile, sec.KeyFile)
		if err != nil {
			t.Fatal(err)
		}
		shown[name] = []tls.Certificate{cert}
	}
	for name, certs := range shown {
		conn := tlsTo(t, q, &tls.Config{NextProtos: []string{transport.ALPN}, Certificates: certs})
		_, err := io.Copy(io.Discard, conn)
		if err == nil || !strings.Contains(err.Error(), "remote error: tls") {
			t.Errorf("certificate %s: %v, want an alert", name, err)
		}
	}
}

// Close does not wait for connections that have not sent a Hello.
func TestCloseDuringHandshakesByTCP(t *testing.T) {
	h := newQUICHarness()
	opts := selfMade(1)
	opts.HandshakeTimeout = time.Hour
	q := h.new(t, opts)
	start(t, q)
	conn := tlsTo(t, q, &tls.Config{NextProtos: []string{transport.ALPN}})
	silent, err := net.Dial("tcp", q.Addrs()[0])
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("a node that is closed speaks")
	}
}

// A port that is free for UDP alone cannot be a peer port.
func TestTCPPortTaken(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	opts := selfMade(1)
	opts.Clock, opts.Listen = wallClock{}, []string{ln.Addr().String()}
	q, err := transport.NewQUIC(opts)
	if err == nil {
		_ = q.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "for TCP as well as UDP") {
		t.Errorf("error %v", err)
	}
	// The failed attempt leaves no socket open.
	udp, err := net.ListenPacket("udp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = udp.Close()
}

// A firewall that passes UDP and blocks TCP is logged once.
func TestPeerWithoutTCP(t *testing.T) {
	core, logs := observer.New(zapcore.ErrorLevel)
	h := newQUICHarness()
	opts := selfMade(1)
	opts.Logger = zap.New(core)
	a, b := h.new(t, opts), h.new(t, selfMade(2))
	b.SetPeer(1, nil)
	a.SetPeer(2, nil) // nobody dials it, so it has no bulk session
	start(t, a, b)
	told := func() int { return logs.FilterMessageSnippet("TCP as well as UDP").Len() }
	refused := errors.New("connection refused")
	for range 2 * transport.NoBulkTold {
		a.BulkFails(2, refused)
	}
	if n := told(); n != 0 {
		t.Errorf("told %d times of a peer that is not reached at all", n)
	}
	if err := a.DialNow(2, b.Addrs()[0]); err != nil {
		t.Fatal(err)
	}
	for i := range 2 * transport.NoBulkTold {
		a.BulkFails(2, refused)
		if n, want := told(), min((i+1)/transport.NoBulkTold, 1); n != want {
			t.Fatalf("told %d times after %d attempts, want %d", n, i+1, want)
		}
	}
}

// TCP connections without a certificate cannot keep other nodes out.
func TestSilentCrowdByTCP(t *testing.T) {
	ca := newAuthority(t)
	h := newQUICHarness()
	secured := func(node keyspace.NodeID, name string) transport.Options {
		o := options(node, ca.security(name, leaf{uri: transport.IdentityURI(cluster, node)}))
		o.HandshakeTimeout = time.Hour
		return o
	}
	a, b := h.new(t, secured(1, "n1")), h.new(t, secured(2, "n2"))
	up := make(chan struct{}, 100)
	a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
		if s.Up {
			up <- struct{}{}
		}
	})
	start(t, b)
	var last net.Conn
	for range transport.MaxGreeting + 1 {
		conn, err := net.Dial("tcp", b.Addrs()[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() }) // it sends nothing and stays open
		last = conn
	}
	if _, err := last.Read(make([]byte, 1)); err == nil { // it is refused: no place is free
		t.Fatal("a node speaks first")
	}
	a.SetPeer(2, b.Addrs())
	b.SetPeer(1, nil) // it does not dial
	start(t, a)
	<-up
}

// failing is a listener that fails before it takes a connection.
type failing struct {
	net.Listener
	times atomic.Int32
}

func (f *failing) Accept() (net.Conn, error) {
	if f.times.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return f.Listener.Accept()
}

// A process that had too many files open for a moment accepts connections again
// afterwards.
func TestTCPAcceptFails(t *testing.T) {
	h := newQUICHarness()
	a, b := h.new(t, selfMade(1)), h.new(t, selfMade(2))
	b.WrapTCP(func(ln net.Listener) net.Listener {
		f := &failing{Listener: ln}
		f.times.Store(3)
		return f
	})
	b.HandleStream(transport.MethodRaftSnapshot, transport.ClassBulk, echo)
	a.SetPeer(2, b.Addrs())
	b.SetPeer(1, nil) // it does not dial
	start(t, a, b)
	until(t, "no bulk session", func() bool { return echoes(t, a, 2) == nil })
}

// A change of addresses does not end a session that a dial attempt has just made.
func TestAddressesChangeAsASessionStands(t *testing.T) {
	h := newQUICHarness()
	var a *transport.QUIC
	var stood atomic.Bool
	core, _ := observer.New(zapcore.DebugLevel)
	opts := selfMade(1)
	opts.Logger = zap.New(core, zap.Hooks(func(e zapcore.Entry) error {
		if e.Message == "session with peer" {
			a.SetPeer(2, []string{"127.0.0.1:1"})
			stood.Store(true)
		}
		return nil
	}))
	a = h.new(t, opts)
	b := h.new(t, selfMade(2))
	b.HandleCall(transport.MethodNodeAdmin, transport.ClassRequest, answerNothing)
	b.SetPeer(1, nil)
	a.SetPeer(2, b.Addrs())
	start(t, a, b)
	until(t, "no session", func() bool { return stood.Load() && a.MainSession(2) != nil })
	session := a.MainSession(2)
	for range 100 {
		if _, err := a.Call(t.Context(), 2, transport.MethodNodeAdmin, nil); err != nil {
			t.Fatal(err)
		}
	}
	if a.MainSession(2) != session {
		t.Error("the session was replaced")
	}
}
