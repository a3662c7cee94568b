// Command against-etcd runs the same load on a three-node etcd and a three-node
// Skein, by turns, and prints all runs, their medians and the ratios.
//
// It builds etcd from its module (the version in this module's go.mod), Skein and
// loadtest from the tree around it, starts both clusters beside each other on one
// file system, and leaves the reports of all runs as JSON. Both clusters run all
// the time: what the idle one costs, both sides bear.
//
//	go run . --runs 5 --total 100000
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// options are the command line.
type options struct {
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
	dir     string
	port    int
	keep    bool
}

func main() {
	var o options
	flag.IntVar(&o.runs, "runs", 5, "runs of each side")
	flag.Int64Var(&o.total, "total", 100_000, "operations of a run")
	flag.DurationVar(&o.warmup, "warmup", 2*time.Second, "unmeasured load before each run")
	flag.IntVar(&o.conns, "conns", 100, "connections")
	flag.IntVar(&o.clients, "clients", 1000, "clients")
	flag.IntVar(&o.value, "value-size", 256, "bytes of a value")
	flag.IntVar(&o.keys, "keys", 100_000, "different keys")
	flag.IntVar(&o.ranges, "ranges", 8, "initial ranges of Skein")
	flag.StringVar(&o.load, "workload", "put", "put, get or mixed")
	flag.StringVar(&o.extra, "loadtest-flags", "", "more flags for loadtest run, separated by blanks")
	flag.StringVar(&o.dir, "dir", "", "directory for binaries, data and reports (default: a new one in the current directory)")
	flag.IntVar(&o.port, "port", 21000, "first of the ports")
	flag.BoolVar(&o.keep, "keep", false, "keep the servers' data")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "against-etcd:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp(".", "results-"); err != nil {
			return err
		}
	}
	if o.dir, err = filepath.Abs(o.dir); err != nil {
		return err
	}
	fmt.Println("building etcd, skein and loadtest into", o.dir)
	if err := build(ctx, o.dir); err != nil {
		return err
	}
	sides := []*cluster{
		{name: "etcd", binary: filepath.Join(o.dir, "etcd"), dir: filepath.Join(o.dir, "data-etcd"), port: o.port},
		{
			name: "skein", binary: filepath.Join(o.dir, "skein"), dir: filepath.Join(o.dir, "data-skein"), port: o.port + 100,
			flags: []string{"--initial-ranges", strconv.Itoa(o.ranges)},
		},
	}
	defer func() {
		for _, c := range sides {
			err = errors.Join(err, c.stop())
			if !o.keep {
				err = errors.Join(err, os.RemoveAll(c.dir))
			}
		}
	}()
	for _, c := range sides {
		if err := c.start(ctx); err != nil {
			return err
		}
	}
	var t table
	for i := range o.runs {
		for _, c := range sides {
			r, err := load(ctx, o, c, i)
			if err != nil {
				return err
			}
			t.add(c.name, r)
		}
	}
	t.write(os.Stdout, sides[1].name, sides[0].name)
	fmt.Println("\nreports:", filepath.Join(o.dir, "*.json"))
	return nil
}

// build compiles the three binaries into dir.
func build(ctx context.Context, dir string) error {
	for _, b := range []struct{ name, from, pkg string }{
		{"etcd", ".", "go.etcd.io/etcd/server/v3"},
		{"skein", "../..", "./cmd/skein"},
		{"loadtest", "../..", "./cmd/loadtest"},
	} {
		cmd := exec.CommandContext(ctx, "go", "build", "-C", b.from, "-buildvcs=auto", "-o", filepath.Join(dir, b.name), b.pkg)
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("build %s (run this in bench/against-etcd): %w", b.name, err)
		}
	}
	return nil
}

// load runs loadtest once against a cluster and returns its report.
func load(ctx context.Context, o options, c *cluster, i int) (report, error) {
	file := filepath.Join(o.dir, fmt.Sprintf("%s-%02d.json", c.name, i+1))
	args := []string{
		"run", "--endpoints", c.endpoints(""), "--server-metrics", c.endpoints("/metrics"),
		"--workload", o.load, "--total", strconv.FormatInt(o.total, 10), "--warmup", o.warmup.String(),
		"--conns", strconv.Itoa(o.conns), "--clients", strconv.Itoa(o.clients),
		"--value-size", strconv.Itoa(o.value), "--keys", strconv.Itoa(o.keys),
		"--data-dir", c.dir, "--json", file,
	}
	cmd := exec.CommandContext(ctx, filepath.Join(o.dir, "loadtest"), append(args, strings.Fields(o.extra)...)...)
	text, err := cmd.CombinedOutput()
	if err != nil {
		return report{}, fmt.Errorf("%s, run %d: %w\n%s", c.name, i+1, err, text)
	}
	r, err := readReport(file)
	if err == nil {
		fmt.Printf("%-6s run %2d  %s\n", c.name, i+1, r)
	}
	return r, err
}
