package etcdapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/watch"
)

// socket opens a websocket to a path of the gateway.
func socket(t *testing.T, r *rig, path string, o *websocket.DialOptions) *websocket.Conn {
	t.Helper()
	c, resp, err := websocket.Dial(t.Context(), "ws://"+r.addr()+path, o)
	if err != nil {
		t.Fatalf("open %s: %v, %+v", path, err, resp)
	}
	t.Cleanup(func() { _ = c.CloseNow() })
	return c
}

func say(t *testing.T, c *websocket.Conn, text string) {
	t.Helper()
	if err := c.Write(t.Context(), websocket.MessageText, []byte(text)); err != nil {
		t.Fatalf("say %.40s: %v", text, err)
	}
}

// hear returns the next message's result.
func hear(t *testing.T, c *websocket.Conn) *struct {
	Created bool
	Header  struct{ Revision string }
	ID      string
	Events  []struct{ Kv struct{ Key []byte } }
} {
	t.Helper()
	typ, b, err := c.Read(t.Context())
	if err != nil || typ != websocket.MessageText || strings.Contains(string(b), "\n") {
		t.Fatalf("heard %v %q, %v", typ, b, err)
	}
	m := struct {
		Result struct {
			Created bool
			Header  struct{ Revision string }
			ID      string
			Events  []struct{ Kv struct{ Key []byte } }
		}
	}{}
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatalf("heard %q: %v", b, err)
	}
	return &m.Result
}

// A watcher by websocket gets the same as one by gRPC, one message each, and may create more. The
// gateway's other reading streams have sockets too.
func TestSocketsOfStreams(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	r, o, _ := watchRig(t, func(o *Options) { o.Leases = &fakeLeases{} })
	for _, path := range []string{"/v3/watch", "/v3beta/watch"} {
		c := socket(t, r, path, nil)
		say(t, c, `{"create_request":{"key":"YQ=="}}`)
		if m := hear(t, c); !m.Created {
			t.Errorf("%s: first heard %+v", path, m)
		}
		for range 3 {
			o.put("a")
			if m := hear(t, c); len(m.Events) != 1 || string(m.Events[0].Kv.Key) != "a" {
				t.Errorf("%s: heard %+v", path, m)
			}
		}
		say(t, c, "{\"create_request\":\n\n{\"key\":\"YQ==\"}}") // over lines, and a second watcher
		if m := hear(t, c); !m.Created {
			t.Errorf("%s: heard %+v of a second watcher", path, m)
		}
		must(t, c.Close(websocket.StatusNormalClosure, ""))
	}
	c := socket(t, r, "/v3/lease/keepalive", nil)
	for range 3 {
		say(t, c, `{"ID":"5"}`)
		if m := hear(t, c); m.ID != "5" {
			t.Errorf("heard %+v of a keepalive", m)
		}
	}
}

// A client gets the gateway's refusal as a message, and then the end.
func TestSocketOfARefusedCall(t *testing.T) {
	r := newRig(t, "http", nil) // there is no Watch
	c := socket(t, r, "/v3/watch", nil)
	say(t, c, `{"create_request":{"key":"YQ=="}}`)
	_, b, err := c.Read(t.Context())
	if err != nil || !strings.Contains(unspaced(string(b)), `"code":12`) {
		t.Errorf("heard %q, %v", b, err)
	}
	if _, b, err := c.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Errorf("heard %q, %v behind it", b, err)
	}
}

// A browser opens a socket for any page without a question, so no socket writes keys.
func TestSocketsWriteNoKeys(t *testing.T) {
	r := newRig(t, "http", nil)
	for _, path := range []string{"/v3/kv/put", "/v3/kv/txn", "/v3/kv/deleterange", "/v3/kv/compaction", "/v3/lease/grant", "/v3/lease/revoke", "/v3/lock/lock", "/v3/auth/enable", "/v3/nothing"} {
		c, resp, err := websocket.Dial(t.Context(), "ws://"+r.addr()+path, nil)
		if err == nil {
			t.Errorf("%s has a socket", path)
			_ = c.CloseNow()
		} else if resp == nil || resp.StatusCode/100 == 1 {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// Pages of any origin may watch, as in etcd. But unlike there, no cookie identifies them. A token
// comes as a protocol, because scripts cannot set headers.
func TestSocketsOfOtherOrigins(t *testing.T) {
	got := make(chan http.Header, 1)
	s := newSockets(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header
		if r.Method != http.MethodPost {
			t.Errorf("method %s", r.Method)
		}
	}), &Options{Clock: clock.System()}, 100)
	r := newRig(t, "http", nil)
	r.gateway.sockets.next = s.next
	for _, c := range []struct {
		protocols     []string
		header        http.Header
		protocol, has string
	}{
		{header: http.Header{"Origin": {"http://elsewhere"}, "Cookie": {"token=abc"}}},
		{protocols: []string{"Bearer", "abc"}, protocol: "Bearer", has: "Bearer abc"},
		{protocols: []string{"other"}},
		{header: http.Header{"Authorization": {"abc"}}, has: "abc"},
	} {
		conn := socket(t, r, "/v3/watch", &websocket.DialOptions{Subprotocols: c.protocols, HTTPHeader: c.header})
		h := <-got
		if h.Get("Authorization") != c.has || h.Get("Cookie") != "" || conn.Subprotocol() != c.protocol {
			t.Errorf("%v %v: %v, protocol %q", c.protocols, c.header, h, conn.Subprotocol())
		}
		if _, _, err := conn.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
			t.Error(err)
		}
	}
}

// A message may be as large as a body, and no larger.
func TestSocketMessagesAreBounded(t *testing.T) {
	r, _, _ := watchRig(t, func(o *Options) { o.MaxRequestBytes = 1 << 10 })
	c := socket(t, r, "/v3/watch", nil)
	say(t, c, `{"create_request":{"key":"YQ=="}`+strings.Repeat(" ", int(r.gateway.maxBodyBytes))+"}")
	if _, b, err := c.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusMessageTooBig {
		t.Errorf("heard %q, %v", b, err)
	}
}

// The socket itself refuses a larger message, each time. Its call only gets an end, and refuses
// nothing.
func TestSocketRefusesWhatIsTooLarge(t *testing.T) {
	const most = 1000
	for _, size := range []int{most - 1, most, most + 1, most + 2, most + 9} {
		virtualSocket(t, most, func(w http.ResponseWriter, r *http.Request) error {
			for done := 0; ; {
				n, err := r.Body.Read(make([]byte, most/3))
				if done += n; err != nil {
					return err
				}
				if done == size+1 {
					_, _ = w.Write([]byte("heard\n"))
				}
			}
		}, func(t *testing.T, conn *websocket.Conn, ended <-chan error) {
			must(t, conn.Write(t.Context(), websocket.MessageText, make([]byte, size)))
			_, b, err := conn.Read(t.Context())
			if size <= most && string(b) != "heard" || size > most && websocket.CloseStatus(err) != websocket.StatusMessageTooBig {
				t.Errorf("%d bytes: heard %q, %v", size, b, err)
			}
			_ = conn.CloseNow()
			if err := <-ended; !errors.Is(err, io.EOF) {
				t.Errorf("%d bytes: the call ended with %v", size, err)
			}
		})
	}
}

// virtualSocket serves one socket in virtual time, and calls f with its client's end. serve's
// result comes from ended.
func virtualSocket(t *testing.T, maxBodyBytes int64, serve func(http.ResponseWriter, *http.Request) error, f func(t *testing.T, conn *websocket.Conn, ended <-chan error)) {
	t.Helper()
	virtualSockets(t, maxBodyBytes, serve, func(t *testing.T, s *sockets, conn *websocket.Conn, ended <-chan error) {
		f(t, conn, ended)
		_ = conn.CloseNow()
		s.close(t.Context())
	})
}

// virtualSockets is virtualSocket for tests that also close the server's end.
func virtualSockets(t *testing.T, maxBodyBytes int64, serve func(http.ResponseWriter, *http.Request) error, f func(t *testing.T, s *sockets, conn *websocket.Conn, ended <-chan error)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		o := Options{Clock: clock.Virtual(), Answers: budget.New(1<<20, 64<<20)}
		ended := make(chan error, 1)
		s := newSockets(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { ended <- serve(w, r) }), &o, maxBodyBytes)
		l := pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}
		server := &http.Server{Handler: s}
		go func() { _ = server.Serve(l) }()
		transport := &http.Transport{DialContext: l.dial}
		conn, _, err := websocket.Dial(t.Context(), "ws://x/v3/watch", &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}})
		must(t, err)
		f(t, s, conn, ended)
		server.Close()
		if n := o.Answers.Held(); n != 0 {
			t.Errorf("%d bytes count in the end", n)
		}
	})
}

// pipeListener accepts the other ends of pipes. A net.Pipe has no bytes under way, and its
// deadlines are exact: a bufconn reports one that had passed before it was lifted.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (l pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l pipeListener) Close() error {
	close(l.closed)
	return nil
}

func (l pipeListener) Addr() net.Addr { return &net.UnixAddr{} }

// Bytes that a client does not take count with those of other answers.
func TestSlowSocketsCount(t *testing.T) {
	r := newRig(t, "http", nil)
	big := make([]byte, 24<<20) // more than the kernel buffers
	r.gateway.sockets.next = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, err := fmt.Fprintf(w, "%s\n", strings.Repeat("x", len(big)))
		if err == nil {
			t.Error("all was written")
		}
	})
	c := socket(t, r, "/v3/watch", nil)
	r.awaitUnsent(t, func(n int64) bool { return n >= 2*int64(len(big)) })
	_ = c.CloseNow()
	r.awaitUnsent(t, func(n int64) bool { return n == 0 })
}

// A client that takes nothing, or sends nothing, is disconnected in the end.
func TestSocketDeadlines(t *testing.T) {
	for name, c := range map[string]struct {
		serve func(w http.ResponseWriter, r *http.Request) error
		want  error
		after time.Duration
	}{
		"it says nothing": {
			serve: func(_ http.ResponseWriter, r *http.Request) error {
				_, err := io.Copy(io.Discard, r.Body)
				return err
			},
			after: requestReadTime,
		},
		"it takes nothing": {
			serve: func(w http.ResponseWriter, _ *http.Request) error {
				_, err := fmt.Fprintf(w, "%s\n", strings.Repeat("x", 3*gatewayChunkBytes))
				return err
			},
			want:  context.Canceled,
			after: 4 * gatewayChunkTime,
		},
	} {
		begun := time.Time{}
		virtualSocket(t, 1000, func(w http.ResponseWriter, r *http.Request) error {
			begun = time.Now()
			return c.serve(w, r)
		}, func(t *testing.T, _ *websocket.Conn, ended <-chan error) {
			if err := <-ended; !errors.Is(err, c.want) {
				t.Errorf("%s: ended with %v", name, err)
			}
			if took := time.Since(begun); took != c.after {
				t.Errorf("%s: ended after %v, want %v", name, took, c.after)
			}
		})
	}
}

// A server that stops ends its sockets, also those whose clients do not answer.
func TestStopEndsSockets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOneRange()
		hub := watch.New(watch.Config{Self: 1, Clock: clock.Virtual(), Log: o, Ranges: o, Feeds: o})
		defer hub.Stop()
		r, dial := virtualRig(t, func(opts *Options) { opts.Watches = hub })
		through := &websocket.DialOptions{HTTPClient: &http.Client{Transport: &http.Transport{DialContext: dial}}}
		c := socket(t, r, "/v3/watch", through)
		say(t, c, `{"create_request":{"key":"YQ=="}}`)
		hear(t, c)
		silent := socket(t, r, "/v3/watch", through)
		say(t, silent, `{"create_request":{"key":"YQ=="}}`)
		hear(t, silent)
		// The stop's time ends when the listening client has got its end, however long that takes. Then
		// only the silent one is left to be cut off.
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		var over time.Time
		go func() {
			for {
				if _, _, err := c.Read(context.Background()); err != nil {
					over = time.Now()
					cancel()
					done <- err
					return
				}
			}
		}()
		r.Stop(ctx)
		ended := time.Now()
		if err := <-done; websocket.CloseStatus(err) != websocket.StatusNormalClosure {
			t.Errorf("the client heard %v", err)
		}
		if took := ended.Sub(over); took > 0 {
			t.Errorf("the stop took %v longer than it may", took)
		}
		if _, _, err := websocket.Dial(t.Context(), "ws://"+r.addr()+"/v3/watch", through); err == nil {
			t.Error("a socket after the stop")
		}
	})
}

// The stop's end cuts off a farewell without answer, also that of a call that ended while a message
// for it was under way.
func TestAStopCutsOffFarewells(t *testing.T) {
	for range 30 {
		virtualSockets(t, 1000, func(http.ResponseWriter, *http.Request) error {
			time.Sleep(time.Second)
			return nil
		}, func(t *testing.T, s *sockets, conn *websocket.Conn, ended <-chan error) {
			say(t, conn, `{}`)
			must(t, <-ended)
			over, cancel := context.WithCancel(t.Context())
			cancel()
			begun := time.Now()
			s.close(over)
			if took := time.Since(begun); took > 0 {
				t.Errorf("the stop took %v longer than it may", took)
			}
			_ = conn.CloseNow()
		})
	}
}

// A client is cut off at once, also if nobody reads its socket at that moment and the farewell
// would wait for an answer itself.
func TestStopEndsSocketsThatNobodyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, dial := virtualRig(t, func(*Options) {})
		const clients = 8
		heard := make(chan struct{}, clients)
		r.gateway.sockets.next = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			heard <- struct{}{}
			<-r.Context().Done() // and takes no message
		})
		for range clients {
			c := socket(t, r, "/v3/watch", &websocket.DialOptions{HTTPClient: &http.Client{Transport: &http.Transport{DialContext: dial}}})
			say(t, c, `{}`)
			<-heard
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		begun := time.Now()
		r.Stop(ctx)
		if took := time.Since(begun); took > 0 {
			t.Errorf("the stop took %v", took)
		}
	})
}

// A call with one message gets the end behind it. Otherwise it would wait for more, and the client
// for the call.
func TestSocketsOfOneMessage(t *testing.T) {
	r := newRig(t, "http", nil)
	r.gateway.sockets.next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s heard %q %v\n", r.URL.Path, b, err)
	})
	for _, path := range []string{"/v3/election/observe", "/v3/maintenance/snapshot"} {
		c := socket(t, r, path, nil)
		say(t, c, `{}`)
		say(t, c, `{"more":1}`) // for nobody
		if _, b, err := c.Read(t.Context()); err != nil || string(b) != path+` heard "{}\n" <nil>` {
			t.Errorf("heard %q, %v", b, err)
		}
	}
}

// A malformed message ends its call and the socket.
func TestBrokenMessagesEndSockets(t *testing.T) {
	r, _, _ := watchRig(t, func(o *Options) { o.Leases = &fakeLeases{} })
	for _, first := range []string{"", `{"create_request":{"key":"YQ=="}}`} {
		for _, broken := range []string{"nonsense", `{"create_request":{"key":5}}`} {
			c := socket(t, r, "/v3/watch", nil)
			if first != "" {
				say(t, c, first)
				hear(t, c)
			}
			say(t, c, broken)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			for err := error(nil); err == nil; {
				if _, _, err = c.Read(ctx); ctx.Err() != nil {
					t.Errorf("%q behind %q: the socket lives on", broken, first)
				}
			}
			cancel()
		}
	}
	s := r.gateway.sockets
	for range 1000 {
		s.mu.Lock()
		open := s.open
		s.mu.Unlock()
		if open == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("sockets are left")
}
