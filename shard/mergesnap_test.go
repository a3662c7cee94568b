package shard

import (
	"fmt"
	"testing"
	"time"
)

// Trap 45: a node misses a merge, and what brings it on is a snapshot of the left range that
// lies over its frozen replica of the right one. In another life the range was split again
// at the same key meanwhile, so that the snapshot does not touch it. Either way it goes, and
// what was written before and after is there.
func TestSnapshotPastAMerge(t *testing.T) {
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprintf("split again %t", again), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, 33, lan)
				r.maxLag = 64 << 10
				r.startAll()
				r.leader(1)
				child := r.split("m")
				r.leader(child)
				r.put("a", "1")
				r.put("x", "1")
				var away *rigNode
				d := &mergeDriver{r: r, id: 100, left: 1, right: child, phase: "preparing"}
				d.before = func(step string) error {
					if step == "absorb" && away == nil {
						// It has the freeze for good, and hears nothing of what follows.
						l := r.leader(1)
						away = r.nodes[int(l.id)%3]
						away.crash()
					}
					return nil
				}
				if err := d.drive(); err != nil {
					t.Fatal(err)
				}
				if again {
					r.leader(r.split("m"))
				}
				for i := range 40 {
					r.put(fmt.Sprintf("a%d", i), string(make([]byte, 8<<10)))
					r.put(fmt.Sprintf("x%d", i), string(make([]byte, 8<<10)))
				}
				for _, n := range r.nodes {
					if n != away {
						n.must(n.engine.Flush(t.Context()))
					}
				}
				r.put("x", "2")
				time.Sleep(5 * time.Second)
				away.start()
				r.gone(child)
				time.Sleep(20 * time.Second)
				if away.snapshots() == 0 {
					t.Error("no snapshot came: the test shows nothing")
				}
				if a, x := r.get("a"), r.get("x"); a != "1" || x != "2" {
					t.Errorf("a is %q, x is %q", a, x)
				}
				r.agree()
				r.stopAll()
			})
		})
	}
}
