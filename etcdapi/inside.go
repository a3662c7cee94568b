package etcdapi

import (
	"context"
	"net"

	"google.golang.org/grpc/test/bufconn"
)

// insideWindowBytes is the buffer of each direction of a connection within the process.
const insideWindowBytes = 64 << 10

// insideListener takes connections of the program that the server is a part of. Unlike the JSON gateway's they stand for
// nobody else.
type insideListener struct{ *bufconn.Listener }

func newInsideListener() insideListener { return insideListener{bufconn.Listen(insideWindowBytes)} }

// Accept implements net.Listener.
func (l insideListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return insideConn{c}, nil
}

// insideConn is one of them.
type insideConn struct{ net.Conn }

// RemoteAddr implements net.Conn.
func (insideConn) RemoteAddr() net.Addr { return insideAddr{} }

// insideAddr is who calls by such a connection: this process.
type insideAddr struct{}

// Network implements net.Addr.
func (insideAddr) Network() string { return "process" }

// String implements net.Addr.
func (insideAddr) String() string { return "this process" }

// DialInside opens a connection to all services within this process, without a socket. It is served from Start to Stop.
// Who calls by it may do what loopback may.
func (s *Server) DialInside(ctx context.Context) (net.Conn, error) { return s.inside.DialContext(ctx) }
