package main

import (
	"fmt"
	"io"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// The kinds of runs: the client's place, relative to the leaders.
const (
	kindEmpty     = "empty gRPC server"
	kindLeader    = "leader"
	kindFollower  = "follower"
	kindBoth      = "gateway leads range and placement"
	kindRange     = "gateway leads the range alone"
	kindPlacement = "gateway leads placement alone"
	kindNeither   = "gateway leads neither, one other both"
	kindThree     = "three nodes: gateway, range, placement"
)

func (r latencyRun) kind() string {
	switch {
	case r.Side == emptySide:
		return kindEmpty
	case r.Side == etcdSide && r.Endpoint == r.Leader:
		return kindLeader
	case r.Side == etcdSide:
		return kindFollower
	case r.Endpoint == r.Leader && r.Endpoint == r.Range:
		return kindBoth
	case r.Endpoint == r.Range:
		return kindRange
	case r.Endpoint == r.Leader:
		return kindPlacement
	case r.Range == r.Leader:
		return kindNeither
	}
	return kindThree
}

// pairs are the runs of a measure, evaluated pair by pair.
type pairs []latencyRun

// of returns, for each pair, the mean over the selected runs of a side.
func (p pairs) of(side string, wanted func(latencyRun) bool, value func(latencyRun) float64) []float64 {
	var all []float64
	for pair := 0; ; pair++ {
		var these []float64
		seen := false
		for _, r := range p {
			if r.Pair == pair {
				seen = true
				if r.Side == side && wanted(r) {
					these = append(these, value(r))
				}
			}
		}
		switch {
		case !seen:
			return all
		case len(these) > 0:
			all = append(all, table.Mean(these...))
		}
	}
}

func p50(r latencyRun) float64 { return r.P50 }

func isKind(kind string) func(latencyRun) bool {
	return func(r latencyRun) bool { return r.kind() == kind }
}

func anyRun(latencyRun) bool      { return true }
func besideRun(r latencyRun) bool { return r.Range == r.Leader }
func apartRun(r latencyRun) bool  { return r.Range != r.Leader }
func minus(a, b []float64) []float64 {
	out := make([]float64, min(len(a), len(b)))
	for i := range out {
		out[i] = a[i] - b[i]
	}
	return out
}

// evenly is the mean over endpoints and ranges if each node leads a third of them: one
// third of the keys is led beside placement.
func evenly(beside, apart []float64) []float64 {
	out := make([]float64, min(len(beside), len(apart)))
	for i := range out {
		out[i] = beside[i]/3 + apart[i]*2/3
	}
	return out
}

func writeLatencies(out io.Writer, o latencyOptions, runs pairs) {
	writeEveryRun(out, o, runs)
	writeMedians(out, runs)
	writeRatios(out, runs)
	writeHops(out, runs)
	writeStages(out, runs)
}

func writeEveryRun(out io.Writer, o latencyOptions, runs pairs) {
	t := table.New("pair, side", "leads range", "leads", "n1", "n2", "n3")
	for i, r := range runs {
		if r.Side == emptySide {
			t.Add(fmt.Sprintf("%d %s", r.Pair+1, r.Side), "", "", table.Number(r.P50))
			continue
		}
		if r.Endpoint > 0 {
			continue // in the row of the first
		}
		t.Add(fmt.Sprintf("%d %s", r.Pair+1, r.Side), nodeName(r.Range), nodeName(r.Leader),
			table.Number(r.P50), table.Number(runs[i+1].P50), table.Number(runs[i+2].P50))
	}
	t.Write(out, fmt.Sprintf("One client, one connection, %d puts at each endpoint: p50 in µs; \"leads\" is etcd's leader, or leads placement", o.puts))
}

func writeMedians(out io.Writer, runs pairs) {
	t := table.New("p50, µs", "median of the pairs", "all")
	row := func(name string, v []float64) {
		if len(v) > 0 {
			t.Add(name, table.Number(table.Median(v)), table.Figures(v, "%.0f"))
		}
	}
	row(kindEmpty, runs.of(emptySide, anyRun, p50))
	row("etcd: "+kindLeader, runs.of(etcdSide, isKind(kindLeader), p50))
	row("etcd: "+kindFollower+"s", runs.of(etcdSide, isKind(kindFollower), p50))
	row("etcd: mean of the endpoints", runs.of(etcdSide, anyRun, p50))
	for _, kind := range []string{kindBoth, kindNeither, kindRange, kindPlacement, kindThree} {
		row("Skein: "+kind, runs.of(skeinSide, isKind(kind), p50))
	}
	beside, apart := runs.of(skeinSide, besideRun, p50), runs.of(skeinSide, apartRun, p50)
	row("Skein: mean of the endpoints, range led beside placement", beside)
	row("Skein: mean of the endpoints, range led elsewhere", apart)
	row("Skein: mean of the endpoints, a third of the ranges beside placement", evenly(beside, apart))
	t.Write(out, "By who leads what")
}

func writeRatios(out io.Writer, runs pairs) {
	t := table.New("Skein / etcd, p50", "median (lowest to highest)", "target")
	leader, every := runs.of(etcdSide, isKind(kindLeader), p50), runs.of(etcdSide, anyRun, p50)
	both := runs.of(skeinSide, isKind(kindBoth), p50)
	beside, apart := runs.of(skeinSide, besideRun, p50), runs.of(skeinSide, apartRun, p50)
	t.Add(kindBoth+" / etcd's leader", table.Spread(both, leader), "≤ 1")
	t.Add(kindBoth+" / mean of etcd's endpoints", table.Spread(both, every), "")
	t.Add("mean of the endpoints, range led beside placement / mean of etcd's", table.Spread(beside, every), "≤ 1.5")
	t.Add("mean of the endpoints, range led elsewhere / mean of etcd's", table.Spread(apart, every), "")
	t.Add("mean of the endpoints, a third of the ranges beside placement / mean of etcd's", table.Spread(evenly(beside, apart), every), "≤ 1.5")
	t.Write(out, "Ratios within the pairs")
}

// writeHops prints a hop's time as the difference of two cases that differ only in it.
func writeHops(out io.Writer, runs pairs) {
	get := func(kind string) []float64 { return runs.of(skeinSide, isKind(kind), p50) }
	both, three := get(kindBoth), get(kindThree)
	if len(both) == 0 || len(three) == 0 {
		return
	}
	whole := table.Median(three)
	t := table.New("hop", "µs", "of a put over three nodes", "how")
	row := func(name string, v []float64, how string) {
		t.Add(name, table.Number(table.Median(v)), fmt.Sprintf("%.0f %%", table.Median(v)/whole*100), how)
	}
	empty := runs.of(emptySide, anyRun, p50)
	row("client and gRPC", empty, kindEmpty)
	row("range's leader: evaluation, logs of a quorum, apply", minus(both, empty), "gateway leads both − empty")
	row("gateway to the range's leader and back", minus(get(kindNeither), both), "leads neither − leads both")
	row("range's leader to the sequencer and back", minus(get(kindRange), both), "leads the range alone − leads both")
	row("both of these, seen at placement's leader", minus(get(kindPlacement), both), "leads placement alone − leads both")
	row("whole, over three nodes", three, kindThree)
	t.Write(out, "What each hop takes, from differences of p50")
}

// writeStages prints the same from the nodes' own histograms, whose means add up.
func writeStages(out io.Writer, runs pairs) {
	parts := []struct {
		name string
		of   func(latencyRun) float64
	}{
		{"client and gRPC", func(r latencyRun) float64 { return r.Mean - r.Stages.Gateway }},
		{"router, bus to the range's leader", func(r latencyRun) float64 { return r.Stages.Gateway - r.Stages.Range }},
		{"evaluate", func(r latencyRun) float64 { return r.Stages.Evaluate }},
		{"sequence", func(r latencyRun) float64 { return r.Stages.Sequence }},
		{"logs of a quorum, apply, answer", func(r latencyRun) float64 { return r.Stages.Range - r.Stages.Evaluate - r.Stages.Sequence }},
		{"whole", func(r latencyRun) float64 { return r.Mean }},
		{"beside it: own log of the range's leader", func(r latencyRun) float64 { return r.Stages.Append }},
	}
	kinds := []string{kindBoth, kindNeither, kindRange, kindPlacement, kindThree}
	t := table.New(append([]string{"part"}, kinds...)...)
	for _, p := range parts {
		row := []string{p.name}
		for _, kind := range kinds {
			v := runs.of(skeinSide, isKind(kind), p.of)
			if len(v) == 0 {
				row = append(row, "")
				continue
			}
			whole := table.Median(runs.of(skeinSide, isKind(kind), func(r latencyRun) float64 { return r.Mean }))
			row = append(row, fmt.Sprintf("%s (%.0f %%)", table.Number(table.Median(v)), table.Median(v)/whole*100))
		}
		t.Add(row...)
	}
	t.Write(out, "Skein's parts of a put by its own histograms: means in µs, and shares of the whole")
}
