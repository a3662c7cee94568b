package main

import (
	"fmt"
	"io"
	"strconv"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// A scaleFigure is one of a turn's.
type scaleFigure func(scaleRun) float64

var (
	scalePuts  scaleFigure = func(r scaleRun) float64 { return r.PerSecond }
	scaleP99   scaleFigure = func(r scaleRun) float64 { return r.P99Millis }
	scaleCPU   scaleFigure = func(r scaleRun) float64 { return r.ServersMicros }
	scaleLoad  scaleFigure = func(r scaleRun) float64 { return r.LoadMicros }
	scaleUnits scaleFigure = func(r scaleRun) float64 { return r.ServersMicros / max(r.LoadMicros, 0.001) }
	scaleBatch scaleFigure = func(r scaleRun) float64 { return r.Batch }
	scaleBusy  scaleFigure = func(r scaleRun) float64 { return 100 * r.MachineBusy }
	scaleOwn   scaleFigure = func(r scaleRun) float64 { return 100 * r.LoadShare }
	// scaleAbove is what a put costs the sequencer's node more than another, and scaleNet that without what it takes more at rest.
	scaleAbove scaleFigure = func(r scaleRun) float64 { return above(r.NodeMicros, r.Sequencer) }
	scaleNet   scaleFigure = func(r scaleRun) float64 {
		return above(r.NodeMicros, r.Sequencer) - above(r.RestMicros, r.Sequencer)/max(r.PerSecond, 1)
	}
)

// above is how much a node's figure is above the mean of the others'.
func above(each []float64, node int) float64 {
	var others float64
	for i, v := range each {
		if i != node {
			others += v / float64(len(each)-1)
		}
	}
	return each[node] - others
}

// of are a figure of some turns.
func (f scaleFigure) of(runs []scaleRun) (all []float64) {
	for _, r := range runs {
		all = append(all, f(r))
	}
	return all
}

func (f scaleFigure) all(runs []scaleRun, format string) string {
	return table.Figures(f.of(runs), format)
}

func (f scaleFigure) median(runs []scaleRun) string { return table.Number(table.Median(f.of(runs))) }

// against is the spread of the ratios to other runs of the same turns: one that failed has no partner.
func (f scaleFigure) against(runs, base []scaleRun) string {
	var a, b []float64
	for _, r := range runs {
		for _, s := range base {
			if r.Turn == s.Turn {
				a, b = append(a, f(r)), append(b, f(s))
			}
		}
	}
	return table.Spread(a, b)
}

// writeScale prints a table of the load for each node and one of the ranges, and the turns that are marked.
func writeScale(out io.Writer, kinds []scaleKind, runs map[string][]scaleRun) {
	// base are the runs with which others are compared.
	base := func(is func(scaleKind) bool) []scaleRun {
		for _, k := range kinds {
			if is(k) {
				return runs[k.name]
			}
		}
		return nil
	}
	three := base(func(k scaleKind) bool { return k.rate > 0 && k.nodes == nodes })
	loads := table.New("the same load for each node", "puts a second: all", "p99, ms", "servers' CPU a put, µs: all", "median", "loadtest's, µs",
		"CPU against 3 nodes", "in units of loadtest's", "sequencer's node above the others, µs a put: all", "median", "without the rest", "the model says",
		"puts in a batch", "machine busy, %", "loadtest, % of its processors")
	one, sixteen := base(func(k scaleKind) bool { return k.rate == 0 && k.ranges == 1 }), base(func(k scaleKind) bool { return k.rate == 0 && k.ranges == 16 })
	ranges := table.New("three nodes, as fast as they answer", "puts a second: all", "median", "against 1 range", "against 16", "p99, ms",
		"servers' CPU a put, µs: all", "median", "against 1 range", "against 16", "loadtest's, µs", "in units of it against 16", "puts in a batch", "machine busy, %", "loadtest, % of its processors")
	for _, k := range kinds {
		t := runs[k.name]
		switch {
		case len(t) == 0:
		case k.rate > 0:
			loads.Add(k.name, scalePuts.all(t, "%.0f"), scaleP99.median(t), scaleCPU.all(t, "%.1f"), scaleCPU.median(t), scaleLoad.median(t),
				scaleCPU.against(t, three), scaleUnits.against(t, three), scaleAbove.all(t, "%.1f"), scaleAbove.median(t), scaleNet.median(t),
				modelText(k.nodes, table.Median(scaleBatch.of(t))), scaleBatch.median(t), scaleBusy.median(t), scaleOwn.median(t))
		default:
			ranges.Add(k.name, scalePuts.all(t, "%.0f"), scalePuts.median(t), scalePuts.against(t, one), scalePuts.against(t, sixteen), scaleP99.median(t),
				scaleCPU.all(t, "%.1f"), scaleCPU.median(t), scaleCPU.against(t, one), scaleCPU.against(t, sixteen), scaleLoad.median(t),
				scaleUnits.against(t, sixteen), scaleBatch.median(t), scaleBusy.median(t), scaleOwn.median(t))
		}
	}
	for _, t := range []*table.Table{loads, ranges} {
		if !t.Empty() {
			t.Write(out, "Every turn, medians, and ratios within the turns")
		}
	}
	writeMarks(out, kinds, runs)
}

// writeMarks prints what was not as it was meant.
func writeMarks(out io.Writer, kinds []scaleKind, runs map[string][]scaleRun) {
	marked := table.New("marked", "turn", "why")
	for _, k := range kinds {
		for _, r := range runs[k.name] {
			for _, why := range r.Marks {
				marked.Add(k.name, strconv.Itoa(r.Turn), why)
			}
		}
	}
	if !marked.Empty() {
		marked.Write(out, "Turns whose load or cluster was not as it was meant; their figures are in the tables")
	}
}

// modelText is what the model of docs/SCALE.md says that a put costs the sequencer's node more than another, in µs, if a batch has
// so many puts. The lower figure is that of messages that share as much as those of 64 calls between two nodes, the higher one that of
// messages that share nothing.
func modelText(size int, batch float64) string {
	if batch == 0 {
		return "–"
	}
	const batchMicros, putMicros, sharedMicros, aloneMicros = 1.0, 0.095, 2.0, 9.8
	// The sequencer's node has an end of each question and answer of the others' batches, and each of the others has an end of its own.
	messages := 2 * float64(size-2) / float64(size) / batch
	own := batchMicros/batch + putMicros
	return fmt.Sprintf("%.1f to %.1f", own+messages*sharedMicros, own+messages*aloneMicros)
}
