package mvcc

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// TestWalkPauses: a walk over many versions lets others run in between, even where there is one processor.
func TestWalkPauses(t *testing.T) {
	const keys, pauses = 16 * pauseAfter, 8 // half of them: the engine has goroutines too
	e := openTest(t)
	w := e.NewBatch()
	for i := range keys {
		rev := keyspace.Revision(i + 2)
		if err := Put(w, &Version{Key: fmt.Appendf(nil, "%05d", i), Mod: rev, Create: rev, Version: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Commit(); err != nil {
		t.Fatal(err)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for name, walk := range map[string]func() error{
		"count": func() error {
			n, err := Count(e, keyspace.Span{}, keyspace.MaxRevision)
			if n != keys {
				return fmt.Errorf("%d keys, want %d", n, keys)
			}
			return err
		},
		"scan": func() error {
			_, err := Scan(e, ScanOptions{At: keyspace.MaxRevision}, func(*Version) error { return nil })
			return err
		},
	} {
		var turns atomic.Int64
		var stop atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ; !stop.Load(); turns.Add(1) {
				runtime.Gosched()
			}
		}()
		err := walk()
		had := turns.Load()
		stop.Store(true)
		if <-done; err != nil || had < pauses {
			t.Errorf("%s: others had %d turns, want %d: %v", name, had, pauses, err)
		}
	}
}
