package transport_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/quic-go/quic-go"
	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// TestRestartIsNoticedByReset: the restarted node cannot dial, so only its stateless
// reset tells of the restart within this test's time.
func TestRestartIsNoticedByReset(t *testing.T) {
	h := newQUICHarness()
	tune := func(node keyspace.NodeID) transport.Options {
		o := selfMade(node)
		o.IdleTimeout = time.Hour
		o.MaxMissedPings = 1 << 20
		o.PingInterval = 20 * time.Millisecond
		return o
	}
	a, b := h.new(t, tune(1)), h.new(t, tune(2))
	boots := make(chan keyspace.BootID, 100)
	a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
		if s.Up {
			boots <- s.Boot
		}
	})
	a.SetPeer(2, b.Addrs())
	b.SetPeer(1, nil)
	start(t, a, b)
	before := <-boots
	session := a.MainSession(2)
	b.Crash()
	c := h.new(t, tune(2))
	c.SetPeer(1, nil)
	start(t, c)
	if after := <-boots; after == before {
		t.Errorf("boot %s again", after)
	}
	if _, ok := errors.AsType[*quic.StatelessResetError](session.Why()); !ok {
		t.Errorf("the session ended by %v", session.Why())
	}
}

func start(t testing.TB, buses ...*transport.QUIC) {
	t.Helper()
	for _, q := range buses {
		if err := q.Start(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSilentPeer: unanswered probes end the session of a silent peer, even while QUIC
// acknowledges.
func TestSilentPeer(t *testing.T) {
	h := newQUICHarness()
	opts := selfMade(1)
	opts.PingInterval, opts.MaxMissedPings = 10*time.Millisecond, 3
	a, b := h.new(t, opts), h.new(t, selfMade(2))
	release := make(chan struct{})
	b.HandleSend(transport.MethodRaftControl, transport.ClassControl, func(keyspace.NodeID, []byte) { <-release })
	up := make(chan struct{}, 100)
	a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
		if s.Up {
			up <- struct{}{}
		}
	})
	a.SetPeer(2, b.Addrs())
	b.SetPeer(1, a.Addrs())
	start(t, a, b)
	<-up
	session := a.MainSession(2)
	if err := a.Send(2, transport.MethodRaftControl, 0, nil); err != nil {
		t.Fatal(err)
	}
	if err := session.Why(); !errors.Is(err, transport.ErrUnreachable) || !strings.Contains(err.Error(), "probes") {
		t.Errorf("the session ended by %v", err)
	}
	close(release)
	<-up
}

// TestSimultaneousDials: of two connections made at the same time exactly one becomes
// the session, the same at both ends.
func TestSimultaneousDials(t *testing.T) {
	h := newQUICHarness()
	a, b := h.new(t, selfMade(1)), h.new(t, selfMade(2))
	a.HandleCall(transport.MethodNodeAdmin, transport.ClassRequest, answerNothing)
	b.HandleCall(transport.MethodNodeAdmin, transport.ClassRequest, answerNothing)
	states := map[*transport.QUIC]chan bool{}
	for _, q := range []*transport.QUIC{a, b} {
		c := make(chan bool, 1000)
		q.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) { c <- s.Up })
		states[q] = c
	}
	a.SetPeer(2, nil)
	b.SetPeer(1, nil)
	start(t, a, b)
	for round := range 100 {
		var wg sync.WaitGroup
		var errA, errB error
		wg.Go(func() { errA = a.DialNow(2, b.Addrs()[0]) })
		wg.Go(func() { errB = b.DialNow(1, a.Addrs()[0]) })
		wg.Wait()
		if (errA == nil) == (errB == nil) {
			t.Fatalf("round %d: not exactly one won: %v, %v", round, errA, errB)
		}
		for _, q := range []*transport.QUIC{a, b} {
			for up := false; !up; {
				up = <-states[q]
			}
		}
		// Both directions work over the remaining connection.
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if _, err := a.Call(ctx, 2, transport.MethodNodeAdmin, nil); err != nil {
			t.Errorf("round %d: %v (dials: %v, %v)", round, err, errA, errB)
		}
		if _, err := b.Call(ctx, 1, transport.MethodNodeAdmin, nil); err != nil {
			t.Errorf("round %d: %v (dials: %v, %v)", round, err, errA, errB)
		}
		cancel()
		a.EndSession(2, errors.New("next round"))
		for _, q := range []*transport.QUIC{a, b} {
			for up := true; up; {
				up = <-states[q]
			}
		}
	}
}

func answerNothing(context.Context, keyspace.NodeID, []byte) ([]byte, error) { return nil, nil }

// TestMovedPeer: after SetPeer with a new address the next session goes there at once.
func TestMovedPeer(t *testing.T) {
	h := newQUICHarness()
	a, b := h.new(t, selfMade(1)), h.new(t, selfMade(2))
	up := make(chan struct{}, 100)
	a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
		if s.Up {
			up <- struct{}{}
		}
	})
	silent, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	a.SetPeer(2, []string{silent.LocalAddr().String()})
	b.SetPeer(1, nil)
	start(t, a, b)
	if _, err := silent.Read(make([]byte, 2000)); err != nil {
		t.Fatal(err)
	}
	// An attempt is under way to an address where nobody answers.
	a.SetPeer(2, b.Addrs())
	<-up
}

// TestUnknownNodeIsReported: a node that is no peer is refused, and Unknown hears of it.
// Unknown hears nothing of a node of another cluster.
func TestUnknownNodeIsReported(t *testing.T) {
	h := newQUICHarness()
	came := make(chan keyspace.NodeID, 100)
	o := selfMade(1)
	o.Unknown = func(n keyspace.NodeID) { came <- n }
	other := selfMade(3)
	other.Cluster++
	a, b, c := h.new(t, o), h.new(t, selfMade(2)), h.new(t, other)
	start(t, a)
	c.SetPeer(1, a.Addrs())
	start(t, c)
	b.SetPeer(1, a.Addrs())
	start(t, b)
	if n := <-came; n != 2 {
		t.Errorf("node %s has come", n)
	}
}

// A node knocks at every address of a peer without a session, also while it waits at another one. Knocks of another cluster, or
// at another node, are not heard. Nor are further ones once nobody wants to know.
func TestKnocks(t *testing.T) { knocksBy(t, transport.CarrierQUIC) }

// TestKnocksBesideTLS: a node that dials by TCP knocks too. The founder that it looks for may dial by QUIC.
func TestKnocksBesideTLS(t *testing.T) { knocksBy(t, transport.CarrierTLS) }

func knocksBy(t *testing.T, carrier transport.Carrier) {
	t.Helper()
	h := newQUICHarness()
	silent, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	came := make(chan keyspace.NodeID, 100)
	knocks := 0 // of one goroutine
	o := selfMade(1)
	o.Knocked = func(n keyspace.NodeID) bool {
		came <- n
		knocks++
		return knocks < 2
	}
	other := selfMade(3)
	other.Cluster++
	knocking := selfMade(2)
	knocking.Carrier = carrier
	a, b, c, d := h.new(t, o), h.new(t, knocking), h.new(t, other), h.new(t, selfMade(4))
	start(t, a)
	c.SetPeer(1, a.Addrs())
	d.SetPeer(5, a.Addrs())
	start(t, c, d)
	b.SetPeer(1, append([]string{silent.LocalAddr().String()}, a.Addrs()...))
	start(t, b)
	for range 2 {
		if n := <-came; n != 2 {
			t.Errorf("node %s has knocked", n)
		}
	}
	// One who does not stop hears more.
	knocked := make(chan []byte, 1)
	go func() {
		buf := make([]byte, 2000)
		for {
			n, err := silent.Read(buf)
			if err != nil {
				return
			}
			if buf[0] == 22 {
				knocked <- buf[:n]
				return
			}
		}
	}()
	if k := <-knocked; len(k) != 25 {
		t.Errorf("%x at the other address", k)
	}
	if len(came) > 0 {
		t.Errorf("node %s was heard when nobody wanted to know", <-came)
	}
}

// TestListenAddresses: a node may listen on several addresses, of which one may be the
// wildcard. It does not start on a malformed one.
func TestListenAddresses(t *testing.T) {
	wild := selfMade(1)
	wild.Clock, wild.Boot, wild.Logger = wallClock{}, 1, zap.NewNop()
	wild.Listen = []string{":0", "127.0.0.1:0"}
	q, err := transport.NewQUIC(wild)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(q.Addrs()); n != 2 {
		t.Errorf("%d addresses", n)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	wild.Listen = []string{"no port"}
	if _, err := transport.NewQUIC(wild); err == nil {
		t.Error("listen on a malformed address")
	}
}

// TestMetrics: after use the bus exports its metrics under their names.
func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	h := newQUICHarness()
	opts := selfMade(1)
	opts.Metrics = transport.NewMetrics(reg)
	a, b := h.new(t, opts), h.new(t, selfMade(2))
	b.HandleCall(transport.MethodNodeAdmin, transport.ClassRequest, answerNothing)
	up := make(chan struct{}, 100)
	a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
		if s.Up {
			up <- struct{}{}
		}
	})
	connect(a, b)
	start(t, a, b)
	<-up
	if _, err := a.Call(t.Context(), 2, transport.MethodNodeAdmin, nil); err != nil {
		t.Fatal(err)
	}
	for a.Peer(2).RTT == 0 {
		time.Sleep(time.Millisecond)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, f := range families {
		have[f.GetName()] = true
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "range" {
					t.Errorf("%s has a range as a label", f.GetName())
				}
			}
		}
	}
	for _, want := range []string{
		"etcd_network_peer_round_trip_time_seconds", "skein_transport_sent_frames_total", "skein_transport_received_bytes_total",
		"skein_transport_queue_bytes", "skein_transport_batch_frames", "skein_transport_dropped_frames_total", "skein_transport_sessions",
		"etcd_network_peer_sent_failures_total", "etcd_network_peer_received_failures_total", "etcd_network_disconnected_peers_total",
	} {
		if !have[want] {
			t.Errorf("no metric %s", want)
		}
	}
	// An answer and a pong are counted after they have been handled.
	for _, c := range []struct{ name, label string }{{"etcd_network_peer_sent_bytes_total", "To"}, {"etcd_network_peer_received_bytes_total", "From"}} {
		for peerBytes(t, reg, c.name, c.label, 2) < 20 {
			time.Sleep(time.Millisecond)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	for a.Peer(2).Up {
		time.Sleep(time.Millisecond)
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(`# HELP etcd_network_active_peers The current number of active peer connections.
# TYPE etcd_network_active_peers gauge
etcd_network_active_peers{Local="1",Remote="2"} 0
# HELP etcd_network_known_peers The current number of known peers.
# TYPE etcd_network_known_peers gauge
etcd_network_known_peers{Local="1",Remote="2"} 1
`), "etcd_network_active_peers", "etcd_network_known_peers"); err != nil {
		t.Error(err)
	}
	if err := a.Send(2, transport.MethodRaftControl, 0, nil); err == nil {
		t.Error("a message to a peer that is down was taken")
	}
	if peerBytes(t, reg, "etcd_network_peer_sent_failures_total", "To", 2) < 1 {
		t.Error("a message that was not sent is not counted")
	}
	a.RemovePeer(2)
	for _, name := range []string{
		"etcd_network_peer_sent_bytes_total", "etcd_network_peer_received_bytes_total", "etcd_network_peer_sent_failures_total",
		"etcd_network_peer_received_failures_total", "etcd_network_active_peers", "etcd_network_known_peers", "etcd_network_disconnected_peers_total",
	} {
		if n, err := testutil.GatherAndCount(reg, name); err != nil || n != 0 {
			t.Errorf("%s of a peer that is gone: %d, %v", name, n, err)
		}
	}
}

// peerBytes returns the value of a counter that has a peer as its only label.
func peerBytes(t *testing.T, reg *prometheus.Registry, name, label string, peer keyspace.NodeID) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); f.GetName() == name && len(l) == 1 && l[0].GetName() == label && l[0].GetValue() == peer.String() {
				return m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("no counter %s{%s=%q}", name, label, peer)
	return 0
}

// TestCloseDuringHandshakes: connections without a Hello and attempts under way do not
// delay Close.
func TestCloseDuringHandshakes(t *testing.T) {
	h := newQUICHarness()
	opts := selfMade(1)
	opts.HandshakeTimeout = time.Hour
	a := h.new(t, opts)
	silent, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	a.SetPeer(2, []string{silent.LocalAddr().String()})
	start(t, a)
	if _, err := silent.Read(make([]byte, 2000)); err != nil {
		t.Fatal(err)
	}
	for _, said := range []string{"", "\x00\x00"} {
		conn, err := rawDial(t, a.Addrs()[0], transport.ALPN)
		if err != nil {
			t.Fatal(err)
		}
		s, err := conn.OpenStream()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write([]byte(said)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.CloseWithError(0, "") })
	}
	closed := make(chan error, 1)
	go func() { closed <- a.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Close waits for what was under way")
	}
}
