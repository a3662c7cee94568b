package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// snapshotOptions are the command line of the measure.
type snapshotOptions struct {
	sizes []stored
	pairs int
}

func snapshotFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o snapshotOptions
	sizes := set.String("keys", "200000,2000000", "keys of each size, separated by commas")
	value := set.Int("value-size", 242, "bytes of a value; a key has 14 more")
	set.IntVar(&o.pairs, "pairs", 6, "snapshots of each side, at each endpoint in turn: the first one at each fills its caches")
	return func(ctx context.Context, b *bench) error {
		for text := range strings.SplitSeq(*sizes, ",") {
			n, err := strconv.Atoi(text)
			if err != nil {
				return fmt.Errorf("snapshot: --keys %s: %q is no number", *sizes, text)
			}
			d := stored{keys: n, value: *value}
			if err := d.check(); err != nil {
				return err
			}
			o.sizes = append(o.sizes, d)
		}
		if o.pairs < 1 {
			return fmt.Errorf("snapshot: %d pairs: at least one", o.pairs)
		}
		return snapshots(ctx, b, &o)
	}
}

// The names of the figures.
const (
	snapshotSeconds = "snapshot, s"
	snapshotFirst   = "snapshot: to its first bytes, s"
	snapshotBytes   = "snapshot: MB/s of live data"
	snapshotSize    = "snapshot: size / live data"
	snapshotGrown   = "snapshot: the node's memory grew by, MiB"
	snapshotCached  = "snapshot: of it the block cache, MiB"
	snapshotOthers  = "snapshot: another node's memory grew by, MiB"
	snapshotCPU     = "snapshot: CPU of the nodes, s"
)

// snapshots takes Maintenance.Snapshot of both sides by turns, with stores of several sizes.
func snapshots(ctx context.Context, b *bench, o *snapshotOptions) error {
	all := map[string]map[string][]figureSet{}
	for i := range o.sizes {
		d := &o.sizes[i]
		runs, err := b.snapshotsOf(ctx, d, o.pairs)
		if err != nil {
			return err
		}
		all[strconv.Itoa(d.keys)] = runs
		writePairs(os.Stdout, d.String(), runs, []string{snapshotSeconds, snapshotFirst, snapshotBytes, snapshotSize, snapshotGrown, snapshotCached, snapshotOthers, snapshotCPU})
	}
	return b.save("snapshot.json", all)
}

// snapshotsOf fills etcd, and Skein with etcd's first snapshot.
func (b *bench) snapshotsOf(ctx context.Context, d *stored, pairs int) (runs map[string][]figureSet, err error) {
	etcd, skein := b.cluster(etcdSide, etcdBinary, 0, etcdArgs(d.quota()...)), b.skein()
	sides := map[string]*cluster{etcdSide: etcd, skeinSide: skein}
	return runs, b.with(ctx, []*cluster{etcd, skein}, func() error {
		if err := d.fill(ctx, etcd); err != nil {
			return err
		}
		file, err := etcd.snapshotOf(ctx, 0, b.dir)
		if err != nil {
			return err
		}
		if _, err := skein.imported(ctx, d, file); err != nil {
			return err
		}
		if err := os.Remove(file); err != nil {
			return err
		}
		runs, err = paired(pairs, []string{etcdSide, skeinSide}, func(side string, pair int) (figureSet, error) {
			return sides[side].snapshotCosts(ctx, d, pair%nodes)
		})
		return err
	})
}

// snapshotOf writes a node's snapshot into a file in a directory.
func (c *cluster) snapshotOf(ctx context.Context, node int, dir string) (path string, err error) {
	client, err := c.connect(node)
	if err != nil {
		return "", err
	}
	defer client.Close()
	f, err := os.CreateTemp(dir, "snapshot-")
	if err != nil {
		return "", err
	}
	_, err = snapshotTo(ctx, client, f)
	return f.Name(), errors.Join(err, f.Close())
}

// snapshotCosts takes a snapshot at one node, once all have come to rest, and throws it away.
func (c *cluster) snapshotCosts(ctx context.Context, d *stored, node int) (figureSet, error) {
	if _, err := c.settle(ctx); err != nil {
		return nil, err
	}
	client, err := c.connect(node)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	before, err := c.cpu()
	if err != nil {
		return nil, err
	}
	// etcd has no block cache: 0.
	cached := func() (float64, error) {
		p, err := c.metrics(ctx, node)
		return p["skein_engine_block_cache_bytes"] / mebibyte, err
	}
	cachedBefore, err := cached()
	if err != nil {
		return nil, err
	}
	var run snapshotRun
	grown, err := c.growth(func() (err error) {
		run, err = snapshotTo(ctx, client, io.Discard)
		return err
	})
	if err != nil {
		return nil, err
	}
	after, err := c.cpu()
	if err != nil {
		return nil, err
	}
	cachedAfter, err := cached()
	if err != nil {
		return nil, err
	}
	others := slices.Delete(slices.Clone(grown[:]), node, node+1)
	return figureSet{
		snapshotSeconds: run.took.Seconds(), snapshotFirst: run.first.Seconds(), snapshotBytes: d.bytes() / megabyte / run.took.Seconds(),
		snapshotSize: float64(run.bytes) / d.bytes(), snapshotGrown: grown[node], snapshotCached: cachedAfter - cachedBefore, snapshotOthers: slices.Max(others), snapshotCPU: (after - before).Seconds(),
	}, nil
}
