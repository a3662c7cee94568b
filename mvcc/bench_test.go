package mvcc

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

const benchKeys = 1_000_000

func benchKey(dst []byte, i int) []byte {
	return fmt.Appendf(dst[:0], "/registry/pods/default/%08d", i)
}

// benchStore loads a million keys of one version each, at revisions from 2 in random
// order, and flushes them.
func benchStore(b *testing.B) *engine.Engine {
	b.Helper()
	e := openTest(b)
	value := make([]byte, 128)
	rng := rand.New(rand.NewPCG(1, 0))
	for i := range value {
		value[i] = byte(rng.Uint32())
	}
	w := e.NewBatch()
	var key []byte
	for n, i := range rng.Perm(benchKeys) {
		key = benchKey(key, i)
		rev := keyspace.Revision(n + 2)
		if err := Put(w, &Version{Key: key, Mod: rev, Create: rev, Version: 1, Value: value}); err != nil {
			b.Fatal(err)
		}
		if n%1000 == 999 {
			if err := w.Commit(); err != nil {
				b.Fatal(err)
			}
			w = e.NewBatch()
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	settle(b, e)
	return e
}

// settle flushes, and waits until the load's compactions are over and the blocks are in the cache.
func settle(b *testing.B, e *engine.Engine) {
	b.Helper()
	if err := e.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
	for last := int64(-1); ; {
		if _, err := Hash(e, keyspace.Span{}, keyspace.MaxRevision, 1); err != nil {
			b.Fatal(err)
		}
		total, _ := e.DiskBytes()
		if total == last {
			return
		}
		last = total
	}
}

// BenchmarkMillion measures operations on the path of requests, with a million keys.
func BenchmarkMillion(b *testing.B) {
	e := benchStore(b)
	rng := rand.New(rand.NewPCG(2, 0))
	var key []byte
	b.Run("Get", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			key = benchKey(key, rng.IntN(benchKeys))
			if _, ok, err := Get(e, key, keyspace.MaxRevision); !ok || err != nil {
				b.Fatal(ok, err)
			}
		}
	})
	b.Run("GetAbsent", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			key = append(benchKey(key, rng.IntN(benchKeys)), 'x')
			if _, ok, err := Get(e, key, keyspace.MaxRevision); ok || err != nil {
				b.Fatal(ok, err)
			}
		}
	})
	for _, batch := range []int{8, 64} {
		b.Run(fmt.Sprintf("Getter/batch=%d", batch), func(b *testing.B) {
			b.ReportAllocs()
			g, err := NewGetter(e)
			for n := 0; b.Loop(); n++ {
				if n%batch == 0 {
					if err == nil {
						err = g.Close()
					}
					if err == nil {
						g, err = NewGetter(e)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				key = benchKey(key, rng.IntN(benchKeys))
				if _, ok, err := g.Get(key, keyspace.MaxRevision); !ok || err != nil {
					b.Fatal(ok, err)
				}
			}
			if err := g.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
	b.Run("Scan/limit=100", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			key = benchKey(key, rng.IntN(benchKeys-200))
			res, err := Scan(e, ScanOptions{Span: keyspace.Span{Start: key}, At: keyspace.MaxRevision, Limit: 100}, func(*Version) error { return nil })
			if err != nil || res.Keys != 100 {
				b.Fatal(res, err)
			}
		}
	})
	b.Run("Count", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if n, err := Count(e, keyspace.Span{}, keyspace.MaxRevision); n != benchKeys || err != nil {
				b.Fatal(n, err)
			}
		}
	})
	b.Run("Hash", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := Hash(e, keyspace.Span{}, keyspace.MaxRevision, 1); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("History/last=1000", func(b *testing.B) {
		b.ReportAllocs()
		// The last thousand revisions are new, and in other tables than the rest.
		w := e.NewBatch()
		for n := range 1000 {
			rev := keyspace.Revision(benchKeys + 2 + n)
			key = benchKey(key, rng.IntN(benchKeys))
			if err := Put(w, &Version{Key: key, Mod: rev, Create: 2, Version: 2, Value: []byte("v")}); err != nil {
				b.Fatal(err)
			}
		}
		if err := w.Commit(); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			n := 0
			_, err := History(e, HistoryOptions{From: benchKeys + 2, To: benchKeys + 1001}, func(*Version) error { n++; return nil })
			if err != nil || n < 900 {
				b.Fatal(n, err)
			}
		}
	})
}

// BenchmarkPut measures a batch of one put, which is the cost of a single put, and of a
// hundred.
func BenchmarkPut(b *testing.B) {
	for _, size := range []int{1, 100} {
		b.Run(fmt.Sprintf("batch=%d", size), func(b *testing.B) {
			e := openTest(b)
			value := make([]byte, 256)
			var key []byte
			rev := keyspace.Revision(1)
			b.ReportAllocs()
			w := e.NewBatch()
			for n := 0; b.Loop(); n++ {
				rev++
				key = benchKey(key, n%benchKeys)
				if err := Put(w, &Version{Key: key, Mod: rev, Create: rev, Version: 1, Value: value}); err != nil {
					b.Fatal(err)
				}
				if n%size == size-1 {
					if err := w.Commit(); err != nil {
						b.Fatal(err)
					}
					w = e.NewBatch()
				}
			}
			if err := w.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
