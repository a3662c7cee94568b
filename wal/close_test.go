package wal

import (
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// TestCloseIsBounded hangs the disk in an fsync of the writer, or in the preparation of a
// segment that the writer waits for or does not need yet. Close still returns and says
// what is not durable. When the disk returns, every completion is called and nothing more
// is written.
func TestCloseIsBounded(t *testing.T) {
	fsync := func(op errorfs.Op) bool { return op.Kind == errorfs.OpFileSyncData }
	preparation := func(op errorfs.Op) bool {
		return op.Kind == errorfs.OpOpen && strings.HasSuffix(op.Path, tempSuffix)
	}
	for name, c := range map[string]closeCase{
		"fsync":  {fsync, 7, 1, "the last 7 records submitted may be lost, 21606 bytes of them were not written"},
		"needed": {preparation, 7, 6, "the last 1 records submitted may be lost, 3601 bytes of them were not written"},
		"spare":  {preparation, 6, 6, "all records are durable"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testCloseIsBounded(t, c) })
		})
	}
}

// closeCase is where the disk hangs, how many batches are submitted then (three to a
// segment), how many of them complete without an error, and what Close says.
type closeCase struct {
	hang             func(op errorfs.Op) bool
	batches, durable int
	want             string
}

func testCloseIsBounded(t *testing.T, c closeCase) {
	gate := make(chan struct{})
	var stuck atomic.Bool
	var written atomic.Int64
	inj := errorfs.InjectorFunc(func(op errorfs.Op) error {
		if stuck.Load() && c.hang(op) {
			<-gate
		}
		if op.Kind == errorfs.OpFileWriteAt {
			written.Add(1)
		}
		return nil
	})
	l := mustOpen(t, testOptions(errorfs.Wrap(vfs.NewMem(), inj)))
	synctest.Wait()
	stuck.Store(true)
	var batches []<-chan error
	for range c.batches {
		batches = append(batches, appendOne(l, 2, strings.Repeat("x", 3500), true))
		synctest.Wait()
	}
	begin := time.Now()
	err := l.Close()
	if err == nil || !strings.Contains(err.Error(), c.want) {
		t.Errorf("close: %v, want %s", err, c.want)
	}
	if took := time.Since(begin); took > closeTimeout {
		t.Errorf("close took %s", took)
	}
	<-l.Fatal()
	stuck.Store(false)
	close(gate)
	before := written.Load()
	for i, done := range batches {
		if err := <-done; (err == nil) != (i < c.durable) {
			t.Errorf("batch %d of %d durable ones: %v", i, c.durable, err)
		}
	}
	synctest.Wait()
	// A preparation under way is completed; no record is written any more.
	if n := written.Load() - before; n > 2 {
		t.Errorf("%d writes after Close", n)
	}
}
