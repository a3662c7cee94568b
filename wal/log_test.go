package wal

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/raft/v3"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// appendOne appends one entry and returns a channel with its completion.
func appendOne(l *Log, g keyspace.GroupID, data string, sync bool) <-chan error {
	b := l.NewBatch()
	b.SetSync(sync)
	last := l.Group(g).LastIndex()
	b.Append(g, nil, testEntries(last+1, 1, data))
	done := make(chan error, 1)
	l.Submit(b, func(err error) { done <- err })
	return done
}

// TestSubmittedIsVisible stops the disk. Submit still returns, the views show everything
// submitted, one fsync serves all waiting batches, and Progress reports how long the disk
// has been stalled.
func TestSubmittedIsVisible(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		var stuck atomic.Bool
		syncs := 0
		inj := errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind == errorfs.OpFileSyncData {
				syncs++
				if stuck.Load() {
					<-gate
				}
			}
			return nil
		})
		o := testOptions(errorfs.Wrap(simdisk.New(), inj))
		o.QueueBytes = 2000
		l := mustOpen(t, o)
		stuck.Store(true)
		first := appendOne(l, 1, "first", true)
		synctest.Wait()
		var rest []<-chan error
		for i := range 30 {
			rest = append(rest, appendOne(l, keyspace.GroupID(2+i%10), fmt.Sprint(i), true))
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if n, pending := l.Progress(); n != 0 || pending != 3*time.Second {
			t.Errorf("%d syncs, oldest batch %s old", n, pending)
		}
		if !l.Overloaded() {
			t.Error("31 batches behind a stuck disk are no load")
		}
		ents, err := l.Group(5).Entries(1, 4, 1<<20)
		if err != nil || len(ents) != 3 || string(ents[2].GetData()) != "23" {
			t.Errorf("entries before their fsync: %v, %v", ents, err)
		}
		if _, ok := l.Group(5).EntriesCached(1, 4, 1<<20); !ok {
			t.Error("entries before their fsync are not in memory")
		}
		select {
		case err := <-first:
			t.Errorf("%v: completed without an fsync", err)
		default:
		}
		stuck.Store(false)
		close(gate)
		for i, c := range rest {
			if err := <-c; err != nil {
				t.Errorf("batch %d: %v", i, err)
			}
		}
		synctest.Wait()
		if n, pending := l.Progress(); n != 2 || pending != 0 || syncs != 2 {
			t.Errorf("31 batches took %d syncs (%d), %s pending", n, syncs, pending)
		}
		if l.Overloaded() {
			t.Error("overloaded when idle")
		}
		mustClose(t, l)
	})
}

// TestLazySync shows the life of an unsynced batch: it completes at once, is durable
// within the bound, and no fsync follows when nothing is left.
func TestLazySync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := simdisk.New()
		l := mustOpen(t, testOptions(mem))
		if err := <-appendOne(l, 1, "lazy", false); err != nil {
			t.Fatal(err)
		}
		if n, _ := l.Progress(); n != 0 {
			t.Errorf("%d syncs for an unsynced batch", n)
		}
		lost := mustOpen(t, testOptions(mem.Crash(0, nil)))
		if lost.Group(1).Exists() {
			t.Error("an unsynced batch survived a crash that keeps nothing unsynced")
		}
		mustClose(t, lost)
		time.Sleep(l.opts.LazySync + time.Millisecond)
		synctest.Wait()
		kept := mustOpen(t, testOptions(mem.Crash(0, nil)))
		if !kept.Group(1).Exists() {
			t.Error("an unsynced batch was lost after LazySync")
		}
		mustClose(t, kept)
		before, _ := l.Progress()
		time.Sleep(time.Hour)
		synctest.Wait()
		if after, _ := l.Progress(); after != before {
			t.Errorf("%d fsyncs of an idle log", after-before)
		}
		mustClose(t, l)
	})
}

// TestSyncProbes shows that Sync uses the disk even when nothing waits for it.
func TestSyncProbes(t *testing.T) {
	l := mustOpen(t, testOptions(simdisk.New()))
	for want := range uint64(3) {
		if n, _ := l.Progress(); n != want {
			t.Errorf("%d syncs, want %d", n, want)
		}
		end := l.LiveBytes()
		if err := l.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l.LiveBytes() == end {
			t.Error("a probe wrote nothing")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Sync(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	mustClose(t, l)
	if err := l.Sync(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("sync after close: %v", err)
	}
	if err := l.Close(); !errors.Is(err, ErrClosed) {
		t.Errorf("second close: %v", err)
	}
}

// TestFsyncErrorPoisons fails one fsync. Everything that waited for it and everything
// later gets the error, in order, and the disk is not touched again.
func TestFsyncErrorPoisons(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fail atomic.Bool
		var after atomic.Int64
		inj := errorfs.InjectorFunc(func(op errorfs.Op) error {
			if fail.Load() && (op.Kind == errorfs.OpFileSyncData || op.Kind == errorfs.OpFileWriteAt) {
				if op.Kind == errorfs.OpFileWriteAt && after.Load() == 0 {
					return nil
				}
				after.Add(1)
				return syscall.EIO
			}
			return nil
		})
		l := mustOpen(t, testOptions(errorfs.Wrap(simdisk.New(), inj)))
		if err := <-appendOne(l, 1, "good", true); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		fail.Store(true)
		bad := appendOne(l, 1, "bad", true)
		<-l.Fatal()
		if err := <-bad; !errors.Is(err, syscall.EIO) {
			t.Errorf("completion of the failed batch: %v", err)
		}
		for range 3 {
			if err := <-appendOne(l, 1, "late", true); !errors.Is(err, syscall.EIO) {
				t.Errorf("completion after the failure: %v", err)
			}
		}
		if err := l.Sync(t.Context()); !errors.Is(err, syscall.EIO) || !errors.Is(l.Err(), syscall.EIO) {
			t.Errorf("sync after the failure: %v", err)
		}
		if after.Load() != 1 {
			t.Errorf("%d operations on the disk after a failed fsync", after.Load()-1)
		}
		if err := l.Close(); !errors.Is(err, syscall.EIO) {
			t.Errorf("close: %v", err)
		}
	})
}

// TestDiskFull fills the disk, or the quota. The log continues in the reserve and reports
// SpaceFull. It reports SpaceOK again once a segment becomes free, even with no space on
// the disk, or once there is space. The same happens if the owner does not allow the log
// more space, and if the process or the machine can open no more files.
func TestDiskFull(t *testing.T) {
	for name, refusal := range map[string]error{"disk": syscall.ENOSPC, "quota": syscall.EDQUOT, "owner": nil, "files": syscall.EMFILE, "files of the machine": syscall.ENFILE} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testDiskFull(t, refusal) })
		})
	}
}

func testDiskFull(t *testing.T, refusal error) {
	var full atomic.Bool
	inj := errorfs.InjectorFunc(func(op errorfs.Op) error {
		if full.Load() && strings.HasSuffix(op.Path, tempSuffix) && op.Kind == errorfs.OpOpen {
			if refusal == nil {
				t.Error("the log takes room that its owner refused")
			}
			return refusal
		}
		if full.Load() && isNoFiles(refusal) && op.Kind == errorfs.OpOpenDir {
			return refusal
		}
		return nil
	})
	mem := simdisk.New()
	o := testOptions(errorfs.Wrap(mem, inj))
	if refusal == nil {
		o.MayAllocate = func(bytes int64) bool {
			if bytes != minSegmentBytes {
				t.Errorf("the log asks for %d bytes", bytes)
			}
			return !full.Load()
		}
	}
	l := mustOpen(t, o)
	synctest.Wait()
	full.Store(true)
	data := strings.Repeat("x", 3000)
	for range 4 {
		if err := <-appendOne(l, 1, data, true); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Wait()
	if l.Space() != SpaceFull || l.Err() != nil {
		t.Fatalf("state %d after the reserve was taken, %v", l.Space(), l.Err())
	}
	// A segment becomes free.
	b := l.NewBatch()
	b.Compact(1, 4)
	l.Submit(b, nil)
	for range 3 {
		if err := l.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Wait()
	if l.Space() != SpaceOK {
		t.Fatal("still full with a recycled segment in reserve")
	}
	// The reserve is used up: the log waits, and nothing is lost.
	var waiting []<-chan error
	for range 12 {
		waiting = append(waiting, appendOne(l, 1, data, true))
	}
	time.Sleep(5 * time.Second)
	synctest.Wait()
	if _, pending := l.Progress(); l.Space() != SpaceFull || pending != 5*time.Second {
		t.Fatalf("state %d, %s pending on a full disk", l.Space(), pending)
	}
	full.Store(false)
	for _, c := range waiting {
		if err := <-c; err != nil {
			t.Fatal(err)
		}
	}
	synctest.Wait()
	if l.Space() != SpaceOK {
		t.Fatal("full with room on the disk")
	}
	full.Store(true)
	closeOnFullDisk(t, l)
}

// closeOnFullDisk closes with no space for what was submitted, and Close says so.
func closeOnFullDisk(t *testing.T, l *Log) {
	t.Helper()
	data := strings.Repeat("x", 3000)
	var errs []<-chan error
	for range 20 {
		errs = append(errs, appendOne(l, 1, data, true))
	}
	if err := l.Close(); !errors.Is(err, ErrClosed) {
		t.Errorf("close on a full disk: %v", err)
	}
	failed := false
	for i, c := range errs {
		err := <-c
		if failed && err == nil {
			t.Errorf("batch %d is durable behind a lost one", i)
		}
		failed = failed || err != nil
	}
	if !failed {
		t.Error("20 batches found room on a full disk")
	}
}

// TestIdleGroupsDoNotPin keeps one group busy beside a thousand idle ones. The log stays
// within its target over many cycles and loses none of them. Pinning names a group that
// is never compacted.
func TestIdleGroupsDoNotPin(t *testing.T) { synctest.Test(t, idleGroupsDoNotPin) }

func idleGroupsDoNotPin(t *testing.T) {
	o := testOptions(simdisk.New())
	o.SegmentBytes, o.TargetBytes = 64<<10, 1<<20
	l := mustOpen(t, o)
	const idle = 1000
	for g := keyspace.GroupID(1); g <= idle; g++ {
		b := l.NewBatch()
		b.Reset(g, 10, 5, testHard(hardState{5, 0, 10}))
		b.Append(g, testHard(hardState{uint64(g), 1, 10}), nil)
		l.Submit(b, nil)
	}
	busy := keyspace.GroupID(idle + 1)
	data := strings.Repeat("x", 1000)
	longest := int64(0)
	for i := range 20000 {
		done := appendOne(l, busy, data, i%50 == 0)
		if i%50 == 0 {
			b := l.NewBatch()
			b.Compact(busy, l.Group(busy).LastIndex())
			l.Submit(b, nil)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			longest = max(longest, l.LiveBytes())
			// The writer does not wait for the rewriter. Let the rewriter end its work here, so
			// that the scheduler does not decide about the length.
			synctest.Wait()
		}
	}
	if longest > o.TargetBytes {
		t.Errorf("the log was %d bytes long, target %d", longest, o.TargetBytes)
	}
	if files, err := o.FS.List(o.Dir); err != nil || int64(len(files))*o.SegmentBytes > 2*o.TargetBytes {
		t.Errorf("%d files, %v", len(files), err)
	}
	if pins := l.Pinning(10); len(pins) > 1 || len(pins) == 1 && pins[0].Group != busy {
		t.Errorf("pinning: %v", pins)
	}
	laggard := keyspace.GroupID(idle + 2)
	for range 300 {
		if err := <-appendOne(l, laggard, data, false); err != nil {
			t.Fatal(err)
		}
	}
	for range 300 {
		if err := <-appendOne(l, busy, data, false); err != nil {
			t.Fatal(err)
		}
	}
	if pins := l.Pinning(1); len(pins) != 1 || pins[0].Group != busy && pins[0].Group != laggard {
		t.Errorf("pinning: %v", pins)
	}
	mustClose(t, l)
	l = mustOpen(t, o)
	for g := keyspace.GroupID(1); g <= idle; g++ {
		if hs := l.Group(g).HardState(); hs.GetTerm() != uint64(g) || l.Group(g).LastIndex() != 10 {
			t.Fatalf("group %s: %v", g, hs)
		}
	}
	mustClose(t, l)
}

// TestViewErrors checks the errors at the borders of a view.
func TestViewErrors(t *testing.T) {
	l := mustOpen(t, testOptions(simdisk.New()))
	b := l.NewBatch()
	b.Reset(1, 10, 5, nil)
	b.Append(1, nil, testEntries(11, 6, "a", "b", "c"))
	b.Compact(1, 11)
	b.Compact(1, 10) // below the base: no effect
	b.Compact(9, 50) // unknown: no effect
	l.Submit(b, nil)
	g := l.Group(1)
	for i, want := range map[uint64]error{10: raft.ErrCompacted, 11: nil, 12: nil, 13: nil, 14: raft.ErrUnavailable} {
		if _, err := g.Term(i); !errors.Is(err, want) {
			t.Errorf("term of %d: %v, want %v", i, err, want)
		}
	}
	for _, c := range []struct {
		lo, hi, max uint64
		n           int
		err         error
	}{
		{11, 13, 100, 0, raft.ErrCompacted},
		{12, 15, 100, 0, raft.ErrUnavailable},
		{12, 14, 100, 2, nil},
		{12, 14, 0, 1, nil},
		{14, 14, 100, 0, nil},
	} {
		ents, err := g.Entries(c.lo, c.hi, c.max)
		if len(ents) != c.n || !errors.Is(err, c.err) {
			t.Errorf("entries [%d, %d) in %d bytes: %d, %v", c.lo, c.hi, c.max, len(ents), err)
		}
		if ents, ok := g.EntriesCached(c.lo, c.hi, c.max); ok != (c.err == nil) || len(ents) != c.n {
			t.Errorf("cached entries [%d, %d) in %d bytes: %d, %t", c.lo, c.hi, c.max, len(ents), ok)
		}
	}
	if err := l.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	if l.queued != 0 {
		t.Errorf("%d bytes are queued in an idle log", l.queued)
	}
	l.mu.Unlock()
	if g := l.Group(77); g.Exists() || g.HardState() != nil || g.LastIndex() != 0 || g.FirstIndex() != 1 {
		t.Error("an unknown group has state")
	}
	mustClose(t, l)
}

// TestMisuse expects panics that name both values.
func TestMisuse(t *testing.T) {
	for name, do := range map[string]func(b *Batch){
		"gap":               func(b *Batch) { b.Append(1, nil, testEntries(14, 6, "x")) },
		"below the base":    func(b *Batch) { b.Append(1, nil, testEntries(10, 6, "x")) },
		"commit too high":   func(b *Batch) { b.Append(1, testHard(hardState{6, 1, 12}), nil) },
		"compact too far":   func(b *Batch) { b.Compact(1, 12) },
		"reset below":       func(b *Batch) { b.Reset(1, 5, 1, nil) },
		"entry too large":   func(b *Batch) { b.Append(1, nil, testEntries(12, 6, strings.Repeat("x", minSegmentBytes))) },
		"not consecutive":   func(b *Batch) { b.Append(1, nil, append(testEntries(12, 6, "x"), testEntries(14, 6, "y")...)) },
		"entry at index 0 ": func(b *Batch) { b.Append(2, nil, testEntries(0, 1, "x")) },
	} {
		t.Run(name, func(t *testing.T) {
			l := mustOpen(t, testOptions(simdisk.New()))
			b := l.NewBatch()
			b.Reset(1, 10, 5, testHard(hardState{5, 1, 10}))
			b.Append(1, nil, testEntries(11, 6, "a"))
			l.Submit(b, nil)
			func() {
				defer func() {
					if recover() == nil {
						t.Error("no panic")
					}
				}()
				b := l.NewBatch()
				do(b)
				l.Submit(b, nil)
			}()
			mustClose(t, l)
		})
	}
}

// TestLargeAppend splits an append that is larger than a unit; the last part carries the
// hard state.
func TestLargeAppend(t *testing.T) {
	o := testOptions(simdisk.New())
	l := mustOpen(t, o)
	var data []string
	for i := range 40 {
		data = append(data, strings.Repeat(string(rune('a'+i%26)), 1000))
	}
	b := l.NewBatch()
	b.Append(1, testHard(hardState{3, 1, 40}), testEntries(1, 3, data...))
	if b.Len() < 8 {
		t.Errorf("40 kB in %d records of at most %d", b.Len(), l.opts.unitBytes())
	}
	l.Submit(b, nil)
	mustClose(t, l)
	l = mustOpen(t, o)
	ents, err := l.Group(1).Entries(1, 41, 1<<20)
	if err != nil || len(ents) != 40 || l.Group(1).HardState().GetCommit() != 40 {
		t.Errorf("%d entries, %v", len(ents), err)
	}
	mustClose(t, l)
}

// TestReadersAndWriters reads old and new entries from many goroutines while tails are
// overwritten, compacted, rewritten and recycled. What is read is consistent.
func TestReadersAndWriters(t *testing.T) {
	o := testOptions(simdisk.New())
	o.EntryCacheBytes, o.TargetBytes = 4<<10, 4*minSegmentBytes
	l := mustOpen(t, o)
	const groups = 8
	var stop atomic.Bool
	var wait sync.WaitGroup
	var disk atomic.Int64
	for r := range 4 {
		wait.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(r), 9))
			for !stop.Load() {
				g := l.Group(keyspace.GroupID(1 + rng.IntN(groups)))
				lo, hi := g.FirstIndex(), g.LastIndex()+1
				if lo >= hi {
					continue
				}
				lo += rng.Uint64N(hi - lo)
				if _, ok := g.EntriesCached(lo, hi, 1<<20); !ok {
					disk.Add(1)
				}
				ents, err := g.Entries(lo, hi, 1<<20)
				if logChanged(err) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				for i, e := range ents {
					if want := fmt.Sprintf("%d.%d.%d.", g.ID(), e.GetIndex(), e.GetTerm()); e.GetIndex() != lo+uint64(i) || !strings.HasPrefix(string(e.GetData()), want) {
						t.Errorf("group %s: entry %d has index %d, data %.20q", g.ID(), lo+uint64(i), e.GetIndex(), e.GetData())
						return
					}
				}
			}
		})
	}
	rng := rand.New(rand.NewPCG(5, 5))
	terms := map[keyspace.GroupID]uint64{}
	for range 4000 {
		id := keyspace.GroupID(1 + rng.IntN(groups))
		g := l.Group(id)
		base, _ := g.Base()
		first := g.LastIndex() + 1
		if rng.IntN(3) == 0 && first > base+1 {
			first -= rng.Uint64N(first - base - 1)
			terms[id]++
		}
		var data []string
		for i := range uint64(1 + rng.IntN(3)) {
			data = append(data, fmt.Sprintf("%d.%d.%d.%s", id, first+i, terms[id]+1, strings.Repeat("x", rng.IntN(200))))
		}
		b := l.NewBatch()
		b.Append(id, nil, testEntries(first, terms[id]+1, data...))
		if last := first + uint64(len(data)) - 1; last > base+12 {
			b.Compact(id, last-10)
		}
		b.SetSync(rng.IntN(8) == 0)
		l.Submit(b, nil)
		if rng.IntN(100) == 0 {
			if err := l.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop.Store(true)
	wait.Wait()
	if disk.Load() == 0 {
		t.Error("nothing was read from the disk")
	}
	mustClose(t, l)
}

// TestMetrics registers the metrics and finds those that dashboards use.
func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	o := testOptions(simdisk.New())
	o.Metrics = NewMetrics(reg)
	l := mustOpen(t, o)
	if err := <-appendOne(l, 1, "x", true); err != nil {
		t.Fatal(err)
	}
	mustClose(t, l)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range families {
		seen[f.GetName()] = true
	}
	for _, want := range []string{
		"etcd_disk_wal_fsync_duration_seconds", "skein_wal_batch_bytes", "skein_wal_appends_per_fsync", "skein_wal_live_bytes",
		"skein_wal_segments", "skein_wal_full", "etcd_disk_wal_write_bytes_total",
	} {
		if !seen[want] {
			t.Errorf("no metric %s", want)
		}
	}
}

// TestIdleGroupMemory bounds the cost of an idle group: its view in the map, without
// entries.
func TestIdleGroupMemory(t *testing.T) {
	// On a real file system, so that the segments are not on the heap.
	o := testOptions(vfs.Default)
	o.Dir, o.SegmentBytes, o.TargetBytes = t.TempDir(), 4<<20, 64<<20
	l := mustOpen(t, o)
	heap := func() uint64 {
		runtime.GC()
		runtime.GC() // The first one leaves what is in pools.
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	const groups = 20000
	for g := range keyspace.GroupID(groups) {
		b := l.NewBatch()
		b.Reset(g+1, 10, 5, testHard(hardState{5, 0, 10}))
		b.SetSync(false)
		l.Submit(b, nil)
		// Sync often, so that the writer's buffers, which grow with its backlog, do not count.
		if g%100 == 99 {
			if err := l.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	used := int64(heap()) - int64(before)
	runtime.KeepAlive(l)
	t.Logf("%d bytes for each idle group", used/groups)
	if used/groups > 300 {
		t.Errorf("%d bytes for each idle group", used/groups)
	}
	mustClose(t, l)
}

// TestOverwrittenInTheirTerm: a tail that is overwritten in its own term, as offline.SoleVoter and raft after two changes of leader do, is
// read once: no entry of a record that was overwritten comes beside the new one, and none comes twice.
func TestOverwrittenInTheirTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for cut := uint64(1); cut <= 8; cut++ {
			mem := simdisk.New()
			o := testOptions(mem)
			o.EntryCacheBytes = 1 // all reads are from the disk
			l := mustOpen(t, o)
			want := map[uint64]string{}
			write := func(first uint64, data ...string) {
				b := l.NewBatch()
				b.Append(1, nil, testEntries(first, 5, data...))
				for i, d := range data {
					want[first+uint64(i)] = d
				}
				done := make(chan error, 1)
				l.Submit(b, func(err error) { done <- err })
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			}
			for first := uint64(1); first <= 7; first += 2 { // four records in one chain
				write(first, fmt.Sprint("old", first), fmt.Sprint("old", first+1))
			}
			write(cut, "new", "new", "new")
			last := l.Group(1).LastIndex()
			write(last+1, "behind")
			last++
			read := func(when string) {
				for lo := uint64(1); lo <= last; lo++ {
					for hi := lo + 1; hi <= last+1; hi++ {
						ents, err := l.Group(1).Entries(lo, hi, 1<<20)
						if err != nil || uint64(len(ents)) != hi-lo {
							t.Errorf("cut at %d, %s, [%d, %d): %d entries: %v, %v", cut, when, lo, hi, len(ents), ents, err)
							continue
						}
						for i, e := range ents {
							if at := lo + uint64(i); e.GetIndex() != at || string(e.GetData()) != want[at] {
								t.Errorf("cut at %d, %s, [%d, %d): entry %d is %v, want %q", cut, when, lo, hi, at, e, want[at])
							}
						}
					}
				}
			}
			read("at once")
			mustClose(t, l)
			l = mustOpen(t, o)
			read("opened again")
			mustClose(t, l)
		}
	})
}
