package sequencer

import (
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// BenchmarkAllocator is the pure allocation: one batch of one node with a lease.
func BenchmarkAllocator(b *testing.B) {
	for _, items := range []int{1, 64} {
		b.Run(map[int]string{1: "one", 64: "sixty-four"}[items], func(b *testing.B) {
			c := newAllocator(newAllocationLog(allocationLogEntries))
			c.lead(6, 1)
			a := &waitingBatch{from: Process{Node: 1, Boot: 1}, Batch: Batch{Boot: 1, Items: make([]Item, items)}}
			for i := range a.Items {
				a.Items[i] = Item{Range: keyspace.RangeID(i), Generation: 1, Count: 1}
			}
			b.ReportAllocs()
			for b.Loop() {
				a.Number++
				a.confirmed = false
				c.arrive(a)
				if out := c.advance(true); out.raise != 0 {
					c.ceilingApplied(6, out.raise)
					c.advance(true)
				}
			}
			b.ReportMetric(float64(c.last)/b.Elapsed().Seconds(), "revisions/s")
		})
	}
}
