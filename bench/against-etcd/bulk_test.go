package main

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// The keys of a transaction are neighbours, or lie in all spans, and each span's grow with the transactions.
func TestBulkKeys(t *testing.T) {
	for _, spread := range []bool{false, true} {
		s, seen, last := bulkSide{spread: spread}, map[string]bool{}, map[int]string{}
		for n := range 50 * fillTxnPuts {
			k := s.key(n)
			span, _ := slices.BinarySearch(bulkBorders(), k+"\x00")
			if seen[k] || len(k) != len(bulkPrefix)+10 || !strings.HasPrefix(k, bulkPrefix) || k <= last[span] {
				t.Fatalf("spread %v: key %d is %q, behind %q, and was there before: %v", spread, n, k, last[span], seen[k])
			}
			seen[k], last[span] = true, k
			if want := n % bulkSpans; spread && span != want {
				t.Fatalf("key %d, %q, lies in span %d", n, k, span)
			}
		}
		for i := range 20 {
			n := 0
			from, end := s.page(rand.New(rand.NewPCG(1, uint64(i))), 100*fillTxnPuts)
			for k := range 100 * fillTxnPuts {
				if s.key(k) >= from && s.key(k) < end {
					n++
				}
			}
			if n != bulkPage {
				t.Errorf("spread %v: %d keys from %s to %s", spread, n, from, end)
			}
		}
		if want := map[bool]int{false: 1, true: bulkSpans}[spread]; len(last) != want {
			t.Errorf("spread %v: %d spans", spread, len(last))
		}
	}
}

func TestCallFigures(t *testing.T) {
	const ms = time.Millisecond
	r := callRun{took: []time.Duration{4 * ms, ms, ms, 2 * ms}, acked: []time.Duration{9 * ms, ms, 2 * ms, 4 * ms}, over: 10 * ms, cpu: 8 * ms}
	if got := r.without(); got != 5*ms {
		t.Errorf("%v without an answer", got)
	}
	f := figureSet{}
	r.into(f, "x")
	want := figureSet{"x: a second": 400, "x: p50, ms": 2, "x: p99, ms": 4, "x: longest, ms": 4, "x: servers' CPU each, µs": 2000}
	for _, name := range callNames("x") {
		if f[name] != want[name] || len(f) != len(want) {
			t.Errorf("%s is %v, want %v", name, f[name], want[name])
		}
	}
}

func TestWriteSides(t *testing.T) {
	var out strings.Builder
	runs := map[string][]figureSet{"a": {{"x": 2}, {"x": 4}}, "b": {{"x": 1}, {"x": 4}}}
	writeSides(&out, "of", []string{"a", "b"}, runs, []string{"x"})
	for _, want := range []string{"| of ", " b / a |", "3.00 (2.00 4.00)", "2.50 (1.00 4.00)", "0.75 (0.50 to 1.00)"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %s", want, out.String())
		}
	}
	out.Reset()
	writeSides(&out, "of", []string{"a", "b"}, map[string][]figureSet{"a": {{"x": 2}}, "b": {{"x": 1}}}, []string{"x"})
	if want := "| x   | 2.00 | 1.00 |  0.50 |"; !strings.Contains(out.String(), want) {
		t.Errorf("no %q in %s", want, out.String())
	}
}
