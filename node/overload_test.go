package node

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/kverror"
)

// More large puts at once than the memory budget holds. A put without room is refused
// with ResourceExhausted, and none hangs. No acknowledged put is lost, and afterwards
// the node serves as before.
func TestOverloadIsRefused(t *testing.T) {
	for _, nodes := range []int{1, 3} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			bubble(t, nodes, borders(4), func(o *Options) {
				o.MemoryBytes, o.WALSegmentBytes = 8<<20, 4<<20
			}, testOverload)
		})
	}
}

func testOverload(r *rig) {
	const puts = 100
	value := strings.Repeat("v", 48<<10)
	r.spread(r.nodes[0], 4, "small")
	var mu sync.Mutex
	acked, failed := map[string]bool{}, map[kverror.Kind]int{}
	start := time.Now()
	var wg sync.WaitGroup
	for i := range puts {
		wg.Go(func() {
			key := fmt.Sprintf("%s/%d", keyOf(i%4), i)
			_, err := r.nodes[i%len(r.nodes)].put(r.t.Context(), key, value)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				acked[key] = true
			} else {
				failed[kverror.Of(err).Kind]++
			}
		})
	}
	wg.Wait()
	r.t.Logf("%d of %d puts acknowledged in %v, refused: %v", len(acked), puts, time.Since(start), failed)
	if took := time.Since(start); took > rigTimeout+time.Second {
		r.t.Errorf("the last answer came after %v", took)
	}
	if len(acked) == 0 || failed[kverror.TooManyRequests] == 0 {
		r.t.Error("nothing was acknowledged, or nothing refused")
	}
	for kind := range failed {
		if kind != kverror.TooManyRequests {
			r.t.Errorf("puts failed with %v", kind)
		}
	}
	for key := range acked {
		r.mustGet(r.nodes[0], key, value)
	}
	for i := range 20 {
		r.mustPut(r.nodes[i%len(r.nodes)], keyOf(i%4), value)
	}
	r.wait(time.Second, "every budget is free again", func() bool {
		for _, n := range r.nodes {
			for _, rep := range n.core.shards.Replicas() {
				if st := rep.Show(); st.NodePendingBytes != 0 || st.Raft.InflightBytes != 0 {
					return false
				}
			}
		}
		return true
	})
	r.caughtUp(20 * time.Second)
	r.stop(r.nodes...)
}
