// Package transporttest is the conformance suite of the bus: it tests what package
// transport promises. The QUIC bus and the simulated one both pass it; users of the bus
// may rely on exactly this.
package transporttest

import (
	"context"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// Bus is what both buses offer.
type Bus interface {
	Self() keyspace.NodeID
	HandleSend(transport.Method, transport.Class, transport.SendHandler)
	HandleCall(transport.Method, transport.Class, transport.CallHandler)
	HandleStream(transport.Method, transport.Class, transport.StreamHandler)
	Start() error
	Close() error
	Send(to keyspace.NodeID, m transport.Method, order uint64, payload []byte) error
	Call(ctx context.Context, to keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error)
	OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error)
	Peer(keyspace.NodeID) transport.PeerState
	OnPeer(func(keyspace.NodeID, transport.PeerState))
	RemovePeer(keyspace.NodeID)
}

// Harness makes the buses that the suite tests.
type Harness struct {
	// Test runs a subtest in the environment that the buses need.
	Test func(t *testing.T, name string, fn func(t *testing.T))
	// New makes a bus for a node, not started, with a boot id of its own. A node may be
	// made again after it was closed or crashed. tune may be nil.
	New func(t *testing.T, node keyspace.NodeID, tune func(*transport.Config)) Bus
	// Connect makes the buses peers of each other. It is called before Start and may
	// be called again after New.
	Connect func(buses ...Bus)
	// Break makes the sessions between two buses impossible, before they are started. Mend
	// makes them possible again.
	Break, Mend func(a, b Bus)
	// Crash stops a bus as a power cut does: no farewell is sent.
	Crash func(Bus)
}

// Methods of the suite: one per class and a second one of requests. In tests that need
// them, all have handlers of each form.
const (
	methodControl transport.Method = 0xf000 + iota
	methodRaft
	methodRequest
	methodBulk
	methodOther
)

var classes = []struct {
	method transport.Method
	class  transport.Class
}{
	{methodControl, transport.ClassControl},
	{methodRaft, transport.ClassRaft},
	{methodRequest, transport.ClassRequest},
	{methodBulk, transport.ClassBulk},
}

// patience bounds every wait of the suite; a longer wait fails the test.
const patience = 20 * time.Second

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	t.Helper()
	tests := []struct {
		name string
		fn   func(*testing.T, Harness)
	}{
		{"send order", testSendOrder},
		{"call", testCall},
		{"call out of order", testCallOutOfOrder},
		{"remote error", testRemoteError},
		{"deadline", testDeadline},
		{"cancel", testCancel},
		{"refusals", testRefusals},
		{"busy", testBusy},
		{"large", testLarge},
		{"stream", testStream},
		{"stream ends", testStreamEnds},
		{"stream credit", testStreamCredit},
		{"stream handler context", testStreamHandlerContext},
		{"slow receiver", testSlowReceiver},
		{"queue full", testQueueFull},
		{"peer events", testPeerEvents},
		{"restart", testRestart},
		{"crash", testCrash},
		{"close", testClose},
		{"remove", testRemove},
		{"detour of calls", testDetourCall},
		{"detour of streams", testDetourStream},
		{"ends of detours", testDetourEnds},
		{"lost detours", testDetourLost},
	}
	for _, test := range tests {
		h.Test(t, test.name, func(t *testing.T) { test.fn(t, h) })
	}
}

// pair is two connected buses; most tests send from a to b and from a to itself.
type pair struct {
	h    Harness
	a, b Bus
}

// newPair makes and starts two buses. register is called for both.
func newPair(t *testing.T, h Harness, tune func(*transport.Config), register func(Bus)) *pair {
	t.Helper()
	p := &pair{h: h, a: newBus(t, h, 1, tune), b: newBus(t, h, 2, tune)}
	h.Connect(p.a, p.b)
	if register != nil {
		register(p.a)
		register(p.b)
	}
	up := watchPeer(p.a, 2)
	for _, b := range []Bus{p.a, p.b} {
		if err := b.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.Close() })
	}
	up.await(t, func(s transport.PeerState) bool { return s.Up })
	p.awaitBulk(t)
	return p
}

// awaitBulk waits for the bulk session, which follows the main one.
func (p *pair) awaitBulk(t *testing.T) {
	t.Helper()
	ctx := within(t)
	for {
		_, err := p.a.Call(ctx, p.b.Self(), methodBulkProbe, nil)
		if transport.NotDelivered(err) && ctx.Err() == nil {
			pause(ctx)
			continue
		}
		if err != nil {
			t.Fatalf("bulk session: %v", err)
		}
		return
	}
}

// methodBulkProbe is answered on every bus of the suite.
const methodBulkProbe transport.Method = 0xf0ff

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// pause waits a moment before it polls a state that no event announces.
func pause(ctx context.Context) {
	moment, cancel := context.WithTimeout(ctx, 2*time.Millisecond)
	defer cancel()
	<-moment.Done()
}

// peerWatch collects the states that a bus reports of one peer.
type peerWatch struct {
	states chan transport.PeerState
}

// newBus makes a bus that answers methodBulkProbe.
func newBus(t *testing.T, h Harness, id keyspace.NodeID, tune func(*transport.Config)) Bus {
	t.Helper()
	b := h.New(t, id, tune)
	b.HandleCall(methodBulkProbe, transport.ClassBulk, func(context.Context, keyspace.NodeID, []byte) ([]byte, error) {
		return nil, nil
	})
	return b
}

// watchPeer is called before Start.
func watchPeer(b Bus, id keyspace.NodeID) *peerWatch {
	w := &peerWatch{states: make(chan transport.PeerState, 1024)}
	b.OnPeer(func(n keyspace.NodeID, s transport.PeerState) {
		if n == id {
			w.states <- s
		}
	})
	return w
}

func (w *peerWatch) await(t *testing.T, want func(transport.PeerState) bool) transport.PeerState {
	t.Helper()
	ctx := within(t)
	for {
		select {
		case s := <-w.states:
			if want(s) {
				return s
			}
		case <-ctx.Done():
			t.Fatal("the peer's state did not come")
		}
	}
}

// receive returns the next value of a channel, and fails if none comes in time.
func receive[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-within(t).Done():
		t.Fatal("nothing came")
		panic("unreachable")
	}
}
