package mvcc

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

// BenchmarkValues writes 128 MiB of values of several sizes three times, in a random order, and reads keys at random. One
// operation is all of it: run it with -benchtime 1x. It shows what the store makes of large values: processor time, bytes written
// for each byte of values, flushes and compactions included, and the disk that they take in the end.
func BenchmarkValues(b *testing.B) {
	for _, size := range []int{512, 4 << 10, 16 << 10, 128 << 10} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			for b.Loop() {
				writeValues(b, size)
			}
		})
	}
}

func writeValues(b *testing.B, size int) {
	b.Helper()
	const total, passes, gets = 128 << 20, 3, 20_000
	e, err := engine.Open(engine.Options{Dir: b.TempDir(), Clock: clock.System(), CacheBytes: 64 << 20, MemTableBytes: 16 << 20, BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		b.Fatal(err)
	}
	rng, keys, rev, value, key := rand.New(rand.NewPCG(1, 0)), total/size, keyspace.Revision(1), make([]byte, size), []byte(nil)
	cpu, written := measure.CPU(), writtenBytes(b)
	for range passes {
		w := e.NewBatch()
		for n, i := range rng.Perm(keys) {
			for j := 0; j < size; j += 8 {
				binary.LittleEndian.PutUint64(value[j:], rng.Uint64())
			}
			rev++
			key = benchKey(key, i)
			if err := Put(w, &Version{Key: key, Mod: rev, Create: rev, Version: 1, Value: value}); err != nil {
				b.Fatal(err)
			}
			if n%max(1, 64<<10/size) == 0 {
				if err := w.Commit(); err != nil {
					b.Fatal(err)
				}
				w = e.NewBatch()
			}
		}
		if err := w.Commit(); err != nil {
			b.Fatal(err)
		}
	}
	settle(b, e)
	b.ReportMetric(float64((measure.CPU()-cpu).Microseconds())/float64(passes*keys), "cpu-µs/put")
	b.ReportMetric(float64(writtenBytes(b)-written)/(passes*total), "written/byte")
	disk, _ := e.DiskBytes()
	b.ReportMetric(float64(disk)/total, "disk/byte")
	cpu = measure.CPU()
	for range gets {
		key = benchKey(key, rng.IntN(keys))
		if v, ok, err := Get(e, key, keyspace.MaxRevision); !ok || err != nil || len(v.Value) != size {
			b.Fatal(ok, err)
		}
	}
	b.ReportMetric(float64((measure.CPU()-cpu).Microseconds())/gets, "cpu-µs/get")
	if err := e.Close(); err != nil {
		b.Fatal(err)
	}
}

// writtenBytes is what the process has handed to write calls.
func writtenBytes(b *testing.B) (n int64) {
	b.Helper()
	io, err := os.ReadFile("/proc/self/io")
	if err != nil {
		b.Skip(err)
	}
	_, rest, _ := strings.Cut(string(io), "wchar: ")
	if _, err := fmt.Sscan(rest, &n); err != nil {
		b.Fatal(err)
	}
	return n
}
