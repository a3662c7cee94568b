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
	"time"

	"github.com/coder/websocket"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
)

// sockets serves the gateway's streams to websocket clients, as etcd does. Each message of the
// client is a JSON request, and each line of the answer a message. etcd serves every call in this
// way. But a browser asks nobody before it opens a socket, so a page that may not read the answer
// could write. So only reading streams are served here.
type sockets struct {
	next         http.Handler
	clock        clock.Clock
	answers      *budget.Bytes
	maxBodyBytes int64

	// ctx ends the remaining calls when the server stops.
	ctx    context.Context
	cancel context.CancelFunc

	mu sync.Mutex
	// Guarded by mu. open counts the calls. No call begins once closed is set, and idle is closed
	// with the last one.
	open   int
	closed bool
	idle   chan struct{}
}

func newSockets(next http.Handler, o *Options, maxBodyBytes int64) *sockets {
	s := &sockets{next: next, clock: o.Clock, answers: o.Answers, maxBodyBytes: maxBodyBytes, idle: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// wantsSocket says whether a request asks for a websocket on a path that has them.
func wantsSocket(r *http.Request) bool {
	return strings.EqualFold(r.Header.Get("Upgrade"), "websocket") && mayStream(r.URL.Path)
}

// mayStream says whether a path's answer is a stream and its calls write nothing.
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

// close lets running calls end until ctx is done, and cuts the others off. The HTTP server does not
// know them any more.
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
	// As for all HTTP here and in etcd, pages of any origin may connect. They gain nothing: unlike in
	// etcd, no cookie identifies a user, and ownPages refuses browsers with a certificate.
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
		// The call ends with its client: a socket cannot be half closed.
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
	feed.Close() // the reader goes on until the client answers the farewell
	// The farewell itself reads if the reader is between two messages. No context ends that read,
	// and the library would wait 5 s for a silent client.
	cut := context.AfterFunc(s.ctx, func() { _ = below.conn.Close() })
	_ = conn.Close(websocket.StatusNormalClosure, "")
	cut()
	cancel()
	reader.Wait()
}

// hijacked keeps the connection that a socket takes over from the HTTP server.
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

// besidesMessage is how far a call may read beyond the largest message: the byte that shows that a
// message is larger, and the newline of the one before. So the socket always refuses the message
// itself, with its own farewell.
const besidesMessage = 2

// bearer precedes the protocol by which scripts, which cannot set headers, pass a token.
const bearer = "Bearer"

// request is the call behind the socket.
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

// feed copies a client's messages to its call, one per line. With one, the call has a single
// message, and feed waits for the client's end behind it. It returns when the client has gone, or
// ctx is done.
func (s *sockets) feed(ctx context.Context, conn *websocket.Conn, call *io.PipeWriter, one bool) {
	for first := true; ; first = false {
		err := s.feedOne(ctx, conn, call, first)
		switch {
		case err == nil && one:
			call.Close()
		case errors.Is(err, io.ErrClosedPipe):
			// The call has ended, and nobody reads further messages.
		case err != nil:
			call.CloseWithError(io.EOF)
			return
		}
	}
}

// feedOne copies one message. The first one has a deadline, as an HTTP request has.
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
	// line is the beginning of a line, and held counts its parts.
	line []byte
	held []*budget.Share
	err  error
}

// Header implements http.ResponseWriter.
func (w *socketWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. As with etcd, a client sees no status: the line says
// what is wrong.
func (w *socketWriter) WriteHeader(int) {}

// Flush implements http.Flusher. Complete lines have been sent already.
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
	w.held = append(w.held, hold(w.s.answers, int64(len(part))*gatewayUnsentFactor))
	w.line = append(w.line, part...)
}

// letGo drops the line.
func (w *socketWriter) letGo() {
	for _, h := range w.held {
		h.Release()
	}
	w.line, w.held = nil, nil
}

// send sends the line. The client has as much time as an HTTP client for as many bytes.
func (w *socketWriter) send() {
	defer w.letGo()
	if len(w.line) == 0 {
		return
	}
	ctx, cancel := clock.WithTimeout(w.ctx, w.s.clock, gatewayChunkTime*time.Duration(1+len(w.line)/gatewayChunkBytes))
	defer cancel()
	w.err = w.conn.Write(ctx, websocket.MessageText, w.line)
}

// end sends the last line if it has no newline.
func (w *socketWriter) end() {
	if w.err == nil {
		w.send()
	}
}
