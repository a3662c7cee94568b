package adminapi

import (
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/api/adminpb"
)

// TestSortRanges: the busiest, or the largest, comes first; equal ones keep their order.
func TestSortRanges(t *testing.T) {
	ranges := func() []*adminpb.Range {
		return []*adminpb.Range{
			{Id: 1, Bytes: 5, WritesPerSecond: 2},
			{Id: 2, Start: []byte("b"), Bytes: 9, ReadsPerSecond: 7},
			{Id: 3, Start: []byte("c"), Bytes: 9, WritesPerSecond: 4, ReadsPerSecond: 4},
		}
	}
	for by, want := range map[string][]uint64{"key": {1, 2, 3}, "size": {2, 3, 1}, "load": {3, 2, 1}} {
		l := ranges()
		if by == "key" {
			slices.Reverse(l)
		}
		if err := SortRanges(l, by); err != nil {
			t.Fatal(err)
		}
		var got []uint64
		for _, r := range l {
			got = append(got, r.GetId())
		}
		if !slices.Equal(got, want) {
			t.Errorf("by %s: %v, want %v", by, got, want)
		}
	}
	if err := SortRanges(nil, "name"); err == nil {
		t.Error("they are sorted by name")
	}
}

// TestTexts are sizes and rates for people.
func TestTexts(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1 << 10: "1.0 KiB", 1258291: "1.2 MiB", 3 << 40: "3.0 TiB", 5000 << 40: "5000.0 TiB"} {
		if got := SizeText(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
	for n, want := range map[float64]string{0: "", 0.04: "0.0", 9.94: "9.9", 12.5: "12", 1e6: "1000000"} {
		if got := perSecond(n); got != want {
			t.Errorf("%v: %q, want %q", n, got, want)
		}
	}
}

// TestKeys: what needs no quotes has none, and what is no key of a format is refused.
func TestKeys(t *testing.T) {
	for key, want := range map[string]string{
		"/registry/pods/a": "/registry/pods/a", "ä$*": "ä$*", "": "", "a b": `"a b"`, "a\x00\xff": `"a\x00\xff"`, `a"`: `"a\""`, `\`: `"\\"`, "-a": `"-a"`, "it's": `"it's"`, "\u200b": `"\u200b"`,
	} {
		if got := QuotedKeys.Text([]byte(key)); got != want {
			t.Errorf("%q: %s, want %s", key, got, want)
		}
	}
	for f, wrong := range map[KeyFormat]string{QuotedKeys: `"a\q"`, HexKeys: "7", Base64Keys: "YQ="} {
		if key, err := f.Key(wrong); err == nil {
			t.Errorf("%s is the %s key %q", wrong, f, key)
		}
	}
	for _, wrong := range []string{`"a`, `"`} { // the shell has taken a quote
		if key, err := QuotedKeys.Key(wrong); err == nil || !strings.Contains(err.Error(), "in quotes") {
			t.Errorf("%s is the key %q, %v", wrong, key, err)
		}
	}
	if key, err := QuotedKeys.Key(`a\x00"`); err != nil || string(key) != `a\x00"` {
		t.Errorf("what does not stand in quotes is taken as %q, %v", key, err)
	}
}
