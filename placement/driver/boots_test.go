package driver

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
)

// One restart is none in a row, and neither are two with a boot between them that has lasted. Two in a
// row count from when the node first fell silent, until one has lasted.
func TestBootsInARow(t *testing.T) {
	const lasts = 100 * time.Second
	type seen struct {
		at     time.Duration
		boot   keyspace.BootID
		silent time.Duration // since when, as it is heard again
		flaps  bool
		began  time.Duration
	}
	for what, all := range map[string][]seen{
		"one restart":           {{0, 1, 0, false, 0}, {10, 2, 5, false, 0}, {90, 2, 0, false, 0}},
		"two that have lasted":  {{0, 1, 0, false, 0}, {10, 2, 5, false, 0}, {110, 2, 0, false, 0}, {120, 3, 115, false, 0}},
		"two in a row":          {{0, 1, 0, false, 0}, {10, 2, 5, false, 0}, {100, 3, 95, true, 5}, {199, 3, 0, true, 5}, {200, 3, 0, false, 0}},
		"too short to be heard": {{0, 1, 0, false, 0}, {10, 2, 0, false, 0}, {12, 3, 0, true, 10}, {20, 4, 15, true, 10}},
		"not known for a while": {{0, 0, 0, false, 0}, {10, 2, 5, false, 0}, {12, 0, 0, false, 0}, {20, 3, 0, false, 0}, {30, 4, 0, true, 20}},
	} {
		var b boots
		for _, s := range all {
			b.see(s.boot, clock.Time(s.silent*time.Second), clock.Time(s.at*time.Second), lasts)
			if b.flaps() != s.flaps || s.flaps && b.began != clock.Time(s.began*time.Second) {
				t.Errorf("%s, at %d s: flaps %t since %v", what, s.at, b.flaps(), time.Duration(b.began))
			}
		}
	}
}

// A node that starts again and again within NodeDeadAfter is never silent for as long, and counts as lost
// all the same. It is back once a boot has lasted. Two restarts never have it lost.
func TestNodeThatCrashesAgainAndAgainIsLost(t *testing.T) {
	for _, tc := range []struct {
		up, down time.Duration
		crashes  int
		lost     bool
	}{
		{20 * time.Second, 10 * time.Second, 12, true},
		{2 * time.Second, 0, 200, true}, // back before anybody has missed it
		{90 * time.Second, 10 * time.Second, 4, true},
		{99 * time.Second, 40 * time.Second, 2, false},
		{10 * time.Second, 0, 2, false},
		{2 * time.Minute, 10 * time.Second, 10, false}, // it mostly runs
	} {
		synctest.Test(t, func(t *testing.T) {
			st := stillDecider(t)
			const flapping = 2
			alive, boot := true, keyspace.BootID(1)
			st.s.o.Alive = func(n keyspace.NodeID) bool { return n != flapping || alive }
			st.s.o.BootOf = func(n keyspace.NodeID) keyspace.BootID { return boot }
			lost := false
			var last decide.Node
			passes := func(d time.Duration) {
				for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
					st.feedNodes(&st.v, st.s.o.Clock.Now())
					st.c.Decide(st.s.o.Clock.Now())
					last = st.nodes[flapping]
					lost = lost || st.lost[flapping]
					if node, _ := (facts{st.decider, &st.v}).Node(flapping); node.Silent != last.Silent {
						t.Fatalf("a decision is compared with silent %t and was made by %t", node.Silent, last.Silent)
					}
				}
			}
			passes(time.Minute)
			for range tc.crashes {
				alive = tc.down == 0
				passes(tc.down)
				alive = true
				boot++
				passes(tc.up)
			}
			passes(st.s.bootLasts() + time.Second)
			if last.Silent || st.lost[flapping] {
				t.Errorf("%v up, %v down: a boot has lasted, and it counts as %+v, lost %t", tc.up, tc.down, last, st.lost[flapping])
			}
			if lost != tc.lost {
				t.Errorf("%v up, %v down, %d times: lost %t", tc.up, tc.down, tc.crashes, lost)
			}
		})
	}
}
