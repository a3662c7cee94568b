package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// rows are the figures of a table.
var rows = []struct {
	name string
	of   func(figures) float64
}{
	{"proposals a second", func(f figures) float64 { return f.PerSecond }},
	{"CPU, µs a proposal", func(f figures) float64 { return f.CPUMicros }},
	{"p50, ms", func(f figures) float64 { return f.P50Millis }},
	{"p99, ms", func(f figures) float64 { return f.P99Millis }},
	{"voluntary context switches a proposal", func(f figures) float64 { return f.Switches }},
	{"peak memory, MiB", func(f figures) float64 { return f.PeakMiB }},
}

// writePairs prints every run, the medians, and the ratios within the pairs.
func writePairs(out io.Writer, caption string, runs map[string][]figures) {
	fmt.Fprintf(out, "\n%s\n\n", caption)
	fmt.Fprintln(out, "| | Dragonboat: all | Skein: all | Dragonboat: median | Skein: median | Skein / Dragonboat: median (lowest to highest) |")
	fmt.Fprintln(out, "| --- | ---: | ---: | ---: | ---: | ---: |")
	for _, row := range rows {
		column := func(side string) (all []float64) {
			for _, f := range runs[side] {
				all = append(all, row.of(f))
			}
			return all
		}
		a, b := column(dragonboatSide), column(skeinSide)
		fmt.Fprintf(out, "| %s | %s | %s | %s | %s | %s |\n", row.name, numbers(a...), numbers(b...), middle(a), middle(b), spread(b, a))
	}
}

// median is the middle value, between two the mean of both. There must be a value.
func median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func middle(of []float64) string {
	if len(of) == 0 {
		return "–"
	}
	return numbers(median(of))
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
		return "–"
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f)", median(ratios), slices.Min(ratios), slices.Max(ratios))
}

// numbers prints figures with three significant digits, or with all before the point.
func numbers(of ...float64) string {
	var texts []string
	for _, v := range of {
		format := "%.2f"
		if v >= 100 {
			format = "%.0f"
		} else if v >= 10 {
			format = "%.1f"
		}
		texts = append(texts, fmt.Sprintf(format, v))
	}
	return strings.Join(texts, " ")
}
