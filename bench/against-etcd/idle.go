package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// idleOptions are the command line of the measure.
type idleOptions struct {
	pairs      int
	rest, over time.Duration
}

func idleFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o idleOptions
	set.IntVar(&o.pairs, "pairs", 5, "how often both sides are measured")
	set.DurationVar(&o.rest, "rest", 30*time.Second, "from the moment when both are quiet to the first measurement")
	set.DurationVar(&o.over, "over", time.Minute, "how long each measurement takes")
	return func(ctx context.Context, b *bench) error { return idle(ctx, b, o) }
}

// The figures of a cluster that nobody uses, of its three nodes together.
const (
	idleCPU   = "CPU, ms a second"
	idleWakes = "waits of threads (voluntary context switches) a second"
)

// idle measures what both clusters cost while nobody uses them. Both are measured over the same time, so that
// what else the machine does meets both: at rest neither takes anything from the other.
func idle(ctx context.Context, b *bench, o idleOptions) error {
	if o.pairs < 1 || o.over < time.Second {
		return fmt.Errorf("idle: %d pairs over %s: at least one, over at least a second", o.pairs, o.over)
	}
	clusters := []*cluster{b.etcd(), b.skein()}
	runs := map[string][]figureSet{}
	err := b.with(ctx, clusters, func() error {
		for _, c := range clusters {
			if err := c.settled(ctx); err != nil {
				return err
			}
		}
		if err := sleep(ctx, o.rest); err != nil {
			return err
		}
		for pair := range o.pairs {
			if err := measureIdle(ctx, clusters, o.over, runs); err != nil {
				return fmt.Errorf("pair %d: %w", pair+1, err)
			}
			for _, c := range clusters {
				progress("%-6s pair %d  %v", c.name, pair+1, runs[c.name][pair])
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	writePairs(os.Stdout, "three nodes that nobody uses", runs, []string{idleCPU, idleWakes})
	return b.save("idle.json", runs)
}

// spent is what the nodes of a cluster have taken so far.
type spent struct {
	at    time.Time
	cpu   time.Duration
	waits int64
}

func (c *cluster) spent() (s spent, err error) {
	s.at = time.Now()
	if s.cpu, err = c.cpu(); err != nil {
		return s, err
	}
	for i := range c.founders() {
		n, err := processWaits(c.pid(i))
		if err != nil {
			return s, err
		}
		s.waits += n
	}
	return s, nil
}

// measureIdle appends a run of each cluster.
func measureIdle(ctx context.Context, clusters []*cluster, over time.Duration, runs map[string][]figureSet) error {
	before := map[*cluster]spent{}
	for _, c := range clusters {
		s, err := c.spent()
		if err != nil {
			return err
		}
		before[c] = s
	}
	if err := sleep(ctx, over); err != nil {
		return err
	}
	for _, c := range clusters {
		s, err := c.spent()
		if err != nil {
			return err
		}
		if err := c.alive(); err != nil {
			return err
		}
		seconds := s.at.Sub(before[c].at).Seconds()
		runs[c.name] = append(runs[c.name], figureSet{
			idleCPU:   millis(s.cpu-before[c].cpu) / seconds,
			idleWakes: float64(s.waits-before[c].waits) / seconds,
		})
	}
	return nil
}

// processWaits is how often the threads of a process have waited for something.
func processWaits(pid int) (sum int64, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return 0, err
	}
	if len(files) == 0 {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if os.IsNotExist(err) {
			continue // that thread has ended
		}
		if err != nil {
			return 0, err
		}
		n, err := parseWaits(string(text))
		if err != nil {
			return 0, fmt.Errorf("%s: %w", f, err)
		}
		sum += n
	}
	return sum, nil
}

// parseWaits reads the voluntary context switches of a thread's status.
func parseWaits(text string) (int64, error) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
			return strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
		}
	}
	return 0, fmt.Errorf("no voluntary_ctxt_switches in %q", text)
}
