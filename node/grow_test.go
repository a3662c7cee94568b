package node

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/transport"
)

// sizedBus notes what its queues may hold for each peer.
type sizedBus struct {
	Bus
	each *atomic.Pointer[[4]int64]
}

func (b sizedBus) SetQueueBytes(q [4]int64) {
	b.each.Store(&q)
	b.Bus.SetQueueBytes(q)
}

// A cluster that grows from three nodes to nine has the same bounds as one that nine nodes
// found: the queues to all peers of a node together stay within its budget. All serve all.
func TestAClusterGrowsThreefold(t *testing.T) {
	var sizes atomic.Pointer[[4]int64]
	bubble(t, 3, nil, func(o *Options) {
		shortLog(o)
		o.MemoryBytes = 1 << 30
		if o.Self != 1 {
			return
		}
		newBus := o.NewBus
		o.NewBus = func(c transport.Config) (Bus, error) {
			sizes.Store(&c.QueueBytes)
			b, err := newBus(c)
			return sizedBus{b, &sizes}, err
		}
	}, func(r *rig) {
		r.publish(r.nodes...)
		if want := r.nodes[0].core.budget.queues(2, 4*r.nodes[0].core.o.MaxRequestBytes); *sizes.Load() != want {
			t.Errorf("of three nodes each other one gets %v, want %v", *sizes.Load(), want)
		}
		for i := 4; i <= 9; i++ {
			n := r.joiner(fmt.Sprintf("n%d", i))
			if err := r.join(r.t.Context(), n, r.nodes[i-4]); err != nil {
				t.Fatal(err)
			}
			r.announced(n)
		}
		time.Sleep(time.Second)
		if want := r.nodes[0].core.budget.queues(8, 4*r.nodes[0].core.o.MaxRequestBytes); *sizes.Load() != want {
			t.Errorf("of nine nodes each other one gets %v, want %v", *sizes.Load(), want)
		}
		for _, n := range r.nodes {
			r.mustPut(n, "k", n.name)
			r.mustGet(r.nodes[0], "k", n.name)
			for _, o := range r.nodes {
				if o != n && !n.core.bus.Peer(o.id).Up {
					t.Errorf("node %s does not reach node %s", n.id, o.id)
				}
			}
		}
	})
}
