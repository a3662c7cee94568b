package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// figureSet are figures of one run by name; all runs of a side have the same names.
type figureSet map[string]float64

// paired runs a measure by turns on each side, so many times. Every other pair begins with the other side: a cluster
// that grows meanwhile, or a machine that gets slower, is then no advantage of one.
func paired(n int, sides []string, run func(side string, pair int) (figureSet, error)) (map[string][]figureSet, error) {
	runs := map[string][]figureSet{}
	for pair := range n {
		turns := slices.Clone(sides)
		if pair%2 == 1 {
			slices.Reverse(turns)
		}
		for _, side := range turns {
			f, err := run(side, pair)
			if err != nil {
				return runs, fmt.Errorf("%s, pair %d: %w", side, pair+1, err)
			}
			runs[side] = append(runs[side], f)
			progress("%-6s pair %d  %v", side, pair+1, f)
		}
	}
	return runs, nil
}

// column returns one figure of all runs of a side.
func column(runs []figureSet, name string) []float64 {
	var all []float64
	for _, f := range runs {
		all = append(all, f[name])
	}
	return all
}

// writePairs prints every run, the medians and the ratios within the pairs, for the
// figures with these names.
func writePairs(out io.Writer, caption string, runs map[string][]figureSet, names []string) {
	t := table.New(caption, "etcd: all", "Skein: all", "etcd: median", "Skein: median", "Skein / etcd: median (lowest to highest)")
	for _, name := range names {
		a, b := column(runs[etcdSide], name), column(runs[skeinSide], name)
		if len(a) == 0 || len(b) == 0 {
			continue
		}
		t.Add(name, strings.Join(table.Numbers(a), " "), strings.Join(table.Numbers(b), " "), table.Number(table.Median(a)), table.Number(table.Median(b)), table.Spread(b, a))
	}
	t.Write(out, "Every run, medians, and the ratios within the pairs")
}

// writeSides prints the medians of several sides with every run, and the ratios to the first side within the pairs.
func writeSides(out io.Writer, caption string, sides []string, runs map[string][]figureSet, names []string) {
	head := append([]string{caption}, sides...)
	for _, side := range sides[1:] {
		head = append(head, side+" / "+sides[0])
	}
	t := table.New(head...)
	for _, name := range names {
		row, ratios, first := []string{name}, []string(nil), column(runs[sides[0]], name)
		for _, side := range sides {
			all := column(runs[side], name)
			cell, ratio := table.Number(table.Median(all)), table.Spread(all, first)
			if len(all) > 1 {
				cell += " (" + strings.Join(table.Numbers(all), " ") + ")"
			} else {
				ratio, _, _ = strings.Cut(ratio, " ")
			}
			row, ratios = append(row, cell), append(ratios, ratio)
		}
		t.Add(append(row, ratios[1:]...)...)
	}
	t.Write(out, "Medians, in parentheses every run, and the ratios within the pairs: median (lowest to highest)")
}

// ratio adds the quotient of two figures to each run.
func ratio(runs []figureSet, name, of, to string) {
	for _, f := range runs {
		if f[to] != 0 {
			f[name] = f[of] / f[to]
		}
	}
}

// quantile is the value below which so many of a thousand lie; took is sorted. Without
// values it is 0.
func quantile(took []time.Duration, ofThousand int) time.Duration {
	if len(took) == 0 {
		return 0
	}
	slices.Sort(took)
	return took[min(len(took)-1, len(took)*ofThousand/1000)]
}

// measured calls do repeatedly, one call after the other, and returns how long each
// took.
func measured(ctx context.Context, n int, do func(context.Context, int) error) ([]time.Duration, error) {
	took := make([]time.Duration, 0, n)
	for i := range n {
		call, cancel := context.WithTimeout(ctx, askLimit)
		begin := time.Now()
		err := do(call, i)
		cancel()
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(begin))
	}
	return took, nil
}

// spans are the first bytes of keys that lie in ranges of their own below a prefix.
const spans = "abcdefgh"

// spanKeys are the keys at which the ranges of prefix/a to prefix/h begin, without the
// first.
func spanKeys(prefix string) []string {
	var keys []string
	for _, c := range spans[1:] {
		keys = append(keys, prefix+string(c))
	}
	return keys
}

// spanKey is the i-th key below a prefix, by turns in each of the ranges.
func spanKey(prefix string, i int) string {
	return fmt.Sprintf("%s%c%08d", prefix, spans[i%len(spans)], i)
}

// side is a cluster with a client of each of its nodes.
type side struct {
	*cluster
	clients [nodes]*clientv3.Client
}

// cpus are the processor times of the side's nodes and of this process so far.
func (s *side) cpus() (servers, client time.Duration, err error) {
	if servers, err = s.cpu(); err != nil {
		return 0, 0, err
	}
	client, err = cpuTime(os.Getpid())
	return servers, client, err
}

// eachSide starts etcd and Skein, Skein with the ranges of prefix. It passes both to
// work once each range has a leader and both are quiet.
func (b *bench) eachSide(ctx context.Context, prefix string, work func(map[string]*side) error) error {
	splits, err := b.splitFile(spanKeys(prefix))
	if err != nil {
		return err
	}
	skein := b.skein("--initial-split-keys", splits)
	clusters := []*cluster{b.etcd(), skein}
	return b.with(ctx, clusters, func() error {
		if err := skein.created(ctx, len(spans)); err != nil {
			return err
		}
		sides := map[string]*side{}
		for _, c := range clusters {
			all, err := c.connectAll()
			if err != nil {
				return err
			}
			defer closeAll(all)
			sides[c.name] = &side{c, all}
			if _, err := c.settle(ctx); err != nil {
				return err
			}
		}
		return work(sides)
	})
}

// shuffled returns the list in a random order, for turns.
func shuffled[T any](list []T) []T {
	list = slices.Clone(list)
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}
