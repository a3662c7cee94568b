package transport_test

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// A passage lets TCP through to an address, and nothing else.
type passage struct {
	ln net.Listener
	to string

	mu    sync.Mutex
	conns []net.Conn // of both sides
	wg    sync.WaitGroup
}

func newPassage(t *testing.T, to string) *passage {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &passage{ln: ln, to: to}
	p.wg.Go(p.run)
	t.Cleanup(func() {
		_ = ln.Close()
		p.cut(0)
		p.wg.Wait()
	})
	return p
}

func (p *passage) run() {
	for {
		in, err := p.ln.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", p.to)
		if err != nil {
			_ = in.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, in, out)
		p.mu.Unlock()
		for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
			p.wg.Go(func() {
				_, _ = io.Copy(way[0], way[1])
				_, _ = way[0].Close(), way[1].Close()
			})
		}
	}
}

// cut closes the connections from the i-th on.
func (p *passage) cut(i int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns[min(2*i, len(p.conns)):] {
		_ = c.Close()
	}
}

// throughTCP is two nodes of which the first dials the second through a passage; the second does not know where the
// first is.
func throughTCP(t *testing.T, carrier transport.Carrier) (a, b *transport.QUIC, p *passage) {
	t.Helper()
	h := newQUICHarness()
	dialler := selfMade(1)
	dialler.Carrier = carrier
	if carrier == transport.CarrierQUIC {
		dialler.HandshakeTimeout = 100 * time.Millisecond
	}
	a, b = h.new(t, dialler), h.new(t, selfMade(2))
	for _, q := range []*transport.QUIC{a, b} {
		q.HandleStream(transport.MethodRaftSnapshot, transport.ClassBulk, echo)
		q.HandleCall(transport.MethodShardRequest, transport.ClassRequest, func(_ context.Context, from keyspace.NodeID, m []byte) ([]byte, error) {
			return append(m, byte(from)), nil
		})
	}
	p = newPassage(t, b.Addrs()[0])
	a.SetPeer(2, []string{p.ln.Addr().String()})
	b.SetPeer(1, nil)
	start(t, a, b)
	return a, b, p
}

// calls has each node call the other, with a small and a large message.
func calls(t *testing.T, a, b *transport.QUIC) error {
	t.Helper()
	for _, n := range []int{3, 1 << 20} {
		for _, way := range [][2]*transport.QUIC{{a, b}, {b, a}} {
			got, err := way[0].Call(t.Context(), way[1].Self(), transport.MethodShardRequest, make([]byte, n))
			if err != nil {
				return err
			}
			if len(got) != n+1 || got[n] != byte(way[0].Self()) {
				t.Errorf("node %s calls node %s with %d bytes, and %d come back", way[0].Self(), way[1].Self(), n, len(got))
			}
		}
	}
	return nil
}

// TestNetworkWithoutUDP: where only TCP passes, nodes have both sessions, and a node that joins can ask. A node that dials by QUIC
// reaches nobody there.
func TestNetworkWithoutUDP(t *testing.T) {
	a, b, p := throughTCP(t, transport.CarrierTLS)
	until(t, "no sessions", func() bool { return calls(t, a, b) == nil && echoes(t, a, 2) == nil && echoes(t, b, 1) == nil })
	ask := transport.AskOptions{Clock: clock.System(), Security: transport.Security{SelfMade: true}, HandshakeTimeout: 10 * time.Second, Carrier: transport.CarrierTLS}
	if got, err := transport.Ask(t.Context(), ask, p.ln.Addr().String()); err == nil {
		t.Errorf("a node with nothing to tell answers %q", got)
	}
	c, _, _ := throughTCP(t, transport.CarrierQUIC)
	time.Sleep(300 * time.Millisecond) // some attempts of the dialler
	if c.MainSession(2) != nil {
		t.Error("QUIC passes where only TCP does")
	}
}

// TestConnectionOfALaneIsLost: a session whose lanes are not all there ends, and the next one has them.
func TestConnectionOfALaneIsLost(t *testing.T) {
	a, b, p := throughTCP(t, transport.CarrierTLS)
	until(t, "no session", func() bool { return calls(t, a, b) == nil })
	for i := 1; i < 4; i++ {
		old := a.MainSession(2)
		p.cut(i)
		until(t, "no session again", func() bool { return a.MainSession(2) != old && calls(t, a, b) == nil })
	}
}

// TestCarriersMeet: nodes that dial by different carriers reach each other, whoever dials.
func TestCarriersMeet(t *testing.T) {
	h := newQUICHarness()
	other := selfMade(2)
	other.Carrier = transport.CarrierTLS
	a, b := h.new(t, selfMade(1)), h.new(t, other)
	for _, q := range []*transport.QUIC{a, b} {
		q.HandleCall(transport.MethodShardRequest, transport.ClassRequest, func(_ context.Context, from keyspace.NodeID, m []byte) ([]byte, error) {
			return append(m, byte(from)), nil
		})
	}
	connect(a, b)
	start(t, a, b)
	for range 4 {
		until(t, "no session", func() bool { return calls(t, a, b) == nil })
		old := a.MainSession(2)
		if s := b.MainSession(1); s != nil { // else it has ended by itself
			s.End(io.ErrUnexpectedEOF)
		}
		until(t, "the session goes on", func() bool { return a.MainSession(2) != old })
	}
}

// TestBriefSessions: the dialler waits longer from one brief session to the next. It would make one after the other where
// the further connections of each fail. The waits are at most 50, 100, 200 and 400 ms, and then half a second; together they
// are seldom below two seconds.
func TestBriefSessions(t *testing.T) {
	a, _, _ := throughTCP(t, transport.CarrierTLS)
	began := time.Now()
	for range 12 {
		until(t, "no session", func() bool { return a.MainSession(2) != nil })
		a.EndSession(2, io.ErrUnexpectedEOF)
	}
	if d := time.Since(began); d < 400*time.Millisecond {
		t.Errorf("12 sessions ended within %v", d)
	}
}

// TestStrangeLanes: a connection that says to belong to a session, and does not, is closed. Sessions go on.
func TestStrangeLanes(t *testing.T) {
	h := newQUICHarness()
	one, two := selfMade(1), selfMade(2)
	one.Carrier, two.Carrier = transport.CarrierTLS, transport.CarrierTLS
	two.HandshakeTimeout = 2 * time.Second // a further connection waits for its session for twice as long
	a, b := h.new(t, one), h.new(t, two)
	for _, q := range []*transport.QUIC{a, b} {
		q.HandleCall(transport.MethodShardRequest, transport.ClassRequest, func(_ context.Context, from keyspace.NodeID, m []byte) ([]byte, error) {
			return append(m, byte(from)), nil
		})
	}
	connect(a, b)
	start(t, a, b)
	until(t, "no session", func() bool { return calls(t, a, b) == nil })
	frame := func(body ...byte) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
	}
	key := make([]byte, 16)
	for name, first := range map[string][]byte{
		"of no session":    frame(append(append([]byte{transport.FrameJoin}, key...), 1, 0, 4)...),
		"of control":       frame(append(append([]byte{transport.FrameJoin}, key...), 0, 0, 1)...),
		"of no class":      frame(append(append([]byte{transport.FrameJoin}, key...), 9, 0, 1)...),
		"beyond its lanes": frame(append(append([]byte{transport.FrameJoin}, key...), 1, 4, 4)...),
		"cut short":        frame(append([]byte{transport.FrameJoin}, key[:9]...)...),
	} {
		conn := tlsTo(t, b, &tls.Config{NextProtos: []string{transport.ALPN}})
		if _, err := conn.Write(first); err != nil {
			t.Fatal(err)
		}
		if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("a connection %s is answered", name)
		}
	}
	until(t, "no session beside strangers", func() bool { return calls(t, a, b) == nil })
}
