package wal

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

// BenchmarkAppend appends one entry of 128 bytes and a hard state to each of many groups.
// Each group submits a batch of its own and waits for its fsync before it continues, as
// with one proposal each.
func BenchmarkAppend(b *testing.B) {
	for _, groups := range []int{1, 16, 1000, 10000} {
		b.Run(fmt.Sprintf("groups=%d", groups), func(b *testing.B) {
			l, err := Open(Options{FS: vfs.Default, Dir: b.TempDir(), Clock: clock.System(), SegmentBytes: 16 << 20})
			if err != nil {
				b.Fatal(err)
			}
			data := string(make([]byte, 128))
			next := make([]uint64, groups)
			before, _ := l.Progress()
			cpu := measure.CPU()
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				var wait sync.WaitGroup
				var failed atomic.Bool
				for g := range groups {
					next[g]++
					batch := l.NewBatch()
					id := keyspace.GroupID(g + 1)
					batch.Append(id, testHard(hardState{1, 1, next[g] - 1}), testEntries(next[g], 1, data))
					if next[g]%1000 == 0 {
						batch.Compact(id, next[g]-10)
					}
					wait.Add(1)
					l.Submit(batch, func(err error) {
						if err != nil {
							failed.Store(true)
						}
						wait.Done()
					})
				}
				wait.Wait()
				if failed.Load() {
					b.Fatal(l.Err())
				}
			}
			after, _ := l.Progress()
			appends := float64(b.N * groups)
			b.ReportMetric(appends/b.Elapsed().Seconds(), "appends/s")
			b.ReportMetric(appends/float64(after-before), "appends/fsync")
			b.ReportMetric(float64((measure.CPU()-cpu).Nanoseconds())/1e3/appends, "cpu-µs/append")
			if err := l.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkRecovery opens a log of 128 MiB of live entries in 1000 groups from the page
// cache. The CPU cost depends on the number of small entries and the bytes of large ones.
func BenchmarkRecovery(b *testing.B) {
	for _, bytes := range []int{128, 4096} {
		b.Run(fmt.Sprintf("entry=%d", bytes), func(b *testing.B) { benchRecovery(b, bytes) })
	}
}

func benchRecovery(b *testing.B, entryBytes int) {
	b.Helper()
	o := Options{FS: vfs.Default, Dir: b.TempDir(), Clock: clock.System(), SegmentBytes: 16 << 20}
	l, err := Open(o)
	if err != nil {
		b.Fatal(err)
	}
	data := string(make([]byte, entryBytes))
	const groups, size = 1000, 128 << 20
	for i := uint64(1); l.LiveBytes() < size; i++ {
		batch := l.NewBatch()
		for g := range keyspace.GroupID(groups) {
			batch.Append(g+1, nil, testEntries(i, 1, data))
		}
		done := make(chan error, 1)
		l.Submit(batch, func(err error) { done <- err })
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
	live := l.LiveBytes()
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(live)
	b.ReportAllocs()
	for b.Loop() {
		l, err := Open(o)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if len(l.Groups()) != groups {
			b.Fatalf("%d groups", len(l.Groups()))
		}
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.ReportMetric(b.Elapsed().Seconds()/float64(b.N)*float64(1<<30)/float64(live), "s/GiB")
}

// BenchmarkSubmit measures what a worker pays for a batch of 32 groups, without the disk.
func BenchmarkSubmit(b *testing.B) {
	o := testOptions(vfs.NewMem())
	o.SegmentBytes, o.TargetBytes = 16<<20, 64<<20
	l := mustOpen(b, o)
	data := string(make([]byte, 128))
	b.ReportAllocs()
	for i := uint64(1); b.Loop(); i++ {
		batch := l.NewBatch()
		batch.SetSync(false)
		for g := range keyspace.GroupID(32) {
			batch.Append(g+1, nil, testEntries(i, 1, data))
			if i > 1 {
				batch.Compact(g+1, i-1)
			}
		}
		l.Submit(batch, nil)
		if l.Overloaded() {
			b.StopTimer()
			if err := l.Sync(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	}
	mustClose(b, l)
}
