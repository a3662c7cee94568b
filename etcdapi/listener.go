package etcdapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/credentials"

	"github.com/skeindb/skein/clock"
)

// sniffTimeout bounds the TLS handshake and the first bytes of a connection together.
const sniffTimeout = 10 * time.Second

// preface is what every HTTP/2 connection begins with.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// sniffer accepts connections and hands each to gRPC or to HTTP by its first bytes, also under TLS. One of HTTP/2 goes where its
// first request belongs. On a secure port etcd serves gRPC through net/http, where a busy
// stream starves the others on its connection.
type sniffer struct {
	inner      net.Listener
	limit      *connLimit
	certified  *certifiedConns
	tls        *tls.Config // nil for a plain port
	plainToo   bool        // a client may do without TLS all the same
	grpc, http *connQueue  // nil is not served here
	clock      clock.Clock
	log        *zap.Logger
	metrics    *Metrics
}

// clientProtos are those of a port for clients. gRPC clients offer only h2, curl and browsers both.
var clientProtos = []string{"h2", "http/1.1"}

// speaking adapts TLS settings to a port that speaks these protocols.
func speaking(base *tls.Config, protos ...string) *tls.Config {
	t := base.Clone()
	t.NextProtos = protos
	t.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if c, ok := hello.Conn.(*sniffedConn); ok {
			c.http1 = slices.Contains(hello.SupportedProtos, "http/1.1")
		}
		if base.GetConfigForClient == nil {
			return nil, nil // t it is
		}
		c, err := base.GetConfigForClient(hello)
		if err != nil || c == nil {
			return c, err
		}
		c = c.Clone()
		c.NextProtos = protos
		return c, nil
	}
	return t
}

// run accepts until the listener is closed. It returns when every connection that it still inspects
// is handed on or closed; ctx hastens that.
func (s *sniffer) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	pause := time.Duration(0)
	for {
		conn, err := s.inner.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Mostly there are too many open files, and others will close some.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			s.log.Warn("cannot accept a client connection", zap.Stringer("address", s.inner.Addr()), zap.Error(err))
			if clock.Sleep(ctx, s.clock, pause) != nil {
				return
			}
			continue
		}
		pause = 0
		if !s.limit.take() {
			s.refuse(conn)
			continue
		}
		wg.Go(func() { s.route(ctx, conn) })
	}
}

// refuse closes a connection beyond the limit. A client of several endpoints then turns to another
// one, which it would not do while its connection waits. gRPC waits longer after each such close. A
// reason in HTTP/2 would make the connection count as good, and its client would come back at once.
func (s *sniffer) refuse(conn net.Conn) {
	s.metrics.RejectedConnections.WithLabelValues("limit").Inc()
	conn.Close()
	if n := s.limit.untold(s.clock.Now()); n > 0 {
		s.log.Warn("refused client connections: "+s.limit.why,
			zap.Int64("limit", s.limit.most), zap.Int64("refused", n), zap.Stringer("remote-addr", conn.RemoteAddr()))
	}
}

// connLimit bounds the open connections of clients.
type connLimit struct {
	most int64 // 0 is no bound
	why  string
	open atomic.Int64

	mu sync.Mutex
	// Guarded by mu: how many were refused since that was told, and when that was.
	refused int64
	told    clock.Time
}

// take counts a connection, unless there are as many as there may be.
func (l *connLimit) take() bool {
	if n := l.open.Add(1); l.most == 0 || n <= l.most {
		return true
	}
	l.open.Add(-1)
	return false
}

// refusedEvery is how often it is told that connections are refused.
const refusedEvery = 10 * time.Second

// untold counts a refused connection, and returns how many are to be told of now.
func (l *connLimit) untold(now clock.Time) (n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused++
	if l.told != 0 && now.Sub(l.told) < refusedEvery {
		return 0
	}
	n, l.refused, l.told = l.refused, 0, now
	return n
}

// route finds out what a connection speaks and hands it on.
func (s *sniffer) route(ctx context.Context, conn net.Conn) {
	s.metrics.OpenConnections.Inc()
	counted := &countedConn{Conn: conn}
	counted.closed = func() {
		s.metrics.OpenConnections.Dec()
		s.limit.open.Add(-1)
		s.certified.forget(counted)
	}
	conn = counted
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	_ = conn.SetDeadline(s.clock.Wall().Add(sniffTimeout)) // a closed connection fails below
	sniffed, queue, cause, err := s.sniff(ctx, conn)
	if !stop() && err == nil {
		cause, err = "stopping", ctx.Err()
	}
	if err != nil {
		s.metrics.RejectedConnections.WithLabelValues(cause).Inc() // count first: the client may look at the counter at once
		conn.Close()
		level := s.log.Warn
		if errors.Is(err, io.EOF) || ctx.Err() != nil {
			level = s.log.Debug // a load balancer's probe, or a stop
		}
		level("rejected connection on client endpoint", zap.Stringer("remote-addr", conn.RemoteAddr()), zap.String("cause", cause), zap.Error(err))
		return
	}
	_ = conn.SetDeadline(time.Time{})
	if sniffed.state != nil {
		s.certified.note(counted, sniffed.state.PeerCertificates) // nobody else can have closed it yet
	}
	queue.offer(sniffed)
}

// sniff reads as much of a connection as shows its protocol.
func (s *sniffer) sniff(ctx context.Context, conn net.Conn) (_ *sniffedConn, _ *connQueue, cause string, _ error) {
	c := &sniffedConn{Conn: conn}
	secure := s.tls != nil
	if secure && s.plainToo {
		first := make([]byte, 1)
		if _, err := conn.Read(first); err != nil {
			return nil, nil, "silent", err
		}
		c.prefix, secure = first, first[0] == recordHandshake
	}
	if secure {
		t := tls.Server(c, s.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			answerPlainHTTP(conn, err)
			return nil, nil, "tls", err
		}
		state := t.ConnectionState()
		c = &sniffedConn{Conn: t, state: &state, http1: c.http1}
	}
	var buf [len(preface)]byte
	var err error
	for n := copy(buf[:], c.prefix); ; {
		begin := buf[:n]
		switch {
		case !bytes.HasPrefix([]byte(preface), begin):
			c.prefix = begin
			return s.speaks(c, false)
		case n == len(preface):
			c.prefix = begin
			return s.speaks(c, true)
		case err != nil:
			return nil, nil, "silent", err
		}
		var m int
		m, err = c.Conn.Read(buf[n:])
		n += m
	}
}

// recordHandshake is what every TLS connection begins with, and no HTTP.
const recordHandshake = 0x16

// speaks hands on a connection of a client that speaks HTTP/2 or not.
func (s *sniffer) speaks(c *sniffedConn, http2 bool) (*sniffedConn, *connQueue, string, error) {
	switch {
	case http2 && s.grpc != nil && s.http != nil:
		c, queue := s.byFirstRequest(c)
		return c, queue, "", nil
	case http2 && s.grpc != nil:
		return c, s.grpc, "", nil
	case s.http != nil:
		return c, s.http, "", nil
	}
	return nil, nil, "http", errOnlyGRPC
}

var errOnlyGRPC = errors.New("HTTP is served at --listen-client-http-urls alone")

// answerPlainHTTP tells a client that speaks HTTP to a TLS port what is wrong, as net/http does.
func answerPlainHTTP(conn net.Conn, err error) {
	re := tls.RecordHeaderError{}
	if !errors.As(err, &re) || re.Conn == nil {
		return
	}
	switch string(re.RecordHeader[:]) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
		_, _ = io.WriteString(conn, "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n")
	}
}

// sniffedConn is a connection whose first bytes were read already.
type sniffedConn struct {
	net.Conn
	prefix []byte
	state  *tls.ConnectionState // nil without TLS
	http1  bool                 // its client offers HTTP/1.1 too in the TLS handshake, as none of gRPC does
}

// Read implements net.Conn. Like every Read of a connection it has one caller at a
// time, which owns prefix.
func (c *sniffedConn) Read(b []byte) (int, error) {
	if len(c.prefix) > 0 {
		n := copy(b, c.prefix)
		if c.prefix = c.prefix[n:]; len(c.prefix) == 0 {
			c.prefix = nil // its buffer is not to live as long as the connection
		}
		return n, nil
	}
	return c.Conn.Read(b)
}

// countedConn reports its close once.
type countedConn struct {
	net.Conn
	once   sync.Once
	closed func()
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.once.Do(c.closed)
	return c.Conn.Close()
}

// certifiedConns are the open connections whose clients have shown certificates.
type certifiedConns struct {
	mu    sync.Mutex
	conns map[net.Conn][]*x509.Certificate // guarded by mu; below TLS
}

func (c *certifiedConns) note(conn net.Conn, shown []*x509.Certificate) {
	if len(shown) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conns == nil {
		c.conns = map[net.Conn][]*x509.Certificate{}
	}
	c.conns[conn] = shown
}

func (c *certifiedConns) forget(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.conns, conn)
}

// follow is the ConnState of an HTTP server that does the TLS handshake itself.
func (c *certifiedConns) follow(conn net.Conn, state http.ConnState) {
	t, ok := conn.(*tls.Conn)
	switch {
	case !ok:
	case state == http.StateActive: // the handshake has ended
		c.note(t.NetConn(), t.ConnectionState().PeerCertificates)
	case state == http.StateClosed:
		c.forget(t.NetConn())
	}
}

// certificateCheckInterval is how long a connection may outlive its certificate. A check costs about as much as
// the verification in a handshake, once for each certificate.
const certificateCheckInterval = time.Minute

// checkEveryMinute closes the connections whose certificates do not hold any more, until ctx ends.
func (c *certifiedConns) checkEveryMinute(ctx context.Context, o *Options) {
	for clock.Sleep(ctx, o.Clock, certificateCheckInterval) == nil {
		c.check(o)
	}
}

func (c *certifiedConns) check(o *Options) {
	c.mu.Lock()
	open := maps.Clone(c.conns)
	c.mu.Unlock()
	verdicts := map[string]error{} // many connections have the same certificate
	for conn, shown := range open {
		var key []byte
		for _, cert := range shown {
			key = append(key, cert.Raw...)
		}
		err, known := verdicts[string(key)]
		if !known {
			err = o.Verify(shown)
			verdicts[string(key)] = err
		}
		if err == nil {
			continue
		}
		o.Logger.Warn("closed a client's connection, whose certificate does not hold any more", zap.Stringer("remote-addr", conn.RemoteAddr()),
			zap.Stringer("subject", shown[0].Subject), zap.String("serial", fmt.Sprintf("%032x", shown[0].SerialNumber)), zap.Error(err))
		// Below TLS: its farewell would wait for a client that does not read.
		_ = conn.Close()
	}
}

// connQueue is the listener from which a server accepts sniffed connections. It holds none:
// offering one waits until it is taken.
type connQueue struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newConnQueue() *connQueue {
	return &connQueue{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (q *connQueue) offer(c net.Conn) {
	select {
	case q.conns <- c:
	case <-q.done:
		c.Close()
	}
}

// Accept implements net.Listener.
func (q *connQueue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (q *connQueue) Close() error {
	q.once.Do(func() { close(q.done) })
	return nil
}

// Addr implements net.Listener. The queue stands for many addresses and names none.
func (q *connQueue) Addr() net.Addr { return queueAddr{} }

type queueAddr struct{}

// Network implements net.Addr.
func (queueAddr) Network() string { return "sniffed" }

// String implements net.Addr.
func (queueAddr) String() string { return "client-urls" }

// sniffedCreds tell gRPC what the sniffer's handshake found. gRPC does no handshake itself.
type sniffedCreds struct{}

// plainInfo is the AuthInfo of a connection without TLS.
type plainInfo struct{ credentials.CommonAuthInfo }

// AuthType implements credentials.AuthInfo.
func (plainInfo) AuthType() string { return "insecure" }

// ServerHandshake implements credentials.TransportCredentials.
func (sniffedCreds) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := conn.(*sniffedConn)
	if !ok || c.state == nil {
		return conn, plainInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}}, nil
	}
	return conn, credentials.TLSInfo{
		State:          *c.state,
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (sniffedCreds) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("etcdapi: credentials of a server used by a client")
}

// Info implements credentials.TransportCredentials.
func (sniffedCreds) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "sniffed"}
}

// Clone implements credentials.TransportCredentials.
func (c sniffedCreds) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials.
func (sniffedCreds) OverrideServerName(string) error { return nil }
