package sequencer

import (
	"testing"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

// BenchmarkLogPart is what a part of the allocation log costs the sequencer for each record, once for all followers that take
// it. Full parts are read, for which allocations wait, and encoded. Each record is of another range than the one before.
func BenchmarkLogPart(b *testing.B) {
	b.Run("read", func(b *testing.B) { logPart(b, false) })
	b.Run("read and encode", func(b *testing.B) { logPart(b, true) })
}

func logPart(b *testing.B, encode bool) {
	b.Helper()
	l := newAllocationLog(allocationLogEntries)
	l.restart(6, 1<<40)
	for i := range keyspace.Revision(allocationLogEntries) {
		l.append(Allocation{First: 1<<40 + 1 + i, Count: 1, Range: keyspace.RangeID(10_000 + i*7919%10_000), Generation: 7})
	}
	records := make([]Allocation, sentLogRecords)
	cpu, n, bytes, at := measure.CPU(), 0, 0, l.after
	for b.Loop() {
		if at == l.last {
			at = l.after
		}
		got, last, err := l.Read(6, at, records)
		if err != nil {
			b.Fatal(err)
		}
		if encode {
			p := LogPart{Term: 6, After: at, Last: last, Records: records[:got]}
			bytes += len(p.encode())
		}
		n, at = n+got, last
	}
	b.ReportMetric(float64((measure.CPU()-cpu).Nanoseconds())/float64(n), "cpu-ns/record")
	if encode {
		b.ReportMetric(float64(bytes)/float64(n), "B/record")
	}
}
