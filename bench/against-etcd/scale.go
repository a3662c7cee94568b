package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// scaleOptions are the command line of the measure.
type scaleOptions struct {
	sizes, ranges  string
	ofNode         int
	rate           float64
	clients, turns int
	turn, warmup   time.Duration
	evenWithin     time.Duration
}

func scaleFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o scaleOptions
	set.StringVar(&o.sizes, "nodes", "3,5,7,9", "nodes of the clusters that have the same load for each node, separated by commas; empty for none")
	set.IntVar(&o.ofNode, "ranges-of-node", 8, "ranges for each node of those")
	set.Float64Var(&o.rate, "rate", 300, "puts a second for each node of those")
	set.StringVar(&o.ranges, "ranges", "1,16,256,4096", "ranges of the clusters of three nodes, separated by commas; empty for none")
	set.IntVar(&o.clients, "clients", 256, "clients that load those as fast as they answer")
	set.IntVar(&o.turns, "turns", 5, "turns of each cluster")
	set.DurationVar(&o.turn, "turn", 20*time.Second, "how long a turn measures")
	set.DurationVar(&o.warmup, "warmup", 3*time.Second, "unmeasured load before each turn")
	set.DurationVar(&o.evenWithin, "even-within", time.Minute, "how long is waited for placement to spread the leaders")
	return func(ctx context.Context, b *bench) error { return scale(ctx, b, o) }
}

// scaleKind is a cluster of a size, and what loads it.
type scaleKind struct {
	name                   string
	nodes, ranges, clients int
	rate                   float64 // 0 is as fast as it answers
}

// scale measures what a put costs the servers in larger clusters and with more ranges. Each turn has a new cluster and no
// other beside it: idle ones of nine nodes would take much of a small machine.
func scale(ctx context.Context, b *bench, o scaleOptions) error {
	kinds, err := o.kinds()
	if err != nil {
		return fmt.Errorf("scale: %w", err)
	}
	runs := map[string][]rowTurn{}
	for turn := range o.turns {
		order := slices.Clone(kinds)
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, k := range order {
			t, failed := b.scaleTurn(ctx, o, k)
			if err = failed; err != nil {
				err = fmt.Errorf("%s, turn %d: %w", k.name, turn+1, err)
				break
			}
			runs[k.name] = append(runs[k.name], t)
			progress("%-28s turn %d  %+v", k.name, turn+1, t)
		}
		if err != nil {
			break
		}
	}
	if len(runs) > 0 {
		writeScale("equal load for each node", kinds, runs, func(k scaleKind) bool { return k.rate > 0 })
		writeScale("three nodes, as fast as they answer", kinds, runs, func(k scaleKind) bool { return k.rate == 0 })
		err = errors.Join(err, b.save("scale.json", runs))
	}
	return err
}

// kinds are the clusters that the command line asks for.
func (o *scaleOptions) kinds() (all []scaleKind, err error) {
	sizes, err1 := counts(o.sizes)
	ranges, err2 := counts(o.ranges)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	if o.turns < 1 || o.ofNode < 1 || o.clients < 1 || o.rate <= 0 {
		return nil, fmt.Errorf("%d turns, %d ranges for each node, %d clients, %v puts a second: more than none of each", o.turns, o.ofNode, o.clients, o.rate)
	}
	for _, n := range sizes {
		if n < nodes || n > roomNodes {
			return nil, fmt.Errorf("--nodes %s: a cluster has %d to %d nodes here", o.sizes, nodes, roomNodes)
		}
		all = append(all, scaleKind{
			name:  fmt.Sprintf("%d nodes, %d ranges", n, n*o.ofNode),
			nodes: n, ranges: n * o.ofNode, clients: 32 * n, rate: o.rate * float64(n),
		})
	}
	for _, n := range ranges {
		all = append(all, scaleKind{name: fmt.Sprintf("%d ranges", n), nodes: nodes, ranges: n, clients: o.clients})
	}
	return all, nil
}

// counts reads numbers above 0 that commas separate.
func counts(text string) (all []int, err error) {
	if text == "" {
		return nil, nil
	}
	for field := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(field))
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q in %q is no number above 0", field, text)
		}
		all = append(all, n)
	}
	return all, nil
}

// scaleTurn starts a cluster, waits until each node leads its share, and loads it.
func (b *bench) scaleTurn(ctx context.Context, o scaleOptions, k scaleKind) (t rowTurn, err error) {
	c := b.skein(append(slices.Clone(keepRanges), "--initial-ranges", strconv.Itoa(k.ranges))...)
	c.size = k.nodes
	err = b.with(ctx, []*cluster{c}, func() error {
		if err := c.created(ctx, k.ranges); err != nil {
			return err
		}
		if err := c.evenLeaders(ctx, o.evenWithin); err != nil {
			return err
		}
		// The first turn puts each key once, and is not counted.
		load := rowsOptions{warmup: o.warmup, rate: k.rate}
		if _, err := c.turn(ctx, b, load, "put", k.clients, time.Second, true); err != nil {
			return err
		}
		t, err = c.turn(ctx, b, load, "put", k.clients, o.turn, false)
		if err == nil && k.rate > 0 && t.PerSecond < 0.95*k.rate {
			err = fmt.Errorf("%.0f puts a second were made of %.0f: a lower --rate lets the machine follow", t.PerSecond, k.rate)
		}
		return err
	})
	return t, err
}

// evenLeaders waits until no node leads more than twice as many ranges as another.
func (c *cluster) evenLeaders(ctx context.Context, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	return waitUntil(ctx, time.Second, func() error {
		list, err := c.ranges(ctx)
		if err != nil {
			return err
		}
		if least, most := leads(list, c.founders()); len(list) >= c.founders() && most > 2*least {
			return fmt.Errorf("of %d ranges a node leads %d and another %d", len(list), least, most)
		}
		return nil
	})
}

// leads returns how many ranges a node leads at least and at most.
func leads(list []rangeState, size int) (least, most int) {
	by := make([]int, size)
	for i := range list {
		for n := range by {
			if list[i].leads(n) {
				by[n]++
			}
		}
	}
	return slices.Min(by), slices.Max(by)
}

// writeScale prints all turns of the kinds that are chosen, and the ratios to the first of them.
func writeScale(caption string, kinds []scaleKind, runs map[string][]rowTurn, chosen func(scaleKind) bool) {
	out := newTable(caption, "puts a second: all", "median", "p99, ms", "servers' CPU a put, µs: all", "median", "in units of loadtest's",
		"CPU against the first, in those units", "puts against the first")
	var first []rowTurn
	for _, k := range kinds {
		turns := runs[k.name]
		if !chosen(k) || len(turns) == 0 {
			continue
		}
		if first == nil {
			first = turns
		}
		of := func(turns []rowTurn, f func(rowTurn) float64) (all []float64) {
			for _, t := range turns {
				all = append(all, f(t))
			}
			return all
		}
		puts := func(t rowTurn) float64 { return t.PerSecond }
		cpu := func(t rowTurn) float64 { return t.ServersMicros }
		unit := func(t rowTurn) float64 { return t.ServersMicros / max(t.LoadMicros, 0.001) }
		out.add(k.name, figures(of(turns, puts), "%.0f"), number(median(of(turns, puts))),
			number(median(of(turns, func(t rowTurn) float64 { return t.P99Millis }))),
			figures(of(turns, cpu), "%.1f"), number(median(of(turns, cpu))), number(median(of(turns, unit))),
			spread(of(turns, unit), of(first, unit)), spread(of(turns, puts), of(first, puts)))
	}
	if first != nil {
		out.write(os.Stdout, caption)
	}
}
