package heat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/internal/golden"
)

// TestFormat holds the bytes of a stored column still.
func TestFormat(t *testing.T) {
	c := Column{
		{"", Counts{Reads: 3}},
		{"/registry/pods/a", Counts{1, 2, 300}},
		{"/registry/pods/a\x00", Counts{}},
		{"/registry/pods/b", Counts{Writes: maxCount, Bytes: maxCount}},
		{"/s", Counts{}},
	}
	form := encode(c)
	golden.Formats(t, map[string][]byte{"column": form, "column-empty": encode(nil)})
	got, err := decode(form)
	if err != nil || !slices.Equal(got, c) {
		t.Errorf("%v, %v", got, err)
	}
}

// What is no column is refused.
func TestDecodeRefuses(t *testing.T) {
	whole := encode(Column{{"a", Counts{1, 2, 3}}, {"ab", Counts{4, 5, 6}}})
	for i := range whole {
		if c, err := decode(whole[:i]); err == nil {
			t.Errorf("%d of %d bytes are %v", i, len(whole), c)
		}
	}
	for what, form := range map[string][]byte{
		"more behind it":    append(slices.Clone(whole), 0),
		"a later version":   append([]byte{columnVersion + 1}, whole[1:]...),
		"no order":          encode(Column{{Start: "b"}, {Start: "a"}}),
		"the same key":      encode(Column{{Start: "b"}, {Start: "b"}}),
		"a long key":        encode(Column{{Start: strings.Repeat("x", maxKeyBytes+2)}}),
		"too many cells":    encode(manyKeys(maxCells+1, numbered)),
		"too many requests": encode(Column{{"a", Counts{Reads: maxCount + 1}}}),
	} {
		if _, err := decode(form); err == nil {
			t.Errorf("%s is taken", what)
		}
	}
}

// A column has no more than its bytes and cells, whatever keys there are, and lacks nothing. So a node stores no more than its
// bound.
func TestColumnIsBounded(t *testing.T) {
	if n := tiers[0].kept + tiers[1].kept + tiers[2].kept; n*maxColumnBytes > maxStoredBytes {
		t.Errorf("%d columns of %d bytes", n, maxColumnBytes)
	}
	for what, key := range map[string]func(i int) string{
		"short": numbered,
		"long": func(i int) string {
			return fmt.Sprintf("%d%s", i*7919%1000+1000, strings.Repeat(string(rune('a'+i%26)), 60))
		},
	} {
		c := manyKeys(1000, key)
		slices.SortFunc(c, func(a, b Cell) int { return strings.Compare(a.Start, b.Start) })
		got, form := pack([]band{c.band(0)})
		var sum Counts
		for i := range got {
			sum.add(got[i].Counts)
		}
		if len(form) > maxColumnBytes || len(got) > maxCells || sum.Reads != 1000 {
			t.Errorf("%s keys: %d cells in %d bytes have %v", what, len(got), len(form), sum)
		}
		if what == "short" && len(got) < maxCells/2 {
			t.Errorf("only %d cells", len(got))
		}
		if back, err := decode(form); err != nil || !slices.Equal(back, got) {
			t.Errorf("%s keys: decoded: %v", what, err)
		}
	}
}

func FuzzColumn(f *testing.F) {
	f.Add(encode(nil))
	f.Add(encode(Column{{"a", Counts{1, 2, 3}}, {"ab", Counts{4, 5, 6}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decode(b)
		if err != nil {
			return
		}
		again, err := decode(encode(c))
		if err != nil || !slices.Equal(again, c) {
			t.Fatalf("%v became %v, %v", c, again, err)
		}
		pack([]band{c.band(0), c.band(0)})
	})
}

func FuzzGrid(f *testing.F) {
	q := Query{Width: minute, Columns: 2, Rows: 3}
	good, err := json.Marshal(&Grid{Starts: [][]byte{[]byte("a"), []byte("b")}, End: []byte("c"), Counts: make([]Counts, 4)})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"starts":["YQ=="],"counts":"AAAAAAA="}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := q.DecodeGrid(b)
		if err != nil {
			return
		}
		form, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		again, err := q.DecodeGrid(form)
		if err != nil || !slices.Equal(again.Counts, g.Counts) || !slices.EqualFunc(again.Starts, g.Starts, bytes.Equal) {
			t.Fatalf("%v became %v, %v", g, again, err)
		}
		q.Merge(g, again)
	})
}
