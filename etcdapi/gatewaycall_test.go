package etcdapi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
)

// Bytes that clients of the gateway do not take count like those of others, until the clients are
// gone. Another read goes on in the reserve.
func TestSlowGatewayClientsCount(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	r := newRig(t, "http", func(o *Options) { o.Answers = budget.New(1<<20, 64<<20) })
	r.kv.value = make([]byte, 24<<20) // more than the kernel buffers
	lazy := dial(t, r.addr())
	if err := lazy.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	body := `{"key":"YQ==","range_end":"Yg=="}`
	if _, err := fmt.Fprintf(lazy, "POST /v3/kv/range HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	r.awaitUnsent(t, func(n int64) bool { return n > 2*24<<20 })
	if status, got := post(t, r, "/v3/kv/range", body); status != http.StatusOK {
		t.Errorf("a read of many keys: %d, %d bytes", status, len(got))
	}
	lazy.Close()
	r.awaitUnsent(t, func(n int64) bool { return n == 0 })
}

// slowHTTP is a client's connection: each write takes its time and fails at its deadline.
type slowHTTP struct {
	http.ResponseWriter
	mu    sync.Mutex
	write time.Time
	// lifted counts how often the read deadline was lifted; read is the last one.
	lifted int
	read   time.Time
	takes  time.Duration
	seen   func()
}

func (s *slowHTTP) Write(p []byte) (int, error) {
	s.seen()
	begin := clock.Virtual().Wall()
	if left := s.write.Sub(begin); left < s.takes {
		return 0, fmt.Errorf("only %v are left", left)
	}
	if err := clock.Sleep(context.Background(), clock.Virtual(), s.takes); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (s *slowHTTP) SetWriteDeadline(at time.Time) error {
	s.write = at
	return nil
}

func (s *slowHTTP) SetReadDeadline(at time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.read = at; at.IsZero() {
		s.lifted++
	}
	return nil
}

func (s *slowHTTP) lifts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lifted
}

// A client that takes an answer slowly is served; one that takes nothing is not.
func TestGatewayWriteDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := budget.New(1<<20, 64<<20)
		p := make([]byte, 10*gatewayChunkBytes+1)
		slow := &slowHTTP{takes: gatewayChunkTime - time.Second, seen: func() {
			if got := answers.Held(); got != int64(2*len(p)) {
				t.Errorf("%d bytes count while %d are written", got, len(p))
			}
		}}
		w := &gatewayWriter{ResponseWriter: slow, clock: clock.Virtual(), answers: answers}
		if n, err := w.Write(p); n != len(p) || err != nil {
			t.Errorf("a slow client: %d, %v", n, err)
		}
		slow.takes = gatewayChunkTime + time.Second
		if n, err := w.Write(p); n != 0 || err == nil {
			t.Errorf("a client that takes nothing: %d, %v", n, err)
		}
		if got := answers.Held(); got != 0 {
			t.Errorf("%d bytes count in the end", got)
		}
	})
}

// A client with an incomplete request has a deadline, however long the call may last afterwards.
func TestGatewayReadDeadline(t *testing.T) {
	for _, c := range []struct {
		path, first, rest string
		// begun says that the deadline is lifted before the body ends.
		begun, lasts bool
	}{
		{"/v3/watch", `{"create_request":`, `{"key":"YQ=="}}`, true, true},
		{"/v3/lease/keepalive", `{"ID"`, `:"7"}`, true, true},
		{"/v3/kv/compaction", `{"revision":"3",`, `"physical":true}`, false, true},
		{"/v3/kv/range", `{"key"`, `:"YQ=="}`, false, false},
	} {
		in, client := io.Pipe()
		w := &slowHTTP{ResponseWriter: httptest.NewRecorder()}
		body := newGatewayBody(w, &http.Request{URL: &url.URL{Path: c.path}, Body: in}, 1000, nil)
		done := make(chan error)
		dec := gatewayJSON{&runtime.JSONPb{UnmarshalOptions: protojson.UnmarshalOptions{DiscardUnknown: true}}}.NewDecoder(body)
		go func() {
			var v pb.WatchRequest
			done <- dec.Decode(&v)
			_, err := io.Copy(io.Discard, body)
			done <- err
		}()
		for _, part := range []string{"", c.first, c.rest} {
			if n := w.lifts(); n != 0 {
				t.Errorf("%s: lifted before %q", c.path, part)
			}
			if _, err := io.WriteString(client, part); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if begun := w.lifts() == 1; begun != c.begun {
			t.Errorf("%s: lifted %v after the message", c.path, begun)
		}
		client.Close()
		if err := <-done; err != nil || (w.lifts() == 1) != c.lasts {
			t.Errorf("%s: lifted %d times after the body, %v", c.path, w.lifts(), err)
		}
	}
}

// The rest of an ended stream's body is read for a bounded time. Otherwise its connection would
// last as long as the client sends.
func TestGatewayEndsWhatIsStillSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{mux: runtime.NewServeMux(), maxBodyBytes: 1000, clock: clock.Virtual(), answers: budget.New(1<<20, 64<<20)}
		for path, want := range map[string]time.Time{"/v3/watch": time.Now().Add(sniffTimeout), "/v3/kv/range": {}} {
			w := &slowHTTP{ResponseWriter: httptest.NewRecorder(), seen: func() {}}
			in, client := io.Pipe()
			g.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, in)) // nobody serves it
			if !w.read.Equal(want) {
				t.Errorf("%s: read until %v, want %v", path, w.read, want)
			}
			client.Close()
		}
	})
}

// In a stream of messages the bound holds for each message.
func TestGatewayMessagesAreBounded(t *testing.T) {
	const most = 4000
	read := func(path, text string) (n int, err error) {
		body := newGatewayBody(httptest.NewRecorder(), &http.Request{URL: &url.URL{Path: path}, Body: io.NopCloser(strings.NewReader(text))}, most, nil)
		dec := gatewayJSON{&runtime.JSONPb{}}.NewDecoder(body)
		for {
			var v pb.WatchRequest
			if err = dec.Decode(&v); err != nil {
				return n, err
			}
			n++
		}
	}
	small := `{"progress_request":{}}` + "\n"
	if n, err := read("/v3/watch", strings.Repeat(small, most)); n != most || !errors.Is(err, io.EOF) {
		t.Errorf("%d messages of a watch, %v", n, err)
	}
	if n, err := read("/v3/watch", small+strings.Repeat(" ", 2*most)+small); n != 1 || errors.Is(err, io.EOF) {
		t.Errorf("a large message of a watch: %d, %v", n, err)
	}
	if n, err := read("/v3/kv/put", strings.Repeat(small, most)); n == most || errors.Is(err, io.EOF) {
		t.Errorf("a large body: %d, %v", n, err)
	}
}

// A stream's client gets the answer to its first message before it sends the next.
func TestGatewayStreamsBothWays(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	r := newRig(t, "http", func(o *Options) { o.Leases = &fakeLeases{} })
	in, client := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.addr()+"/v3/lease/keepalive", in)
	if err != nil {
		t.Fatal(err)
	}
	turns := make(chan struct{})
	said := make(chan error, 1)
	go func() {
		defer client.Close()
		for range turns {
			if _, err := io.WriteString(client, `{"ID":"5"}`); err != nil {
				said <- err
				return
			}
		}
		said <- nil
	}()
	turns <- struct{}{}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines, n := bufio.NewScanner(resp.Body), 0; lines.Scan(); n++ {
		if !strings.Contains(unspaced(lines.Text()), `"ID":"5"`) {
			t.Errorf("answer %d: %s", n, lines.Text())
		}
		if n < 3 {
			turns <- struct{}{}
		} else if n == 3 {
			close(turns)
		}
	}
	if err := <-said; err != nil {
		t.Error(err)
	}
}

// One body at a time may be larger than others.
func TestGatewayReadsOneLargeBody(t *testing.T) {
	const most = 100
	var large atomic.Bool
	body := func(bytes int) *gatewayBody {
		text := io.NopCloser(strings.NewReader(strings.Repeat(" ", bytes)))
		return newGatewayBody(httptest.NewRecorder(), &http.Request{URL: &url.URL{Path: "/v3/kv/put"}, Body: text}, most, &large)
	}
	read := func(b *gatewayBody) error {
		_, err := io.Copy(io.Discard, b)
		return err
	}
	first := body(most + 1)
	if err := read(first); err != nil || !large.Load() {
		t.Errorf("a large body: %v", err)
	}
	var refused *http.MaxBytesError
	second := body(most + 1)
	if err := read(second); !errors.As(err, &refused) || refused.Limit != most {
		t.Errorf("another one: %v", err)
	}
	second.end(time.Time{})
	if err := read(body(most)); err != nil || !large.Load() {
		t.Errorf("a small one beside it: %v", err)
	}
	first.end(time.Time{})
	third := body(largeBodyFactor*most + 1)
	if err := read(third); !errors.As(err, &refused) || !large.Load() {
		t.Errorf("one that is too large: %v", err)
	}
	if third.end(time.Time{}); large.Load() {
		t.Error("the place is not given back")
	}
}
