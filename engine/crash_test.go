package engine

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// groups is a workload over a few groups. Entry i of a group writes a group-local key
// named i and the applied record with index i in one batch. So a store's keys show what
// it contains: 1 to index, and no other.
type groups struct {
	e *Engine

	// Mutex guards the maps. It is not held over calls of the store, which may hold its
	// own locks when it ends the process.
	sync.Mutex
	applied map[keyspace.GroupID]uint64
	// durable is what the store has reported durable.
	durable map[keyspace.GroupID]uint64
}

func newGroups(e *Engine) *groups {
	return &groups{e: e, applied: map[keyspace.GroupID]uint64{}, durable: map[keyspace.GroupID]uint64{}}
}

// next returns the index of the group's next entry.
func (w *groups) next(g keyspace.GroupID) uint64 {
	w.Lock()
	defer w.Unlock()
	w.applied[g]++
	return w.applied[g]
}

// apply commits the next entry of each of the groups in one batch.
func (w *groups) apply(gs ...keyspace.GroupID) error {
	b := w.e.NewBatch()
	for _, g := range gs {
		i := w.next(g)
		if err := b.Set(GroupLocalKey(g, fmt.Appendf(nil, "%06d", i)), []byte("entry")); err != nil {
			return err
		}
		if err := b.SetApplied(g, Applied{Index: i, Term: 1}); err != nil {
			return err
		}
	}
	return b.Commit()
}

// look records what the store reports durable now.
func (w *groups) look() error {
	w.Lock()
	gs := slices.Collect(maps.Keys(w.applied))
	w.Unlock()
	for _, g := range gs {
		a, ok, err := w.e.DurableApplied(g)
		if err != nil {
			return err
		}
		if ok {
			w.note(g, a.Index)
		}
	}
	return nil
}

// checkRecovered opens the store on a file system after a crash. Each group must be a
// prefix, no shorter than durable and no longer than applied.
func checkRecovered(t testing.TB, fs vfs.FS, applied, durable map[keyspace.GroupID]uint64) {
	t.Helper()
	e := openAt(t, fs)
	defer func() {
		if err := e.Abort(); err != nil {
			t.Error(err)
		}
	}()
	for g, last := range applied {
		a, _, err := e.Applied(g)
		if err != nil {
			t.Fatal(err)
		}
		if a.Index < durable[g] || a.Index > last {
			t.Fatalf("group %s: recovered index %d; durable was %d, applied %d", g, a.Index, durable[g], last)
		}
		var want, got []string
		for i := range a.Index {
			want = append(want, fmt.Sprintf("%06d", i+1))
		}
		s := GroupLocalSpan(g)
		it, err := e.NewIter(IterOptions{Lower: s.Lower, Upper: s.Upper})
		if err != nil {
			t.Fatal(err)
		}
		for ok := it.First(); ok; ok = it.Next() {
			_, suffix, err := DecodeGroupLocalKey(it.Key())
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, string(suffix))
		}
		if err := it.Close(); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("group %s: applied index %d with entries %v", g, a.Index, got)
		}
	}
}

// TestCrashLeavesPrefix crashes at random moments, with random parts of the unsynced
// data, and checks each group (traps 24, 28: the wal may be truncated to the durable
// index and no further).
func TestCrashLeavesPrefix(t *testing.T) {
	for seed := range int64(10) {
		rng := rand.New(rand.NewPCG(uint64(seed), 0))
		fs := simdisk.New()
		w := newGroups(openAt(t, fs))
		for step := range 150 {
			gs := []keyspace.GroupID{1, 2, 3, keyspace.PlacementGroup}[rng.IntN(4):]
			if err := w.apply(gs...); err != nil {
				t.Fatal(err)
			}
			switch rng.IntN(10) {
			case 0:
				if err := w.e.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			case 1:
				if _, err := w.e.db.AsyncFlush(); err != nil { // may still run at the crash
					t.Fatal(err)
				}
			}
			if step%25 == 24 {
				if err := w.look(); err != nil {
					t.Fatal(err)
				}
				clone := fs.Crash(rng.IntN(101), rng)
				checkRecovered(t, clone, w.applied, w.durable)
			}
		}
		if err := w.e.Abort(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCloseMakesDurable closes cleanly, then crashes: nothing is lost.
func TestCloseMakesDurable(t *testing.T) {
	fs := simdisk.New()
	w := newGroups(openAt(t, fs))
	for range 10 {
		if err := w.apply(1, 2); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.e.Close(); err != nil {
		t.Fatal(err)
	}
	checkRecovered(t, fs.Crash(0, nil), w.applied, w.applied)
}

// TestIngestCrashAtEachOperation crashes at each file system operation of an ingest
// (traps 31, 32, 58). Afterwards the group is entirely the old one or entirely the new
// one, and the new one if the ingest had returned.
func TestIngestCrashAtEachOperation(t *testing.T) {
	for _, memtable := range []bool{true, false} {
		t.Run(fmt.Sprintf("memtable=%v", memtable), func(t *testing.T) { testIngestCrash(t, memtable) })
	}
}

func testIngestCrash(t *testing.T, memtable bool) {
	const g = 7
	spans := []KeySpan{VersionedSpan(keyspace.Span{Start: []byte("b"), End: []byte("d")}), GroupLocalSpan(g)}
	from := openTest(t, simdisk.New())
	put(t, from, "c", 30, "new")
	commit(t, from, func(b *Batch) error {
		return errors.Join(b.Set(GroupLocalKey(g, []byte("new")), nil), b.SetApplied(g, Applied{Index: 100, Term: 6}))
	})
	s := from.NewSnapshot()
	defer s.Close()

	mem := simdisk.New()
	on := false
	var clones []*simdisk.Disk
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(1, 0))
	to := openAt(t, errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		mu.Lock() // a compaction may continue behind the ingest
		defer mu.Unlock()
		if on && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			clones = append(clones, mem.Crash(50, rng), mem.Crash(0, nil))
		}
		return nil
	})))
	put(t, to, "b", 20, "old")
	commit(t, to, func(b *Batch) error {
		return errors.Join(b.Set(GroupLocalKey(g, []byte("old")), nil), b.SetApplied(g, Applied{Index: 50, Term: 5}))
	})
	if err := to.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if memtable {
		put(t, to, "c", 21, "old")
		commit(t, to, func(b *Batch) error { return b.SetApplied(g, Applied{Index: 51, Term: 5}) })
	}
	in := Ingest{Group: g, Spans: spans, Paths: export(t, s, to, g, spans, 0)}
	mu.Lock()
	on = true
	mu.Unlock()
	if _, err := to.IngestTables(t.Context(), in); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	on = false
	clones = append(clones, mem.Crash(0, nil))
	mu.Unlock()

	old := "applied/7: 5/50 \"\"\ngroup/7/\"old\": \nkey/\"b\"@20: old\n"
	newer := "applied/7: 5/51 \"\"\ngroup/7/\"old\": \nkey/\"b\"@20: old\nkey/\"c\"@21: old\n"
	want := "applied/7: 6/100 \"\"\ngroup/7/\"new\": \nkey/\"c\"@30: new\n"
	seen := map[string]int{}
	for i, clone := range clones {
		e := openAt(t, clone)
		got := dump(t, e)
		seen[got]++
		if got != want && (i == len(clones)-1 || got != old && got != newer) {
			t.Fatalf("crash %d of %d left\n%s", i, len(clones), got)
		}
		if err := e.Abort(); err != nil {
			t.Fatal(err)
		}
	}
	if seen[want] < 1 || seen[old]+seen[newer] < 3 {
		t.Fatalf("%d crashes prove little: %v", len(clones), seen)
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
}

// script runs commits, flushes, an ingest and a clean end on a file system that may fail.
func (w *groups) script(t testing.TB, o Options, tables map[string][]byte) (err error) {
	t.Helper()
	fs := o.FS
	if w.e, err = Open(o); err != nil {
		return err
	}
	defer func() {
		cerr := w.e.Close()
		if cerr == nil {
			w.note(1, w.applied[1])
			w.note(2, w.applied[2])
		}
		err = errors.Join(err, cerr)
	}()
	for range 3 {
		for range 5 {
			if err := w.apply(1, 2); err != nil {
				return err
			}
		}
		if err := w.e.Flush(t.Context()); err != nil {
			return err
		}
		if err := w.look(); err != nil {
			return err
		}
	}
	if err := w.apply(1, 2); err != nil {
		return err
	}
	in := Ingest{Group: 3, Spans: []KeySpan{GroupLocalSpan(3)}}
	for name, data := range tables {
		in.Paths = append(in.Paths, fs.PathJoin(w.e.StagingDir(), name))
		if err := vfsWrite(fs, in.Paths[len(in.Paths)-1], data); err != nil {
			return err
		}
	}
	w.Lock()
	w.applied[3] = 5 // or nothing yet
	w.Unlock()
	a, err := w.e.IngestTables(t.Context(), in)
	if err != nil {
		return err
	}
	w.note(3, a.Index)
	return nil
}

// note records that the group is durable up to the index.
func (w *groups) note(g keyspace.GroupID, index uint64) {
	w.Lock()
	defer w.Unlock()
	w.durable[g] = index
}

func vfsWrite(fs vfs.FS, path string, data []byte) error {
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(slices.Clone(data))
	return errors.Join(err, f.Close())
}

// groupTables exports group 3 with five entries.
func groupTables(t testing.TB) map[string][]byte {
	t.Helper()
	fs := simdisk.New()
	w := newGroups(openAt(t, fs))
	for range 5 {
		if err := w.apply(3); err != nil {
			t.Fatal(err)
		}
	}
	s := w.e.NewSnapshot()
	paths := export(t, s, w.e, 3, []KeySpan{GroupLocalSpan(3)}, 0)
	tables := map[string][]byte{}
	for _, p := range paths {
		f, err := fs.Open(p)
		if err != nil {
			t.Fatal(err)
		}
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, st.Size())
		if _, err := f.ReadAt(b, 0); err != nil {
			t.Fatal(err)
		}
		tables[fs.PathBase(p)] = b
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(s.Close(), w.e.Close()); err != nil {
		t.Fatal(err)
	}
	return tables
}

// TestErrorAtEachOperation lets each write to the file system fail once: what was
// reported durable exists after a crash. A store that loses its manifest ends its
// process, so the test runs in processes of its own, each until it ends.
func TestErrorAtEachOperation(t *testing.T) {
	if n, err := strconv.Atoi(os.Getenv(childEnv)); err == nil {
		errorsFrom(t, int32(n))
		return
	}
	for n, lost := 0, 0; ; n, lost = n+1, lost+1 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestErrorAtEachOperation$", "-test.v", "-test.timeout=20s")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", childEnv, n))
		out, err := cmd.CombinedOutput()
		if err == nil {
			if n < 40 || lost < 4 {
				t.Fatalf("%d operations, %d of which ended the process", n, lost)
			}
			return
		}
		found := lostLine.FindSubmatch(out)
		if found == nil {
			t.Fatalf("%v\n%s", err, out)
		}
		n, _ = strconv.Atoi(string(found[1]))
	}
}

var lostLine = regexp.MustCompile(`lost its manifest at operation (\d+), recovered`)

// errorsFrom fails the n-th operation, then the next one, and so on.
func errorsFrom(t *testing.T, n int32) {
	t.Helper()
	tables := groupTables(t)
	for ; ; n++ {
		mem := simdisk.New()
		var count atomic.Int32
		o := testOptions(errorfs.Wrap(mem, errorfs.InjectorFunc(func(o errorfs.Op) error {
			if o.Kind.ReadOrWrite() == errorfs.OpIsWrite && count.Add(1) == n+1 {
				return errorfs.ErrInjected
			}
			return nil
		})))
		w := newGroups(nil)
		o.onLost = func() {
			w.Lock()
			defer w.Unlock()
			checkRecovered(t, mem.Crash(0, nil), w.applied, w.durable)
			if !t.Failed() {
				fmt.Printf("lost its manifest at operation %d, recovered\n", n)
			}
			os.Exit(3)
		}
		err := w.script(t, o, tables)
		if count.Load() <= n {
			if err != nil {
				t.Fatal(err)
			}
			return
		}
		checkRecovered(t, mem.Crash(0, nil), w.applied, w.durable)
	}
}

// TestNoSpaceAtEachOperation lets each write find the disk full once. The ballast is
// deleted and the write retried. Only the ingest notices, because it is not begun on a
// full disk.
func TestNoSpaceAtEachOperation(t *testing.T) {
	tables := groupTables(t)
	for n, done := int32(0), false; !done; n++ {
		synctest.Test(t, func(t *testing.T) { done = noSpaceAt(t, n, tables) })
		if done && n < 12 {
			t.Errorf("only %d operations", n)
		}
	}
}

// nthFailure fails one operation of a file system once.
type nthFailure struct {
	n     int32
	count atomic.Int32
	op    errorfs.Op // the one that failed
}

// failNth fails the n-th (from 0) of the operations that count, from when the store is open and
// has its ballast.
func failNth(fs vfs.FS, n int32, counts func(errorfs.Op) bool, err error) (vfs.FS, *nthFailure) {
	f, on := &nthFailure{n: n}, new(atomic.Bool)
	return errorfs.Wrap(fs, errorfs.InjectorFunc(func(o errorfs.Op) error {
		if strings.Contains(o.Path, ballastName) && o.Kind == errorfs.OpRename {
			on.Store(true)
		}
		if on.Load() && counts(o) && f.count.Add(1) == n+1 {
			f.op = o
			return fmt.Errorf("injected: %w", err)
		}
		return nil
	})), f
}

// beyond says that there were no more than n such operations.
func (f *nthFailure) beyond() bool { return f.count.Load() <= f.n }

// noSpaceAt fails the n-th write; done says that there are fewer.
func noSpaceAt(t *testing.T, n int32, tables map[string][]byte) (done bool) {
	t.Helper()
	mem := simdisk.New()
	fs, failed := failNth(mem, n, func(o errorfs.Op) bool {
		return strings.Contains(o.Path, "db/0") && o.Kind.ReadOrWrite() == errorfs.OpIsWrite
	}, syscall.ENOSPC)
	o, w := testOptions(fs), newGroups(nil)
	o.Clock = clock.Virtual()
	err := w.script(t, o, tables)
	// Pebble creates a log file although its WAL is off, and syncs the file on close.
	if err != nil && !errors.Is(err, ErrNoSpace) && !strings.HasSuffix(failed.op.Path, ".log") {
		t.Errorf("operation %d (%v %s): %v", n, failed.op.Kind, failed.op.Path, err)
	}
	checkRecovered(t, mem.Crash(0, nil), w.applied, w.durable)
	return failed.beyond()
}

// TestNoFilesAtEachOpen lets each attempt of Pebble to open a file find that the process can open no
// more. Only the ingest notices, as on a full disk.
func TestNoFilesAtEachOpen(t *testing.T) {
	tables := groupTables(t)
	for n, done := int32(0), false; !done; n++ {
		synctest.Test(t, func(t *testing.T) { done = noFilesAt(t, n, tables) })
		if done && n < 8 {
			t.Errorf("only %d files are opened", n)
		}
	}
}

// noFilesAt fails the n-th attempt; done says that there are fewer.
func noFilesAt(t *testing.T, n int32, tables map[string][]byte) (done bool) {
	t.Helper()
	mem := simdisk.New()
	fs, failed := failNth(mem, n, func(o errorfs.Op) bool {
		opens := []errorfs.OpKind{errorfs.OpCreate, errorfs.OpOpen, errorfs.OpOpenDir, errorfs.OpReuseForWrite}
		return slices.Contains(opens, o.Kind) && !strings.Contains(o.Path, stagingName)
	}, syscall.EMFILE)
	o, w := testOptions(fs), newGroups(nil)
	o.Clock = clock.Virtual()
	if err := w.script(t, o, tables); err != nil && !errors.Is(err, ErrNoSpace) {
		t.Errorf("file %d (%v %s): %v", n, failed.op.Kind, failed.op.Path, err)
	}
	checkRecovered(t, mem.Crash(0, nil), w.applied, w.durable)
	return failed.beyond()
}
