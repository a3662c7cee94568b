package backup

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/mvcc"
)

func someManifest() *Manifest {
	at := time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	s := block.Sum{Versions: 2, Bytes: 10, Hash: 1<<64 - 1}
	return &Manifest{
		Cluster: "abc", Chain: "20261124T120000Z-100", Number: 2,
		Cut: Cut{
			Kind: Versions, Revision: 130, Previous: 100, Compacted: 90, Time: at,
			Points: []Point{{Time: at.Add(-time.Minute), Revision: 120}, {Time: at, Revision: 130}},
			Leases: []Lease{{ID: 1<<63 - 1, TTLSeconds: 60, RemainingSeconds: 12}},
			Users:  []byte("users"),
		},
		PreviousManifest: strings.Repeat("0f", 32),
		Spans: []SpanFiles{
			{End: []byte("m"), Segments: []Segment{{
				File: "130/segment-000000-000000-ABCDEFGH", Bytes: 100, SHA256: strings.Repeat("a1", 32), First: []byte("a"), Last: []byte("b"), Sum: s,
			}}},
			{Start: []byte("m")},
		},
		Sum: s, StoredBytes: 100, Finished: at.Add(time.Second),
	}
}

func TestGoldenFiles(t *testing.T) {
	m := someManifest()
	if err := m.check(); err != nil {
		t.Fatal(err)
	}
	rec := &record{Span: 3, Index: 7, Segment: &m.Spans[0].Segments[0], Done: true}
	for name, v := range map[string]any{"manifest": m, "record": rec} {
		file := filepath.Join("testdata", "format", name+".json")
		got := encode(v)
		if os.Getenv("SKEIN_REWRITE") != "" {
			if err := os.WriteFile(file, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %s, in the file %s, error %v", name, got, want, err)
		}
		again := reflect.New(reflect.TypeOf(v).Elem()).Interface()
		if err := decode(bytes.NewReader(want), again); err != nil || !reflect.DeepEqual(again, v) {
			t.Errorf("%s: %+v, error %v", name, again, err)
		}
	}
	golden.Formats(t, map[string][]byte{"segment": someSegment(t)})
}

// someSegment is a segment of two blocks.
func someSegment(t testing.TB) []byte {
	t.Helper()
	mem := newMem()
	w, err := repo(mem, Keys{}).newSegment(t.Context(), "f/", "s")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"a", "b"} {
		vs := []mvcc.Version{{Key: []byte(key), Mod: 5, Create: 5, Version: 1, Value: []byte("value")}}
		blocks, sum, err := block.Encode(block.ByKey, vs)
		if err == nil {
			err = w.add(blocks[0], vs, sum)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.finish(); err != nil {
		t.Fatal(err)
	}
	return mem.files["f/s"]
}

// A manifest that contradicts itself is refused with what is wrong.
func TestManifestIsChecked(t *testing.T) {
	for name, c := range map[string]struct {
		change func(m *Manifest)
		want   string
	}{
		"cluster":          {func(m *Manifest) { m.Cluster = "0xyz" }, "is not an id"},
		"kind":             {func(m *Manifest) { m.Kind = "half" }, `unknown kind "half"`},
		"revision":         {func(m *Manifest) { m.Revision = 0 }, "revision 0"},
		"compacted":        {func(m *Manifest) { m.Compacted = 131 }, "compacted 131"},
		"previous":         {func(m *Manifest) { m.Previous = 131 }, "on one at revision 131"},
		"number":           {func(m *Manifest) { m.Number = 1 }, "number 1, kind versions"},
		"points":           {func(m *Manifest) { m.Points[1].Revision = 119 }, "point 1, revision 119"},
		"no spans":         {func(m *Manifest) { m.Spans = nil }, "do not begin with the first key"},
		"a hole":           {func(m *Manifest) { m.Spans[1].Start = []byte("n") }, "is not followed by the next"},
		"an end":           {func(m *Manifest) { m.Spans[1].End = []byte("z") }, "is not followed by the next"},
		"sum":              {func(m *Manifest) { m.Sum.Hash++ }, "the segments have"},
		"size":             {func(m *Manifest) { m.StoredBytes++ }, "noted 2 versions, 10 bytes, hash ffffffffffffffff in 101 bytes"},
		"key outside":      {func(m *Manifest) { m.Spans[0].Segments[0].Last = []byte("x") }, `keys "a" to "x"`},
		"sha":              {func(m *Manifest) { m.Spans[0].Segments[0].SHA256 = "aa" }, `SHA-256 "aa"`},
		"overlapping":      {func(m *Manifest) { s := &m.Spans[0]; s.Segments = append(s.Segments, s.Segments[0]) }, "the one before ends with"},
		"no manifest link": {func(m *Manifest) { m.PreviousManifest = "" }, `previous manifest ""`},
	} {
		m := someManifest()
		c.change(m)
		if err := m.check(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	for text, want := range map[string]string{
		"":                        "not a file of a backup, or damaged",
		"{}":                      "no format",
		`{"format": 2, "new": 1}`: "use a newer program",
		`{"format": 1, "new": 1}`: "damaged: its body has SHA-256",
		`[1]`:                     "not a file of a backup, or damaged",
		string(encode(record{})):  "unknown field",
	} {
		if err := decode(strings.NewReader(text), new(Manifest)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// FuzzManifest reads anything under a right hash as a manifest. What is accepted is encoded to
// the same again.
func FuzzManifest(f *testing.F) {
	full := someManifest()
	full.Kind, full.Previous, full.Number, full.PreviousManifest = Full, 0, 1, ""
	for _, m := range []*Manifest{someManifest(), full} {
		body, err := json.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		m := new(Manifest)
		if decode(bytes.NewReader(enclose(body)), m) != nil || m.check() != nil {
			return
		}
		again := new(Manifest)
		if err := decode(bytes.NewReader(encode(m)), again); err != nil {
			t.Fatalf("%v: %s", err, encode(m))
		}
		x, _ := json.Marshal(m)
		y, _ := json.Marshal(again)
		if !bytes.Equal(x, y) {
			t.Fatalf("%s, again %s", x, y)
		}
		if p := choose([]*Manifest{m}, When{}); p != nil && (p.Revision != m.Revision || p.Compacted > p.Revision) {
			t.Fatalf("plan %+v of %+v", p, m)
		}
	})
}

// FuzzSegment reads anything as a segment: it ends, and whatever it returns keeps to the order
// and the limits.
func FuzzSegment(f *testing.F) {
	f.Add(someSegment(f))
	f.Fuzz(func(t *testing.T, b []byte) {
		mem := newMem()
		mem.files["f/s"] = b
		seg := &Segment{File: "s", First: []byte("a"), Last: []byte("b")}
		l := limits{revision: 10}
		r, err := repo(mem, Keys{}).openSegment(t.Context(), "f/", seg, l)
		if err != nil {
			return
		}
		defer func() { _ = r.close() }()
		var last []byte
		for {
			vs, err := r.next()
			if err != nil {
				return
			}
			for _, v := range vs {
				if bytes.Compare(v.Key, last) < 0 || v.Mod < 1 || v.Mod > 10 {
					t.Fatalf("%+v after %q", v, last)
				}
				last = slices.Clone(v.Key)
			}
		}
	})
}
