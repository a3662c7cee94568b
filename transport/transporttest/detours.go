package transporttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// triangle is three buses, of which a and b have no session with each other: b refuses a.
// Each of them knows that r hears the other.
type triangle struct {
	h       Harness
	a, b, r Bus
}

func newTriangle(t *testing.T, h Harness, register func(Bus)) *triangle {
	t.Helper()
	tune := func(c *transport.Config) {
		c.Relays = func(keyspace.NodeID) []keyspace.NodeID { return []keyspace.NodeID{3} }
	}
	g := &triangle{h: h, a: newBus(t, h, 1, tune), b: newBus(t, h, 2, tune), r: newBus(t, h, 3, tune)}
	h.Connect(g.a, g.b, g.r)
	h.Break(g.a, g.b)
	var up []*peerWatch
	for _, bus := range []Bus{g.a, g.b} {
		register(bus)
		up = append(up, watchPeer(bus, 3))
	}
	register(g.r)
	up = append(up, watchPeer(g.r, 1), watchPeer(g.r, 2))
	for _, bus := range []Bus{g.a, g.b, g.r} {
		if err := bus.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = bus.Close() })
	}
	for _, w := range up {
		w.await(t, func(s transport.PeerState) bool { return s.Up })
	}
	return g
}

// testDetourCall: a call goes around a broken link. Handler and caller notice nothing: who
// asks, the answer, the handler's error and the end of the caller's patience pass. What the
// relay cannot deliver certainly did not run.
func testDetourCall(t *testing.T, h Harness) {
	ended := make(chan error, 1)
	g := newTriangle(t, h, func(b Bus) {
		b.HandleSend(methodRaft, transport.ClassRaft, func(keyspace.NodeID, []byte) {})
		b.HandleCall(methodRequest, transport.ClassRequest, func(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
			switch string(payload) {
			case "fail":
				return nil, &transport.RemoteError{Code: 7, Message: "no", Detail: []byte("because")}
			case "wait":
				<-ctx.Done()
				ended <- ctx.Err()
				return nil, ctx.Err()
			}
			return fmt.Appendf(nil, "%s to %s from %s", payload, b.Self(), from), nil
		})
		if b.Self() == 3 {
			b.HandleCall(methodOther, transport.ClassRequest, echo)
		}
	})
	answer, err := g.a.Call(within(t), 2, methodRequest, []byte("hello"))
	if err != nil || string(answer) != "hello to 2 from 1" {
		t.Fatalf("%q, %v", answer, err)
	}
	var re *transport.RemoteError
	if _, err := g.a.Call(within(t), 2, methodRequest, []byte("fail")); !errors.As(err, &re) || re.Code != 7 || string(re.Detail) != "because" {
		t.Errorf("a handler's error: %v", err)
	}
	ctx, cancel := context.WithCancel(within(t))
	go func() {
		pause(ctx)
		cancel()
	}()
	if _, err := g.a.Call(ctx, 2, methodRequest, []byte("wait")); !errors.Is(err, context.Canceled) || transport.NotDelivered(err) {
		t.Errorf("a caller that gives up: %v", err)
	}
	if err := receive(t, ended); err == nil {
		t.Error("its handler goes on")
	}
	if _, err := g.a.Call(within(t), 2, methodOther, nil); !errors.Is(err, transport.ErrNoMethod) || !transport.NotDelivered(err) {
		t.Errorf("a method that only the relay has: %v", err)
	}
	if err := g.a.Send(2, methodRaft, 0, nil); !errors.Is(err, transport.ErrNoRoute) {
		t.Errorf("raft does not go around: %v", err)
	}
	if _, err := g.a.Call(within(t), 4, methodRequest, nil); !errors.Is(err, transport.ErrNoRoute) {
		t.Errorf("a node that is no peer: %v", err)
	}
	// The receiver is gone, and the relay loses its session too.
	lost := make(chan error, 1)
	go func() {
		_, err := g.a.Call(within(t), 2, methodRequest, []byte("wait"))
		lost <- err
	}()
	for ctx := within(t); ctx.Err() == nil && len(lost) == 0; pause(ctx) {
		_ = g.b.Close()
	}
	if err := receive(t, lost); err == nil || !errors.Is(err, transport.ErrUnreachable) && !errors.Is(err, transport.ErrNoRoute) && !errors.Is(err, transport.ErrClosed) {
		t.Errorf("the receiver is gone: %v", err)
	}
	down := func() bool { return !g.r.Peer(2).Up }
	for ctx := within(t); ctx.Err() == nil && !down(); pause(ctx) {
	}
	if _, err := g.a.Call(within(t), 2, methodRequest, nil); !errors.Is(err, transport.ErrNoRoute) || !transport.NotDelivered(err) {
		t.Errorf("nobody reaches it: %v", err)
	}
}

// testDetourStream: a stream goes around a broken link, with its credit, its order and its
// ends. When the link is mended the stream ends as if its session were lost, and the next
// one needs no relay.
func testDetourStream(t *testing.T, h Harness) {
	const messages, bytes = 200, 32 << 10
	handlers := make(chan error, 4)
	g := newTriangle(t, h, func(b Bus) { handleDetours(b, handlers, messages, bytes) })
	ctx := within(t)
	open := func(first string) transport.Stream {
		t.Helper()
		s, err := g.a.OpenStream(ctx, 2, methodRequest, []byte(first))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open("fill")
	for i := range messages {
		p, err := s.Recv(ctx)
		if err != nil || len(p) != bytes || p[0] != byte(i) {
			t.Fatalf("message %d: %d bytes, %v", i, len(p), err)
		}
	}
	if _, err := s.Recv(ctx); !errors.Is(err, io.EOF) {
		t.Errorf("the end: %v", err)
	}
	s.Close(nil)
	if err := receive(t, handlers); err != nil {
		t.Error(err)
	}
	var re *transport.RemoteError
	s = open("fail")
	if _, err := s.Recv(ctx); !errors.As(err, &re) || re.Code != 9 {
		t.Errorf("the handler's error: %v", err)
	}
	s.Close(nil)
	_ = receive(t, handlers)
	s = open("echo")
	if err := s.Send(ctx, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if p, err := s.Recv(ctx); err != nil || string(p) != "x" {
		t.Errorf("%q, %v", p, err)
	}
	s.Close(nil)
	if err := receive(t, handlers); err != nil {
		t.Errorf("the opener has closed: %v", err)
	}
	testDetourMended(t, g, open, handlers)
}

// testDetourMended mends the link of a triangle.
func testDetourMended(t *testing.T, g *triangle, open func(string) transport.Stream, handlers <-chan error) {
	t.Helper()
	ctx := within(t)
	s := open("echo")
	g.h.Mend(g.a, g.b)
	if _, err := s.Recv(ctx); !errors.Is(err, transport.ErrUnreachable) {
		t.Errorf("the direct way is open again: %v", err)
	}
	s.Close(nil)
	_ = receive(t, handlers)
	_ = g.r.Close()
	s = open("echo")
	if err := s.Send(ctx, []byte("y")); err != nil {
		t.Fatal(err)
	}
	if p, err := s.Recv(ctx); err != nil || string(p) != "y" {
		t.Errorf("directly: %q, %v", p, err)
	}
	s.Close(nil)
	_ = receive(t, handlers)
}

// handleDetours serves the streams of testDetourStream.
func handleDetours(b Bus, handlers chan<- error, messages, bytes int) {
	b.HandleStream(methodRequest, transport.ClassRequest, func(ctx context.Context, from keyspace.NodeID, first []byte, s transport.Stream) (err error) {
		defer func() { handlers <- err }()
		if b.Self() != 2 || from != 1 {
			return fmt.Errorf("at %s from %s", b.Self(), from)
		}
		switch string(first) {
		case "fail":
			return &transport.RemoteError{Code: 9, Message: "no"}
		case "fill":
			for i := range messages {
				p := make([]byte, bytes)
				p[0] = byte(i)
				if err := s.Send(ctx, p); err != nil {
					return err
				}
			}
			return nil
		}
		for {
			p, err := s.Recv(ctx)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err == nil {
				err = s.Send(ctx, p)
			}
			if err != nil {
				return err
			}
		}
	})
}

// endings are what the handlers of streams that end have to say.
type endings struct {
	t *testing.T
	// sent is how many messages a handler has sent, ends what it got and then saw.
	sent chan int
	ends chan ending
}

type ending struct {
	got int
	err error
}

const (
	endMessages = 55 // of endBytes: more than the relay and one window hold together
	endBytes    = 32 << 10
)

// patient sends until nothing moves any more.
func patient(ctx context.Context, s transport.Stream) (n int) {
	for ; n < endMessages; n++ {
		c, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		err := s.Send(c, make([]byte, endBytes))
		cancel()
		if err != nil {
			break
		}
	}
	return n
}

func (o *endings) drain(s transport.Stream) (e ending) {
	for {
		if _, e.err = s.Recv(within(o.t)); e.err != nil {
			return e
		}
		e.got++
	}
}

func (o *endings) register(b Bus) {
	b.HandleStream(methodRequest, transport.ClassRequest, func(ctx context.Context, _ keyspace.NodeID, first []byte, s transport.Stream) error {
		switch string(first) {
		case "send", "fail":
			o.sent <- patient(ctx, s)
			if string(first) == "fail" {
				return &transport.RemoteError{Code: 9, Message: "no"}
			}
		case "late":
			for c, i := within(o.t), 0; i < 100; i++ {
				pause(c)
			}
			o.ends <- o.drain(s)
		case "wait":
			o.sent <- 0
			o.ends <- o.drain(s)
		}
		return nil
	})
}

func (o *endings) open(g *triangle, first string) transport.Stream {
	o.t.Helper()
	s, err := g.a.OpenStream(within(o.t), 2, methodRequest, []byte(first))
	if err != nil {
		o.t.Fatal(err)
	}
	return s
}

// testDetourEnds: whatever ends a stream that goes around, each side gets all that the other one
// has sent before its end, and how it has ended.
func testDetourEnds(t *testing.T, h Harness) {
	o := &endings{t: t, sent: make(chan int, 1), ends: make(chan ending, 1)}
	g := newTriangle(t, h, o.register)
	for _, first := range []string{"send", "fail"} {
		s := o.open(g, first)
		n := receive(t, o.sent)
		_ = s.Send(within(t), []byte("nobody reads it"))
		for c, i := within(t), 0; i < 20; i++ {
			pause(c)
		}
		var re *transport.RemoteError
		if e := o.drain(s); e.got != n || errors.Is(e.err, io.EOF) != (first == "send") || errors.As(e.err, &re) != (first == "fail") {
			t.Errorf("%s: the handler sent %d messages, %d came, then %v", first, n, e.got, e.err)
		}
		s.Close(nil)
	}
	s := o.open(g, "late")
	n := patient(within(t), s)
	s.Close(nil)
	if e := receive(t, o.ends); e.got != n || !errors.Is(e.err, io.EOF) {
		t.Errorf("the opener sent %d messages and closed; the handler got %d, then %v", n, e.got, e.err)
	}
	s = o.open(g, "wait")
	receive(t, o.sent)
	g.a.RemovePeer(2)
	if _, err := s.Recv(within(t)); !errors.Is(err, transport.ErrNoRoute) {
		t.Errorf("the receiver is removed: %v", err)
	}
	s.Close(nil)
	receive(t, o.ends)
}

// testDetourLost: a lost side, or a lost relay, is no clean end of a stream.
func testDetourLost(t *testing.T, h Harness) {
	o := &endings{t: t, sent: make(chan int, 1), ends: make(chan ending, 1)}
	g := newTriangle(t, h, o.register)
	o.open(g, "wait")
	receive(t, o.sent)
	_ = g.a.Close()
	if e := receive(t, o.ends); e.err == nil || errors.Is(e.err, io.EOF) {
		t.Errorf("the opener's session is lost, and the handler sees %v", e.err)
	}
	g.close()
	g = newTriangle(t, h, o.register)
	s := o.open(g, "wait")
	receive(t, o.sent)
	_ = g.r.Close()
	if _, err := s.Recv(within(t)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the relay is closed, and the opener sees %v", err)
	}
	if e := receive(t, o.ends); e.err == nil || errors.Is(e.err, io.EOF) {
		t.Errorf("the relay is closed, and the handler sees %v", e.err)
	}
}

// close closes the buses, so that the nodes can be made again.
func (g *triangle) close() {
	for _, b := range []Bus{g.a, g.b, g.r} {
		_ = b.Close()
	}
}
