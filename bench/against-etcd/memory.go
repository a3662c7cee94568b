package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// memoryOptions are the command line of the measure.
type memoryOptions struct {
	pairs, keys, value int
	rest               time.Duration
}

func memoryFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o memoryOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side, each with new nodes")
	set.IntVar(&o.keys, "keys", 40_000, "keys")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.DurationVar(&o.rest, "rest", 130*time.Second, "time from when nodes are quiet until their memory is read; "+
		"garbage of the load is collected after 2 minutes without a collection by etcd, after 1 by Skein")
	return func(ctx context.Context, b *bench) error { return smallStore(ctx, b, o) }
}

// The names of the figures.
const (
	memoryEmpty   = "a node before the puts, mean, MiB"
	memoryMean    = "a node after them, mean, MiB"
	memoryLargest = "the largest node after them, MiB"
	memoryAnon    = "of the mean not of files, MiB"
)

// smallStore measures the memory of nodes with few keys.
func smallStore(ctx context.Context, b *bench, o memoryOptions) error {
	if o.pairs < 1 || o.keys < 1 || o.value < 1 || o.rest < 0 {
		return fmt.Errorf("memory: %d pairs, %d keys with values of %d bytes: at least one of each, and a rest of %v", o.pairs, o.keys, o.value, o.rest)
	}
	runs, err := paired(o.pairs, []string{etcdSide, skeinSide}, func(side string, _ int) (f figureSet, err error) {
		c := b.etcd()
		if side == skeinSide {
			c = b.skein()
		}
		return f, b.with(ctx, []*cluster{c}, func() error {
			f, err = o.run(ctx, c)
			return err
		})
	})
	if err != nil {
		return err
	}
	writePairs(os.Stdout, fmt.Sprintf("three nodes, %d keys, values of %d bytes", o.keys, o.value), runs,
		[]string{memoryEmpty, memoryMean, memoryLargest, memoryAnon})
	return b.save("memory.json", runs)
}

// run puts the keys, by 64 clients on 12 connections.
func (o *memoryOptions) run(ctx context.Context, c *cluster) (figureSet, error) {
	empty, _, err := c.restingMemory(ctx, settleMax, o.rest)
	if err != nil {
		return nil, err
	}
	p := pace{endpoints: c.endpoints(), conns: 12, clients: 64, keys: numbered(o.keys)}
	if err := p.fill(ctx, func(int) int { return o.value }); err != nil {
		return nil, err
	}
	all, anonymous, err := c.restingMemory(ctx, settleMax, o.rest)
	if err != nil {
		return nil, err
	}
	return figureSet{
		memoryEmpty: table.Mean(empty...), memoryMean: table.Mean(all...), memoryLargest: slices.Max(all), memoryAnon: table.Mean(anonymous...),
	}, nil
}

// restingMemory is the resident memory of each node at rest, and what of it belongs to no file, in MiB. limit bounds the
// wait until they are quiet, rest lies between that and the reading.
func (c *cluster) restingMemory(ctx context.Context, limit, rest time.Duration) (all, anonymous []float64, err error) {
	if _, err := c.settleWithin(ctx, limit); err != nil {
		return nil, nil, err
	}
	if err := sleep(ctx, rest); err != nil {
		return nil, nil, err
	}
	for i := range c.founders() {
		m, err := resident(c.pid(i))
		if err != nil {
			return nil, nil, err
		}
		all, anonymous = append(all, float64(m.now)/mebibyte), append(anonymous, float64(m.anonymous)/mebibyte)
	}
	return all, anonymous, nil
}
