package transport

import (
	"context"
	"io"
	"net"

	"github.com/skeindb/skein/keyspace"
)

// Crash stops the bus as the death of its process would: the sockets go silent.
func (q *QUIC) Crash() {
	// The sockets close first, so that no farewell is sent.
	for _, s := range q.sockets.listen {
		_ = s.udp.Close()
		_ = s.tcp.Close()
	}
	_ = q.Close()
}

// DialNow makes one attempt beside the dialler's own.
func (q *QUIC) DialNow(id keyspace.NodeID, addr string) error {
	_, err := q.link(id).dial(KindMain, addr, 0)
	return err
}

// EndSession ends the main session with a peer and waits until it is gone.
func (q *QUIC) EndSession(id keyspace.NodeID, err error) {
	if s := q.link(id).session(KindMain); s != nil {
		s.End(err)
		<-s.Done()
	}
}

// Why returns why a session ended, once it has.
func (s *Session) Why() error {
	<-s.Done()
	return context.Cause(s.ctx)
}

// MainSession returns the main session with a peer.
func (q *QUIC) MainSession(id keyspace.NodeID) *Session { return q.link(id).session(KindMain) }

// BulkSession returns the bulk session with a peer, nil without one.
func (q *QUIC) BulkSession(id keyspace.NodeID) *Session { return q.link(id).session(KindBulk) }

// BulkFails tells the dialler that an attempt to make a bulk session has failed.
func (q *QUIC) BulkFails(id keyspace.NodeID, err error) { q.link(id).bulkFailed(err) }

// NoBulkTold is noBulkLogged.
const NoBulkTold = noBulkLogged

// Hello returns the frame by which a node asks for a session of a kind.
func (q *QUIC) Hello(k Kind, to keyspace.NodeID) []byte {
	return helloFrame(frameHello, q.hello(k, to, verdictWelcome))
}

// Refusal returns the reason in the answer to a Hello.
func Refusal(r io.Reader) (string, error) {
	b, err := newFrameReader(r, maxHelloBytes).body()
	if err != nil {
		return "", err
	}
	h, err := parseHello(b, frameAnswer)
	return h.verdict.String(), err
}

// WrapTCP puts something before the listeners for TCP, before Start.
func (q *QUIC) WrapTCP(wrap func(net.Listener) net.Listener) {
	for _, s := range q.sockets.listen {
		s.tcp = wrap(s.tcp)
	}
}

// MaxGreeting is maxUnidentified.
const MaxGreeting = maxUnidentified

// CertificateCheckInterval is certificateCheckInterval.
const CertificateCheckInterval = certificateCheckInterval

// FrameJoin is the kind of the first frame of a further connection.
const FrameJoin = frameJoin
