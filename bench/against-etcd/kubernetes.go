package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// kubeOptions are the command line of the measure.
type kubeOptions struct {
	pairs, total, workers int
	rate                  float64
	ranges                string
}

func kubeFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o kubeOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.total, "total", 20_000, "operations of each kind in a run")
	set.IntVar(&o.workers, "workers", 64, "clients")
	set.Float64Var(&o.rate, "rate", 500, "operations a second of the mix, whatever the servers do")
	set.StringVar(&o.ranges, "ranges", "one", "where Skein's keys lie: in one range, spread over 12, or own: as it splits them by itself")
	return func(ctx context.Context, b *bench) error { return kubernetes(ctx, b, o) }
}

const kubeMix = "mix"

// kubeKinds are the kinds of writes, each alone and as fast as the servers answer, and with how many pods for each
// operation it begins. A worker deletes pods of its own, and none may run out of them.
var kubeKinds = []struct {
	name string
	pods float64
}{{"create", 0}, {"renew", 0}, {"delete", 1.5}, {"status", 0.1}, {"event", 0}}

// kubeSplits are the keys at which ranges begin if the keys are spread: pods and events lie below 100 namespaces,
// and lease objects have the numbers of their nodes, 1,000.
func kubeSplits() (keys []string) {
	const prefix = "/registry/loadtest/"
	for i := range 4 {
		keys = append(keys, fmt.Sprintf("%spods/ns-%03d/", prefix, 25*i), fmt.Sprintf("%sleases/kube-node-lease/node-%06d", prefix, 250*i))
		if i > 0 {
			keys = append(keys, fmt.Sprintf("%sevents/ns-%03d/", prefix, 25*i))
		}
	}
	slices.Sort(keys)
	return keys
}

// kubernetes plays the API servers of a large cluster, on etcd and Skein by turns.
func kubernetes(ctx context.Context, b *bench, o kubeOptions) error {
	flags := slices.Clone(keepRanges)
	switch o.ranges {
	case "one":
	case "own":
		flags = nil
	case "spread":
		file, err := b.splitFile(kubeSplits())
		if err != nil {
			return err
		}
		flags = append(flags, "--initial-split-keys", file)
	default:
		return fmt.Errorf("kubernetes: --ranges %s: there are one, spread and own", o.ranges)
	}
	sides := map[string]*cluster{etcdSide: b.etcd(), skeinSide: b.skein(flags...)}
	return b.with(ctx, []*cluster{sides[etcdSide], sides[skeinSide]}, func() error {
		runs, err := paired(o.pairs, []string{etcdSide, skeinSide}, func(side string, pair int) (figureSet, error) {
			all := figureSet{}
			for _, k := range kubeKinds {
				pods := strconv.Itoa(int(k.pods * float64(o.total)))
				if err := sides[side].kubePart(ctx, b, o, k.name, pair, all, "--mix", k.name+"=1", "--total", strconv.Itoa(o.total), "--pods", pods); err != nil {
					return nil, err
				}
			}
			return all, sides[side].kubePart(ctx, b, o, kubeMix, pair, all, "--rate", fmt.Sprint(o.rate), "--duration", "20s", "--pods", "5000")
		})
		if len(runs[skeinSide]) > 0 {
			names := slices.Sorted(maps.Keys(runs[etcdSide][0]))
			writePairs(os.Stdout, fmt.Sprintf("%d workers; ranges: %s", o.workers, o.ranges), runs, names)
			err = errors.Join(err, b.save("kubernetes.json", runs))
		}
		return err
	})
}

// kubePart does a part and adds its figures. Processor time is that of the whole run of loadtest, with what it puts
// before and with the work that it leaves behind.
func (c *cluster) kubePart(ctx context.Context, b *bench, o kubeOptions, part string, pair int, to figureSet, args ...string) error {
	before, err := c.cpu()
	if err != nil {
		return err
	}
	file := filepath.Join(b.dir, fmt.Sprintf("kubernetes-%s-%s-%02d.json", c.name, part, pair+1))
	args = append(strings.Fields("kubernetes --conns 6 --endpoints "+c.all(c.clientURL, "")+" --clients "+strconv.Itoa(o.workers)),
		append(args, "--data-dir", c.dir, "--json", file)...)
	if text, err := exec.CommandContext(ctx, filepath.Join(b.dir, loadBinary), args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", part, err, text)
	}
	report, err := os.ReadFile(file)
	if err == nil {
		err = kubeFigures(report, part, to)
	}
	if err != nil {
		return fmt.Errorf("report %s: %w", file, err)
	}
	if _, err := c.settle(ctx); err != nil {
		return err
	}
	after, err := c.cpu()
	to["CPU of the servers for all, s"] += (after - before).Seconds()
	return err
}

// kubeFigures adds the figures of a part's report.
func kubeFigures(report []byte, part string, to figureSet) error {
	var r struct {
		Kinds []struct {
			Kind       string    `json:"kind"`
			Throughput float64   `json:"throughput_per_second"`
			Latency    latencies `json:"latency"`
		} `json:"kinds"`
		Watch struct {
			Delay latencies `json:"delay"`
		} `json:"watch"`
	}
	if err := json.Unmarshal(report, &r); err != nil {
		return err
	}
	for _, k := range r.Kinds {
		if part != kubeMix && part != k.Kind {
			continue
		}
		name := map[bool]string{true: "in the mix: "}[part == kubeMix] + k.Kind
		to[name+", 1/s"] = k.Throughput
		to[name+" p50, ms"], to[name+" p99, ms"] = k.Latency.P50/1e3, k.Latency.P99/1e3
	}
	if part == kubeMix {
		to["in the mix: an event's delay p50, ms"], to["in the mix: an event's delay p99, ms"] = r.Watch.Delay.P50/1e3, r.Watch.Delay.P99/1e3
	}
	return nil
}
