package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/internal/background"
)

// Bulk sessions go over TCP, with the same TLS as QUIC's. What they carry, copies of ranges,
// is many bytes of which none is urgent: there TCP takes six tenths of the processor time that
// QUIC's packets of 1,400 bytes take, and the rest of what QUIC is for here, streams that
// do not wait for each other and connections that a restarted peer refuses at once, is not
// needed. They are read and written by threads of low priority.

// dialTCP makes a connection to a peer for its bulk session.
func (q *QUIC) dialTCP(ctx context.Context, target netip.AddrPort, tc *tls.Config) (*tcpWire, error) {
	d := net.Dialer{LocalAddr: q.sockets.dialFrom(target.Addr())}
	conn, err := d.DialContext(ctx, "tcp", target.String())
	if err != nil {
		return nil, err
	}
	// Records grow with what a connection has sent; here each is to be full.
	tc.DynamicRecordSizingDisabled = true
	w, err := q.shakeHands(ctx, tls.Client(conn, tc))
	if err != nil {
		_ = conn.Close()
	}
	return w, err
}

// shakeHands does either side's TLS handshake.
func (q *QUIC) shakeHands(ctx context.Context, t *tls.Conn) (*tcpWire, error) {
	if err := limitSilence(t.NetConn().(*net.TCPConn), bulkPatience*q.opts.IdleTimeout); err != nil {
		return nil, fmt.Errorf("bound the silence of a connection: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, q.opts.HandshakeTimeout)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	if got := t.ConnectionState().NegotiatedProtocol; got != ALPN {
		return nil, fmt.Errorf("the peer speaks %q, not %q", got, ALPN) // TLS lets those pass that speak none
	}
	return newTCPWire(q, t), nil
}

// isTLS says whether a TLS handshake over TCP has failed for what one side thinks of the other.
func isTLS(err error) bool {
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "remote error" {
		return true // an alert, whose type package tls keeps to itself
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true
	}
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

// bulkPatience is how many idle timeouts of the main session a bulk one may be silent. A peer
// that is gone is noticed by the main session, which takes the bulk one with it; this is for
// a connection that is lost alone. And its reader has low priority: it may be held up.
const bulkPatience = 3

// silenceMax is the most that Linux takes (MAX_TCP_KEEPIDLE is 32,767 s).
const silenceMax = 9 * time.Hour

// limitSilence ends a connection whose peer acknowledges nothing, or takes nothing, for so long.
func limitSilence(conn *net.TCPConn, d time.Duration) error {
	d = min(d, silenceMax)
	if err := conn.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: d, Interval: d, Count: 1}); err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
	return errors.Join(err, failed)
}

// errClosedHere is the cause of the end of a connection that was closed without a reason.
var errClosedHere = errors.New("closed")

// close closes the connection. TCP has no reasons: the peer sees its end.
func (w *tcpWire) close(_ quic.ApplicationErrorCode, reason string) {
	cause := errClosedHere
	if reason != "" {
		cause = errors.New(reason)
	}
	w.cancel(cause)
	// Not TLS's close, which may wait for the peer. A session's frames say how long they
	// are, and its end is an error wherever it comes. And Close waits until the threads that
	// read and write have left the connection, which are of low priority: who ends a session
	// may not, since the calls of the main one fail behind the bulk one.
	conn := w.NetConn()
	if !w.q.Go(func() { _ = conn.Close() }) {
		_ = conn.Close()
	}
}

func (w *tcpWire) cause() error { return context.Cause(w.ended) }

func (w *tcpWire) awaitEnd() {
	// The peer has nothing more to say than that it closes. Whoever limits the time of the
	// connection closes it otherwise.
	_, _ = io.CopyN(io.Discard, w.Conn, maxHelloBytes)
}

func (w *tcpWire) only(k Kind) bool { return k == KindBulk }

// serve moves the frames of the bulk class, all lanes of it over the one stream.
func (w *tcpWire) serve(q *QUIC, fr *frameReader, s *Session) {
	run := func(fn func()) {
		if !q.Go(func() {
			background.LowPriority()
			fn()
		}) {
			s.End(ErrClosed)
		}
	}
	out := &lanesWriter{w: w.Conn}
	fr.max = frameLimit(&q.cfg)
	for _, lane := range s.Lanes() {
		run(func() { q.writeLane(s, lane, out) })
	}
	run(func() { q.readLane(s, fr, ClassBulk) })
}

// lanesWriter lets several lanes write batches of whole frames to one stream.
type lanesWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lanesWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}
