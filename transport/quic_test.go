package transport_test

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func randomBoot() keyspace.BootID {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return keyspace.BootID(binary.BigEndian.Uint64(b[:]) | 1)
}

// quicHarness gives the suite QUIC buses on loopback. A node keeps its port.
type quicHarness struct {
	mu    sync.Mutex
	ports map[keyspace.NodeID]string
}

func (h *quicHarness) new(t testing.TB, opts transport.Options) *transport.QUIC {
	t.Helper()
	if opts.Clock == nil {
		opts.Clock = clock.System()
	}
	opts.Boot = randomBoot()
	if opts.Logger == nil {
		opts.Logger = zaptest.NewLogger(t)
	}
	// Generous for a loaded machine; tests of times set their own.
	if opts.HandshakeTimeout == 0 {
		opts.HandshakeTimeout = 10 * time.Second
	}
	if opts.IdleTimeout == 0 {
		opts.IdleTimeout = 30 * time.Second
	}
	if opts.MaxMissedPings == 0 {
		opts.MaxMissedPings = 60
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	addr := h.ports[opts.Node]
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	opts.Listen = []string{addr}
	q, err := transport.NewQUIC(opts)
	if err != nil {
		t.Fatal(err)
	}
	h.ports[opts.Node] = q.Addrs()[0]
	t.Cleanup(func() { _ = q.Close() })
	return q
}

func newQUICHarness() *quicHarness { return &quicHarness{ports: map[keyspace.NodeID]string{}} }

func TestConformance(t *testing.T) { conformance(t, transport.CarrierQUIC) }

// TestConformanceTLS: main sessions over TCP keep the same promises.
func TestConformanceTLS(t *testing.T) { conformance(t, transport.CarrierTLS) }

func conformance(t *testing.T, carrier transport.Carrier) {
	t.Helper()
	var h *quicHarness
	transporttest.Run(t, transporttest.Harness{
		Test: func(t *testing.T, name string, fn func(t *testing.T)) {
			t.Run(name, func(t *testing.T) {
				h = newQUICHarness()
				fn(t)
			})
		},
		New: func(t *testing.T, node keyspace.NodeID, tune func(*transport.Config)) transporttest.Bus {
			opts := transport.Options{
				Config:   transport.Config{Cluster: 0xc1, Node: node},
				Security: transport.Security{SelfMade: true},
				Carrier:  carrier,
			}
			if tune != nil {
				tune(&opts.Config)
			}
			return h.new(t, opts)
		},
		Connect: func(buses ...transporttest.Bus) { connect(buses...) },
		Break: func(a, b transporttest.Bus) { // nobody knows where the other one is
			a.(*transport.QUIC).SetPeer(b.Self(), nil)
			b.(*transport.QUIC).SetPeer(a.Self(), nil)
		},
		Mend:  func(a, b transporttest.Bus) { connect(a, b) },
		Crash: func(b transporttest.Bus) { b.(*transport.QUIC).Crash() },
	})
}

func connect(buses ...transporttest.Bus) {
	for _, b := range buses {
		for _, o := range buses {
			if b != o {
				b.(*transport.QUIC).SetPeer(o.Self(), o.(*transport.QUIC).Addrs())
			}
		}
	}
}

// wallClock is a clock for buses that are never started.
type wallClock struct{ clock.Clock }

func (wallClock) Wall() time.Time { return time.Now() }
