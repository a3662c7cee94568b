package etcdapi

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"
)

// rawClient speaks HTTP/2 frame by frame, for what a gRPC client does not do.
type rawClient struct {
	t      *testing.T
	conn   net.Conn
	framer *http2.Framer
}

func newRawClient(t *testing.T, addr string) *rawClient {
	t.Helper()
	c := &rawClient{t: t, conn: dial(t, addr)}
	c.framer = http2.NewFramer(c.conn, c.conn)
	_, err := io.WriteString(c.conn, http2.ClientPreface)
	c.must(err)
	c.must(c.framer.WriteSettings())
	return c
}

func (c *rawClient) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// watchHealth opens a stream that stays open, and returns once it has an answer.
func (c *rawClient) watchHealth() {
	c.t.Helper()
	c.must(c.askHealth())
	c.next(func(f http2.Frame) bool { _, ok := f.(*http2.DataFrame); return ok })
}

// askHealth opens a stream that stays open.
func (c *rawClient) askHealth() error {
	c.t.Helper()
	block := headerBlock(c.t, ":method", "POST", ":scheme", "http", ":path", "/grpc.health.v1.Health/Watch", ":authority", "h",
		"content-type", "application/grpc", "te", "trailers")
	if err := c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block, EndHeaders: true}); err != nil {
		return err
	}
	return c.framer.WriteData(1, true, make([]byte, 5)) // one empty message
}

// next returns the first frame for which is returns true, or nil if the connection ends before.
func (c *rawClient) next(is func(http2.Frame) bool) http2.Frame {
	c.t.Helper()
	for {
		f, err := c.framer.ReadFrame()
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return nil
		}
		c.must(err)
		if is(f) {
			return f
		}
	}
}

// ping sends n pings one after another and says whether all are answered.
func (c *rawClient) ping(n int) bool {
	c.t.Helper()
	for range n {
		if c.framer.WritePing(false, [8]byte{}) != nil {
			return false
		}
		f := c.next(func(f http2.Frame) bool {
			switch f := f.(type) {
			case *http2.PingFrame:
				return f.IsAck()
			case *http2.GoAwayFrame:
				return true
			}
			return false
		})
		if _, ok := f.(*http2.PingFrame); !ok {
			return false
		}
	}
	return true
}

// TestKeepAlive: a client that pings too often is disconnected, and so is a silent one that answers
// no pings.
func TestKeepAlive(t *testing.T) {
	for minTime, want := range map[time.Duration]bool{time.Nanosecond: true, time.Hour: false} {
		r := newRig(t, "http", func(o *Options) { o.KeepAliveMinTime = minTime })
		c := newRawClient(t, r.addr())
		c.watchHealth()
		if got := c.ping(10); got != want {
			t.Errorf("pings at once with a least time of %v between them: served on %v, want %v", minTime, got, want)
		}
	}
	// gRPC takes at least one second. A client with a timeout of a millisecond may be cut off
	// before its ping is sent; another client shows that there is a ping.
	dial := func(timeout time.Duration) *rawClient {
		r := newRig(t, "http", func(o *Options) { o.KeepAliveInterval, o.KeepAliveTimeout = time.Second, timeout })
		return newRawClient(t, r.addr())
	}
	pinged := func(f http2.Frame) bool { p, ok := f.(*http2.PingFrame); return ok && !p.IsAck() }
	patient, strict := dial(time.Hour), dial(time.Millisecond)
	patient.watchHealth()  // a connection without a call is not gRPC's yet
	_ = strict.askHealth() // it may be cut off meanwhile
	if patient.next(pinged) == nil {
		t.Error("a silent client is not pinged")
	}
	if strict.next(pinged) != nil {
		if f := strict.next(pinged); f != nil {
			t.Errorf("a client that does not answer is not cut off but pinged again: %v", f)
		}
	}
}
