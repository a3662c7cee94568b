package driver

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// A lost part of a report is noticed, and the node is asked for everything. What comes twice or
// late changes nothing.
func TestReportsHaveNoHoles(t *testing.T) {
	h := newTracker()
	led := func(id keyspace.RangeID, term uint64) Measure { return Measure{Range: id, Term: term, Bytes: 100} }
	part := func(boot keyspace.BootID, number uint64, whole, more bool, ms ...Measure) *Part {
		return &Part{Boot: boot, Number: number, Whole: whole, More: more, Led: ms}
	}
	expect := func(what string, from keyspace.NodeID, p *Part, anew bool, leaders string) {
		t.Helper()
		if got := h.Report(from, p); got != anew {
			t.Errorf("%s: anew %t, want %t", what, got, anew)
		}
		got := ""
		for id := range keyspace.RangeID(5) {
			got += fmt.Sprint(uint64(h.of(id + 1).leader))
		}
		if got != leaders {
			t.Errorf("%s: the ranges 1 to 5 are led by %s, want %s", what, got, leaders)
		}
	}
	complete := func(n keyspace.NodeID) bool { _, _, c := h.Node(n); return c }
	expect("changes to who knows nothing", 1, part(7, 4, false, false, led(1, 5)), true, "00000")
	expect("the beginning of everything", 1, part(7, 6, true, true, led(1, 5)), false, "10000")
	if complete(1) {
		t.Error("half of everything is all")
	}
	expect("the end of everything", 1, part(7, 7, false, false, led(2, 5)), false, "11000")
	if !complete(1) {
		t.Error("everything is not all")
	}
	expect("a change", 1, part(7, 8, false, false, led(3, 9)), false, "11100")
	expect("the same again", 1, part(7, 8, false, false, led(3, 9)), false, "11100")
	expect("one is missing", 1, part(7, 10, false, false, led(4, 9)), true, "11100")
	expect("the beginning, late", 1, part(7, 6, true, true, led(5, 5)), false, "11100")
	expect("another node, of a later term", 2, part(3, 1, true, false, led(1, 6), led(3, 8)), false, "21100")
	expect("not any more", 1, part(7, 9, false, false, Measure{Range: 1}, Measure{Range: 2}), false, "20100")
	expect("after a restart", 1, part(8, 1, false, false), true, "20100")
	expect("everything, and nothing is led", 1, part(8, 2, true, false), false, "20000")
	expect("the same term after a word of the range itself", 2, part(3, 2, false, false, led(4, 2)), false, "20020")
	h.saw(4, 1)
	expect("its own word in the same term", 1, part(8, 3, false, false, led(4, 2)), false, "20010")
	h.saw(5, 2)
	expect("who is found to lead may tell of it in a moment", 2, part(3, 3, false, false), false, "20012")
	for range BareSurveys {
		h.keep(func(keyspace.RangeID) bool { return true })
	}
	expect("who does not", 2, part(3, 4, false, false), true, "20012")
	expect("tells everything", 2, part(3, 5, true, false, led(1, 6), led(5, 3)), false, "20012")
	h.claims[5] = claim{} // as it was
	for range claimSurveys {
		h.keep(func(id keyspace.RangeID) bool { return id == 4 })
	}
	expect("the map may have the others in a moment", 2, part(3, 6, false, false), false, "20010")
	h.keep(func(id keyspace.RangeID) bool { return id == 4 })
	if len(h.claims) != 1 || len(h.take()) != 1 || len(h.take()) != 0 {
		t.Errorf("kept %v", h.claims)
	}
}
