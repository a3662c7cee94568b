//go:build planted

package sim

import (
	"context"
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/transport"
)

// twice is a bus that hands each request to its range two times: what a transport
// that repeats calls would do, or a router that repeats writes of unknown fate.
type twice struct{ node.Bus }

func (b twice) HandleCall(m transport.Method, class transport.Class, h transport.CallHandler) {
	if m != transport.MethodShardRequest {
		b.Bus.HandleCall(m, class, h)
		return
	}
	b.Bus.HandleCall(m, class, func(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
		again := append([]byte(nil), payload...)
		answer, err := h(ctx, from, payload)
		_, _ = h(ctx, from, again)
		return answer, err
	})
}

// TestPlanted puts something wrong under healthy nodes, and expects the same
// checkers that pass the same seeds without it to find it.
func TestPlanted(t *testing.T) {
	for _, c := range []struct {
		name   string
		plant  plant
		faults []Fault
	}{
		{"requests run twice", plant{bus: func(b node.Bus) node.Bus { return twice{b} }}, []Fault{Drift}},
		{"the wal's syncs do nothing", plant{noSync: true}, []Fault{CrashAll, CrashAll}},
		{"a lease that does not end", plant{freeze: true}, []Fault{IsolateLeader, IsolateLeader, IsolateLeader}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := Config{Nodes: 3, Clients: 6, BurstOps: 4, Faults: c.faults, Borders: []string{"j", "s"}}
			for seed := range uint64(3) {
				t.Run(fmt.Sprint("without/", seed), func(t *testing.T) {
					cfg := cfg
					cfg.Seed = seed
					simulate(t, cfg)
				})
			}
			for seed := range uint64(6) {
				var bad []string
				t.Run(fmt.Sprint("with/", seed), func(t *testing.T) {
					cfg := cfg
					cfg.Seed, cfg.plant = seed, c.plant
					bad = judge(t, cfg)
				})
				if len(bad) > 0 {
					t.Logf("found with seed %d: %.600s", seed, bad[0])
					return
				}
			}
			t.Error("not found")
		})
	}
}
