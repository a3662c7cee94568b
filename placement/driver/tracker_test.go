package driver

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
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
	complete := func(n keyspace.NodeID) bool { return h.Told(&decide.Node{ID: n}) }
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

// A replica in quarantine is known until its node says that it is not any more, or tells everything
// and does not repeat it. A report of everything that is not complete forgets nothing.
func TestQuarantinesAreTracked(t *testing.T) {
	h := newTracker()
	expect := func(what string, from keyspace.NodeID, p *Part, want string) {
		t.Helper()
		if h.Report(from, p) {
			t.Errorf("%s: a part is missing", what)
		}
		got := ""
		for id := range keyspace.RangeID(2) {
			for _, q := range h.Quarantined(id + 1) {
				got += fmt.Sprintf("%d:%d ", id+1, q.Replica)
			}
		}
		if got != want {
			t.Errorf("%s: in quarantine are %q, want %q", what, got, want)
		}
	}
	in := func(id keyspace.RangeID, replica keyspace.ReplicaID) []Quarantined {
		return []Quarantined{{Range: id, Replica: replica, Reason: "rot"}}
	}
	expect("everything", 1, &Part{Boot: 7, Number: 1, Whole: true, Quarantined: in(1, 11)}, "1:11 ")
	expect("another node", 2, &Part{Boot: 8, Number: 1, Whole: true, Quarantined: in(1, 12)}, "1:11 1:12 ")
	expect("one more", 1, &Part{Boot: 7, Number: 2, Quarantined: in(2, 21)}, "1:11 1:12 2:21 ")
	expect("not any more", 1, &Part{Boot: 7, Number: 3, Quarantined: in(1, 0)}, "1:12 2:21 ")
	expect("half of everything", 1, &Part{Boot: 9, Number: 1, Whole: true, More: true}, "1:12 2:21 ")
	expect("the other half", 1, &Part{Boot: 9, Number: 2, Quarantined: in(1, 13)}, "1:13 1:12 ")
	h.take()
	expect("gone", 2, &Part{Boot: 8, Number: 2, Quarantined: in(1, 0)}, "1:13 ")
	if got := h.take(); len(got) != 1 || got[0] != 1 {
		t.Errorf("changed are %v", got)
	}

	d := keyspace.Descriptor{Range: 1, Replicas: []keyspace.Replica{{ID: 13, Node: 1}, {ID: 14, Node: 2}, {ID: 15, Node: 3}, {ID: 16, Node: 4}, {ID: 17, Node: 5}}}
	votes := h.votes(&d, func(n keyspace.NodeID) bool { return n != 3 })
	// A new leader of placement goes on with a removal before it knows which other replicas vote.
	h.Report(4, &Part{Boot: 9, Number: 1, Whole: true, More: true})
	for n, want := range []bool{1: false, 2: true, 3: false, 4: false, 5: false} {
		if n > 0 && votes(keyspace.NodeID(n)) != want {
			t.Errorf("node %d votes: %t", n, !want)
		}
	}
}
