package alone

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/internal/measure"
)

// BenchmarkAlone measures the cost of a proposal in raft groups and the layers below. CPU
// is that of all three hosts and of the proposer. The room that one batch of a group frees
// is refilled at once. So with many proposals in flight entries share most of their cost;
// with 8 in flight in each group they share little.
func BenchmarkAlone(b *testing.B) {
	for _, c := range []struct{ groups, depth, bytes int }{
		{48, 20000 / 48, 16}, {48, 20000 / 48, 256}, {48, 8, 256}, {1, 20000, 16}, {1, 20000, 256}, {1, 1, 256}, {1000, 1, 16}, {1000, 1, 256},
	} {
		b.Run(fmt.Sprintf("groups=%d/inflight=%d/bytes=%d", c.groups, c.groups*c.depth, c.bytes), func(b *testing.B) {
			l, err := Start(b.Context(), Options{Dir: b.TempDir(), Groups: c.groups, Depth: c.depth})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := l.Close(); err != nil {
					b.Error(err)
				}
			}()
			data := make([]byte, c.bytes)
			payload := func() []byte { return data }
			// Warm up until everything is under way, and logs and memtables were touched.
			warm := 2 * c.groups * c.depth
			l.Propose(payload, func() bool { warm--; return warm >= 0 })
			applied, fsyncs, cpu := l.Applied(), l.Syncs(), measure.CPU()
			b.ReportAllocs()
			l.Propose(payload, b.Loop)
			n, used := float64(l.Applied()-applied), measure.CPU()-cpu
			b.ReportMetric(n/b.Elapsed().Seconds(), "proposals/s")
			b.ReportMetric(float64(used.Nanoseconds())/1e3/n, "cpu-µs/proposal")
			if err := l.Check(); err != nil {
				b.Error(err)
			}
			b.ReportMetric(n*float64(l.Hosts())/float64(l.Syncs()-fsyncs), "appends/fsync")
		})
	}
}
