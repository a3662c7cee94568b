package engine

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// openVirtual opens a store under virtual time, within a synctest bubble.
func openVirtual(t *testing.T, fs vfs.FS, low int64) *Engine {
	t.Helper()
	o := testOptions(fs)
	o.Clock, o.LowSpaceBytes, o.BallastBytes = clock.Virtual(), low, 10<<20
	e, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func expectSpace(t *testing.T, e *Engine, want SpaceState) {
	t.Helper()
	synctest.Wait()
	if got := e.Space(); got != want {
		t.Fatalf("space is %v, want %v", got, want)
	}
}

// TestSpaceFollowsDisk lowers and raises the free space of a disk of 1 GiB.
func TestSpaceFollowsDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := vfs.NewMem()
		free := func(b uint64) {
			mem.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: b, TotalBytes: 1 << 30, UsedBytes: 1<<30 - b})
		}
		free(800 << 20)
		e := openVirtual(t, mem, 40<<20)
		expectSpace(t, e, SpaceOK)
		if _, err := mem.Stat("db/ballast"); err != nil {
			t.Fatal("no ballast:", err)
		}
		free(39 << 20)
		time.Sleep(spacePoll + 1)
		expectSpace(t, e, SpaceFull)
		if _, err := e.IngestTables(t.Context(), Ingest{Group: 1}); !errors.Is(err, ErrNoSpace) {
			t.Errorf("ingest on a full disk: %v", err)
		}
		free(45 << 20) // above the bound, but by less than a quarter: no flapping
		time.Sleep(spacePoll + 1)
		expectSpace(t, e, SpaceFull)
		free(50 << 20)
		time.Sleep(spacePoll + 1)
		expectSpace(t, e, SpaceOK)
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestLeavesRoom asks for space beside the store, on a disk of 1 GiB and with a low of 40
// MiB. 10 MiB are the store's, and 10 MiB more without the ballast.
func TestLeavesRoom(t *testing.T) {
	mem := vfs.NewMem()
	o := Options{FS: mem, Dir: "db", LowSpaceBytes: 40 << 20, BallastBytes: 10 << 20}
	if !o.LeavesRoom("wal", 1<<40) {
		t.Error("refused without knowledge")
	}
	expect := func(free, bytes uint64, want bool) {
		t.Helper()
		mem.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: free, TotalBytes: 1 << 30, UsedBytes: 1<<30 - free})
		if got := o.LeavesRoom("wal", int64(bytes)); got != want {
			t.Errorf("%d bytes of %d: %v", bytes, free, got)
		}
	}
	expect(30<<20, 11<<20, false)
	expect(31<<20, 11<<20, true)
	if err := mem.MkdirAll("db", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := vfsWrite(mem, "db/"+ballastName, []byte("b")); err != nil {
		t.Fatal(err)
	}
	expect(20<<20, 11<<20, false)
	expect(21<<20, 11<<20, true)
	expect(5<<20, 11<<20, false)
	other := Options{FS: twoDisks{mem}, Dir: "db", LowSpaceBytes: 40 << 20, BallastBytes: 10 << 20}
	if !other.LeavesRoom("wal", 11<<20) {
		t.Error("the room of another disk was refused")
	}
}

// twoDisks is a file system whose directory "wal" is a separate disk.
type twoDisks struct{ vfs.FS }

func (f twoDisks) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	if path == "wal" {
		return vfs.DiskUsage{AvailBytes: 12 << 20, TotalBytes: 64 << 20}, nil
	}
	return f.FS.GetDiskUsage(path)
}

// TestFullDisk fails every write of a table for half a minute. Commits and reads
// continue, a flush waits and then succeeds, and the state ends by itself.
func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := simdisk.New()
		var full atomic.Bool
		var tries atomic.Int32
		fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if full.Load() && (op.Kind == errorfs.OpCreate || op.Kind == errorfs.OpFileWrite) {
				tries.Add(1)
				return syscall.ENOSPC
			}
			return nil
		}))
		e := openVirtual(t, fs, -1)
		expectSpace(t, e, SpaceOK)
		full.Store(true)
		put(t, e, "k", 2, "v")
		begin := time.Now()
		done := make(chan error, 1)
		go func() { done <- e.Flush(t.Context()) }()
		time.Sleep(30 * time.Second)
		expectSpace(t, e, SpaceFull)
		if _, err := mem.Stat("db/ballast"); err == nil {
			t.Error("the ballast was not given up")
		}
		if n := tries.Load(); n > 200 {
			t.Errorf("%d attempts in 30 s", n)
		}
		if _, ok, err := e.Get(AppendVersionedKey(nil, []byte("k"), 2)); !ok || err != nil {
			t.Errorf("read on a full disk: %v %v", ok, err)
		}
		put(t, e, "l", 3, "v")
		full.Store(false)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d < 30*time.Second || d > 33*time.Second {
			t.Errorf("the flush ended after %v", d)
		}
		time.Sleep(3 * time.Second)
		expectSpace(t, e, SpaceOK)
		if _, err := mem.Stat("db/ballast"); err != nil {
			t.Error("the ballast does not stand again:", err)
		}
		if err := e.Err(); err != nil {
			t.Fatal(err)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// A flush and a compaction that are held back by turns, every half second, do not keep the state after
// the disk has space again.
func TestHeldBackByTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := vfs.NewMem()
		mem.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 800 << 20, TotalBytes: 1 << 30})
		e := openVirtual(t, mem, 40<<20)
		var tables sync.WaitGroup
		defer func() {
			err := e.Close()
			tables.Wait()
			if err != nil {
				t.Error(err)
			}
		}()
		mem.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 0, TotalBytes: 1 << 30})
		time.Sleep(spacePoll + 1)
		expectSpace(t, e, SpaceFull)
		for _, category := range []vfs.DiskWriteCategory{flushCategory, compactionCategory} {
			time.Sleep(retryPause / 2)
			tables.Go(func() {
				for e.ctx.Err() == nil { // as Pebble does
					if err := e.space.admit(category); err != nil {
						e.backgroundError(err)
					} else {
						time.Sleep(retryPause)
					}
				}
			})
		}
		time.Sleep(10 * time.Second)
		expectSpace(t, e, SpaceFull)
		mem.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 800 << 20, TotalBytes: 1 << 30})
		time.Sleep(3 * time.Second)
		expectSpace(t, e, SpaceOK)
	})
}

// TestCloseOnFullDisk closes a store that cannot flush: in bounded time, with an error
// that says so.
func TestCloseOnFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var full atomic.Bool
		e := openVirtual(t, errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
			if full.Load() && op.Kind == errorfs.OpCreate {
				return syscall.ENOSPC
			}
			return nil
		})), -1)
		full.Store(true)
		put(t, e, "k", 2, "v")
		begin := time.Now()
		if err := e.Close(); err == nil {
			t.Error("a lost flush was not reported")
		}
		if d := time.Since(begin); d > 2*closeTimeout {
			t.Errorf("closed after %v", d)
		}
	})
}

// TestFailedSyncIsFatal fails one sync of a flush. Pebble's retry succeeds, which proves
// nothing: nothing may be reported durable (trap 22).
func TestFailedSyncIsFatal(t *testing.T) {
	var on atomic.Bool
	e := openAt(t, errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if (op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData) && on.CompareAndSwap(true, false) {
			return errorfs.ErrInjected
		}
		return nil
	})))
	commit(t, e, func(b *Batch) error { return b.SetApplied(1, Applied{Index: 11, Term: 5}) })
	on.Store(true)
	if err := e.Flush(t.Context()); !errors.Is(err, errorfs.ErrInjected) {
		t.Errorf("flush: %v", err)
	}
	<-e.Fatal()
	if a, ok, err := e.DurableApplied(1); err == nil && ok {
		t.Errorf("called durable: %+v", a)
	}
	if err := e.Close(); !errors.Is(err, errorfs.ErrInjected) {
		t.Errorf("close: %v", err)
	}
}

// TestOnDurable counts the calls of a listener.
func TestOnDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := openVirtual(t, vfs.NewMem(), -1)
		var calls atomic.Int32
		remove := e.OnDurable(func() { calls.Add(1) })
		commit(t, e, func(b *Batch) error { return b.SetApplied(1, Applied{Index: 11, Term: 5}) })
		synctest.Wait()
		if n := calls.Load(); n != 0 {
			t.Errorf("%d calls before a flush", n)
		}
		if err := e.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if calls.Load() == 0 {
			t.Error("no call after a flush")
		}
		remove()
		calls.Store(0)
		if err := e.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := calls.Load(); n != 0 {
			t.Errorf("%d calls after the listener was removed", n)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestBadTables gives damaged, incomplete and foreign tables to an ingest.
func TestBadTables(t *testing.T) {
	tables := groupTables(t)
	e := openTest(t, vfs.NewMem())
	write := func(change func(name string, b []byte) []byte) []string {
		var paths []string
		for name, data := range tables {
			p := e.FS().PathJoin(e.StagingDir(), name)
			if data = change(name, append([]byte(nil), data...)); data == nil {
				continue
			}
			if err := vfsWrite(e.FS(), p, data); err != nil {
				t.Fatal(err)
			}
			paths = append(paths, p)
		}
		return paths
	}
	same := func(_ string, b []byte) []byte { return b }
	local := []KeySpan{GroupLocalSpan(3)}
	for _, c := range []struct {
		what   string
		group  keyspace.GroupID
		spans  []KeySpan
		change func(name string, b []byte) []byte
	}{
		{"another group", 4, []KeySpan{GroupLocalSpan(4)}, same},
		{"a missing span", 3, append(local, GroupLocalSpan(4)), same},
		{"no applied record", 3, local, func(name string, b []byte) []byte {
			if name == "3-0" {
				return nil
			}
			return b
		}},
		{"a truncated table", 3, local, func(_ string, b []byte) []byte { return b[:len(b)-1] }},
		{"a table of nothing", 3, local, func(string, []byte) []byte { return []byte{} }},
		{"a flipped bit", 3, local, func(_ string, b []byte) []byte { b[3] ^= 1; return b }},
	} {
		in := Ingest{Group: c.group, Spans: c.spans, Paths: write(c.change)}
		if _, err := e.VerifyTables(t.Context(), in); !errors.Is(err, ErrBadTables) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	in := Ingest{Group: 3, Spans: local, Paths: write(same)}
	if a, err := e.IngestTables(t.Context(), in); err != nil || a.Index != 5 {
		t.Errorf("ingest of good tables: %+v %v", a, err)
	}
}

// TestExportStops ends an export by its context and by its sink.
func TestExportStops(t *testing.T) {
	e := openTest(t, vfs.NewMem())
	s := e.NewSnapshot()
	defer s.Close()
	if _, err := s.ExportTables(t.Context(), 1, nil, 0, nil); !errors.Is(err, ErrNoApplied) {
		t.Errorf("export of an unknown group: %v", err)
	}
	commit(t, e, func(b *Batch) error { return b.SetApplied(1, Applied{Index: 11, Term: 5}) })
	s2 := e.NewSnapshot()
	defer s2.Close()
	_, err := s2.ExportTables(t.Context(), 1, nil, 0, func(int) (io.WriteCloser, error) { return nil, io.ErrShortWrite })
	if !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("export into a broken sink: %v", err)
	}
}

// The metric that etcd's alert divides by is the quota, or what the disk leaves the store.
func TestQuotaMetric(t *testing.T) {
	for _, quota := range []int64{0, 1 << 20} {
		disk := simdisk.New()
		disk.SetUsage(vfs.DiskUsage{TotalBytes: 100 << 30, AvailBytes: 10 << 30, UsedBytes: 90 << 30})
		reg := prometheus.NewRegistry()
		e, err := Open(Options{FS: disk, Dir: "data", Clock: clock.System(), BallastBytes: -1, QuotaBytes: quota, Metrics: NewMetrics(reg)})
		if err != nil {
			t.Fatal(err)
		}
		total, _ := e.DiskBytes()
		want := total + 10<<30 - DefaultLowSpaceBytes
		if quota > 0 {
			want = quota
		}
		all, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, m := range all {
			if m.GetName() == "etcd_server_quota_backend_bytes" {
				found = true
				if got := int64(m.GetMetric()[0].GetGauge().GetValue()); got < want-1<<10 || got > want+1<<10 {
					t.Errorf("with the quota %d the metric is %d, want %d", quota, got, want)
				}
			}
		}
		if !found {
			t.Errorf("with the quota %d there is no metric", quota)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
