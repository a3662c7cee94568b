package etcdapi

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/skeindb/skein/clock"
)

// sockets serves the gateway's streams to websocket clients, as etcd does: each message of
// the client is a JSON request, and each line of the answer a message. Nothing else is
// served so: in etcd every call is, but a browser asks nobody before it opens a socket, so
// that a page that may not even read the answer could write.
type sockets struct {
	next         http.Handler
	clock        clock.Clock
	unsent       *atomic.Int64
	maxBodyBytes int64

	// ctx ends the calls that are left when the server stops.
	ctx    context.Context
	cancel context.CancelFunc

	mu sync.Mutex
	// Guarded by mu. open counts the calls; once closed is set none begins, and idle is
	// closed with the last one.
	open   int
	closed bool
	idle   chan struct{}
}

func newSockets(next http.Handler, o *Options, unsent *atomic.Int64, maxBodyBytes int64) *sockets {
	s := &sockets{next: next, clock: o.Clock, unsent: unsent, maxBodyBytes: maxBodyBytes, idle: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// wantsSocket says whether a request asks for a websocket where there is one.
func wantsSocket(r *http.Request) bool {
	return strings.EqualFold(r.Header.Get("Upgrade"), "websocket") && mayStream(r.URL.Path)
}

// mayStream says whether the answer of a path is a stream, and nothing is written by it.
func mayStream(path string) bool {
	return mayGoOn(path) || path == "/v3/election/observe" || path == "/v3/maintenance/snapshot"
}

func (s *sockets) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.open++
	}
	return !s.closed
}

func (s *sockets) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open--; s.open == 0 && s.closed {
		close(s.idle)
	}
}

// close lets the calls that run end until ctx is done, and cuts off the rest. The HTTP
// server does not know of them any more.
func (s *sockets) close(ctx context.Context) {
	s.mu.Lock()
	if s.closed = true; s.open == 0 {
		close(s.idle)
	}
	s.mu.Unlock()
	select {
	case <-s.idle:
	case <-ctx.Done():
	}
	s.cancel()
	<-s.idle
}

// ServeHTTP implements http.Handler.
func (s *sockets) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.enter() {
		http.Error(w, "the server stops", http.StatusServiceUnavailable)
		return
	}
	defer s.leave()
	// Pages of any origin, as all of HTTP here and as in etcd. It gives them nothing: no
	// cookie says who somebody is, unlike in etcd, and whose browser has a certificate was
	// refused (ownPages).
	below := &hijacked{ResponseWriter: w}
	conn, err := websocket.Accept(below, r, &websocket.AcceptOptions{InsecureSkipVerify: true, Subprotocols: []string{bearer}})
	if err != nil {
		return // the client has been told
	}
	conn.SetReadLimit(s.maxBodyBytes)
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()

	body, feed := io.Pipe()
	call := s.request(ctx, r, body)
	out := &socketWriter{s: s, ctx: ctx, conn: conn, header: http.Header{}}
	defer out.letGo()
	var reader sync.WaitGroup
	reader.Go(func() {
		// When the client has gone so has its call: a socket has no half.
		defer cancel()
		s.feed(ctx, conn, feed, !mayGoOn(r.URL.Path))
	})
	limited := newGatewayBody(out, call, s.maxBodyBytes+besidesMessage, nil)
	limited.broken = func() {
		// Nobody reads the body any more, and nothing else ends the call.
		body.CloseWithError(io.ErrClosedPipe)
		cancel()
	}
	call.Body = limited
	s.next.ServeHTTP(out, call)
	out.end()
	feed.Close() // the reader goes on, until the client has answered the farewell
	// Or the farewell reads by itself, where the reader is between two messages: then no
	// context ends it, and the library would wait 5 s for a client that says nothing.
	cut := context.AfterFunc(s.ctx, func() { _ = below.conn.Close() })
	_ = conn.Close(websocket.StatusNormalClosure, "")
	cut()
	cancel()
	reader.Wait()
}

// hijacked keeps the connection that a socket takes from the HTTP server.
type hijacked struct {
	http.ResponseWriter
	conn net.Conn
}

// Hijack implements http.Hijacker.
func (h *hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	h.conn = conn
	return conn, rw, err
}

// besidesMessage is what a call may read beyond a message of the largest size: the byte from
// which the socket knows that it is larger, and the newline of the one before. So it is
// always the socket that refuses it, with its own farewell: the call hears of no more.
const besidesMessage = 2

// bearer leads the protocol by which scripts, which cannot set headers, hand over a token.
const bearer = "Bearer"

// request is the call that the socket stands for.
func (s *sockets) request(ctx context.Context, r *http.Request, body io.ReadCloser) *http.Request {
	call := r.Clone(ctx)
	call.Method, call.Body, call.ContentLength = http.MethodPost, body, -1
	call.Header = http.Header{}
	if _, token, ok := strings.Cut(r.Header.Get("Sec-WebSocket-Protocol"), bearer+","); ok {
		call.Header.Set("Authorization", bearer+" "+strings.TrimSpace(token))
	} else if a := r.Header.Get("Authorization"); a != "" {
		call.Header.Set("Authorization", a)
	}
	return call
}

// feed copies the messages of a client to its call, a line each; with one a call has one
// message, and waits for the end behind it. It returns when the client has gone, or ctx is
// done.
func (s *sockets) feed(ctx context.Context, conn *websocket.Conn, call *io.PipeWriter, one bool) {
	for first := true; ; first = false {
		err := s.feedOne(ctx, conn, call, first)
		switch {
		case err == nil && one:
			call.Close()
		case errors.Is(err, io.ErrClosedPipe):
			// The call has ended: what else the client says is for nobody.
		case err != nil:
			call.CloseWithError(io.EOF)
			return
		}
	}
}

// feedOne copies one message. The first has its time, as a request of HTTP has.
func (s *sockets) feedOne(ctx context.Context, conn *websocket.Conn, call io.Writer, first bool) error {
	if first {
		timed, cancel := clock.WithTimeout(ctx, s.clock, requestReadTime)
		defer cancel()
		ctx = timed
	}
	_, m, err := conn.Reader(ctx)
	if err != nil {
		return err
	}
	if _, err = io.Copy(call, m); err == nil {
		_, err = call.Write([]byte{'\n'})
	}
	if _, gone := io.Copy(io.Discard, m); gone != nil {
		return gone
	}
	return err
}

// socketWriter makes messages of the lines of an answer.
type socketWriter struct {
	s      *sockets
	ctx    context.Context
	conn   *websocket.Conn
	header http.Header
	// line is what there is of a line, and held what counts for it as not sent.
	line []byte
	held int64
	err  error
}

// Header implements http.ResponseWriter.
func (w *socketWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. A client sees no status, as with etcd: the
// line says what is wrong.
func (w *socketWriter) WriteHeader(int) {}

// Flush implements http.Flusher: what is a line has been sent.
func (w *socketWriter) Flush() {}

// Write implements io.Writer.
func (w *socketWriter) Write(p []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	for rest := p; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		w.keep(part)
		if whole {
			w.send()
		}
		if w.err != nil {
			return 0, w.err
		}
		rest = after
	}
	return len(p), nil
}

// keep adds to the line.
func (w *socketWriter) keep(part []byte) {
	bytes := int64(len(part)) * gatewayUnsentFactor
	w.held += bytes
	w.s.unsent.Add(bytes)
	w.line = append(w.line, part...)
}

// letGo forgets the line.
func (w *socketWriter) letGo() {
	w.s.unsent.Add(-w.held)
	w.line, w.held = nil, 0
}

// send sends the line. The client has as much time as one of HTTP has for as many bytes.
func (w *socketWriter) send() {
	defer w.letGo()
	if len(w.line) == 0 {
		return
	}
	ctx, cancel := clock.WithTimeout(w.ctx, w.s.clock, gatewayChunkTime*time.Duration(1+len(w.line)/gatewayChunkBytes))
	defer cancel()
	w.err = w.conn.Write(ctx, websocket.MessageText, w.line)
}

// end sends what no newline has ended.
func (w *socketWriter) end() {
	if w.err == nil {
		w.send()
	}
}
