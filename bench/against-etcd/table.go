package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
)

// report is the part of loadtest's report that is compared.
type report struct {
	Throughput float64    `json:"throughput_per_second"`
	Failed     int64      `json:"failed"`
	Put        *latencies `json:"put"`
	Get        *latencies `json:"get"`
	CPU        struct {
		Self    float64 `json:"self_us_per_operation"`
		Servers float64 `json:"servers_us_per_operation"`
	} `json:"cpu"`
}

type latencies struct {
	P50   float64 `json:"p50_us"`
	P99   float64 `json:"p99_us"`
	P9999 float64 `json:"p99_99_us"`
}

func readReport(file string) (report, error) {
	var r report
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		return r, fmt.Errorf("report %s: %w", file, err)
	}
	return r, nil
}

// String is a run as one line.
func (r report) String() string {
	text := fmt.Sprintf("%9.1f/s", r.Throughput)
	for _, l := range []struct {
		name string
		of   *latencies
	}{{"put", r.Put}, {"get", r.Get}} {
		if l.of != nil {
			text += fmt.Sprintf("  %s p50 %.2f ms, p99 %.2f ms, p99.99 %.2f ms", l.name, l.of.P50/1e3, l.of.P99/1e3, l.of.P9999/1e3)
		}
	}
	return text + fmt.Sprintf("  CPU per op: servers %.1f µs, loadtest %.1f µs  failed %d", r.CPU.Servers, r.CPU.Self, r.Failed)
}

// measures are what is compared, in the order of the table.
var measures = []struct {
	name string
	of   func(r report) (float64, bool)
}{
	{"throughput, 1/s", func(r report) (float64, bool) { return r.Throughput, true }},
	{"put p50, µs", func(r report) (float64, bool) { return of(r.Put, func(l *latencies) float64 { return l.P50 }) }},
	{"put p99, µs", func(r report) (float64, bool) { return of(r.Put, func(l *latencies) float64 { return l.P99 }) }},
	{"put p99.99, µs", func(r report) (float64, bool) { return of(r.Put, func(l *latencies) float64 { return l.P9999 }) }},
	{"get p50, µs", func(r report) (float64, bool) { return of(r.Get, func(l *latencies) float64 { return l.P50 }) }},
	{"get p99, µs", func(r report) (float64, bool) { return of(r.Get, func(l *latencies) float64 { return l.P99 }) }},
	{"get p99.99, µs", func(r report) (float64, bool) { return of(r.Get, func(l *latencies) float64 { return l.P9999 }) }},
	{"servers' CPU per op, µs", func(r report) (float64, bool) { return r.CPU.Servers, r.CPU.Servers > 0 }},
	{"loadtest's CPU per op, µs", func(r report) (float64, bool) { return r.CPU.Self, true }},
	{"failed", func(r report) (float64, bool) { return float64(r.Failed), true }},
}

func of(l *latencies, value func(*latencies) float64) (float64, bool) {
	if l == nil {
		return 0, false
	}
	return value(l), true
}

// table collects the runs of both sides.
type table struct{ runs map[string][]report }

func (t *table) add(side string, r report) {
	if t.runs == nil {
		t.runs = map[string][]report{}
	}
	t.runs[side] = append(t.runs[side], r)
}

// write prints the medians of both sides, and of the ratios of the first to the second
// within each pair of runs, with the lowest and the highest: the machine's moods meet
// both runs of a pair more or less alike.
func (t *table) write(out io.Writer, first, second string) {
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "medians of %d pairs\t%s\t%s\t%s / %s\tfrom\tto\t\n", len(t.runs[first]), first, second, first, second)
	for _, m := range measures {
		a, ok1 := values(t.runs[first], m.of)
		b, ok2 := values(t.runs[second], m.of)
		if !ok1 || !ok2 {
			continue
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%s\t\n", m.name, median(a), median(b), spread(a, b))
	}
	// The target is the terminal: there is nothing to be done about an error.
	_ = w.Flush()
}

// spread is the median of the pairs' ratios, the lowest and the highest.
func spread(a, b []float64) string {
	var ratios []float64
	for i := range min(len(a), len(b)) {
		if b[i] != 0 {
			ratios = append(ratios, a[i]/b[i])
		}
	}
	if len(ratios) == 0 {
		return "–\t\t"
	}
	return fmt.Sprintf("%.2f\t%.2f\t%.2f", median(ratios), slices.Min(ratios), slices.Max(ratios))
}

// values returns a measure of all runs, false if one lacks it or there is none.
func values(runs []report, of func(report) (float64, bool)) ([]float64, bool) {
	var all []float64
	for _, r := range runs {
		v, ok := of(r)
		if !ok {
			return nil, false
		}
		all = append(all, v)
	}
	return all, len(all) > 0
}

func median(of []float64) float64 {
	all := slices.Sorted(slices.Values(of))
	return (all[(len(all)-1)/2] + all[len(all)/2]) / 2
}
