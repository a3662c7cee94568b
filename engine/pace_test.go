package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// TestPace writes 100 MiB at several heights of L0.
func TestPace(t *testing.T) {
	for _, c := range []struct {
		sublevels int
		takes     time.Duration
	}{
		{0, 4 * time.Second},
		{l0Compaction, 4 * time.Second},
		{l0Compaction + 1, 2 * time.Second},
		{l0Compaction + 3, 500 * time.Millisecond},
		{l0Compaction + paceFreeAt, 0},
	} {
		t.Run(fmt.Sprint(c.sublevels), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPace(t.Context(), clock.Virtual(), 1<<20)
				p.sublevels = func() int { return c.sublevels }
				begin := time.Now()
				for range 100 << 20 / (32 << 10) {
					p.wrote(32 << 10)
				}
				got := time.Since(begin)
				if got < c.takes-2*paceWait || got > c.takes+2*paceWait {
					t.Errorf("took %v, want %v", got, c.takes)
				}
			})
		})
	}
}

// Small tables make compactions no faster, unless there are very many.
func TestPaceOfSmallTables(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		sublevels int
		bytes     int64
		want      int
	}{
		{0, 0, 0},
		{1, 29 * mib, 1},
		{8, 8 * 29 * mib, 8}, // full memtables
		{8, 4*29*mib + 4*mib, 5},
		{7, 6 * mib, 1},
		{40, 6 * mib, 10},
	} {
		if got := height(c.sublevels, c.bytes, 51*mib); got != c.want {
			t.Errorf("%d sublevels of %d MiB are %d high, want %d", c.sublevels, c.bytes/mib, got, c.want)
		}
	}
}

// TestPaceEnds lets L0 grow, and closes the store, during a paced compaction.
func TestPaceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		p, sublevels := newPace(ctx, clock.Virtual(), 1<<20), 0
		p.sublevels = func() int { return sublevels }
		p.wrote(1 << 30) // a debt of more than 40 s; each wait lasts paceLook
		begin := time.Now()
		sublevels = l0Compaction + paceFreeAt
		p.wrote(1)
		p.wrote(1 << 30)
		if d := time.Since(begin); d > paceLook {
			t.Errorf("%v of waits with a full L0", d)
		}
		sublevels = 0
		stop()
		begin = time.Now()
		p.wrote(1 << 30)
		if d := time.Since(begin); d > 0 {
			t.Errorf("%v of waits once closed", d)
		}
	})
}

// TestCompactionsArePaced compacts 32 MiB, and flushes them without any wait.
func TestCompactionsArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := openVirtual(t, vfs.NewMem(), -1)
		defer e.Close()
		random, value := rand.NewChaCha8([32]byte{}), make([]byte, 32<<10)
		begin := time.Now()
		for i := range 1024 {
			_, _ = random.Read(value)
			b := e.NewBatch()
			if err := b.Set(AppendVersionedKey(nil, fmt.Appendf(nil, "k%08d", i), keyspace.Revision(i+2)), value); err != nil {
				t.Fatal(err)
			}
			if err := b.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d > 100*time.Millisecond {
			t.Errorf("flushes took %v", d)
		}
		begin = time.Now()
		if err := e.db.Compact(t.Context(), []byte{0}, []byte{0xff}, false); err != nil {
			t.Fatal(err)
		}
		want := time.Second * (32<<20 - paceBurst) / paceBytes
		if d := time.Since(begin); d < want/2 {
			t.Errorf("32 MiB were compacted in %v, want about %v", d, want)
		}
	})
}
