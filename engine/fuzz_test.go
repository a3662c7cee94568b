package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

// FuzzGroupKeys: what decodes as a group's key encodes to the same bytes.
func FuzzGroupKeys(f *testing.F) {
	f.Add(GroupLocalKey(7, []byte("suffix")))
	f.Add(appliedKey(7))
	f.Add([]byte{prefixApplied})
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, suffix, err := DecodeGroupLocalKey(b); err == nil {
			if !bytes.Equal(GroupLocalKey(g, suffix), b) || !GroupLocalSpan(g).Contains(b) {
				t.Fatalf("%x decodes to group %s, %q", b, g, suffix)
			}
		} else if !errors.Is(err, ErrBadKey) {
			t.Fatal(err)
		}
		if g, err := decodeAppliedKey(b); err == nil {
			if !bytes.Equal(appliedKey(g), b) || !appliedSpan(g).Contains(b) {
				t.Fatalf("%x decodes to group %s", b, g)
			}
		} else if !errors.Is(err, ErrBadKey) {
			t.Fatal(err)
		}
		_ = FormatKey(b)
	})
}

// FuzzAppliedClaims: decoding an applied record allocates in proportion to its size.
func FuzzAppliedClaims(f *testing.F) {
	f.Add(AppendApplied(nil, &Applied{Index: 300, Term: 2, ConfIndex: 9, Payload: []byte("p"), Replicas: []keyspace.Replica{{ID: 1, Node: 2, Role: 1}}}))
	f.Add(binary.AppendUvarint([]byte{1, 1, 1, 1}, 1<<40))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got := measure.Excess(len(b), func() { _, _ = DecodeApplied(b) }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(b))
		}
	})
}

// FuzzOrder: for any bytes, the order of physical keys is that of user keys, then of
// revisions from the newest.
func FuzzOrder(f *testing.F) {
	f.Add([]byte("a"), []byte("a\x00"), uint64(1), uint64(2))
	f.Add([]byte("a\x00\xff"), []byte("a\x00\x01"), uint64(9), uint64(9))
	f.Fuzz(func(t *testing.T, a, b []byte, ra, rb uint64) {
		revA := keyspace.Revision(ra % uint64(keyspace.MaxRevision))
		revB := keyspace.Revision(rb % uint64(keyspace.MaxRevision))
		ka, kb := AppendVersionedKey(nil, a, revA), AppendVersionedKey(nil, b, revB)
		want := bytes.Compare(a, b)
		if want == 0 {
			want = bytes.Compare(binary.BigEndian.AppendUint64(nil, uint64(revB)), binary.BigEndian.AppendUint64(nil, uint64(revA)))
		}
		if got := bytes.Compare(ka, kb); got != want {
			t.Fatalf("%q@%d and %q@%d: physical order %d, want %d", a, revA, b, revB, got, want)
		}
		span := keyspace.Span{Start: a, End: b}
		if len(b) > 0 && bytes.Compare(a, b) < 0 && (!VersionedSpan(span).Contains(ka) || VersionedSpan(span).Contains(kb)) {
			t.Fatalf("the span of %s has the wrong keys", span)
		}
	})
}

// FuzzTable gives the engine a snapshot table with some bytes replaced. It is refused, or
// it is the export that it claims to be, and nothing panics.
func FuzzTable(f *testing.F) {
	const g = 7
	e := openTest(f, vfs.NewMem())
	spans := []KeySpan{GroupLocalSpan(g), VersionedSpan(keyspace.Span{Start: []byte("b"), End: []byte("d")})}
	b := e.NewBatch()
	for _, err := range []error{
		b.SetApplied(g, Applied{Index: 11, Term: 5, Payload: []byte("p")}),
		b.Set(GroupLocalKey(g, []byte("local")), []byte("v")),
		b.Set(AppendVersionedKey(nil, []byte("c"), 5), []byte("value")),
		b.Commit(),
	} {
		if err != nil {
			f.Fatal(err)
		}
	}
	s := e.NewSnapshot()
	paths := export(f, s, e, g, spans, 0)
	if err := s.Close(); err != nil {
		f.Fatal(err)
	}
	var tables [][]byte
	for _, p := range paths {
		tables = append(tables, readAll(f, e.FS(), p))
		f.Add(uint8(len(tables)-1), uint16(20), []byte{1, 2, 3})
		f.Add(uint8(len(tables)-1), uint16(len(tables[len(tables)-1])-60), []byte{0xff, 0xff, 0xff, 0xff, 0x7f})
	}
	f.Add(uint8(0), uint16(0), []byte{})
	f.Fuzz(func(t *testing.T, which uint8, at uint16, patch []byte) {
		i := int(which) % len(tables)
		broken := bytes.Clone(tables[i])
		off := int(at) % len(broken)
		copy(broken[off:], patch)
		in := Ingest{Group: g, Spans: spans, Paths: append([]string(nil), paths...)}
		in.Paths[i] = e.FS().PathJoin(e.StagingDir(), "broken")
		writeAll(t, e.FS(), in.Paths[i], broken)
		a, err := e.VerifyTables(t.Context(), in)
		if err == nil && (a.Index != 11 || a.Term != 5 || string(a.Payload) != "p") {
			t.Fatalf("%x at %d of table %d: taken for %+v", patch, off, i, a)
		}
	})
}

func readAll(t testing.TB, fs vfs.FS, path string) []byte {
	t.Helper()
	f, err := fs.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(f)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	return b
}

func writeAll(t testing.TB, fs vfs.FS, path string, b []byte) {
	t.Helper()
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}
