package mvcc

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

// largeKeys, of 300 bytes each with its value, are far more than the smallest of the caches.
const largeKeys = 1_000_000

// largeKey appends the i-th of keys in no order, below one prefix.
func largeKey(dst []byte, i int) []byte {
	return fmt.Appendf(dst[:0], "/registry/%016x", uint64(i)*0x9e3779b97f4a7c15)
}

// BenchmarkLarge measures a store larger than its cache, and one that fits it: random gets, gets of absent keys, and puts of
// new keys in batches of a hundred, each with the read of what was there. It reports the CPU of the process and the blocks
// that were not in the cache. Give it a number of operations, such as -benchtime 200000x.
func BenchmarkLarge(b *testing.B) {
	for _, cache := range []int64{32 << 20, 1 << 30} {
		b.Run(fmt.Sprintf("cache=%dMiB", cache>>20), func(b *testing.B) {
			l := openLarge(b, cache)
			b.Run("Get", l.get)
			b.Run("GetAbsent", l.getAbsent)
			b.Run("PutNew", l.putNew)
		})
	}
}

// large is a store with largeKeys keys.
type large struct {
	e       *engine.Engine
	metrics *prometheus.Registry
	rng     *rand.Rand
	rev     keyspace.Revision
	next    int // the first key that is not there
	value   [256]byte
	key     []byte
}

func openLarge(b *testing.B, cache int64) *large {
	b.Helper()
	l := &large{rng: rand.New(rand.NewPCG(1, 0)), rev: 1, metrics: prometheus.NewRegistry()}
	e, err := engine.Open(engine.Options{
		FS: vfs.NewMem(), Dir: "db", Clock: clock.System(), CacheBytes: cache, MemTableBytes: 16 << 20, BallastBytes: -1, LowSpaceBytes: -1,
		Metrics: engine.NewMetrics(l.metrics),
	})
	if err != nil {
		b.Fatal(err)
	}
	l.e = e
	b.Cleanup(func() {
		if err := e.Close(); err != nil {
			b.Error(err)
		}
	})
	for l.next < largeKeys {
		w := e.NewBatch()
		for range 1000 {
			l.put(b, w)
		}
		if err := w.Commit(); err != nil {
			b.Fatal(err)
		}
	}
	settle(b, e)
	return l
}

// put writes the next key with a value that does not compress.
func (l *large) put(b *testing.B, w *engine.Batch) {
	b.Helper()
	for i := 0; i < len(l.value); i += 8 {
		binary.LittleEndian.PutUint64(l.value[i:], l.rng.Uint64())
	}
	l.rev++
	l.key = largeKey(l.key, l.next)
	l.next++
	if err := Put(w, &Version{Key: l.key, Mod: l.rev, Create: l.rev, Version: 1, Value: l.value[:]}); err != nil {
		b.Fatal(err)
	}
}

func (l *large) get(b *testing.B) {
	report := l.report(b)
	defer report()
	for b.Loop() {
		l.key = largeKey(l.key, l.rng.IntN(largeKeys))
		if _, ok, err := Get(l.e, l.key, keyspace.MaxRevision); !ok || err != nil {
			b.Fatal(ok, err)
		}
	}
}

func (l *large) getAbsent(b *testing.B) {
	report := l.report(b)
	defer report()
	for b.Loop() {
		l.key = largeKey(l.key, 1<<40+l.rng.IntN(1<<30))
		if _, ok, err := Get(l.e, l.key, keyspace.MaxRevision); ok || err != nil {
			b.Fatal(ok, err)
		}
	}
}

func (l *large) putNew(b *testing.B) {
	report := l.report(b)
	defer report()
	w := l.e.NewBatch()
	for n := 1; b.Loop(); n++ {
		l.key = largeKey(l.key, l.next)
		if _, ok, err := Get(l.e, l.key, keyspace.MaxRevision); ok || err != nil {
			b.Fatal(ok, err)
		}
		l.put(b, w)
		if n%100 == 0 {
			if err := w.Commit(); err != nil {
				b.Fatal(err)
			}
			w = l.e.NewBatch()
		}
	}
	if err := w.Commit(); err != nil {
		b.Fatal(err)
	}
}

// report returns what reports the costs since then, those of flushes and compactions included.
func (l *large) report(b *testing.B) func() {
	b.Helper()
	cpu, misses := measure.CPU(), l.misses(b)
	return func() {
		b.ReportMetric(float64((measure.CPU()-cpu).Nanoseconds())/float64(b.N), "cpu-ns/op")
		b.ReportMetric((l.misses(b)-misses)/float64(b.N), "misses/op")
	}
}

func (l *large) misses(b *testing.B) float64 {
	b.Helper()
	families, err := l.metrics.Gather()
	if err != nil {
		b.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "skein_engine_block_cache_misses_total" {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	b.Fatal("no metric of misses")
	return 0
}
