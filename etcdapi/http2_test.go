package etcdapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/internal/ports"
)

// askGateway asks the JSON gateway for a key, and returns the answer without its body.
func askGateway(ctx context.Context, c *http.Client, address string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, address+"/v3/kv/range", strings.NewReader(`{"key":"aw=="}`))
	if err != nil {
		return nil, err
	}
	a, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(io.Discard, a.Body)
	return a, errors.Join(err, a.Body.Close())
}

// One address serves gRPC and HTTP by both of its versions, with TLS and without. A client that has the choice gets HTTP/2.
func TestHTTP2BesideGRPC(t *testing.T) {
	p := newPKI(t)
	free, err := ports.Unused(1)
	must(t, err)
	host := fmt.Sprintf("127.0.0.1:%d", free[0])
	serveAt(t, p, []url.URL{{Scheme: "https", Host: host}, {Scheme: "http", Host: host}}, nil)
	for _, c := range []struct {
		scheme string
		set    func(*http.Protocols)
		major  int
	}{
		{"http", byHTTP1, 1},
		{"http", byPlainHTTP2, 2},
		{"https", byHTTP1, 1},
		{"https", byHTTP2, 2},
		{"https", func(p *http.Protocols) { p.SetHTTP1(true); p.SetHTTP2(true) }, 2},
	} {
		client, at := browser(t, p, c.set), c.scheme+"://"+host
		var all sync.WaitGroup
		for range 8 { // on one connection by HTTP/2
			all.Go(func() {
				for range 4 {
					a, err := askGateway(t.Context(), client, at)
					if err != nil || a.StatusCode != http.StatusOK || a.ProtoMajor != c.major {
						t.Errorf("%s by HTTP/%d: %+v, %v", at, c.major, a, err)
					}
				}
			})
		}
		all.Wait()
		if a := mustGet(t, client, at+"/version"); a.StatusCode != http.StatusOK || a.ProtoMajor != c.major {
			t.Errorf("%s by HTTP/%d: %s by %s", at, c.major, a.Status, a.Proto)
		}
	}
	for _, scheme := range []string{"http", "https"} {
		cfg := clientv3.Config{Endpoints: []string{scheme + "://" + host}}
		if scheme == "https" {
			cfg.TLS = &tls.Config{RootCAs: p.pool}
		}
		client, err := clientv3.New(cfg)
		must(t, err)
		if _, err := client.Get(t.Context(), "k"); err != nil {
			t.Errorf("%s: %v", scheme, err)
		}
		must(t, client.Close())
	}
}

// readAhead reads a connection ahead, as the kernel does for a socket and a pipe does not.
type readAhead struct {
	net.Conn
	came chan []byte
	rest []byte
}

// Close skips the farewell of TLS, for which a pipe has no room.
func (r *readAhead) Close() error {
	if t, ok := r.Conn.(*tls.Conn); ok {
		return t.NetConn().Close()
	}
	return r.Conn.Close()
}

func newReadAhead(c net.Conn) *readAhead {
	r := &readAhead{Conn: c, came: make(chan []byte, 1024)}
	go func() {
		defer close(r.came)
		for {
			b := make([]byte, 4096)
			n, err := c.Read(b)
			if err != nil {
				return
			}
			r.came <- b[:n]
		}
	}()
	return r
}

func (r *readAhead) Read(b []byte) (int, error) {
	if len(r.rest) == 0 {
		var ok bool
		if r.rest, ok = <-r.came; !ok {
			return 0, io.EOF
		}
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// A client that connects ahead, and sends its first request long after, is served: one of gRPC, and a browser, which has offered
// HTTP/1.1 too.
func TestAConnectionAheadOfItsFirstRequest(t *testing.T) {
	for _, idle := range []time.Duration{0, sniffTimeout - time.Second, sniffTimeout + time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			r := newCertifiedRig(t)
			defer r.stop()
			c := r.ahead("h2")
			defer c.conn.Close()
			time.Sleep(idle)
			if status := c.unary("/etcdserverpb.KV/Range", &pb.RangeRequest{Key: []byte("k")}); status != "0" {
				t.Errorf("gRPC behind %v: status %q", idle, status)
			}
			c = r.ahead("h2", "http/1.1")
			defer c.conn.Close()
			time.Sleep(idle)
			if status := c.get("/version"); status != "200" {
				t.Errorf("HTTP behind %v: status %q", idle, status)
			}
		})
	}
}

// A connection of gRPC that went to HTTP, because its client offered HTTP/1.1 too and was silent, is given up at the first call. The
// next one has a new connection.
func TestGRPCOnAConnectionOfHTTP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newCertifiedRig(t)
		defer r.stop()
		var dialed atomic.Int64
		dial := func(context.Context, string) (net.Conn, error) {
			dialed.Add(1)
			c, err := r.connect(r.clients, "h2", "http/1.1")
			return newReadAhead(c), err
		}
		conn, err := grpc.NewClient("passthrough:///h", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
		must(t, err)
		defer conn.Close()
		ask := func() error {
			_, err := pb.NewKVClient(conn).Range(t.Context(), &pb.RangeRequest{Key: []byte("k")})
			return err
		}
		conn.Connect()
		time.Sleep(sniffTimeout + time.Second)
		if err := ask(); status.Code(err) != codes.Unavailable {
			t.Errorf("a call on a connection that went to HTTP: %v, want Unavailable, so that it is tried again", err)
		}
		synctest.Wait() // the client learns that the connection is given up
		for range 2 {
			if err := ask(); err != nil {
				t.Errorf("the next call: %v", err)
			}
		}
		if n := dialed.Load(); n != 2 {
			t.Errorf("%d connections, want 2", n)
		}
	})
}

// ahead connects a client that offers these protocols, up to where it could send a request.
func (r *certifiedRig) ahead(protos ...string) *rawClient {
	r.t.Helper()
	conn, err := r.connect(r.clients, protos...)
	must(r.t, err)
	ahead := newReadAhead(conn)
	c := &rawClient{t: r.t, conn: ahead, framer: http2.NewFramer(ahead, ahead)}
	_, err = io.WriteString(ahead, preface)
	must(r.t, err)
	must(r.t, c.framer.WriteSettings())
	// gRPC clients wait for the server's settings, and answer them.
	if _, ok := c.next(func(http2.Frame) bool { return true }).(*http2.SettingsFrame); !ok {
		r.t.Fatal("the server does not begin with its settings")
	}
	must(r.t, c.framer.WriteSettingsAck())
	return c
}

// get asks for a page by HTTP/2, and returns the status. It is empty where the connection or the stream was ended instead.
func (c *rawClient) get(path string) (status string) {
	c.t.Helper()
	block := headerBlock(c.t, ":method", "GET", ":scheme", "https", ":path", path, ":authority", "h")
	c.must(c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block, EndHeaders: true, EndStream: true}))
	dec := hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		if f.Name == ":status" {
			status = f.Value
		}
	})
	c.next(func(f http2.Frame) bool {
		switch f := f.(type) {
		case *http2.HeadersFrame:
			_, err := dec.Write(f.HeaderBlockFragment())
			c.must(err)
			return true
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			return true
		}
		return false
	})
	return status
}

// A request's content type says what it is. Without a request it is what is said otherwise.
func TestFirstIsGRPC(t *testing.T) {
	request := func(fields ...string) string {
		var b strings.Builder
		c := &rawClient{t: t, framer: http2.NewFramer(&b, nil)}
		must(t, c.framer.WriteSettings())
		must(t, c.framer.WriteWindowUpdate(0, 1<<20))
		must(t, c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headerBlock(t, fields...), EndHeaders: true}))
		return b.String()
	}
	for _, otherwise := range []bool{true, false} {
		for _, said := range []string{
			"", emptySettings, "GET / HTTP/1.1\r\n", emptySettings + "\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678",
			strings.Repeat(emptySettings, firstRequestBytes),
		} {
			if got := firstIsGRPC(strings.NewReader(said), otherwise); got != otherwise {
				t.Errorf("%.80q: gRPC %t", said, got)
			}
		}
	}
	for _, c := range []struct {
		said string
		grpc bool
	}{
		{request(":method", "POST", "content-type", "application/grpc"), true},
		{request(":method", "POST", "content-type", "application/grpc+proto"), true},
		{request(":method", "POST", "content-type", "application/grpc-web"), false},
		{request(":method", "POST", "content-type", "application/json"), false},
		{request(":method", "GET"), false},
	} {
		for _, r := range []io.Reader{strings.NewReader(c.said), iotest.OneByteReader(strings.NewReader(c.said))} {
			if got := firstIsGRPC(r, !c.grpc); got != c.grpc {
				t.Errorf("%.80q: gRPC %t", c.said, got)
			}
		}
	}
}

// The server reads everything but the first answer to settings, however it comes.
func TestWithoutAck(t *testing.T) {
	data := "\x00\x00\x05\x00\x00\x00\x00\x00\x01hello"
	for said, want := range map[string]string{
		preface + emptySettings + settingsAck + data + settingsAck:                          preface + emptySettings + data + settingsAck,
		preface + emptySettings + data + settingsAck:                                        preface + emptySettings + data,
		preface + emptySettings + data:                                                      preface + emptySettings + data,
		preface + "\x00\x00\x09\x00\x00\x00\x00\x00\x01" + settingsAck + settingsAck + data: preface + "\x00\x00\x09\x00\x00\x00\x00\x00\x01" + settingsAck + data,
	} {
		for _, r := range []io.Reader{strings.NewReader(said), iotest.OneByteReader(strings.NewReader(said))} {
			got, err := io.ReadAll(&withoutAck{Conn: scripted{Reader: r}, pass: len(preface)})
			if err != nil || string(got) != want {
				t.Errorf("of %q it reads %q, %v", said, got, err)
			}
		}
	}
}

// headerBlock encodes names and values by turns.
func headerBlock(t *testing.T, fields ...string) []byte {
	t.Helper()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for i := 0; i < len(fields); i += 2 {
		must(t, enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
	}
	return block.Bytes()
}
