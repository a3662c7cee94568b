package wal

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/keyspace"
)

// TestRewritesEnd fills the log with tails that are all small and together exceed the
// target. Rewriting them cannot shorten the log: they are rewritten once, then the log is
// left alone and Pinning names them. Once most of them are compacted, the rest is
// rewritten, and the log is within its target.
func TestRewritesEnd(t *testing.T) { synctest.Test(t, testRewritesEnd) }

func testRewritesEnd(t *testing.T) {
	// A log that never stops writing would never let the bubble's time pass.
	var written atomic.Int64
	inj := errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileWriteAt && written.Add(1) > 5000 {
			return errors.New("writes do not end")
		}
		return nil
	})
	o := testOptions(errorfs.Wrap(vfs.NewMem(), inj))
	o.SegmentBytes, o.TargetBytes, o.SmallTailBytes = 16<<10, 64<<10, 1<<10
	reg := prometheus.NewRegistry()
	o.Metrics = NewMetrics(reg)
	l := mustOpen(t, o)
	defer mustClose(t, l)
	const groups = 200
	for g := range keyspace.GroupID(groups) {
		if err := <-appendOne(l, g+1, strings.Repeat("x", 900), true); err != nil {
			t.Fatal(err)
		}
	}
	rewritten := func() float64 {
		time.Sleep(time.Hour)
		synctest.Wait()
		return counter(t, reg, "skein_wal_rewritten_bytes_total")
	}
	first := rewritten()
	if again := rewritten(); again != first || l.Err() != nil {
		t.Fatalf("%.0f bytes rewritten without any traffic, %v", again-first, l.Err())
	}
	// While the log grew by twelve segments, each quarter of its length may have cost a
	// cycle.
	if live := l.LiveBytes(); first > 6*float64(live) {
		t.Errorf("%.0f bytes rewritten for a log of %d", first, live)
	}
	pins := l.Pinning(groups)
	if len(pins) < groups/2 {
		t.Fatalf("%d groups are named, %d hold the log at %d bytes", len(pins), groups, l.LiveBytes())
	}
	// Changes since the last cycle may also begin one.
	bound := first + float64(l.LiveBytes())
	for _, p := range pins[:groups/2] {
		bound += 4 * float64(p.Bytes+recordLen)
		b := l.NewBatch()
		b.Compact(p.Group, 1)
		l.Submit(b, nil)
	}
	if err := l.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := rewritten(); after == first || after > bound {
		t.Errorf("%.0f bytes rewritten after half of the tails was given up, at most %.0f are worth it", after-first, bound-first)
	}
	// All at once: if a cycle began among them, those behind it could be less than the quarter of
	// the log that must change before the next one.
	b := l.NewBatch()
	for g := range keyspace.GroupID(groups - 20) {
		b.Compact(g+1, 1)
	}
	l.Submit(b, nil)
	if err := l.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	rewritten()
	if live := l.LiveBytes(); live > o.TargetBytes {
		t.Errorf("the log has %d bytes, target %d", live, o.TargetBytes)
	}
	if pins := l.Pinning(groups); len(pins) > 0 {
		t.Errorf("small tails are named in a log within its target: %v", pins)
	}
}

// TestMove: a tail that is larger than the small ones, than a unit and than a segment
// holds the log while other groups write. Once Move is called, it is rewritten in steps,
// and the log stays within twice its target for as long as the others write. It costs no
// more than the log's bound of four times what the others write.
func TestMove(t *testing.T) { synctest.Test(t, testMove) }

func testMove(t *testing.T) {
	o := testOptions(vfs.NewMem())
	o.SegmentBytes, o.TargetBytes, o.SmallTailBytes = 64<<10, 512<<10, 1<<10
	reg := prometheus.NewRegistry()
	o.Metrics = NewMetrics(reg)
	l := mustOpen(t, o)
	const stuck, tail = 1, 300
	var want []string
	for i := range tail {
		want = append(want, fmt.Sprint(i, strings.Repeat("s", 900)))
	}
	b := l.NewBatch()
	b.Append(stuck, testHard(hardState{1, 1, 0}), testEntries(1, 1, want...))
	l.Submit(b, nil)
	next := uint64(1)
	written := int64(0)
	write := func(bytes int64) {
		for end := written + bytes; written < end; next++ {
			b := l.NewBatch()
			b.Append(2, testHard(hardState{1, 1, next}), testEntries(next, 1, strings.Repeat("w", 2000)))
			b.Compact(2, next)
			written += b.Bytes()
			l.Submit(b, nil)
			if err := l.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
	}
	write(2 * o.TargetBytes)
	if p := l.Pinning(10); len(p) != 1 || p[0].Group != stuck {
		t.Fatalf("named: %v", p)
	}
	if live := l.LiveBytes(); live < 2*o.TargetBytes {
		t.Fatalf("a log of %d bytes proves nothing", live)
	}
	l.Group(stuck).Move()
	before := counter(t, reg, "skein_wal_rewritten_bytes_total")
	write(o.TargetBytes / 8)
	if live := l.LiveBytes(); live > o.TargetBytes {
		t.Errorf("%d bytes after the move, target %d", live, o.TargetBytes)
	}
	first := counter(t, reg, "skein_wal_rewritten_bytes_total") - before
	if bytes := float64(tail * 915); first < bytes || first > 1.2*bytes {
		t.Errorf("%.0f bytes rewritten for a tail of %.0f", first, bytes)
	}
	for range 20 {
		write(o.TargetBytes / 4)
		l.Group(stuck).Move()
		if live := l.LiveBytes(); live > 2*o.TargetBytes {
			t.Fatalf("%d bytes, target %d", live, o.TargetBytes)
		}
	}
	if cost := counter(t, reg, "skein_wal_rewritten_bytes_total"); cost > 4*float64(written) {
		t.Errorf("%.0f bytes rewritten while %d were written", cost, written)
	}
	mustClose(t, l)
	l = mustOpen(t, o)
	defer mustClose(t, l)
	ents, err := l.Group(stuck).Entries(1, tail+1, 1<<40)
	if err != nil || len(ents) != tail {
		t.Fatalf("%d entries, %v", len(ents), err)
	}
	for i, e := range ents {
		if string(e.GetData()) != want[i] {
			t.Fatalf("entry %d is %.20q", i+1, e.GetData())
		}
	}
}

// TestMoveOnFullDisk: without a further segment, the rest of the active one is for hard states and
// commits. A tail that fills whole segments stays where it is until there is room again.
func TestMoveOnFullDisk(t *testing.T) {
	for _, move := range []bool{false, true} {
		t.Run(fmt.Sprint("move ", move), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFullDisk(t)
				const tail = 150
				var want []string
				for i := range tail {
					want = append(want, fmt.Sprint(i, strings.Repeat("s", 900)))
				}
				f.append(1, want...)
				f.fill()
				if move {
					f.l.Group(1).Move()
				}
				f.hardStates(100)
				if !move {
					return
				}
				f.full.Store(false)
				// Nobody writes: the move goes on by itself.
				time.Sleep(2 * spaceRetry)
				synctest.Wait()
				if n := counter(t, f.reg, "skein_wal_rewritten_bytes_total"); n < tail*900 {
					t.Errorf("%.0f bytes of the tail are rewritten once there is room", n)
				}
				mustClose(t, f.l)
				f.l = mustOpen(t, f.l.opts)
				ents, err := f.l.Group(1).Entries(1, tail+1, 1<<40)
				if err != nil || len(ents) != tail {
					t.Fatalf("%d entries, %v", len(ents), err)
				}
				for i, e := range ents {
					if string(e.GetData()) != want[i] {
						t.Fatalf("entry %d is %.20q", i+1, e.GetData())
					}
				}
			})
		})
	}
}

// TestSmallTailOnFullDisk: a tail that fits into the active segment, and leaves room there, is
// rewritten also on a full disk. The segments that it held serve again.
func TestSmallTailOnFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFullDisk(t)
		f.append(1, strings.Repeat("s", 3000))
		f.fill()
		f.l.Group(1).Move()
		f.hardStates(10)
		if f.l.Space() != SpaceOK || f.l.LiveBytes() > f.l.opts.TargetBytes {
			t.Errorf("the log has %d bytes, target %d; room: %d", f.l.LiveBytes(), f.l.opts.TargetBytes, f.l.Space())
		}
	})
}

// fullDisk is a log whose disk takes no further segment once full is set.
type fullDisk struct {
	t    *testing.T
	l    *Log
	reg  *prometheus.Registry
	full atomic.Bool
	next uint64
}

func newFullDisk(t *testing.T) *fullDisk {
	t.Helper()
	f := &fullDisk{t: t, reg: prometheus.NewRegistry(), next: 1}
	o := testOptions(vfs.NewMem())
	o.SegmentBytes, o.TargetBytes, o.SmallTailBytes = 64<<10, 256<<10, 1<<10
	o.Metrics = NewMetrics(f.reg)
	o.MayAllocate = func(int64) bool { return !f.full.Load() }
	f.l = mustOpen(t, o)
	t.Cleanup(func() {
		f.full.Store(false)
		mustClose(t, f.l)
	})
	return f
}

func (f *fullDisk) append(g keyspace.GroupID, data ...string) {
	b := f.l.NewBatch()
	b.Append(g, testHard(hardState{1, 1, 0}), testEntries(1, 1, data...))
	f.submit(b)
}

// submit waits until the log is idle, for no more than a minute.
func (f *fullDisk) submit(b *Batch) {
	f.t.Helper()
	done := make(chan error, 1)
	f.l.Submit(b, func(err error) { done <- err })
	synctest.Wait()
	select {
	case err := <-done:
		if err != nil {
			f.t.Fatal(err)
		}
	default:
		f.t.Fatalf("the log stands still with %d bytes in the queue", f.l.queued)
	}
}

// fill makes the log longer than its target with what nobody needs, then takes the disk's room, and
// goes on until only 30 KiB of the last segment are left.
func (f *fullDisk) fill() {
	f.t.Helper()
	for {
		f.full.Store(f.l.LiveBytes() > 2*f.l.opts.TargetBytes)
		f.l.mu.Lock()
		s, ready := f.l.segs[len(f.l.segs)-1], len(f.l.ready)
		f.l.mu.Unlock()
		if ready == 0 && s.size-s.end.Load() < 32<<10 {
			return
		}
		b := f.l.NewBatch()
		b.Append(2, testHard(hardState{1, 1, f.next}), testEntries(f.next, 1, strings.Repeat("w", 2000)))
		b.Compact(2, f.next)
		f.next++
		f.submit(b)
	}
}

func (f *fullDisk) hardStates(n int) {
	f.t.Helper()
	for i := range n {
		b := f.l.NewBatch()
		b.Append(3, testHard(hardState{uint64(i + 1), 1, 0}), nil)
		f.submit(b)
	}
}
