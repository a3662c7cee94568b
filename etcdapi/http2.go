package etcdapi

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// gRPC and HTTP on connections of HTTP/2. Behind one address nothing but a request's content type tells the two apart, and
// gRPC's server cannot pass a request on. So the sniffer reads up to the first request, and its server has the connection.

const (
	// firstRequestBytes bounds what is read up to the end of the first request's header.
	firstRequestBytes = 64 << 10
	frameHeaderBytes  = 9
)

// emptySettings are how a server begins. gRPC clients send no request before.
const emptySettings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// settingsAck is a client's answer to settings.
const settingsAck = "\x00\x00\x00\x04\x01\x00\x00\x00\x00"

// byFirstRequest hands on a connection whose preface was read. A client that sends no request within the time for that connects
// ahead: a browser where it offers HTTP/1.1 too, else one of gRPC.
func (s *sniffer) byFirstRequest(c *sniffedConn) (*sniffedConn, *connQueue) {
	var seen bytes.Buffer
	from := io.TeeReader(c, &seen)
	_, err := io.CopyN(io.Discard, from, int64(len(preface))) // it is there
	if err == nil {
		_, err = io.WriteString(c.Conn, emptySettings)
	}
	isGRPC := err != nil || firstIsGRPC(from, !c.http1)
	whole := &sniffedConn{Conn: c.Conn, prefix: seen.Bytes(), state: c.state}
	if isGRPC {
		return whole, s.grpc // its server does not mind an answer to settings that it has not sent
	}
	return &sniffedConn{Conn: &withoutAck{Conn: whole, pass: len(preface)}, state: c.state}, s.http
}

// firstIsGRPC reads what follows the preface. It returns otherwise where that is no request.
func firstIsGRPC(r io.Reader, otherwise bool) bool {
	f := http2.NewFramer(io.Discard, bufio.NewReaderSize(io.LimitReader(r, firstRequestBytes), 1<<10))
	f.ReadMetaHeaders, f.MaxHeaderListSize = hpack.NewDecoder(4096, nil), firstRequestBytes
	f.SetMaxReadFrameSize(firstRequestBytes)
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return otherwise
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame, *http2.WindowUpdateFrame, *http2.PriorityFrame:
		case *http2.MetaHeadersFrame:
			return slices.ContainsFunc(frame.RegularFields(), func(h hpack.HeaderField) bool {
				return h.Name == "content-type" && typeOfGRPC(h.Value)
			})
		default:
			return otherwise
		}
	}
}

func typeOfGRPC(contentType string) bool {
	rest, ok := strings.CutPrefix(contentType, "application/grpc")
	return ok && (rest == "" || strings.ContainsAny(rest[:1], "+;"))
}

// toNewConnection refuses gRPC's requests on a connection that went to HTTP by an earlier request, or without one, and lets the
// connection end. To clients of gRPC that is Unavailable, so they try again, on a connection that gRPC's server gets.
func (s *Server) toNewConnection(next http.Handler) http.Handler {
	if len(s.opts.HTTPURLs) > 0 {
		return next // gRPC has other addresses
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 && slices.ContainsFunc(r.Header["Content-Type"], typeOfGRPC) {
			w.Header().Set("Connection", "close") // a GOAWAY
			http.Error(w, "this connection is for HTTP, by its first request or for want of one: use another one for gRPC", http.StatusServiceUnavailable)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// withoutAck leaves the client's answer to the sniffer's settings out of what the server reads, since net/http ends a
// connection for one that it has not asked for.
type withoutAck struct {
	net.Conn
	// pass is how many bytes come before the header of the next frame; header has what was read of that one, and ready what of
	// it is still to be read by the server.
	pass   int
	header [frameHeaderBytes]byte
	have   int
	ready  []byte
	done   bool // the answer has come
}

// Read implements net.Conn.
func (c *withoutAck) Read(b []byte) (int, error) {
	for {
		switch {
		case len(c.ready) > 0:
			n := copy(b, c.ready)
			c.ready = c.ready[n:]
			return n, nil
		case c.done:
			return c.Conn.Read(b)
		case c.pass > 0:
			n, err := c.Conn.Read(b[:min(len(b), c.pass)])
			c.pass -= n
			return n, err
		}
		n, err := c.Conn.Read(c.header[c.have:])
		c.have += n
		switch {
		case c.have == 0 && err != nil:
			return 0, err
		case c.have < frameHeaderBytes && err != nil: // which comes again
			c.done, c.ready = true, c.header[:c.have]
		case c.have < frameHeaderBytes:
		case string(c.header[:]) == settingsAck:
			c.done = true
		default:
			c.have, c.ready = 0, c.header[:]
			c.pass = int(c.header[0])<<16 | int(c.header[1])<<8 | int(c.header[2])
		}
	}
}
