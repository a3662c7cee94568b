package transport

import (
	"context"

	"github.com/skeindb/skein/keyspace"
)

// Crash stops the bus as the death of its process would: the sockets go silent.
func (q *QUIC) Crash() {
	// Closing the sockets first leaves nobody a way to say goodbye.
	for _, s := range q.sockets.listen {
		_ = s.udp.Close()
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
