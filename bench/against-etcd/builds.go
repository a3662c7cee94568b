package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// buildsOptions are the command line of the measure.
type buildsOptions struct {
	before          string
	pairs           int
	loads, clients  string
	total, ofClient int64
	ranges          int
}

func buildsFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o buildsOptions
	set.StringVar(&o.before, "before", "HEAD~1", "commit to compare this tree with")
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.StringVar(&o.loads, "workloads", "put,get", "put, get, mixed or txn, separated by commas")
	set.StringVar(&o.clients, "clients", "1,16,1000", "how many clients load a cluster at once, separated by commas")
	set.Int64Var(&o.total, "total", 60_000, "operations of a run at most")
	set.Int64Var(&o.ofClient, "of-client", 4_000, "operations of one client at most")
	set.IntVar(&o.ranges, "ranges", 8, "ranges of each cluster")
	return func(ctx context.Context, b *bench) error { return builds(ctx, b, o) }
}

// The sides: the other commit twice, since what its two clusters differ by says how much a
// difference of the builds has to be.
const (
	beforeSide = "before"
	twiceSide  = "again"
	nowSide    = "now"
)

var buildSides = []string{beforeSide, twiceSide, nowSide}

// builds compares the processor time of two builds of Skein for an operation. The clusters run all
// the time and are loaded by turns, in a random order. Each range is led by the same node everywhere:
// where chance puts the leaders moves a run by 20 % and more.
func builds(ctx context.Context, b *bench, o buildsOptions) error {
	var clients []int
	for text := range strings.SplitSeq(o.clients, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return fmt.Errorf("builds: --clients %s: %q is no number of clients", o.clients, text)
		}
		clients = append(clients, n)
	}
	binary, err := b.buildOf(ctx, o.before)
	if err != nil {
		return err
	}
	var clusters []*cluster
	for i, side := range buildSides {
		c := b.cluster(side, skeinBinary, 100*i, etcdArgs(append(strings.Fields(b.skeinFlags), "--initial-ranges", strconv.Itoa(o.ranges))...))
		if side != nowSide {
			c.binary = binary
		}
		clusters = append(clusters, c)
	}
	// By workload and clients, and then by side.
	runs, names := map[string]map[string][]buildRun{}, []string{}
	err = b.with(ctx, clusters, func() error {
		for _, c := range clusters {
			if err := c.layOut(ctx, o.ranges); err != nil {
				return err
			}
		}
		for i := range o.pairs {
			for load := range strings.SplitSeq(o.loads, ",") {
				for _, n := range clients {
					name := fmt.Sprintf("%s, %d clients", load, n)
					if runs[name] == nil {
						runs[name], names = map[string][]buildRun{}, append(names, name)
					}
					for _, c := range shuffled(clusters) {
						if err := c.settled(ctx); err != nil {
							return err
						}
						progress("%s, pair %d", name, i+1)
						cpu, err := c.costs(ctx, b, o, load, n, i)
						if err != nil {
							return err
						}
						runs[name][c.name] = append(runs[name][c.name], cpu)
					}
				}
			}
		}
		return nil
	})
	if len(names) > 0 {
		writeBuilds(o, names, runs)
		err = errors.Join(err, b.save("builds.json", runs))
	}
	return err
}

// buildRun is the processor time of a run, in µs for each operation.
type buildRun struct {
	Servers, Loadtest float64
}

// inLoadtest is the servers' processor time with the load generator's as its unit. The generator does the
// same for an operation of either build. What else the machine does slows both, so this differs less from
// run to run than the time itself.
func (r buildRun) inLoadtest() float64 { return r.Servers / r.Loadtest }

func (r buildRun) servers() float64 { return r.Servers }

func writeBuilds(o buildsOptions, names []string, runs map[string]map[string][]buildRun) {
	for _, unit := range []struct {
		name, format string
		of           func(buildRun) float64
	}{{"µs", "%.1f", buildRun.servers}, {"in units of loadtest's", "%.2f", buildRun.inLoadtest}} {
		t := table.New("servers' CPU per operation, "+unit.name, beforeSide, twiceSide, nowSide, "now / before: median (lowest to highest)", "again / before")
		for _, name := range names {
			by := map[string][]float64{}
			for side, of := range runs[name] {
				for _, r := range of {
					by[side] = append(by[side], unit.of(r))
				}
			}
			// Both clusters of the other commit say what it costs.
			var both []float64
			for i := range min(len(by[beforeSide]), len(by[twiceSide])) {
				both = append(both, table.Mean(by[beforeSide][i], by[twiceSide][i]))
			}
			row := []string{name}
			for _, side := range buildSides {
				row = append(row, table.Figures(by[side], unit.format))
			}
			t.Add(append(row, precise(by[nowSide], both), precise(by[twiceSide], by[beforeSide]))...)
		}
		t.Write(os.Stdout, fmt.Sprintf("This tree against %s; the ratio is that to the mean of its two clusters", o.before))
	}
}

// precise is spread with one figure more.
func precise(a, b []float64) string {
	var ratios []float64
	for i := range min(len(a), len(b)) {
		ratios = append(ratios, a[i]/b[i])
	}
	if len(ratios) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.3f (%.3f to %.3f)", table.Median(ratios), slices.Min(ratios), slices.Max(ratios))
}

// costs loads a cluster once, and returns the processor time for each operation, the servers' with the
// work that the load leaves behind.
func (c *cluster) costs(ctx context.Context, b *bench, o buildsOptions, load string, clients, pair int) (buildRun, error) {
	r, err := loadOnce(ctx, b, c, pair, throughputOptions{
		total: min(o.total, o.ofClient*int64(clients)), warmup: time.Second, conns: max(1, min(30, clients/4)), clients: clients,
		value: 256, keys: 10_000, load: load,
	})
	if err == nil && r.Failed > 0 {
		err = fmt.Errorf("%s: %d operations failed", c.name, r.Failed)
	}
	return buildRun{Servers: r.CPU.Servers, Loadtest: r.CPU.Self}, err
}

// buildOf compiles Skein as of a commit.
func (b *bench) buildOf(ctx context.Context, commit string) (binary string, err error) {
	tree := filepath.Join(b.dir, "before")
	git := func(args ...string) error {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Stderr = os.Stderr
		return cmd.Run()
	}
	if err := git("worktree", "add", "--quiet", "--detach", tree, commit); err != nil {
		return "", fmt.Errorf("check out %s: %w", commit, err)
	}
	defer func() { err = errors.Join(err, git("worktree", "remove", "--force", tree)) }()
	binary = filepath.Join(b.dir, skeinBinary+"-before")
	cmd := exec.CommandContext(ctx, "go", "build", "-C", tree, "-o", binary, "./cmd/skein")
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("build %s: %w", commit, err)
	}
	return binary, nil
}

// layOut has each node lead every third range, and the first one placement, and then leaves it so:
// placement makes no decision any more.
func (c *cluster) layOut(ctx context.Context, ranges int) error {
	if err := c.created(ctx, ranges); err != nil {
		return err
	}
	if err := c.command(ctx, "placement", "pause"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return waitUntil(ctx, pollEvery, func() error {
		list, err := c.ranges(ctx)
		if err != nil {
			return err
		}
		var wrong []error
		for i := range list {
			if r := &list[i]; !r.leads(i % nodes) {
				wrong = append(wrong, fmt.Errorf("range %d is led by %s", r.ID, r.Leader),
					c.command(ctx, "range", "transfer-leader", strconv.FormatUint(r.ID, 10), "--to", nodeName(i%nodes)))
			}
		}
		clients, err := c.connectAll()
		if err != nil {
			return err
		}
		defer closeAll(clients)
		if leader, err := c.leader(ctx, clients); err != nil || leader != 0 {
			wrong = append(wrong, err, fmt.Errorf("%s leads placement", nodeName(leader)), c.command(ctx, "placement", "transfer-leader", "--to", nodeName(0)))
		}
		return errors.Join(wrong...)
	})
}

// settled is settle without the costs.
func (c *cluster) settled(ctx context.Context) error {
	_, err := c.settle(ctx)
	return err
}

// command runs a command of the cluster's own binary.
func (c *cluster) command(ctx context.Context, args ...string) error {
	text, err := exec.CommandContext(ctx, c.binary, append(args, "--endpoints", strings.Join(c.endpoints(), ","))...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("skein %s: %w: %s", strings.Join(args, " "), err, text)
	}
	return nil
}
