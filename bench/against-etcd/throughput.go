package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// throughputOptions are the command line of the measure.
type throughputOptions struct {
	runs    int
	total   int64
	warmup  time.Duration
	conns   int
	clients int
	value   int
	keys    int
	ranges  int
	load    string
	extra   string
}

func throughputFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o throughputOptions
	set.IntVar(&o.runs, "runs", 5, "runs of each side")
	set.Int64Var(&o.total, "total", 100_000, "operations of a run")
	set.DurationVar(&o.warmup, "warmup", 2*time.Second, "unmeasured load before each run")
	set.IntVar(&o.conns, "conns", 100, "connections")
	set.IntVar(&o.clients, "clients", 1000, "clients")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.IntVar(&o.keys, "keys", 100_000, "different keys")
	set.IntVar(&o.ranges, "ranges", 8, "initial ranges of Skein")
	set.StringVar(&o.load, "workload", "put", "put, get or mixed")
	set.StringVar(&o.extra, "loadtest-flags", "", "more flags for loadtest run, separated by blanks")
	return func(ctx context.Context, b *bench) error { return throughput(ctx, b, o) }
}

// throughput loads the sides by turns. All clusters run all the time, so that all sides
// bear the cost of idle ones.
func throughput(ctx context.Context, b *bench, o throughputOptions) error {
	clusters := []*cluster{b.etcd(), b.skein("--initial-ranges", strconv.Itoa(o.ranges)), b.empty(o.value)}
	runs := map[string][]report{}
	err := b.with(ctx, clusters, func() error {
		for i := range o.runs {
			for _, c := range clusters {
				r, err := loadOnce(ctx, b, c, i, o)
				if err != nil {
					return err
				}
				runs[c.name] = append(runs[c.name], r)
			}
		}
		return nil
	})
	if len(runs[emptySide]) > 0 {
		writeThroughput(os.Stdout, o.load, runs)
		progress("\nreports: %s", filepath.Join(b.dir, "*.json"))
	}
	return err
}

// loadOnce runs loadtest once against a cluster and returns its report.
func loadOnce(ctx context.Context, b *bench, c *cluster, i int, o throughputOptions) (report, error) {
	file := filepath.Join(b.dir, fmt.Sprintf("%s-%02d.json", c.name, i+1))
	args := []string{
		"run", "--endpoints", c.all(c.clientURL, ""), "--server-metrics", c.all(c.webURL, "/metrics"),
		"--workload", o.load, "--total", strconv.FormatInt(o.total, 10), "--warmup", o.warmup.String(),
		"--conns", strconv.Itoa(o.conns), "--clients", strconv.Itoa(o.clients),
		"--value-size", strconv.Itoa(o.value), "--keys", strconv.Itoa(o.keys),
		// Keys in all ranges; failures are a row of the table.
		"--key-prefix", "", "--max-failures", strconv.FormatInt(o.total, 10), "--data-dir", c.dir, "--json", file,
	}
	cmd := exec.CommandContext(ctx, filepath.Join(b.dir, loadBinary), append(args, strings.Fields(o.extra)...)...)
	text, err := cmd.CombinedOutput()
	if err != nil {
		return report{}, fmt.Errorf("%s, run %d: %w\n%s", c.name, i+1, err, text)
	}
	r, err := readReport(file)
	if err != nil {
		return r, err
	}
	after, err := c.settle(ctx)
	if err != nil {
		return r, err
	}
	if r.CPU.Servers > 0 {
		r.CPU.Servers += float64(after.Microseconds()) / float64(o.total)
	}
	progress("%-6s run %2d  %s, of which %v afterwards", c.name, i+1, r, after.Round(10*time.Millisecond))
	return r, nil
}

const (
	// quiet is the processor time per second of three nodes below which a cluster has finished the work of the last
	// load. More nodes may take as much more.
	quiet     = 100 * time.Millisecond
	settleMax = time.Minute
)

var errBusy = errors.New("still busy")

// settle waits until the cluster has finished the work of the ended load, so that its
// flushes and compactions do not run in another side's time. It returns their cost.
func (c *cluster) settle(ctx context.Context) (time.Duration, error) {
	return c.settleWithin(ctx, settleMax)
}

// settleWithin is settle with another limit, for loads that leave more work.
func (c *cluster) settleWithin(ctx context.Context, limit time.Duration) (time.Duration, error) {
	begin, err := c.cpu()
	if err != nil {
		return 0, err
	}
	last := begin
	for range int(limit / time.Second) {
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		now, err := c.cpu()
		if err != nil {
			return 0, err
		}
		if now-last < quiet*time.Duration(max(nodes, c.founders()))/nodes {
			return last - begin, nil
		}
		last = now
	}
	return 0, fmt.Errorf("%s is %w %v after the load ended", c.name, errBusy, limit)
}

// cpu returns the processor time of all nodes since their start.
func (c *cluster) cpu() (sum time.Duration, err error) {
	each, err := c.cpuEach()
	for _, d := range each {
		sum += d
	}
	return sum, err
}

// cpuEach returns the processor time of each node since its start.
func (c *cluster) cpuEach() ([]time.Duration, error) {
	each := make([]time.Duration, c.founders())
	for i := range each {
		var err error
		if each[i], err = cpuTime(c.pid(i)); err != nil {
			return nil, err
		}
	}
	return each, nil
}

// report is the compared part of loadtest's report.
type report struct {
	Throughput float64    `json:"throughput_per_second"`
	Elapsed    float64    `json:"elapsed_seconds"`
	Failed     int64      `json:"failed"` // with those that were due and never sent
	Put        *latencies `json:"put"`
	Get        *latencies `json:"get"`
	CPU        struct {
		Self    float64 `json:"self_us_per_operation"`
		Servers float64 `json:"servers_us_per_operation"`
		// SelfSeconds is the load generator's time on so many Processors, MachineBusy the used part of the machine, 0 to 1.
		SelfSeconds float64 `json:"self_seconds"`
		Processors  int     `json:"processors"`
		MachineBusy float64 `json:"machine_busy"`
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

// compared are the compared figures, in the order of the table.
var compared = []struct {
	name, format string
	of           func(r report) (float64, bool)
}{
	{"throughput, 1/s", "%.0f", func(r report) (float64, bool) { return r.Throughput, true }},
	{"servers' CPU per op, µs", "%.1f", func(r report) (float64, bool) { return r.CPU.Servers, r.CPU.Servers > 0 }},
	{"loadtest's CPU per op, µs", "%.1f", func(r report) (float64, bool) { return r.CPU.Self, true }},
	{"put p50, ms", "%.1f", func(r report) (float64, bool) { return of(r.Put, func(l *latencies) float64 { return l.P50 }) }},
	{"put p99, ms", "%.1f", func(r report) (float64, bool) { return of(r.Put, func(l *latencies) float64 { return l.P99 }) }},
	{"put p99.99, ms", "%.1f", func(r report) (float64, bool) { return of(r.Put, func(l *latencies) float64 { return l.P9999 }) }},
	{"get p50, ms", "%.1f", func(r report) (float64, bool) { return of(r.Get, func(l *latencies) float64 { return l.P50 }) }},
	{"get p99, ms", "%.1f", func(r report) (float64, bool) { return of(r.Get, func(l *latencies) float64 { return l.P99 }) }},
	{"get p99.99, ms", "%.1f", func(r report) (float64, bool) { return of(r.Get, func(l *latencies) float64 { return l.P9999 }) }},
	{"failed", "%.0f", func(r report) (float64, bool) { return float64(r.Failed), true }},
}

// of returns one of some latencies in milliseconds.
func of(l *latencies, value func(*latencies) float64) (float64, bool) {
	if l == nil {
		return 0, false
	}
	return value(l) / 1e3, true
}

// values returns the compared figures of all runs. It returns false if one lacks a
// figure or there is none.
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

// writeThroughput prints all runs, and then the medians and the ratios of the pairs.
func writeThroughput(out io.Writer, load string, runs map[string][]report) {
	every := table.New("every run", etcdSide, skeinSide, "empty gRPC servers")
	medians := table.New("medians", etcdSide, skeinSide, "empty gRPC servers", "Skein / etcd: median (lowest to highest)")
	for _, m := range compared {
		var row, middle []string
		sides := map[string][]float64{}
		for _, side := range []string{etcdSide, skeinSide, emptySide} {
			v, ok := values(runs[side], m.of)
			if !ok {
				break
			}
			sides[side] = v
			row = append(row, table.Figures(v, m.format))
			middle = append(middle, fmt.Sprintf(m.format, table.Median(v)))
		}
		if len(row) < 3 {
			continue
		}
		every.Add(append([]string{m.name}, row...)...)
		medians.Add(append(append([]string{m.name}, middle...), table.Spread(sides[skeinSide], sides[etcdSide]))...)
	}
	every.Write(out, fmt.Sprintf("Workload %s, %d runs of each side by turns", load, len(runs[emptySide])))
	medians.Write(out, "Medians, and the ratios within the pairs")
}
