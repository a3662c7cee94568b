package backup

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// packed has the blocks of some spans, ready to be read.
type packed struct {
	spans  map[string][][]byte // by start
	bytes  int64
	border [][]byte
}

func (p *packed) Read(_ context.Context, span keyspace.Span, emit func([]byte, []mvcc.Version) error) error {
	var dec block.Decoder
	for _, b := range p.spans[string(span.Start)] {
		vs, err := dec.Decode(b)
		if err != nil {
			return err
		}
		if err := emit(b, vs); err != nil {
			return err
		}
	}
	return nil
}

// pack makes n spans of about 32 MiB of keys and values, half of which is random.
func pack(tb testing.TB, n int) *packed {
	tb.Helper()
	p := &packed{spans: map[string][][]byte{}}
	random := rand.NewChaCha8([32]byte{1})
	value := make([]byte, 256)
	for i := range n {
		start := fmt.Sprintf("/%d", i)
		if i == 0 {
			start = ""
		} else {
			p.border = append(p.border, []byte(start))
		}
		w := block.NewWriter(block.ByKey, func(b []byte, s block.Sum) error {
			p.spans[start] = append(p.spans[start], b)
			p.bytes += s.Bytes
			return nil
		})
		for j := range 32 << 20 / 280 {
			_, _ = random.Read(value[:128])
			v := mvcc.Version{Key: fmt.Appendf(nil, "/%d/registry/pods/%08d", i, j), Mod: 5, Create: 5, Version: 1, Value: value}
			if err := w.Add(&v); err != nil {
				tb.Fatal(err)
			}
		}
		if err := w.Flush(); err != nil {
			tb.Fatal(err)
		}
	}
	return p
}

// BenchmarkWrite measures a backup to a folder: the bytes of keys and values.
func BenchmarkWrite(b *testing.B) {
	pub, id := someone(b)
	for name, k := range map[string]Keys{"plain": {}, "encrypted": mustKeys(b, []string{pub}, id)} {
		b.Run(name, func(b *testing.B) {
			p := pack(b, 4)
			b.SetBytes(p.bytes)
			for b.Loop() {
				writePacked(b, p, k)
			}
		})
	}
}

func writePacked(tb testing.TB, p *packed, k Keys) *Repository {
	tb.Helper()
	folder, err := target.Open("file://"+tb.TempDir(), clock.System())
	if err != nil {
		tb.Fatal(err)
	}
	r := repo(folder, k)
	d, err := r.Begin(tb.Context(), testCluster, "", Cut{Kind: Full, Revision: 5}, p.border)
	if err == nil {
		_, err = r.Write(tb.Context(), d, p, Options{})
	}
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// BenchmarkVersions measures the reading of a backup for a restore.
func BenchmarkVersions(b *testing.B) {
	p := pack(b, 4)
	r := writePacked(b, p, Keys{})
	b.SetBytes(p.bytes)
	for b.Loop() {
		plan, err := r.Plan(b.Context(), testCluster, When{})
		if err != nil {
			b.Fatal(err)
		}
		for _, err := range r.Versions(b.Context(), plan, keyspace.Span{}) {
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	b.ReportMetric(float64(m.Sys)/(1<<20), "MiB-sys")
}
