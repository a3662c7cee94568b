package engine

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// put commits a versioned key.
func put(t testing.TB, e *Engine, key string, rev keyspace.Revision, value string) {
	t.Helper()
	b := e.NewBatch()
	if err := b.Set(AppendVersionedKey(nil, []byte(key), rev), []byte(value)); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
}

// commit commits what f writes.
func commit(t testing.TB, e *Engine, f func(*Batch) error) {
	t.Helper()
	b := e.NewBatch()
	if err := f(b); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
}

// dump returns all keys with their values, a line for each.
func dump(t testing.TB, r Reader) string {
	t.Helper()
	it, err := r.NewIter(IterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := ""
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			t.Fatal(err)
		}
		if g, err := decodeAppliedKey(it.Key()); err == nil {
			a, err := DecodeApplied(v)
			if err != nil {
				t.Fatal(err)
			}
			out += fmt.Sprintf("applied/%s: %d/%d %q\n", g, a.Term, a.Index, a.Payload)
			continue
		}
		out += fmt.Sprintf("%s: %s\n", FormatKey(it.Key()), v)
	}
	if err := it.Error(); err != nil {
		t.Fatal(err)
	}
	if err := it.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

// export writes the group's tables into the receiver's staging directory.
func export(t testing.TB, s *Snapshot, to *Engine, g keyspace.GroupID, spans []KeySpan, maxBytes int64) []string {
	t.Helper()
	var paths []string
	_, err := s.ExportTables(t.Context(), g, spans, maxBytes, func(n int) (io.WriteCloser, error) {
		p := to.FS().PathJoin(to.StagingDir(), fmt.Sprintf("%s-%d", g, n))
		paths = append(paths, p)
		return to.FS().Create(p, vfs.WriteCategoryUnspecified)
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// table writes a table with what f puts into it into the staging directory.
func table(t *testing.T, e *Engine, name string, f func(w *sstable.Writer) error) string {
	t.Helper()
	path := e.FS().PathJoin(e.StagingDir(), name)
	file, err := e.FS().Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	w := sstable.NewWriter(&tableFile{w: file}, writerOptions())
	if err := errors.Join(f(w), w.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// peakFile records the peak of the memory in use while a table is written.
type peakFile struct {
	n, next int64
	peak    *uint64
}

func (f *peakFile) Write(p []byte) (int, error) {
	if f.n += int64(len(p)); f.n >= f.next {
		f.next = f.n + 1<<20
		*f.peak = max(*f.peak, living())
	}
	return len(p), nil
}

func (f *peakFile) Close() error { return nil }

func living() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestExportMemory: a table of older versions of keys is not kept in memory until it is
// complete.
func TestExportMemory(t *testing.T) {
	const versions, size = 64 << 10, 256
	// Under the race detector the block cache is on the heap: 5 MiB of it here.
	const bound = 12 << 20
	opts := testOptions(vfs.NewMem())
	opts.CacheBytes = 1 << 20
	e := openWith(t, opts)
	value := make([]byte, size)
	commit(t, e, func(b *Batch) error {
		return b.SetApplied(7, Applied{Index: 9, Term: 6})
	})
	for rev := keyspace.Revision(1); rev <= versions; rev += versions / 8 {
		commit(t, e, func(b *Batch) (err error) {
			for r := rev; r < rev+versions/8 && err == nil; r++ {
				_, _ = rand.Read(value)
				err = b.Set(AppendVersionedKey(nil, []byte("k"), r), value)
			}
			return err
		})
	}
	if err := e.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := e.NewSnapshot()
	defer s.Close()
	before, peak := living(), uint64(0)
	x, err := s.ExportTables(t.Context(), 7, []KeySpan{VersionedSpan(keyspace.Span{})}, 0, func(int) (io.WriteCloser, error) {
		return &peakFile{peak: &peak}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(x.Tables); n != 2 || x.Tables[1].Bytes < versions*size {
		t.Fatalf("%d tables, the last of %d bytes", n, x.Tables[n-1].Bytes)
	}
	if peak > before+bound {
		t.Errorf("%d bytes lived more than before while a table of %d was written, bound %d", peak-before, x.Tables[1].Bytes, bound)
	}
}

// TestVerifyRefusesWhatIngestRefuses builds sets of tables that the store would not
// accept: their install would be retried for ever.
func TestVerifyRefusesWhatIngestRefuses(t *testing.T) {
	const g = 7
	e := openTest(t, vfs.NewMem())
	data := VersionedSpan(keyspace.Span{Start: []byte("b"), End: []byte("d")})
	local := GroupLocalSpan(g)
	key := func(k string) []byte { return AppendVersionedKey(nil, []byte(k), 5) }
	puts := func(keys ...string) func(w *sstable.Writer) error {
		return func(w *sstable.Writer) (err error) {
			for _, k := range keys {
				err = errors.Join(err, w.Set(key(k), []byte("v")))
			}
			return err
		}
	}
	clears := func(s KeySpan) func(w *sstable.Writer) error {
		return func(w *sstable.Writer) error { return w.DeleteRange(s.Lower, s.Upper) }
	}
	leased := func(keys ...string) func(w *sstable.Writer) error {
		return func(w *sstable.Writer) (err error) {
			for _, k := range keys {
				err = errors.Join(err, w.Set(AppendLeaseKey(nil, keyspace.LeaseID(len(keys)), []byte(k)), nil))
			}
			return err
		}
	}
	clearsLease := func(start, end string) func(w *sstable.Writer) error {
		return clears(LeaseSpan(6, keyspace.Span{Start: []byte(start), End: []byte(end)}))
	}
	record := table(t, e, "record", func(w *sstable.Writer) error {
		a := Applied{Index: 9, Term: 6}
		s := appliedSpan(g)
		return errors.Join(w.Set(appliedKey(g), AppendApplied(nil, &a)), w.DeleteRange(s.Lower, s.Upper))
	})
	cleared := table(t, e, "cleared", clears(local))
	for i, c := range []struct {
		what   string
		tables []func(w *sstable.Writer) error
		good   bool
	}{
		{"side by side", []func(*sstable.Writer) error{puts("c", "c1"), puts("b", "b9")}, true},
		{"a border in common", []func(*sstable.Writer) error{
			clears(KeySpan{data.Lower, key("c")}), puts("c"),
		}, true},
		{"one within the other", []func(*sstable.Writer) error{puts("b", "c9"), puts("c")}, false},
		{"one key in both", []func(*sstable.Writer) error{puts("b", "c"), puts("c", "c1")}, false},
		{"cleared twice", []func(*sstable.Writer) error{clears(local)}, false},
		{"beyond the span", []func(*sstable.Writer) error{puts("c", "d")}, false},
		{"from one span into another", []func(*sstable.Writer) error{func(w *sstable.Writer) error {
			return errors.Join(w.Set(GroupLocalKey(g, []byte("x")), nil), w.DeleteRange(data.Lower, data.Upper))
		}}, false},
		{"leases of the span", []func(*sstable.Writer) error{leased("b", "c"), leased("cc"), clearsLease("b", "d")}, true},
		{"a lease beyond the span", []func(*sstable.Writer) error{leased("b", "d")}, false},
		{"a lease before the span", []func(*sstable.Writer) error{leased("a", "c")}, false},
		{"a lease cleared beyond the span", []func(*sstable.Writer) error{clearsLease("c", "dd")}, false},
		{"a lease cleared to its end", []func(*sstable.Writer) error{clearsLease("c", "")}, false},
		{"several leases cleared as one", []func(*sstable.Writer) error{func(w *sstable.Writer) error {
			return w.DeleteRange(AppendLeaseKey(nil, 6, []byte("b")), AppendLeaseKey(nil, 7, []byte("c")))
		}}, false},
		{"range keys", []func(*sstable.Writer) error{func(w *sstable.Writer) error {
			return w.RangeKeyDelete(data.Lower, data.Upper)
		}}, false},
	} {
		in := Ingest{Group: g, Spans: []KeySpan{data, local}, Paths: []string{record, cleared}}
		for j, f := range c.tables {
			in.Paths = append(in.Paths, table(t, e, fmt.Sprint(i, "-", j), f))
		}
		_, err := e.VerifyTables(t.Context(), in)
		if c.good && err != nil || !c.good && !errors.Is(err, ErrBadTables) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// TestSnapshotReplacesLeases: spans of many leases share tables. The tables clear what
// the receiver has in the spans, and touch nothing between them.
func TestSnapshotReplacesLeases(t *testing.T) {
	const g = 7
	span := keyspace.Span{Start: []byte("b"), End: []byte("d")}
	from, to := openTest(t, vfs.NewMem()), openTest(t, vfs.NewMem())
	attach := func(e *Engine, lease keyspace.LeaseID, keys ...string) {
		commit(t, e, func(b *Batch) (err error) {
			for _, k := range keys {
				err = errors.Join(err, b.Set(AppendLeaseKey(nil, lease, []byte(k)), nil))
			}
			return err
		})
	}
	spans := []KeySpan{VersionedSpan(span), GroupLocalSpan(g)}
	want := "applied/7: 6/100 \"\"\n"
	for lease := range keyspace.LeaseID(40) {
		keys := []string{}
		for i := range 20 {
			keys = append(keys, fmt.Sprintf("c%02d", i))
		}
		if lease%3 == 0 {
			keys = nil
		}
		attach(from, lease, append(keys, "a", "d")...)
		attach(to, lease, "a", "b", "c05", "cc", "d")
		all := spans
		if lease%4 != 0 {
			all = append(all, LeaseSpan(lease, span))
		} else {
			keys = []string{"b", "c05", "cc"}
		}
		spans = all
		for _, k := range append(append([]string{"a"}, keys...), "d") {
			want += FormatKey(AppendLeaseKey(nil, lease, []byte(k))) + ": \n"
		}
	}
	commit(t, from, func(b *Batch) error { return b.SetApplied(g, Applied{Index: 100, Term: 6}) })
	s := from.NewSnapshot()
	defer s.Close()
	in := Ingest{Group: g, Spans: spans[:2], Paths: export(t, s, to, g, spans, 1<<10)}
	if n := len(in.Paths); n < 5 || n > 20 {
		t.Errorf("%d tables", n)
	}
	if _, err := to.VerifyTables(t.Context(), in); err != nil {
		t.Fatal(err)
	}
	if _, err := to.IngestTables(t.Context(), in); err != nil {
		t.Fatal(err)
	}
	if got := dump(t, to); got != want {
		t.Errorf("after the ingest\n%swant\n%s", got, want)
	}
}

// TestSnapshotReplacesReplica sends a replica to a node that has an old one. Keys that
// only the old one had must go, and keys outside must stay.
func TestSnapshotReplacesReplica(t *testing.T) {
	const g = 7
	span := keyspace.Span{Start: []byte("b"), End: []byte("d")}
	spans := []KeySpan{VersionedSpan(span), GroupLocalSpan(g)}
	for _, flushed := range []bool{false, true} {
		t.Run(fmt.Sprintf("flushed=%v", flushed), func(t *testing.T) {
			from, to := openTest(t, vfs.NewMem()), openTest(t, vfs.NewMem())
			for i := range 300 {
				put(t, from, fmt.Sprintf("c%03d", i), keyspace.Revision(10+i), "new")
			}
			commit(t, from, func(b *Batch) error {
				if err := b.Set(GroupLocalKey(g, []byte("new")), []byte("1")); err != nil {
					return err
				}
				return b.SetApplied(g, Applied{Index: 100, Term: 6, Payload: []byte("new")})
			})
			put(t, to, "a", 3, "left")
			put(t, to, "bb", 4, "old")
			put(t, to, "c000", 5, "old")
			put(t, to, "d", 6, "right")
			commit(t, to, func(b *Batch) error {
				for _, h := range []keyspace.GroupID{g - 1, g, g + 1} {
					if err := b.Set(GroupLocalKey(h, []byte("old")), []byte("1")); err != nil {
						return err
					}
					if err := b.SetApplied(h, Applied{Index: 50, Term: 5, Payload: []byte("old")}); err != nil {
						return err
					}
				}
				return nil
			})
			if flushed {
				if err := to.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			before := to.NewSnapshot()
			defer before.Close()
			was := dump(t, before)

			s := from.NewSnapshot()
			defer s.Close()
			in := Ingest{Group: g, Spans: spans, Paths: export(t, s, to, g, spans, 2<<10)}
			if len(in.Paths) < 4 {
				t.Fatalf("%d tables; the bound on their size has no effect", len(in.Paths))
			}
			if a, err := to.VerifyTables(t.Context(), in); err != nil || a.Index != 100 {
				t.Fatalf("verify: %+v %v", a, err)
			}
			if a, err := to.IngestTables(t.Context(), in); err != nil || a.Index != 100 || a.Term != 6 {
				t.Fatalf("ingest: %+v %v", a, err)
			}
			if a, ok, err := to.DurableApplied(g); err != nil || !ok || a.Index != 100 {
				t.Fatalf("durable after the ingest: %+v %v %v", a, ok, err)
			}
			if got := dump(t, before); got != was {
				t.Errorf("a snapshot from before sees\n%swant\n%s", got, was)
			}
			want := "applied/6: 5/50 \"old\"\napplied/7: 6/100 \"new\"\napplied/8: 5/50 \"old\"\n" +
				"group/6/\"old\": 1\ngroup/7/\"new\": 1\ngroup/8/\"old\": 1\nkey/\"a\"@3: left\n"
			for i := range 300 {
				want += fmt.Sprintf("key/\"c%03d\"@%d: new\n", i, 10+i)
			}
			want += "key/\"d\"@6: right\n"
			if got := dump(t, to); got != want {
				t.Errorf("after the ingest\n%swant\n%s", got, want)
			}
		})
	}
}

// TestSnapshotsBesideIngests: a snapshot made while another range's copy is ingested does
// no harm. Pebble would panic over one that did not exist when the excise began.
func TestSnapshotsBesideIngests(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(8)) // more threads than cores: they stop anywhere
	const g = 7
	spans := []KeySpan{VersionedSpan(keyspace.Span{Start: []byte("b"), End: []byte("d")}), GroupLocalSpan(g)}
	from, to := openTest(t, vfs.NewMem()), openTest(t, vfs.NewMem())
	put(t, from, "c", 10, "new")
	commit(t, from, func(b *Batch) error { return b.SetApplied(g, Applied{Index: 100, Term: 6}) })
	s := from.NewSnapshot()
	defer s.Close()
	stop := make(chan struct{})
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				snap := to.NewSnapshot()
				runtime.Gosched()
				if err := snap.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	defer wait.Wait()
	defer close(stop)
	for i := range 60 {
		// Data in a memtable make the ingest wait for a flush.
		put(t, to, "c", keyspace.Revision(20+i), "old")
		in := Ingest{Group: g, Spans: spans, Paths: export(t, s, to, g, spans, 1<<20)}
		if _, err := to.IngestTables(t.Context(), in); err != nil {
			t.Fatal(err)
		}
	}
}
