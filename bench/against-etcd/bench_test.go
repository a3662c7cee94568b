package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// TestLongestGap: the gap around the kill counts from the write before it, and one that
// lasts to the end counts up to there. A gap that ends before or begins after does not
// count.
func TestLongestGap(t *testing.T) {
	for _, c := range []struct {
		name     string
		acks     []time.Duration
		from, to time.Duration
		want     gap
	}{
		{"around from", []time.Duration{1, 5, 9, 20, 22}, 10, 30, gap{9, 11}},
		{"later", []time.Duration{9, 11, 12, 25, 26}, 10, 30, gap{12, 13}},
		{"to the end", []time.Duration{9, 11, 12}, 10, 30, gap{12, 18}},
		{"before from", []time.Duration{1, 9, 10, 12, 29}, 10, 30, gap{12, 17}},
		{"ends at from", []time.Duration{1, 10, 15}, 10, 16, gap{10, 5}},
		{"across to", []time.Duration{10, 20, 50}, 10, 30, gap{20, 30}},
		{"after to", []time.Duration{10, 20, 29, 31, 80}, 10, 30, gap{10, 10}},
		{"first after from", []time.Duration{15, 17}, 10, 18, gap{15, 2}},
		{"none", nil, 10, 30, gap{10, 20}},
	} {
		if got := longestGap(c.acks, c.from, c.to); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestLedger(t *testing.T) {
	var l ledger
	for _, at := range []time.Duration{7, 3, 20, 5} { // answers overtake each other
		l.ack(at)
	}
	if got, want := l.gap(6, 21), (gap{7, 13}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestLongest(t *testing.T) {
	if i, d := longest([]gap{{1, 5}, {2, 9}, {3, 9}, {4, 1}}); i != 1 || d != 9 {
		t.Errorf("range %d, %d", i, d)
	}
}

func TestParsePage(t *testing.T) {
	page, err := parsePage(strings.NewReader("# HELP x y\nplain 3\nh_sum{kind=\"write\"} 0.5\nh_sum 1e-3\n"))
	if err != nil || page["plain"] != 3 || page[`h_sum{kind="write"}`] != 0.5 || page["h_sum"] != 0.001 {
		t.Errorf("%v, %v", page, err)
	}
	if got := page.perOp(nil, "h", `{kind="write"}`, 1000); got != 500 {
		t.Errorf("%g µs", got)
	}
	if _, err := parsePage(strings.NewReader("name no-number\n")); err == nil {
		t.Error("no error")
	}
}

func TestParseStat(t *testing.T) {
	const text = "42 (a ) b) S 1 1 1 0 -1 0 10 0 0 0 250 50 0 0 20 0"
	if got, err := parseStat(text); err != nil || got != 3*time.Second {
		t.Errorf("%s, %v", got, err)
	}
	for _, bad := range []string{"", "42 (a) S 1", "42 (a) S 1 1 1 0 -1 0 10 0 0 0 x 50 0"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func TestRoles(t *testing.T) {
	list := make([]rangeState, len(prefixes))
	for i := range list {
		list[i].Leader = nodeName([]int{2, 0, 1, 2, 0, 1}[i])
	}
	got, err := pickRoles(list, 1)
	if want := []role{{"c", 1, 1}, {"a", 1, 2}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	if by, nobody := led(append(list, rangeState{})); by != [nodes]int{2, 2, 2} || nobody != 1 {
		t.Errorf("%v, %d", by, nobody)
	}
	for i := range list {
		list[i].Leader = nodeName(0)
	}
	for _, leader := range []int{0, 1} {
		if _, err := pickRoles(list, leader); err == nil {
			t.Errorf("all ranges led by n1, placement by %s: no error", nodeName(leader))
		}
	}
	if _, err := pickRoles(list[1:], 0); err == nil {
		t.Error("a range is missing: no error")
	}
}

// TestKinds: each place of a client has its own name, and the pairs are kept apart.
func TestKinds(t *testing.T) {
	runs := pairs{
		{Side: skeinSide, Endpoint: 0, Leader: 0, Range: 0, P50: 10},
		{Side: skeinSide, Endpoint: 1, Leader: 0, Range: 0, P50: 14},
		{Side: skeinSide, Endpoint: 2, Leader: 0, Range: 0, P50: 18},
		{Side: skeinSide, Endpoint: 0, Leader: 0, Range: 2, P50: 20},
		{Side: skeinSide, Endpoint: 1, Leader: 0, Range: 2, P50: 30},
		{Side: skeinSide, Endpoint: 2, Leader: 0, Range: 2, P50: 40},
		{Side: etcdSide, Endpoint: 1, Leader: 1, Range: 1, P50: 5},
		{Side: etcdSide, Endpoint: 2, Leader: 1, Range: 1, P50: 7},
		{Side: emptySide, P50: 1},
		{Pair: 1, Side: skeinSide, P50: 12},
	}
	want := []string{kindBoth, kindNeither, kindNeither, kindPlacement, kindThree, kindRange, kindLeader, kindFollower, kindEmpty, kindBoth}
	for i, r := range runs {
		if r.kind() != want[i] {
			t.Errorf("%+v: %s, want %s", r, r.kind(), want[i])
		}
	}
	for _, c := range []struct {
		got, want []float64
	}{
		{runs.of(skeinSide, besideRun, p50), []float64{14, 12}},
		{runs.of(skeinSide, apartRun, p50), []float64{30}},
		{runs.of(skeinSide, isKind(kindBoth), p50), []float64{10, 12}},
		{runs.of(etcdSide, anyRun, p50), []float64{6}},
		{evenly([]float64{15}, []float64{30, 1}), []float64{25}},
		{minus([]float64{15, 3}, []float64{5}), []float64{10}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%v, want %v", c.got, c.want)
		}
	}
}

func TestFirstKeys(t *testing.T) {
	got := firstKeys([]rangeState{{}, {Start: []byte("b")}})
	if len(got) != 2 || string(got[0]) != "\x00" || string(got[1]) != "b" {
		t.Errorf("%q", got)
	}
}

func TestNamed(t *testing.T) {
	for _, m := range measures {
		if got, err := named(m.name); err != nil || got.name != m.name {
			t.Errorf("%s: %v", m.name, err)
		}
	}
	if _, err := named("speed"); err == nil || !strings.Contains(err.Error(), "sleeping") {
		t.Errorf("%v", err)
	}
}

func TestParseStatus(t *testing.T) {
	m, err := parseStatus([]byte("Name:\tx y\nVmHWM:\t  2048 kB\nVmRSS:\t    1024 kB\nRssAnon:\t     512 kB\nEmpty:\n"))
	if want := (processMemory{now: 1 << 20, peak: 2 << 20, anonymous: 1 << 19}); err != nil || m != want {
		t.Errorf("%+v, %v", m, err)
	}
	for _, text := range []string{"", "VmRSS:\t1 kB\nRssAnon:\t1 kB\n", "VmRSS:\t1 kB\nVmHWM:\t1 kB\n", "VmRSS:\tx kB\nVmHWM:\t1 kB\nRssAnon:\t1 kB\n"} {
		if _, err := parseStatus([]byte(text)); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}

// The keys of one filling transaction lie in one range, and all ranges get some.
func TestFilling(t *testing.T) {
	f := filling{keys: 2000, prefixes: [][]byte{{0}, []byte("m")}}
	for n := range f.keys {
		if (f.key(n)[0] == 'm') != (n/fillTxnPuts%2 == 1) {
			t.Fatalf("key %d is %q", n, f.key(n))
		}
	}
}
