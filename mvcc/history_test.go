package mvcc

import (
	"fmt"
	"math/bits"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// TestHistories runs the stories in testdata/histories. Commands:
//
//	txn rev=R                  one operation a line: "put KEY VALUE [lease=N]" or
//	                           "delete KEY"; create and version follow from the store
//	get key=K at=R             newest version at R
//	scan [start=] [end=] at=R [limit=N] [bytes=N] [keys-only]
//	count [start=] [end=] at=R
//	history [start=] [end=] from=R to=R [bytes=N]
//	remove compacted=R [since=R] [deletes=N]   whole pass, step by step
//	hash at=R compacted=R      and whether two halves at "b" add up to it
//	flush
//
// What writes prints the stored versions behind it.
func TestHistories(t *testing.T) {
	datadriven.Walk(t, "testdata/histories", func(t *testing.T, path string) {
		s := &story{e: openTest(t), hashes: map[uint64]string{}}
		datadriven.RunTest(t, path, s.run)
	})
}

// TestHistoryOfLargeRevision: one revision with very many events is returned completely,
// without being sorted again and again.
func TestHistoryOfLargeRevision(t *testing.T) {
	events := 200_000
	if testing.Short() {
		events = 40_000
	}
	e := openTest(t)
	b := e.NewBatch()
	for i := range events {
		// The second revision comes from every other key, so it is dropped again and
		// again until its room is gone.
		for rev := keyspace.Revision(2); rev <= 2+keyspace.Revision(i%2); rev++ {
			v := Version{Key: fmt.Appendf(nil, "k%07d", i), Mod: rev, Create: rev, Version: 1}
			if err := Put(b, &v); err != nil {
				t.Fatal(err)
			}
		}
		if b.Len() > 1<<20 {
			if err := b.Commit(); err != nil {
				t.Fatal(err)
			}
			b = e.NewBatch()
		}
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	const maxBytes = 64 << 10
	h := newHistory(HistoryOptions{From: 2, To: 9, MaxBytes: maxBytes})
	if err := h.collect(e); err != nil {
		t.Fatal(err)
	}
	if len(h.events) != events || h.to != 2 {
		t.Errorf("%d events up to %d, want %d up to 2", len(h.events), h.to, events)
	}
	if most := bits.Len64(uint64(h.bytes/maxBytes)) + 2; h.trims > most {
		t.Errorf("sorted %d times, want at most %d", h.trims, most)
	}
	pages, got := 0, 0
	o, key := HistoryOptions{From: 2, To: 2, MaxBytes: 1 << 20}, []byte(nil)
	for ; o.From <= o.To; pages++ {
		var err error
		if o.From, key, err = HistoryPages(e, o, key, func(*Version) error { got++; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if size := h.bytes / o.MaxBytes; got != events || pages > int(2*size)+3 {
		t.Errorf("%d events in %d pages, want %d of %d bytes", got, pages, events, h.bytes)
	}
}

type story struct {
	e      *engine.Engine
	hashes map[uint64]string // names, so that no golden file contains the sums
}

// args are the arguments that commands share.
type args struct {
	start, end, key                                         string
	at, from, to, compacted, since, rev, limit, bytes, dels int64
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var a args
	for name, to := range map[string]any{
		"start": &a.start, "end": &a.end, "key": &a.key, "at": &a.at, "from": &a.from, "to": &a.to, "rev": &a.rev,
		"compacted": &a.compacted, "since": &a.since, "limit": &a.limit, "bytes": &a.bytes, "deletes": &a.dels,
	} {
		d.MaybeScanArgs(t, name, to)
	}
	span := keyspace.Span{Start: []byte(a.start), End: []byte(a.end)}
	at := keyspace.Revision(a.at)
	var out strings.Builder
	show := func(v *Version) error {
		fmt.Fprintln(&out, line(v))
		return nil
	}
	switch d.Cmd {
	case "txn":
		s.txn(t, keyspace.Revision(a.rev), strings.Split(d.Input, "\n"))
		return s.stored(t)
	case "get":
		v, ok, err := GetVersion(s.e, []byte(a.key), at)
		if err != nil {
			return err.Error() + "\n"
		}
		if !ok {
			return "none\n"
		}
		_ = show(&v)
	case "scan":
		res, err := Scan(s.e, ScanOptions{Span: span, At: at, Limit: a.limit, MaxBytes: a.bytes, KeysOnly: d.HasArg("keys-only")}, show)
		if err != nil {
			return err.Error() + "\n"
		}
		fmt.Fprintf(&out, "keys %d, bytes %d", res.Keys, res.Bytes)
		if res.More {
			fmt.Fprintf(&out, ", next %q", res.Next)
		}
		fmt.Fprintln(&out)
	case "count":
		n, err := Count(s.e, span, at)
		if err != nil {
			return err.Error() + "\n"
		}
		fmt.Fprintln(&out, n)
	case "history":
		o := HistoryOptions{Span: span, From: keyspace.Revision(a.from), To: keyspace.Revision(a.to), MaxBytes: a.bytes}
		for o.From <= o.To {
			next, err := History(s.e, o, show)
			if err != nil {
				return err.Error() + "\n"
			}
			o.From = next
			fmt.Fprintf(&out, "next %d\n", next)
		}
	case "remove":
		return s.remove(t, RemoveOptions{Span: span, Compacted: keyspace.Revision(a.compacted), Since: keyspace.Revision(a.since), MaxDeletes: a.dels})
	case "hash":
		return s.hash(t, at, keyspace.Revision(a.compacted))
	case "flush":
		if err := s.e.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
	return out.String()
}

func (s *story) txn(t *testing.T, rev keyspace.Revision, ops []string) {
	t.Helper()
	b := s.e.NewBatch()
	written := map[string]Version{}
	for sub, op := range ops {
		f := strings.Fields(op)
		v := Version{Key: []byte(f[1]), Mod: rev, Sub: uint32(sub), Tombstone: f[0] == "delete"}
		before, twice := written[f[1]]
		if twice {
			v.Earlier = &before
		}
		if !v.Tombstone {
			prev, ok, err := Get(s.e, v.Key, rev)
			if err != nil {
				t.Fatal(err)
			}
			if twice {
				prev, ok = before, !before.Tombstone
			}
			v.Value, v.Create, v.Version = []byte(f[2]), rev, 1
			if ok {
				v.Create, v.Version = prev.Create, prev.Version+1
			}
			if len(f) > 3 {
				if _, err := fmt.Sscanf(f[3], "lease=%d", &v.Lease); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := Put(b, &v); err != nil {
			t.Fatal(err)
		}
		written[f[1]] = v
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
}

func (s *story) remove(t *testing.T, o RemoveOptions) string {
	t.Helper()
	var out strings.Builder
	for {
		b := s.e.NewBatch()
		res, err := RemoveOld(s.e, b, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "visited %d, removed %d", res.Visited, res.Removed)
		if res.Cursor != nil {
			fmt.Fprintf(&out, ", goes on at %s", engine.FormatKey(res.Cursor))
		}
		fmt.Fprintln(&out)
		if o.Cursor = res.Cursor; o.Cursor == nil {
			return out.String() + s.stored(t)
		}
	}
}

func (s *story) hash(t *testing.T, at, compacted keyspace.Revision) string {
	t.Helper()
	sum, err := Hash(s.e, keyspace.Span{}, at, compacted)
	if err != nil {
		t.Fatal(err)
	}
	name, ok := s.hashes[sum]
	if !ok {
		name = fmt.Sprintf("hash-%d", len(s.hashes)+1)
		s.hashes[sum] = name
	}
	var halves uint64
	for _, span := range []keyspace.Span{{End: []byte("b")}, {Start: []byte("b")}} {
		h, err := Hash(s.e, span, at, compacted)
		if err != nil {
			t.Fatal(err)
		}
		halves += h
	}
	return fmt.Sprintf("%s, halves add up: %v\n", name, halves == sum)
}

func (s *story) stored(t *testing.T) string {
	t.Helper()
	out := ""
	for _, l := range stored(t, s.e) {
		out += "  " + l + "\n"
	}
	return out
}

// TestHistoryOfReplacedWrites: a write that a later one of the same transaction replaced
// is an event as long as the later one is, even at the compacted revision: a lagging
// watcher must still get it.
func TestHistoryOfReplacedWrites(t *testing.T) {
	e := openTest(t)
	b := e.NewBatch()
	for rev := keyspace.Revision(2); rev < 5; rev++ {
		v := Version{Key: []byte("k"), Mod: rev, Create: rev, Version: 1, Sub: 1, Earlier: &Version{Key: []byte("k"), Mod: rev, Tombstone: true}}
		if err := Put(b, &v); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"2.0 2.1 3.0 3.1 4.0 4.1", "3.0 3.1 4.0 4.1", "4.0 4.1"} {
		compacted := keyspace.Revision(2 + i)
		b := e.NewBatch()
		if _, err := RemoveOld(e, b, RemoveOptions{Compacted: compacted}); err != nil {
			t.Fatal(err)
		}
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		var got []string
		_, err := History(e, HistoryOptions{From: compacted, To: 9}, func(v *Version) error {
			got = append(got, fmt.Sprintf("%d.%d", v.Mod, v.Sub))
			return nil
		})
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("compacted at %d: %v, %v, want %s", compacted, got, err, want)
		}
	}
}
