package etcdfile

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

var benchKeys = flag.Int("keys", 200_000, "how many keys of 256 bytes the benchmarks' files have")

// benchVersions gives versions in the order of keys, which were written in another order, as
// an export brings them.
func benchVersions(yield func(*mvcc.Version) bool) {
	rng := rand.New(rand.NewPCG(1, 1))
	value := make([]byte, 256)
	for i := range *benchKeys {
		for j := 0; j < len(value); j += 8 {
			value[j] = byte(rng.Uint32())
		}
		rev := keyspace.Revision(2 + uint64(i)*7_368_787%uint64(*benchKeys)) // a permutation: the factor is a prime
		v := mvcc.Version{Key: fmt.Appendf(nil, "/registry/pods/namespace-%03d/pod-%07d", i/1000, i), Mod: rev, Create: rev, Version: 1, Value: value}
		if !yield(&v) {
			return
		}
	}
}

func benchWrite(b *testing.B, path string, runBytes, transactionBytes int64) {
	b.Helper()
	s := NewSorter(SorterOptions{Order: ByRevision, TempDir: b.TempDir(), RunBytes: runBytes})
	defer s.Close()
	for v := range benchVersions {
		if err := s.Add(v); err != nil {
			b.Fatal(err)
		}
	}
	w, err := Create(path, Header{Revision: keyspace.Revision(*benchKeys + 2), TransactionBytes: transactionBytes})
	if err != nil {
		b.Fatal(err)
	}
	if err := w.AddAll(b.Context(), s); err != nil {
		b.Fatal(err)
	}
	stats, err := w.Finish(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(stats.Bytes)/1e6, "MB-file")
	b.ReportMetric(float64(s.TempBytes())/1e6, "MB-temporary")
}

func reportMemory(b *testing.B) {
	b.Helper()
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(r.Maxrss)/1024, "MiB-of-process")
}

// BenchmarkWrite sorts versions by revision and writes them: an export without its network.
// -keys 2000000 is the size of the measure in docs/PERFORMANCE.md.
func BenchmarkWrite(b *testing.B) { benchWrites(b, 0, 0) }

// BenchmarkWriteSnapshot does so with as little memory as a node gives.
func BenchmarkWriteSnapshot(b *testing.B) { benchWrites(b, 16<<20, 4<<20) }

func benchWrites(b *testing.B, runBytes, transactionBytes int64) {
	b.Helper()
	for b.Loop() {
		benchWrite(b, filepath.Join(b.TempDir(), "db"), runBytes, transactionBytes)
	}
	b.ReportMetric(float64(*benchKeys)*float64(b.N)/b.Elapsed().Seconds(), "versions/s")
	reportMemory(b)
}

// BenchmarkRead reads a file by key: an import without its network. Its file comes from
// BenchmarkWrite's code, which counts in the memory of the process.
func BenchmarkRead(b *testing.B) {
	path := filepath.Join(b.TempDir(), "db")
	benchWrite(b, path, 0, 0)
	for b.Loop() {
		f, err := Open(b.Context(), path, Options{})
		if err != nil {
			b.Fatal(err)
		}
		vs, err := f.Versions(b.Context(), ReadOptions{TempDir: b.TempDir()})
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for ; ; n++ {
			if _, err := vs.Next(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				b.Fatal(err)
			}
		}
		if n != *benchKeys {
			b.Fatalf("%d versions, want %d", n, *benchKeys)
		}
		vs.Close()
		f.Close()
	}
	b.ReportMetric(float64(*benchKeys)*float64(b.N)/b.Elapsed().Seconds(), "versions/s")
	reportMemory(b)
}
