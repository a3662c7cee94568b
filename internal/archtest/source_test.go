package archtest

import (
	"fmt"
	"maps"
	"strings"
	"testing"
)

// TestSizes holds packages and interfaces to their bounds. It reads every source
// file itself, so that a cached result of these tests ends when one changes.
func TestSizes(t *testing.T) {
	packages, err := Packages(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(packages) < 30 {
		t.Fatalf("found only %d packages", len(packages))
	}
	for _, w := range CheckSizes(packages) {
		t.Error(w)
	}
}

// TestSizesAreChecked proves that each bound can fail, and that a stale exception is
// found.
func TestSizesAreChecked(t *testing.T) {
	packages, err := Packages(root)
	if err != nil {
		t.Fatal(err)
	}
	packages["big"] = Package{Lines: maxLines + 1, Interfaces: map[string]int{"Wide": maxMethods + 1, "Right": maxMethods}}
	small := packages["etcdapi"]
	small.Interfaces = maps.Clone(small.Interfaces)
	small.Interfaces["KV"] = maxMethods
	packages["etcdapi"] = small
	want := []string{
		"big has 8001 lines, the limit is 8000",
		"big.Wide has 6 methods, the limit is 5",
		"the exception for etcdapi.KV is no longer needed: it has 5 methods",
	}
	wrong := strings.Join(CheckSizes(packages), "\n")
	for _, w := range want {
		if !strings.Contains(wrong, w) {
			t.Errorf("not found: %s\nin: %s", w, wrong)
		}
	}
	if got, want := fmt.Sprint(tooLarge("lines", map[string]int{"p": 9000}, maxLines, map[string]exception{"p": {9500, "x"}})),
		"[p has 9000 lines: lower its limit from 9500]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
