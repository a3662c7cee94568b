package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// rowsOptions are the command line of the measure.
type rowsOptions struct {
	pairs        int
	turn, warmup time.Duration
	loads        string
	prefix       string
	ranges       int
	settle       time.Duration
	settleOf     int
	rate         float64 // puts a second, 0 for as many as are answered
}

func rowsFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o rowsOptions
	set.IntVar(&o.pairs, "pairs", 5, "turns of each side in each row")
	set.DurationVar(&o.turn, "turn", 5*time.Second, "length of a turn")
	set.DurationVar(&o.warmup, "warmup", time.Second, "unmeasured load before each turn")
	set.DurationVar(&o.settle, "settle", 110*time.Second, "unmeasured load of each side at the beginning: by then Skein's placement has followed it")
	set.IntVar(&o.settleOf, "settle-clients", 16, "clients of that load")
	set.StringVar(&o.loads, "loads", "put/1,put/4,put/16,put/64,put/1000,get/1000,txn/1000", "the rows: workload of loadtest and clients, on at most 100 connections")
	set.StringVar(&o.prefix, "prefix", "/registry/", "stands before each key")
	set.IntVar(&o.ranges, "ranges", 8, "ranges of Skein's second cluster, where the keys are spread")
	return func(ctx context.Context, b *bench) error { return rows(ctx, b, o) }
}

// rowSides are etcd, and Skein with all keys in one range and with them spread over ranges.
var rowSides = []string{etcdSide, "one range", "spread"}

// A rowTurn is what one turn gave.
type rowTurn struct {
	// PerSecond is the rate, P50Millis a latency.
	PerSecond, P50Millis, P99Millis float64
	// ServersMicros and LoadMicros are processor time of an operation, NodeMicros that of each server.
	ServersMicros, LoadMicros float64
	NodeMicros                []float64
	// MachineBusy is the used part of the machine's processors, LoadShare what the load generator used of its own, 0 to 1.
	MachineBusy, LoadShare float64
	// Failed counts operations without success, those that were due and never sent with them.
	Failed int64
	// Warnings are loadtest's: the figures may be its own in place of the servers'.
	Warnings []string `json:",omitempty"`
}

// rows measures the rates, latencies and processor time of few and many clients, by turns in a random order.
func rows(ctx context.Context, b *bench, o rowsOptions) error {
	type load struct {
		name, workload string
		clients        int
	}
	var loads []load
	for text := range strings.SplitSeq(o.loads, ",") {
		workload, clients, _ := strings.Cut(text, "/")
		n, err := strconv.Atoi(clients)
		if err != nil || n < 1 {
			return fmt.Errorf("rows: --loads %s: %q is no workload with clients, such as put/16", o.loads, text)
		}
		loads = append(loads, load{text, workload, n})
	}
	one := b.cluster(rowSides[1], skeinBinary, 100, etcdArgs(strings.Fields(b.skeinFlags)...))
	apart := b.cluster(rowSides[2], skeinBinary, 200, etcdArgs(append(strings.Fields(b.skeinFlags), "--initial-ranges", strconv.Itoa(o.ranges))...))
	clusters := []*cluster{b.etcd(), one, apart}
	turns := map[string]map[string][]rowTurn{}
	err := b.with(ctx, clusters, func() error {
		for _, c := range clusters {
			progress("%s gets its keys, and used to the load", c.name)
			if _, err := c.turn(ctx, b, o, "put", o.settleOf, o.settle, true); err != nil {
				return err
			}
		}
		for i := range o.pairs {
			for _, l := range loads {
				if turns[l.name] == nil {
					turns[l.name] = map[string][]rowTurn{}
				}
				for _, c := range shuffled(clusters) {
					t, err := c.turn(ctx, b, o, l.workload, l.clients, o.turn, false)
					if err != nil {
						return fmt.Errorf("%s, %s, pair %d: %w", l.name, c.name, i+1, err)
					}
					turns[l.name][c.name] = append(turns[l.name][c.name], t)
					progress("%-9s %-9s pair %d  %+v", l.name, c.name, i+1, t)
				}
			}
		}
		return nil
	})
	if len(turns) == 0 {
		return err
	}
	for _, l := range loads {
		writeRow(l.name, turns[l.name])
	}
	if saved := b.save("rows.json", turns); err == nil {
		err = saved
	}
	return err
}

// turn loads the cluster for so long, and waits until it is quiet again. With fill it puts each key before; that would count as
// the servers' processor time of the turn's operations, so the turns that are measured go without.
func (c *cluster) turn(ctx context.Context, b *bench, o rowsOptions, workload string, clients int, length time.Duration, fill bool, more ...string) (rowTurn, error) {
	prefix := o.prefix
	if c.name == rowSides[2] {
		prefix = "" // keys in all ranges
	}
	return c.loaded(ctx, b, length, o.warmup, append(more, "--endpoints", c.all(c.clientURL, ""), "--workload", workload, "--clients", strconv.Itoa(clients),
		"--conns", strconv.Itoa(min(clients, 100)), "--rate", strconv.FormatFloat(o.rate, 'f', -1, 64), "--key-prefix", prefix,
		"--fill="+strconv.FormatBool(fill))...)
}

// loaded runs loadtest with these flags, and returns what it gave when the cluster is quiet again, if it is to be.
func (c *cluster) loaded(ctx context.Context, b *bench, length, warmup time.Duration, flags ...string) (t rowTurn, err error) {
	file := filepath.Join(b.dir, "turn.json")
	before, err := c.cpuEach()
	if err != nil {
		return t, err
	}
	args := append([]string{"run", "--duration", length.String(), "--warmup", warmup.String(), "--data-dir", c.dir, "--json", file}, flags...)
	//nolint:gosec // the arguments are this program's own
	text, err := exec.CommandContext(ctx, filepath.Join(b.dir, loadBinary), args...).CombinedOutput()
	if err != nil {
		return t, fmt.Errorf("%w\n%s", err, text)
	}
	after, err := c.cpuEach()
	if err != nil {
		return t, err
	}
	// The next side begins when this one is quiet. What it does until then comes in turns to all rows, and is not counted:
	// with one client it would be mostly that of an idle cluster.
	if err := c.settled(ctx); err != nil && !(c.alone && errors.Is(err, errBusy)) {
		return t, err
	}
	r, err := readReport(file)
	if err != nil {
		return t, err
	}
	for _, l := range []*latencies{r.Put, r.Get} {
		if l != nil {
			t.P50Millis, t.P99Millis = l.P50/1e3, l.P99/1e3
		}
	}
	// The warm-up's operations cost as much.
	done := max(r.Throughput*(length+warmup).Seconds(), 1)
	for i := range after {
		t.NodeMicros = append(t.NodeMicros, micros(after[i]-before[i])/done)
		t.ServersMicros += t.NodeMicros[i]
	}
	t.PerSecond, t.LoadMicros, t.Failed, t.Warnings = r.Throughput, r.CPU.Self, r.Failed, warnings(string(text))
	t.MachineBusy = r.CPU.MachineBusy
	t.LoadShare = r.CPU.SelfSeconds / max(r.Elapsed*float64(r.CPU.Processors), 0.001)
	return t, nil
}

// warnings are those in what loadtest has printed.
func warnings(text string) (all []string) {
	for line := range strings.Lines(text) {
		if _, why, found := strings.Cut(line, "WARNING: "); found {
			all = append(all, strings.TrimSpace(why))
		}
	}
	return all
}

// writeRow prints all turns of a row, and the ratios within the pairs.
func writeRow(name string, turns map[string][]rowTurn) {
	out := table.New(append([]string{name}, "etcd: all", "one range: all", "spread: all", "etcd", "one range", "spread",
		"one range / etcd: median (lowest to highest)", "spread / etcd")...)
	for _, figure := range []struct {
		name string
		of   func(rowTurn) float64
	}{
		{"per second", func(t rowTurn) float64 { return t.PerSecond }},
		{"p50, ms", func(t rowTurn) float64 { return t.P50Millis }},
		{"p99, ms", func(t rowTurn) float64 { return t.P99Millis }},
		{"servers' CPU each, µs", func(t rowTurn) float64 { return t.ServersMicros }},
		{"the same in units of loadtest's", func(t rowTurn) float64 { return t.ServersMicros / max(t.LoadMicros, 0.001) }},
		{"machine busy, %", func(t rowTurn) float64 { return 100 * t.MachineBusy }},
	} {
		var columns [][]float64
		cells := []string{figure.name}
		for _, side := range rowSides {
			var column []float64
			for _, t := range turns[side] {
				column = append(column, figure.of(t))
			}
			columns = append(columns, column)
			cells = append(cells, strings.Join(table.Numbers(column), " "))
		}
		if len(columns[0]) == 0 || len(columns[1]) == 0 || len(columns[2]) == 0 {
			return
		}
		for _, column := range columns {
			cells = append(cells, table.Number(table.Median(column)))
		}
		out.Add(append(cells, table.Spread(columns[1], columns[0]), table.Spread(columns[2], columns[0]))...)
	}
	out.Write(os.Stdout, name)
}
