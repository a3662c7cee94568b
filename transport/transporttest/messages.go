package transporttest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// testSendOrder: messages of one (peer, class, order) arrive in order and once. With
// room in the queues and a standing session all arrive. (Trap 47.)
func testSendOrder(t *testing.T, h Harness) {
	const keys, perKey = 7, 300
	var mu sync.Mutex
	next := map[string]uint64{}
	bad := make(chan string, 1)
	done := make(chan struct{})
	arrived := 0
	register := func(b Bus) {
		for _, c := range classes {
			b.HandleSend(c.method, c.class, func(from keyspace.NodeID, payload []byte) {
				mu.Lock()
				defer mu.Unlock()
				key := fmt.Sprintf("%s %s %s %d", b.Self(), from, c.class, binary.BigEndian.Uint64(payload))
				if got := binary.BigEndian.Uint64(payload[8:]); got != next[key] {
					select {
					case bad <- fmt.Sprintf("%s: message %d, want %d", key, got, next[key]):
					default:
					}
				}
				next[key]++
				if arrived++; arrived == 2*len(classes)*keys*perKey {
					close(done)
				}
			})
		}
	}
	p := newPair(t, h, nil, register)
	for i := range uint64(perKey) {
		for key := range uint64(keys) {
			for _, c := range classes {
				for _, to := range []keyspace.NodeID{p.a.Self(), p.b.Self()} {
					payload := binary.BigEndian.AppendUint64(nil, key)
					payload = binary.BigEndian.AppendUint64(payload, i)
					if err := p.a.Send(to, c.method, key, payload); err != nil {
						t.Fatalf("send %d: %v", i, err)
					}
				}
			}
		}
	}
	receive(t, done)
	select {
	case s := <-bad:
		t.Error(s)
	default:
	}
}

func echo(_ context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
	return fmt.Appendf(nil, "%s:%s", from, payload), nil
}

func testCall(t *testing.T, h Harness) {
	p := newPair(t, h, nil, func(b Bus) {
		for _, c := range classes {
			b.HandleCall(c.method, c.class, echo)
		}
	})
	for _, to := range []Bus{p.a, p.b} {
		for _, c := range classes {
			got, err := p.a.Call(within(t), to.Self(), c.method, []byte("hi"))
			if err != nil || string(got) != "1:hi" {
				t.Errorf("call to %s by %s: %q, %v", to.Self(), c.class, got, err)
			}
		}
	}
	if got, err := p.b.Call(within(t), 1, methodRequest, nil); err != nil || string(got) != "2:" {
		t.Errorf("call back: %q, %v", got, err)
	}
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			want := fmt.Sprintf("1:%d", i)
			got, err := p.a.Call(within(t), 2, methodRequest, fmt.Append(nil, i))
			if err != nil || string(got) != want {
				t.Errorf("call %d: %q, %v", i, got, err)
			}
		})
	}
	wg.Wait()
}

func testCallOutOfOrder(t *testing.T, h Harness) {
	release := make(chan struct{})
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, func(_ context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
			if string(payload) == "slow" {
				<-release
			}
			return payload, nil
		})
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		slow := make(chan error, 1)
		go func() {
			_, err := p.a.Call(within(t), to, methodRequest, []byte("slow"))
			slow <- err
		}()
		for range 20 {
			if _, err := p.a.Call(within(t), to, methodRequest, []byte("fast")); err != nil {
				t.Fatal(err)
			}
		}
		release <- struct{}{}
		if err := receive(t, slow); err != nil {
			t.Error(err)
		}
	}
}

func testRemoteError(t *testing.T, h Harness) {
	want := &transport.RemoteError{Code: 7, Message: "no such thing", Detail: []byte{1, 0, 2}}
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, func(_ context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
			if string(payload) == "typed" {
				return nil, fmt.Errorf("wrapped: %w", want)
			}
			return nil, errors.New("plain")
		})
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		_, err := p.a.Call(within(t), to, methodRequest, []byte("typed"))
		re, ok := errors.AsType[*transport.RemoteError](err)
		if !ok || re.Code != want.Code || re.Message != want.Message || string(re.Detail) != string(want.Detail) {
			t.Errorf("to %s: %#v", to, err)
		}
		if transport.NotDelivered(err) {
			t.Errorf("to %s: a handler's error counts as not delivered", to)
		}
		_, err = p.a.Call(within(t), to, methodRequest, nil)
		re, ok = errors.AsType[*transport.RemoteError](err)
		if !ok || re.Code != 0 || re.Message != "plain" {
			t.Errorf("to %s: %#v", to, err)
		}
	}
}

// waiting is a handler that waits for its context to end and reports it.
func waiting(started chan<- bool, ended chan<- error) transport.CallHandler {
	return func(ctx context.Context, _ keyspace.NodeID, _ []byte) ([]byte, error) {
		_, hasDeadline := ctx.Deadline()
		started <- hasDeadline
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}
}

func testDeadline(t *testing.T, h Harness) {
	started, ended := make(chan bool, 1), make(chan error, 1)
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, waiting(started, ended))
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		ctx, cancel := context.WithTimeout(context.Background(), patience/100)
		_, err := p.a.Call(ctx, to, methodRequest, nil)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || transport.NotDelivered(err) {
			t.Errorf("to %s: %v", to, err)
		}
		if !receive(t, started) {
			t.Errorf("to %s: the handler has no deadline", to)
		}
		if err := receive(t, ended); err == nil {
			t.Errorf("to %s: the handler's context did not end", to)
		}
		ctx, cancel = context.WithTimeout(context.Background(), 0)
		_, err = p.a.Call(ctx, to, methodRequest, nil)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || !transport.NotDelivered(err) {
			t.Errorf("to %s after its deadline: %v", to, err)
		}
	}
}

func testCancel(t *testing.T, h Harness) {
	started, ended := make(chan bool, 1), make(chan error, 1)
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, waiting(started, ended))
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		ctx, cancel := context.WithCancel(within(t))
		result := make(chan error, 1)
		go func() {
			_, err := p.a.Call(ctx, to, methodRequest, nil)
			result <- err
		}()
		receive(t, started)
		cancel()
		if err := receive(t, result); !errors.Is(err, context.Canceled) || transport.NotDelivered(err) {
			t.Errorf("to %s: %v", to, err)
		}
		if err := receive(t, ended); !errors.Is(err, context.Canceled) {
			t.Errorf("to %s: handler: %v", to, err)
		}
	}
}

func testRefusals(t *testing.T, h Harness) {
	const limit = 1 << 20
	tune := func(c *transport.Config) { c.MaxMessageBytes = limit }
	p := newPair(t, h, tune, func(b Bus) {
		b.HandleSend(methodRaft, transport.ClassRaft, func(keyspace.NodeID, []byte) {})
		b.HandleCall(methodRequest, transport.ClassRequest, func(context.Context, keyspace.NodeID, []byte) ([]byte, error) {
			return make([]byte, limit+1), nil
		})
	})
	for _, test := range []struct {
		name string
		to   keyspace.NodeID
		m    transport.Method
		size int
		want error
	}{
		{"unknown node", 77, methodRequest, 0, transport.ErrNoRoute},
		{"method without handler", 2, transport.MethodNodeAdmin, 0, transport.ErrNoMethod},
		{"own method without handler", 1, transport.MethodNodeAdmin, 0, transport.ErrNoMethod},
		{"unknown method", 2, 0xefff, 0, transport.ErrNoMethod},
		{"too large", 2, methodRequest, limit + 1, transport.ErrTooLarge},
		{"too large to self", 1, methodRequest, limit + 1, transport.ErrTooLarge},
	} {
		_, err := p.a.Call(within(t), test.to, test.m, make([]byte, test.size))
		if !errors.Is(err, test.want) || !transport.NotDelivered(err) {
			t.Errorf("%s: %v", test.name, err)
		}
	}
	for _, to := range []keyspace.NodeID{1, 2} {
		if _, err := p.a.Call(within(t), to, methodRequest, nil); !errors.Is(err, transport.ErrTooLarge) || transport.NotDelivered(err) {
			t.Errorf("answer too large from %s: %v", to, err)
		}
		if err := p.a.Send(to, methodRaft, 0, make([]byte, limit+1)); !errors.Is(err, transport.ErrTooLarge) {
			t.Errorf("send too large to %s: %v", to, err)
		}
	}
	if err := p.a.Send(77, methodRaft, 0, nil); !errors.Is(err, transport.ErrNoRoute) {
		t.Errorf("send to an unknown node: %v", err)
	}
	for _, to := range []keyspace.NodeID{1, 2} {
		s, err := p.a.OpenStream(within(t), to, transport.MethodPlacementFeed, nil)
		if err == nil {
			_, err = s.Recv(within(t))
			s.Close(nil)
		}
		if !errors.Is(err, transport.ErrNoMethod) || !transport.NotDelivered(err) {
			t.Errorf("stream without handler to %s: %v", to, err)
		}
	}
}

// testBusy: calls beyond a method's MaxHandlers get ErrPeerBusy, and other methods go
// on.
func testBusy(t *testing.T, h Harness) {
	release := make(chan struct{})
	started := make(chan bool, 8)
	tune := func(c *transport.Config) { c.MaxHandlers = 2 }
	p := newPair(t, h, tune, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, func(context.Context, keyspace.NodeID, []byte) ([]byte, error) {
			started <- true
			<-release
			return nil, nil
		})
		b.HandleCall(methodOther, transport.ClassRequest, func(context.Context, keyspace.NodeID, []byte) ([]byte, error) {
			return nil, nil
		})
	})
	for _, to := range []keyspace.NodeID{1, 2} {
		results := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := p.a.Call(within(t), to, methodRequest, nil)
				results <- err
			}()
			receive(t, started)
		}
		_, err := p.a.Call(within(t), to, methodRequest, nil)
		if !errors.Is(err, transport.ErrPeerBusy) || !transport.NotDelivered(err) {
			t.Errorf("third call to %s: %v", to, err)
		}
		if _, err := p.a.Call(within(t), to, methodOther, nil); err != nil {
			t.Errorf("call of another method to %s: %v", to, err)
		}
		for range 2 {
			release <- struct{}{}
			if err := receive(t, results); err != nil {
				t.Error(err)
			}
		}
	}
}

func testLarge(t *testing.T, h Harness) {
	got := make(chan int, 1)
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, func(_ context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
			return payload, nil
		})
		b.HandleSend(methodRaft, transport.ClassRaft, func(_ keyspace.NodeID, payload []byte) { got <- len(payload) })
	})
	for _, size := range []int{1, 60 << 10, 64 << 10, 65 << 10, 200 << 10, 5 << 20} {
		want := strings.Repeat("x", size)
		answer, err := p.a.Call(within(t), 2, methodRequest, []byte(want))
		if err != nil || string(answer) != want {
			t.Errorf("call of %d bytes: %d bytes, %v", size, len(answer), err)
		}
		if err := p.a.Send(2, methodRaft, 0, []byte(want)); err != nil {
			t.Errorf("send of %d bytes: %v", size, err)
		} else if n := receive(t, got); n != size {
			t.Errorf("sent %d bytes, %d arrived", size, n)
		}
	}
}
