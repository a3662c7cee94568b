package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"

	"github.com/quic-go/quic-go"
)

// The codes with which a connection is closed.
const (
	closeShutdown  quic.ApplicationErrorCode = 1 // the node stops; it may come back at once
	closeDuplicate quic.ApplicationErrorCode = 2 // another connection serves
	closeRefused   quic.ApplicationErrorCode = 3 // the Hello was refused
	closeProtocol  quic.ApplicationErrorCode = 4
	closeEnded     quic.ApplicationErrorCode = 5 // given up for another reason
)

// wire is a connection with a peer, of either carrier, after its TLS handshake.
type wire interface {
	// control is the stream of the handshake, opened by the dialler.
	control(ctx context.Context, dialled bool) (io.ReadWriteCloser, error)
	// certificates are the peer's.
	certificates() []*x509.Certificate
	// close tells the peer why, as far as the carrier can. It does not block.
	close(code quic.ApplicationErrorCode, reason string)
	// cause is why the connection ended, nil while it has not.
	cause() error
	// awaitEnd waits until the peer has closed the connection or close was called.
	awaitEnd()
	// serve moves the bytes of the session, beginning after the bytes that fr has read
	// of the control stream, until either ends.
	serve(q *QUIC, fr *frameReader, s *Session)
	// only says whether a session of this kind may use such a connection.
	only(k Kind) bool
	RemoteAddr() net.Addr
}

// quicWire is a QUIC connection. It carries main sessions.
type quicWire struct {
	*quic.Conn
	ctl *quic.Stream
}

func (w *quicWire) control(ctx context.Context, dialled bool) (io.ReadWriteCloser, error) {
	var err error
	if dialled {
		w.ctl, err = w.OpenStream()
	} else {
		w.ctl, err = w.AcceptStream(ctx)
	}
	return w.ctl, err
}

func (w *quicWire) certificates() []*x509.Certificate {
	return w.ConnectionState().TLS.PeerCertificates
}

func (w *quicWire) close(code quic.ApplicationErrorCode, reason string) {
	_ = w.CloseWithError(code, reason)
}

func (w *quicWire) cause() error { return context.Cause(w.Context()) }

func (w *quicWire) awaitEnd() { <-w.Context().Done() }

func (w *quicWire) only(k Kind) bool { return k == KindMain }

// tcpWire is a TLS connection over TCP. It carries bulk sessions, and main ones whose dialler has CarrierTLS.
type tcpWire struct {
	*tls.Conn
	q *QUIC
	// again makes one more connection with the peer. Nil for a connection that was accepted, or of a bulk session.
	again  func(context.Context) (*tcpWire, error)
	ended  context.Context
	cancel context.CancelCauseFunc
}

func newTCPWire(q *QUIC, conn *tls.Conn) *tcpWire {
	w := &tcpWire{Conn: conn, q: q}
	w.ended, w.cancel = context.WithCancelCause(context.Background())
	return w
}

func (w *tcpWire) control(context.Context, bool) (io.ReadWriteCloser, error) {
	return tcpControl{w.Conn}, nil
}

// tcpControl is the connection as its own control stream.
type tcpControl struct{ *tls.Conn }

// Close ends the writing direction.
func (c tcpControl) Close() error { return c.CloseWrite() }

func (w *tcpWire) certificates() []*x509.Certificate { return w.ConnectionState().PeerCertificates }

// What one unread stream may occupy of its connection's window. Less than leastStreamWindow would make
// each write wait for a round trip.
const (
	maxStreamWindow   = 4 << 20
	leastStreamWindow = 64 << 10
)

// streamWindow returns the window of a stream of a new connection: the windows of all peers together
// are half of QueueBytes. A connection keeps the window that it began with, also when peers are added.
func streamWindow(c *Config, streams, peers int) int64 {
	return min(max(c.QueueBytes/2/int64(max(peers, 1)*streams), leastStreamWindow), maxStreamWindow)
}

// quicConfig returns the parameters of a new connection where there are so many peers. The
// connection's window is what all of its streams together may hold; otherwise unread data of one class
// would stop the others.
func quicConfig(c *Config, opts *Options, peers int) *quic.Config {
	streams := 2
	for _, n := range c.Lanes {
		streams += n
	}
	window := uint64(streamWindow(c, streams, peers))
	return &quic.Config{
		Versions:                       []quic.Version{quic.Version1},
		HandshakeIdleTimeout:           opts.HandshakeTimeout,
		MaxIdleTimeout:                 opts.IdleTimeout,
		KeepAlivePeriod:                opts.IdleTimeout / 3,
		InitialStreamReceiveWindow:     min(1<<20, window),
		MaxStreamReceiveWindow:         window,
		InitialConnectionReceiveWindow: uint64(streams) * window,
		MaxConnectionReceiveWindow:     uint64(streams) * window,
		MaxIncomingStreams:             1,
		MaxIncomingUniStreams:          numClasses * maxLanes,
	}
}

// config returns the parameters of the connections of now.
func (q *QUIC) config() *quic.Config {
	c := quicConfig(&q.cfg, &q.opts, len(*q.table.Load()))
	c.GetConfigForClient = func(*quic.ClientInfo) (*quic.Config, error) { return q.config(), nil }
	return c
}

// isShutdown says that the peer closed its bus.
func isShutdown(err error) bool {
	ae, ok := errors.AsType[*quic.ApplicationError](err)
	return ok && ae.Remote && ae.ErrorCode == closeShutdown
}

// endCode returns the code for closing a session's connection.
func endCode(err error) quic.ApplicationErrorCode {
	switch {
	case errors.Is(err, ErrClosed):
		return closeShutdown
	case errors.Is(err, errReplaced):
		return closeDuplicate
	case errors.Is(err, errProtocol), errors.Is(err, errMalformed):
		return closeProtocol
	}
	return closeEnded
}
