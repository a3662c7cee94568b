package transporttest

import (
	"context"
	"errors"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// testSlowReceiver: a receiver that reads no raft data costs its sender no more than
// the byte budget, and control and requests pass. (Trap 48.)
func testSlowReceiver(t *testing.T, h Harness) {
	release := make(chan struct{})
	control := make(chan struct{}, 1)
	tune := func(c *transport.Config) { c.QueueBytes = 1 << 20 }
	p := newPair(t, h, tune, func(b Bus) {
		b.HandleSend(methodRaft, transport.ClassRaft, func(keyspace.NodeID, []byte) { <-release })
		b.HandleSend(methodControl, transport.ClassControl, func(keyspace.NodeID, []byte) { control <- struct{}{} })
		b.HandleCall(methodRequest, transport.ClassRequest, echo)
	})
	defer close(release)
	full := false
	payload := make([]byte, 16<<10)
	// The network's own buffers are bounded too.
	for sent := 0; sent < 64<<20 && !full; sent += len(payload) {
		err := p.a.Send(2, methodRaft, uint64(sent), payload)
		if full = errors.Is(err, transport.ErrQueueFull); err != nil && !full {
			t.Fatal(err)
		}
		if !full && sent%(1<<20) == 0 {
			pause(within(t))
		}
	}
	if !full {
		t.Fatal("the queue of a receiver that reads nothing never fills")
	}
	for range 10 {
		if err := p.a.Send(2, methodControl, 0, nil); err != nil {
			t.Fatal(err)
		}
		receive(t, control)
		if _, err := p.a.Call(within(t), 2, methodRequest, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// testQueueFull: a node's messages to itself have the same bound.
func testQueueFull(t *testing.T, h Harness) {
	release := make(chan struct{})
	tune := func(c *transport.Config) { c.QueueBytes = 64 << 10 }
	p := newPair(t, h, tune, func(b Bus) {
		b.HandleSend(methodRaft, transport.ClassRaft, func(keyspace.NodeID, []byte) { <-release })
	})
	defer close(release)
	var err error
	for n := 0; n < 100 && err == nil; n++ {
		err = p.a.Send(1, methodRaft, 0, make([]byte, 1<<10))
	}
	if !errors.Is(err, transport.ErrQueueFull) || !transport.NotDelivered(err) {
		t.Errorf("messages to a blocked self: %v", err)
	}
}

func testPeerEvents(t *testing.T, h Harness) {
	a, b := newBus(t, h, 1, nil), newBus(t, h, 2, nil)
	h.Connect(a, b)
	seen := watchPeer(a, 2)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	if s := a.Peer(2); s.Up {
		t.Errorf("up before its start: %+v", s)
	}
	if err := a.Send(2, transport.MethodRaft, 0, nil); !errors.Is(err, transport.ErrNoRoute) {
		t.Errorf("send before its start: %v", err)
	}
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	up := seen.await(t, func(s transport.PeerState) bool { return s.Up })
	if up.Boot == 0 || up.Since == 0 {
		t.Errorf("state %+v", up)
	}
	ctx := within(t)
	for a.Peer(2).RTT == 0 && ctx.Err() == nil {
		pause(ctx)
	}
	if s := a.Peer(2); s.RTT == 0 || s.Boot != up.Boot {
		t.Errorf("no round trip: %+v", s)
	}
}

// testRestart: a peer that returns has another boot id, calls under way fail with an
// unknown fate, and later calls pass.
func testRestart(t *testing.T, h Harness) {
	restart(t, h, func(b Bus) { _ = b.Close() })
}

// testCrash is testRestart without the farewell.
func testCrash(t *testing.T, h Harness) {
	restart(t, h, h.Crash)
}

func restart(t *testing.T, h Harness, stop func(Bus)) {
	t.Helper()
	started := make(chan struct{}, 1)
	register := func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, func(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
			if string(payload) == "wait" {
				started <- struct{}{}
				<-ctx.Done()
			}
			return payload, ctx.Err()
		})
	}
	p := newPair(t, h, nil, register)
	before := p.a.Peer(2)
	seen := watchPeer(p.a, 2)
	result := make(chan error, 1)
	go func() {
		_, err := p.a.Call(within(t), 2, methodRequest, []byte("wait"))
		result <- err
	}()
	receive(t, started)
	stop(p.b)
	b := newBus(t, h, 2, nil)
	h.Connect(p.a, b)
	register(b)
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	if err := receive(t, result); transport.NotDelivered(err) || err == nil {
		t.Errorf("the call under way: %v", err)
	}
	after := seen.await(t, func(s transport.PeerState) bool { return s.Up && s.Boot != before.Boot })
	if after.Since <= before.Since {
		t.Errorf("since %d, before %d", after.Since, before.Since)
	}
	if got, err := p.a.Call(within(t), 2, methodRequest, []byte("x")); err != nil || string(got) != "x" {
		t.Errorf("after the restart: %q, %v", got, err)
	}
}

// testClose: Close ends handlers' contexts and waits for them, tells the peers, and
// refuses everything afterwards.
func testClose(t *testing.T, h Harness) {
	started, ended := make(chan bool, 1), make(chan error, 1)
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, waiting(started, ended))
		b.HandleStream(methodBulk, transport.ClassBulk, echoStream)
	})
	s, err := p.a.OpenStream(within(t), 2, methodBulk, []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(within(t)); err != nil {
		t.Fatal(err)
	}
	seen := watchPeer(p.a, 2)
	result := make(chan error, 1)
	go func() {
		_, err := p.a.Call(within(t), 2, methodRequest, nil)
		result <- err
	}()
	receive(t, started)
	if err := p.b.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the handler's context has no error")
		}
	default:
		t.Error("Close did not wait for a handler")
	}
	if err := receive(t, result); err == nil || transport.NotDelivered(err) {
		t.Errorf("the call under way: %v", err)
	}
	seen.await(t, func(s transport.PeerState) bool { return !s.Up })
	if _, err := s.Recv(within(t)); err == nil {
		t.Error("the stream goes on")
	}
	s.Close(nil)
	if _, err := p.a.Call(within(t), 2, methodRequest, nil); !transport.NotDelivered(err) {
		t.Errorf("call to a closed peer: %v", err)
	}
	for _, to := range []keyspace.NodeID{1, 2} {
		if _, err := p.b.Call(within(t), to, methodRequest, nil); !errors.Is(err, transport.ErrClosed) {
			t.Errorf("call by a closed bus to %s: %v", to, err)
		}
		if _, err := p.b.OpenStream(within(t), to, methodBulk, nil); !errors.Is(err, transport.ErrClosed) {
			t.Errorf("stream by a closed bus to %s: %v", to, err)
		}
	}
	if err := p.b.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func testRemove(t *testing.T, h Harness) {
	p := newPair(t, h, nil, func(b Bus) {
		b.HandleCall(methodRequest, transport.ClassRequest, echo)
	})
	seen := watchPeer(p.b, 1)
	p.a.RemovePeer(2)
	if _, err := p.a.Call(within(t), 2, methodRequest, nil); !errors.Is(err, transport.ErrNoRoute) {
		t.Errorf("call to a removed peer: %v", err)
	}
	seen.await(t, func(s transport.PeerState) bool { return !s.Up })
	if _, err := p.b.Call(within(t), 1, methodRequest, nil); !transport.NotDelivered(err) {
		t.Errorf("call by a removed peer: %v", err)
	}
}
