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

// Bulk sessions go over TCP, with the same TLS as QUIC. They carry copies of ranges:
// many bytes, none of them urgent. TCP moves them with six tenths of the CPU that
// QUIC's packets of 1,400 bytes cost. They do not need QUIC's independent streams or
// its fast refusal after a restart. Threads of low priority read and write them.

// dialTCP makes a connection to a peer for its bulk session.
func (q *QUIC) dialTCP(ctx context.Context, target netip.AddrPort, tc *tls.Config) (*tcpWire, error) {
	d := net.Dialer{LocalAddr: q.sockets.dialFrom(target.Addr())}
	conn, err := d.DialContext(ctx, "tcp", target.String())
	if err != nil {
		return nil, err
	}
	// Go grows TLS records with the bytes sent so far; here each record is full from the
	// start.
	tc.DynamicRecordSizingDisabled = true
	w, err := q.handshakeTLS(ctx, tls.Client(conn, tc))
	if err != nil {
		_ = conn.Close()
	}
	return w, err
}

// handshakeTLS does either side's TLS handshake.
func (q *QUIC) handshakeTLS(ctx context.Context, t *tls.Conn) (*tcpWire, error) {
	if err := limitSilence(t.NetConn().(*net.TCPConn), bulkIdleTimeouts*q.opts.IdleTimeout); err != nil {
		return nil, fmt.Errorf("bound the silence of a connection: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, q.opts.HandshakeTimeout)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	if err := speaksALPN(t); err != nil {
		return nil, err
	}
	return newTCPWire(q, t), nil
}

// speaksALPN is the error of a peer of another protocol. TLS lets a peer pass that names none.
func speaksALPN(t *tls.Conn) error {
	if got := t.ConnectionState().NegotiatedProtocol; got != ALPN {
		return fmt.Errorf("the peer speaks %q, not %q", got, ALPN)
	}
	return nil
}

// isTLS says whether a TLS handshake over TCP failed because one side refused the
// other.
func isTLS(err error) bool {
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "remote error" {
		return true // an alert; package tls does not export its type
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true
	}
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

// bulkIdleTimeouts is how many idle timeouts of the main session a bulk connection may
// be silent. The main session notices a dead peer and ends the bulk one with it, so
// this bound is only for a connection that is lost alone. It is wide because the
// reader's low priority may delay it.
const bulkIdleTimeouts = 3

// silenceMax is the most that Linux takes (MAX_TCP_KEEPIDLE is 32,767 s).
const silenceMax = 9 * time.Hour

// limitSilence ends a connection whose peer acknowledges or reads nothing for d.
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

// close closes the connection. TCP carries no reasons, so the peer only sees the end.
func (w *tcpWire) close(_ quic.ApplicationErrorCode, reason string) {
	cause := errClosedHere
	if reason != "" {
		cause = errors.New(reason)
	}
	w.cancel(cause)
	// Not TLS's own close, which may wait for the peer. The peer needs no closing alert:
	// frames have lengths, and the end of a session is always an error. The goroutine is
	// needed because Close waits for the reading and writing threads, which have low
	// priority. The caller may not wait: calls of the main session fail only after the
	// bulk session has ended.
	conn := w.NetConn()
	if !w.q.Go(func() { _ = conn.Close() }) {
		_ = conn.Close()
	}
}

func (w *tcpWire) cause() error { return context.Cause(w.ended) }

func (w *tcpWire) awaitEnd() {
	// The peer sends nothing more until it closes. Otherwise the timer of the handshake
	// closes the connection.
	_, _ = io.CopyN(io.Discard, w.Conn, maxHelloBytes)
}

func (w *tcpWire) only(Kind) bool { return true }

// serveBulk moves the frames of the bulk class; all its lanes share the one stream.
func (w *tcpWire) serveBulk(q *QUIC, fr *frameReader, s *Session) {
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
