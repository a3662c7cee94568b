package mirror

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// BenchmarkFollow follows revisions of one put of 256 bytes through a spool on a real disk. The
// target is in memory.
func BenchmarkFollow(b *testing.B) {
	s, d := newSource(1), newTarget()
	s.txn(op{"a", "1", 0})
	d.fs = vfs.Default
	o := Options{
		FS: vfs.Default, Dir: b.TempDir(), Clock: clock.System(), Source: s, Target: d, SourceData: s, TargetData: d, Nonce: "n",
		SnapshotRevision: func(path string) (keyspace.Revision, error) {
			db, err := readDatabase(vfs.Default, path)
			return db.Revision, err
		},
	}
	ctx, cancel := context.WithCancel(b.Context())
	ended := start(ctx, o)
	value := string(make([]byte, 256))
	position := func() keyspace.Revision {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.rev
	}
	for position() < 2 {
		time.Sleep(time.Millisecond)
	}
	began := time.Now()
	for i := range b.N {
		s.txn(op{fmt.Sprintf("key-%05d", i%10000), value, 0})
	}
	for position() < s.rev {
		time.Sleep(time.Millisecond)
	}
	b.ReportMetric(float64(b.N)/time.Since(began).Seconds(), "revisions/s")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		b.Fatal(err)
	}
}
