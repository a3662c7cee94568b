package driver

import (
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
)

// TestGathering: leads are gathered on a node that has had little to do for a while, and spread once it has much.
func TestGathering(t *testing.T) {
	for _, tc := range []struct {
		what string
		// parts of the two processors that are in use, for two minutes each.
		parts []float64
		// want after each of them.
		want []bool
	}{
		{"nothing to do", []float64{0}, []bool{true}},
		{"some", []float64{0.45}, []bool{false}},
		{"little", []float64{0.35}, []bool{true}},
		{"ever more, and ever less", []float64{0.1, 0.4, 0.65, 0.8, 0.6, 0.4}, []bool{true, true, true, false, false, false}},
		{"it rests after it was spread", []float64{0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1}, []bool{true, false, false, false, false, false, true, true}},
		{
			"it rests longer each time",
			[]float64{0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1},
			[]bool{true, false, false, false, false, false, true, true, false, false, false, false, false, false, false, false, false, false, true, true},
		},
		{"much at first", []float64{0.9, 0.1}, []bool{false, true}},
	} {
		var g gathering
		now, used := clock.Time(1), time.Hour
		for i, part := range tc.parts {
			for range 120 {
				if g.due(now) {
					g.look(used, 2, now)
				}
				now, used = now.Add(time.Second), used+time.Duration(2*part*float64(time.Second))
			}
			if g.on != tc.want[i] {
				t.Errorf("%s: after %d × 2 minutes leads are gathered: %v", tc.what, i+1, g.on)
			}
		}
	}
}

// TestGatheringWaits: it does not begin before the sequencer would have moved, and one busy window begins the wait anew.
func TestGatheringWaits(t *testing.T) {
	var g gathering
	begins := func(busy time.Duration) time.Duration {
		g = gathering{}
		used := time.Duration(0)
		for at := time.Duration(0); at < 10*time.Minute; at += time.Second {
			if now := clock.Time(at) + 1; g.due(now) {
				g.look(used, 1, now)
			}
			if g.on {
				return at
			}
			if at >= busy && at < busy+2*gatherWindow {
				used += time.Second
			}
		}
		return 0
	}
	if at := begins(time.Hour); at < (seatRow+1)*seatWindow || at > 2*time.Minute {
		t.Errorf("it begins after %s", at)
	}
	if at := begins(2 * gatherWindow); at < 4*gatherWindow+gatherRow*gatherWindow {
		t.Errorf("it begins after %s, and the node was busy until %s", at, 4*gatherWindow)
	}
}
