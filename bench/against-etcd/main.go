// Command against-etcd measures whole clusters: three processes of etcd and three of
// Skein on one machine and one file system, with the load beside them.
//
// It builds etcd from its module (the version in this module's go.mod), Skein and
// loadtest from the tree around it. It prints every run and the ratios as Markdown, and
// leaves all figures as JSON.
//
//	go run . throughput --runs 5 --total 100000
//	go run . latency
//	go run . rows
//	go run . builds --before HEAD~1
//	go run . failover
//	go run . sleeping
//	go run . idle
//	go run . rangestream
//	go run . list
//	go run . watch
//	go run . history
//	go run . txn
//	go run . leaseput
//	go run . expiry
//	go run . reshape
//	go run . rebuild
//	go run . fourth
//	go run . users
//	go run . import
//	go run . backup
//	go run . snapshot
//	go run . mirror
//	go run . kubernetes
//	go run . apiserver
//	go run . scale
//	go run . bulk
//	go run . attach
//	go run . memory
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

// The sides that are measured.
const (
	etcdSide  = "etcd"
	skeinSide = "skein"
	emptySide = "empty" // gRPC servers that answer at once
)

// The binaries have unusual names, so that nobody who ends other servers by name ends
// these.
const (
	etcdBinary  = "bench-etcd"
	skeinBinary = "bench-skein"
	loadBinary  = "bench-load"
)

// A measure is one of the things that can be measured.
type measure struct {
	name, about string
	// flags registers the measure's flags and returns how to run it.
	flags func(*flag.FlagSet) func(context.Context, *bench) error
}

// measures are all measures; the first is the default.
var measures = []measure{
	{"throughput", "operations a second and CPU of each, by turns, beside an empty gRPC server", throughputFlags},
	{"rows", "rates, latencies and CPU of few and many clients, with all keys in one range and with them spread", rowsFlags},
	{"pipe", "Skein's pipe against etcd's unary calls, each with as many clients as make it fastest", pipeFlags},
	{"builds", "CPU of two builds of Skein for an operation, by turns", buildsFlags},
	{"latency", "puts of one client at each endpoint, and what each hop takes", latencyFlags},
	{"failover", "the gap between acknowledged writes after kill -9 of the leader", failoverFlags},
	{"rangestream", "a read of everything by RangeStream: time, and memory of each node", rangestreamFlags},
	{"list", "pages at an older revision beside writes, as kube-apiserver reads them", listFlags},
	{"sleeping", "what thousands of ranges cost that nobody uses", sleepingFlags},
	{"idle", "CPU and wake-ups of clusters that nobody uses", idleFlags},
	{"watch", "the put rate that many watchers of one prefix can follow, and what they cost puts", watchFlags},
	{"history", "events a second of one watcher from revision 1", historyFlags},
	{"txn", "a transaction over two ranges beside one within a range", costFlags(txnCost)},
	{"leaseput", "a put with a lease beside a put", costFlags(leasePut)},
	{"reshape", "puts while ranges are split and merged", reshapeFlags},
	{"rebuild", "a node of many ranges is lost and rebuilt on a fourth", rebuildFlags},
	{"fourth", "a fourth node joins three loaded ones and takes its share", fourthFlags},
	{"users", "puts and gets with users checked beside those without, and changes of rights", usersFlags},
	{"import", "an etcd's snapshot into three new nodes, and an export of it", importFlags},
	{"backup", "backups and restores, and puts beside backups", backupFlags},
	{"snapshot", "Maintenance.Snapshot: time, and memory of each node", snapshotFlags},
	{"mirror", "an etcd under load mirrored into three new nodes, and the cut-over", mirrorFlags},
	{"kubernetes", "what the API servers of a large Kubernetes cluster do, by kind, and the CPU that it costs", kubeFlags},
	{"apiserver", "creates, renewals of leases and deletes through a kube-apiserver on each side, and the CPU that they cost", apiserverFlags},
	{"scale", "CPU of a put in clusters of 3 to 9 nodes, and with 1 to 4,096 ranges", scaleFlags},
	{"expiry", "puts while 10,000 leases expire", expiryFlags},
	{"bulk", "a large store of one node: filled by txns of 100 puts, then gets, puts, pages, counts; memory and disk", bulkFlags},
	{"attach", "grants, first puts with new leases, keepalives", attachFlags},
	{"memory", "resident memory of nodes with few keys", memoryFlags},
}

// bench is the common part of all measures.
type bench struct {
	dir  string // binaries, data and reports
	port int
	keep bool
	// skeinFlags are more flags for Skein's nodes, separated by blanks.
	skeinFlags string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if len(os.Args) > 1 && os.Args[1] == loginsCommand {
		err = loginsOfMany(ctx, os.Args[2:])
	} else {
		err = run(ctx, os.Args[1:])
	}
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "against-etcd:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	m := measures[0]
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		var err error
		if m, err = named(args[0]); err != nil {
			return err
		}
		args = args[1:]
	}
	var b bench
	set := flag.NewFlagSet(m.name, flag.ContinueOnError)
	set.Usage = func() {
		fmt.Fprintf(set.Output(), "%s: %s\n", m.name, m.about)
		set.PrintDefaults()
	}
	set.StringVar(&b.dir, "dir", "", "directory for binaries, data and reports (default: a new one in the current directory)")
	set.IntVar(&b.port, "port", 21000, "first of the ports")
	set.BoolVar(&b.keep, "keep", false, "keep the servers' data and logs")
	set.StringVar(&b.skeinFlags, "skein-flags", "", "more flags for Skein's nodes, separated by blanks: --enable-pprof, to look into them")
	work := m.flags(set)
	if err := set.Parse(args); err != nil {
		return err
	}
	if set.NArg() > 0 {
		return fmt.Errorf("%s: %q is no flag", m.name, set.Arg(0))
	}
	if err := b.build(ctx); err != nil {
		return err
	}
	return work(ctx, &b)
}

func named(name string) (measure, error) {
	var lines []string
	for _, m := range measures {
		if m.name == name {
			return m, nil
		}
		lines = append(lines, fmt.Sprintf("  %-11s  %s", m.name, m.about))
	}
	return measure{}, fmt.Errorf("%q is no measure; there are\n%s", name, strings.Join(lines, "\n"))
}

// build makes the directory and compiles the three binaries into it.
func (b *bench) build(ctx context.Context) (err error) {
	if b.dir == "" {
		if b.dir, err = os.MkdirTemp(".", "results-"); err != nil {
			return err
		}
	}
	if b.dir, err = filepath.Abs(b.dir); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "building etcd, skein and loadtest into", b.dir)
	for _, it := range []struct{ name, from, pkg string }{
		{etcdBinary, ".", "go.etcd.io/etcd/server/v3"},
		{skeinBinary, "../..", "./cmd/skein"},
		{loadBinary, "../..", "./cmd/loadtest"},
	} {
		cmd := exec.CommandContext(ctx, "go", "build", "-C", it.from, "-buildvcs=auto", "-o", filepath.Join(b.dir, it.name), it.pkg)
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("build %s (run this in bench/against-etcd): %w", it.name, err)
		}
	}
	return nil
}

// etcd, skein and empty are the clusters of the three sides, not started.
func (b *bench) etcd() *cluster { return b.cluster(etcdSide, etcdBinary, 0, etcdArgs()) }

func (b *bench) skein(flags ...string) *cluster {
	return b.cluster(skeinSide, skeinBinary, 100, etcdArgs(append(flags, strings.Fields(b.skeinFlags)...)...))
}

func (b *bench) empty(valueBytes int) *cluster {
	c := b.cluster(emptySide, loadBinary, 200, emptyArgs(valueBytes))
	c.web = c.peerURL
	return c
}

func (b *bench) cluster(name, binary string, offset int, args func(*cluster, int) []string) *cluster {
	return &cluster{
		name: name, binary: filepath.Join(b.dir, binary), dir: filepath.Join(b.dir, "data-"+name),
		port: b.port + offset, args: args,
	}
}

// with starts clusters, does work and ends them whatever the outcome.
func (b *bench) with(ctx context.Context, clusters []*cluster, work func() error) (err error) {
	defer func() {
		for _, c := range clusters {
			// The logs explain errors.
			err = errors.Join(err, c.stop(b.keep || err != nil))
		}
	}()
	for _, c := range clusters {
		if err := c.start(ctx); err != nil {
			return err
		}
	}
	return work()
}

// save writes figures as JSON and prints the place.
func (b *bench) save(name string, figures any) error {
	text, err := json.MarshalIndent(figures, "", "  ")
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	file := filepath.Join(b.dir, name)
	if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	fmt.Fprintln(os.Stderr, "report:", file)
	return nil
}

// progress reports the progress; stdout gets only the tables.
func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
