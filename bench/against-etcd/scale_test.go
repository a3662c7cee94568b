package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestScaleKinds(t *testing.T) {
	o := scaleOptions{sizes: "3, 9", ranges: "16", ofNode: 8, rate: 300, clients: 256, turns: 1, turn: time.Second, rest: time.Second}
	kinds, err := o.kinds()
	want := []scaleKind{
		{"3 nodes, 24 ranges", 3, 24, 96, 900},
		{"9 nodes, 72 ranges", 9, 72, 288, 2700},
		{"16 ranges", 3, 16, 256, 0},
	}
	if err != nil || len(kinds) != len(want) {
		t.Fatalf("%+v, %v", kinds, err)
	}
	for i := range want {
		if kinds[i] != want[i] {
			t.Errorf("%+v in place of %+v", kinds[i], want[i])
		}
	}
	for _, bad := range []string{"2", "10", "3,,5", "many", "-3"} {
		o.sizes = bad
		if kinds, err := o.kinds(); err == nil {
			t.Errorf("--nodes %s: %+v", bad, kinds)
		}
	}
}

func TestLayout(t *testing.T) {
	all := []string{"n1", "n2", "n3"}
	l := layout{ranges: []rangeState{
		{ID: 1, Leader: "n1", Replicas: all},
		{ID: 2, Leader: "n3", Replicas: all},
		{ID: 3, Leader: "n1", Replicas: all},
		{ID: 4, Leader: "n1", Replicas: all},
		{ID: 5, Replicas: all[:2]},
	}}
	leads, replicas := l.holds(4)
	if want := []int{3, 0, 1, 0}; !slices.Equal(leads, want) {
		t.Errorf("leads %v in place of %v", leads, want)
	}
	if want := []int{5, 5, 4, 0}; !slices.Equal(replicas, want) {
		t.Errorf("replicas %v in place of %v", replicas, want)
	}
	// n2 gets one of n1's. Then no transfer makes it more even: n4 has no replica, and range 5 no leader.
	if got, want := l.evening(4), []transfer{{1, 1}}; !slices.Equal(got, want) {
		t.Errorf("transfers %v in place of %v", got, want)
	}
	later := layout{ranges: slices.Clone(l.ranges)}
	later.ranges[0].Leader = "n2"
	if n := l.otherLeaders(later); n != 1 {
		t.Errorf("%d ranges have another leader", n)
	}
	if got := later.evening(4); got != nil {
		t.Errorf("transfers %v of even leads", got)
	}
	if n := l.otherLeaders(l); n != 0 {
		t.Errorf("%d ranges have another leader than themselves", n)
	}
}

func TestMarks(t *testing.T) {
	k := scaleKind{nodes: 3, rate: 1000}
	ranges := []rangeState{{ID: 1, Leader: "n1"}}
	before := layout{ranges, 0, 100, 10}
	good := scaleRun{rowTurn: rowTurn{PerSecond: 990}}
	good.laidOut(k, before, layout{ranges, 0, 600, 110})
	if len(good.Marks) > 0 || good.Batch != 5 {
		t.Errorf("a good turn has marks %q and %v in a batch", good.Marks, good.Batch)
	}
	bad := scaleRun{rowTurn: rowTurn{PerSecond: 900, Failed: 7}}
	bad.laidOut(k, before, layout{[]rangeState{{ID: 1, Leader: "n2"}}, 1, 600, 110})
	want := []string{
		"the sequencer went from n1 to n2", "1 ranges have another leader than before", "7 puts failed, or were due and never sent",
		"900 puts a second were made of 1000: a lower --rate lets the machine follow",
	}
	if !slices.Equal(bad.Marks, want) || bad.Batch != 0 {
		t.Errorf("marks %q and %v in a batch in place of %q", bad.Marks, bad.Batch, want)
	}
}

func TestScaleTables(t *testing.T) {
	run := func(turn int, puts, cpu float64) scaleRun {
		return scaleRun{Turn: turn, Batch: 2, Sequencer: 1, RestMicros: []float64{100, 1100, 100}, rowTurn: rowTurn{
			PerSecond: puts, ServersMicros: cpu, LoadMicros: cpu / 4, NodeMicros: []float64{20, 25, 22}, MachineBusy: 0.5,
		}}
	}
	three, nine := scaleKind{name: "three", nodes: 3, ranges: 24, rate: 1}, scaleKind{name: "nine", nodes: 9, ranges: 72, rate: 1}
	few, many := scaleKind{name: "few", nodes: 3, ranges: 16}, scaleKind{name: "many", nodes: 3, ranges: 4096}
	marked := run(2, 900, 120)
	marked.Marks = []string{"7 puts failed"}
	var out strings.Builder
	writeScale(&out, []scaleKind{three, nine, few, many}, map[string][]scaleRun{
		// Turn 1 of nine failed: its turn 2 is compared with turn 2 of three.
		"three": {run(1, 500, 50), run(2, 500, 60)}, "nine": {run(2, 1000, 66)},
		"few": {run(2, 1000, 100)}, "many": {marked},
	})
	rows := map[string]string{}
	for line := range strings.Lines(out.String()) {
		if fields := strings.SplitN(line, "|", 3); len(fields) == 3 {
			rows[strings.TrimSpace(fields[1])] += fields[2]
		}
	}
	for name, wants := range map[string][]string{
		// 25 µs are 4 above the mean of 20 and 22, and 1,000 µs a second at rest are 2 of them at 500 puts a second.
		"three": {"500 500", "1.00 (1.00 to 1.00)", "4.0 4.0 ", " 4.00 |", " 2.00 |", "1.3 to 3.9"},
		"nine":  {"1.10 (1.10 to 1.10)", "1.00 (1.00 to 1.00)", " 3.00 |", "2.2 to 8.2"},
		"many":  {"0.90 (0.90 to 0.90)", "1.20 (1.20 to 1.20)", "– |", "2 | 7 puts failed"},
	} {
		for _, want := range wants {
			if !strings.Contains(rows[name], want) {
				t.Errorf("%s: no %q in %s", name, want, rows[name])
			}
		}
	}
	if t.Failed() {
		t.Log(out.String())
	}
}

func TestWarnings(t *testing.T) {
	got := warnings("puts 12\n\nWARNING: the load generator is saturated\n  WARNING: it woke late\n")
	if want := []string{"the load generator is saturated", "it woke late"}; !slices.Equal(got, want) {
		t.Errorf("%q in place of %q", got, want)
	}
}
