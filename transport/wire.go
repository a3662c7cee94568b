package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"

	"github.com/quic-go/quic-go"
)

// wire is a connection with a peer, of either carrier, from the moment that its TLS
// handshake is over.
type wire interface {
	// control is the stream by which the Hello goes and comes, which the dialler opens.
	control(ctx context.Context, dialled bool) (io.ReadWriteCloser, error)
	// certificates are those that the peer has shown.
	certificates() []*x509.Certificate
	// close tells the peer why, as far as the carrier can. It does not block.
	close(code quic.ApplicationErrorCode, reason string)
	// cause is why the connection ended, nil while it has not.
	cause() error
	// awaitEnd waits until the peer has closed the connection, or close was called.
	awaitEnd()
	// serve moves the bytes of the session that was made of the connection, behind what
	// was read of the control stream, until either ends.
	serve(q *QUIC, fr *frameReader, s *Session)
	// only says whether a session of this kind belongs on such a connection.
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

func (w *quicWire) serve(q *QUIC, fr *frameReader, s *Session) { q.serve(w.Conn, w.ctl, fr, s) }

// tcpWire is a TLS connection over TCP. It carries bulk sessions.
type tcpWire struct {
	*tls.Conn
	q      *QUIC
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

// tcpControl is the connection as its control stream, which is closed for itself.
type tcpControl struct{ *tls.Conn }

// Close says that nothing more is written.
func (c tcpControl) Close() error { return c.CloseWrite() }

func (w *tcpWire) certificates() []*x509.Certificate { return w.ConnectionState().PeerCertificates }
