package transporttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// echoStream sends back every message until the other side closes.
func echoStream(ctx context.Context, _ keyspace.NodeID, first []byte, s transport.Stream) error {
	for msg := first; ; {
		if err := s.Send(ctx, append([]byte("re:"), msg...)); err != nil {
			return err
		}
		var err error
		if msg, err = s.Recv(ctx); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

func testStream(t *testing.T, h Harness) {
	p := newPair(t, h, nil, func(b Bus) {
		for _, c := range classes {
			b.HandleStream(c.method, c.class, echoStream)
		}
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		for _, c := range classes {
			s, err := p.a.OpenStream(within(t), to, c.method, []byte("0"))
			if err != nil {
				t.Fatal(err)
			}
			for i := range 50 {
				got, err := s.Recv(within(t))
				if want := fmt.Sprintf("re:%d", i); err != nil || string(got) != want {
					t.Fatalf("to %s by %s: %q, %v", to, c.class, got, err)
				}
				if err := s.Send(within(t), fmt.Append(nil, i+1)); err != nil {
					t.Fatal(err)
				}
			}
			s.Close(nil)
			if err := s.Send(within(t), nil); !errors.Is(err, transport.ErrStreamClosed) {
				t.Errorf("send after close: %v", err)
			}
		}
	}
}

// testStreamEnds: messages sent before an end arrive before it, in both directions.
func testStreamEnds(t *testing.T, h Harness) {
	result := make(chan string, 1)
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleStream(methodBulk, transport.ClassBulk, func(ctx context.Context, _ keyspace.NodeID, first []byte, s transport.Stream) error {
			switch string(first) {
			case "ok", "fail":
				for range 10 {
					if err := s.Send(ctx, []byte("m")); err != nil {
						return err
					}
				}
				if string(first) == "fail" {
					return &transport.RemoteError{Code: 9, Message: "failed"}
				}
				return nil
			}
			n := 0
			for {
				if _, err := s.Recv(ctx); err != nil {
					result <- fmt.Sprintf("%d %v", n, err)
					return nil
				}
				n++
			}
		})
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		for _, first := range []string{"ok", "fail"} {
			s, err := p.a.OpenStream(within(t), to, methodBulk, []byte(first))
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for ; err == nil; n++ {
				_, err = s.Recv(within(t))
			}
			re, isRemote := errors.AsType[*transport.RemoteError](err)
			if n != 11 || first == "ok" && !errors.Is(err, io.EOF) || first == "fail" && (!isRemote || re.Code != 9) {
				t.Errorf("%s from %s: %d messages, then %v", first, to, n-1, err)
			}
			if err := s.Send(within(t), nil); err == nil {
				t.Errorf("send to an ended stream succeeds")
			}
			s.Close(nil)
		}
		for _, end := range []error{nil, errors.New("given up")} {
			s, err := p.a.OpenStream(within(t), to, methodBulk, nil)
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				if err := s.Send(within(t), []byte("m")); err != nil {
					t.Fatal(err)
				}
			}
			s.Close(end)
			want := "10 EOF"
			if end != nil {
				want = "10 given up"
			}
			if got := receive(t, result); got != want {
				t.Errorf("handler at %s got %q, want %q", to, got, want)
			}
		}
	}
}

// testStreamCredit: an unread stream stops its writer and delays nobody else.
func testStreamCredit(t *testing.T, h Harness) {
	const window = 64 << 10
	read := make(chan struct{})
	total := make(chan int, 1)
	tune := func(c *transport.Config) { c.StreamWindowBytes = window }
	p := newPair(t, h, tune, func(b Bus) {
		b.HandleStream(methodRequest, transport.ClassRequest, func(ctx context.Context, _ keyspace.NodeID, first []byte, s transport.Stream) error {
			if string(first) == "echo" {
				return echoStream(ctx, 0, first, s)
			}
			<-read
			n := 0
			for {
				if _, err := s.Recv(ctx); err != nil {
					total <- n
					return nil
				}
				n++
			}
		})
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		slow, err := p.a.OpenStream(within(t), to, methodRequest, []byte("slow"))
		if err != nil {
			t.Fatal(err)
		}
		sent := 0
		for ; ; sent++ {
			ctx, cancel := context.WithTimeout(context.Background(), patience/100)
			err := slow.Send(ctx, make([]byte, 1000))
			cancel()
			if err != nil {
				break
			}
			if sent > 4*window/1000 {
				t.Fatalf("to %s: %d messages fit a window of %d bytes", to, sent, window)
			}
		}
		quick, err := p.a.OpenStream(within(t), to, methodRequest, []byte("echo"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := quick.Recv(within(t)); err != nil {
			t.Errorf("to %s beside a slow stream: %v", to, err)
		}
		quick.Close(nil)
		read <- struct{}{}
		for range 500 {
			if err := slow.Send(within(t), make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		slow.Close(nil)
		if n := receive(t, total); n != sent+500 {
			t.Errorf("to %s: %d messages of %d arrived", to, n, sent+500)
		}
	}
}

// testStreamHandlerContext: the end of a stream ends its handler's context, after the
// handler has read the messages sent before.
func testStreamHandlerContext(t *testing.T, h Harness) {
	ended := make(chan error, 1)
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleStream(methodRequest, transport.ClassRequest, func(ctx context.Context, _ keyspace.NodeID, _ []byte, s transport.Stream) error {
			if err := s.Send(ctx, []byte("ready")); err != nil {
				return err
			}
			<-ctx.Done()
			ended <- ctx.Err()
			return nil
		})
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		for _, end := range []error{nil, errors.New("enough")} {
			s, err := p.a.OpenStream(within(t), to, methodRequest, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Recv(within(t)); err != nil {
				t.Fatal(err)
			}
			s.Close(end)
			if err := receive(t, ended); err == nil {
				t.Errorf("at %s: no error", to)
			}
		}
	}
}
