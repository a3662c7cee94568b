package replicas

import (
	"fmt"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// BenchmarkRemove removes all replicas of a node at once, as an operator's drain may. The wal is not
// in it.
func BenchmarkRemove(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("replicas=%d", n), func(b *testing.B) {
			for range b.N {
				b.StopTimer()
				o := engine.Options{FS: vfs.Default, Dir: b.TempDir(), Clock: clock.System(), BallastBytes: -1, LowSpaceBytes: -1}
				onEngine(b, o, func(w *world) {
					var ds []keyspace.Descriptor
					for i := range n {
						end := fmt.Sprintf("%08d", i+1)
						if i == n-1 {
							end = ""
						}
						ds = append(ds, describe(keyspace.RangeID(i+1), fmt.Sprintf("%08d", i), end))
					}
					w.must(w.m.Create(b.Context(), ds))
					w.locked(func() {
						for _, r := range w.open {
							r.state.Descriptor.Replicas = members[1:]
						}
					})
					b.StartTimer()
					for i := range ds {
						w.m.Check(ds[i].Range)
					}
					for left := n; left > 0; time.Sleep(time.Millisecond) {
						w.locked(func() { left = len(w.open) })
					}
					b.StopTimer()
				})
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*n), "µs/replica")
		})
	}
}
