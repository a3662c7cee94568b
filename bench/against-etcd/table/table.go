// Package table prints the tables of measures as Markdown, and the figures in them.
package table

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// A Table is printed as Markdown. The first column is text, the others are figures.
type Table struct {
	head []string
	rows [][]string
}

// New returns a table with these columns.
func New(head ...string) *Table { return &Table{head: head} }

// Add adds a row. Cells that it lacks are empty.
func (t *Table) Add(cells ...string) { t.rows = append(t.rows, cells) }

// Empty says that the table has no rows.
func (t *Table) Empty() bool { return len(t.rows) == 0 }

// Write prints the table below a caption, in columns of even width.
func (t *Table) Write(out io.Writer, caption string) {
	width := make([]int, len(t.head))
	for _, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			width[i] = max(width[i], 3, utf8.RuneCountInString(cell))
		}
	}
	line := func(cells []string) {
		for i := range t.head {
			var cell string
			if i < len(cells) {
				cell = cells[i]
			}
			gap := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i == 0 {
				cell, gap = cell+gap, ""
			}
			fmt.Fprintf(out, "| %s%s ", gap, cell)
		}
		fmt.Fprintln(out, "|")
	}
	fmt.Fprintf(out, "\n%s\n\n", caption)
	line(t.head)
	for i := range t.head {
		rule := strings.Repeat("-", width[i])
		if i > 0 {
			rule = rule[1:] + ":"
		}
		fmt.Fprintf(out, "| %s ", rule)
	}
	fmt.Fprintln(out, "|")
	for _, row := range t.rows {
		line(row)
	}
}

// Median is the middle value, between two the mean of both. There must be a value.
func Median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// Mean is the mean of values. There must be one.
func Mean(of ...float64) float64 {
	var sum float64
	for _, v := range of {
		sum += v
	}
	return sum / float64(len(of))
}

// Spread is the median of the pairs' ratios, the lowest and the highest: the machine's
// moods meet both runs of a pair more or less alike.
func Spread(a, b []float64) string {
	var ratios []float64
	for i := range min(len(a), len(b)) {
		if b[i] != 0 {
			ratios = append(ratios, a[i]/b[i])
		}
	}
	if len(ratios) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f)", Median(ratios), slices.Min(ratios), slices.Max(ratios))
}

// Figures are values in a row, in their original order.
func Figures(of []float64, format string) string {
	var texts []string
	for _, v := range of {
		texts = append(texts, fmt.Sprintf(format, v))
	}
	return strings.Join(texts, " ")
}

// Number prints a figure of a table with three significant digits, or with all digits
// before the point.
func Number(v float64) string {
	switch {
	case v != 0 && v < 10 && v > -10:
		return fmt.Sprintf("%.2f", v)
	case v < 100 && v > -100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// Numbers prints figures of a table.
func Numbers(of []float64) []string {
	var texts []string
	for _, v := range of {
		texts = append(texts, Number(v))
	}
	return texts
}
