package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// rangestreamOptions are the command line of the measure.
type rangestreamOptions struct {
	filling
	pairs int
}

func rangestreamFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o rangestreamOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.keys, "keys", 1_000_000, "keys")
	set.IntVar(&o.value, "value-size", 100, "bytes of a value")
	set.IntVar(&o.ranges, "ranges", 16, "Skein's ranges")
	return func(ctx context.Context, b *bench) error { return rangestream(ctx, b, &o) }
}

// streamRun is one read of everything by RangeStream.
type streamRun struct {
	Pair     int     `json:"pair"`
	Side     string  `json:"side"`
	Endpoint int     `json:"endpoint"` // nodes are counted from 0
	Seconds  float64 `json:"seconds"`
	Keys     int     `json:"keys"`
	Parts    int     `json:"parts"`
	// Grown is the largest growth of each node's memory, in MiB.
	Grown [nodes]float64 `json:"grown_mib"`
}

func rangestream(ctx context.Context, b *bench, o *rangestreamOptions) error {
	var runs []streamRun
	err := b.filled(ctx, &o.filling, func(sides []*cluster) error {
		for pair := range o.pairs {
			for _, c := range sides {
				run, err := c.streamed(ctx, o, pair%nodes)
				if err != nil {
					return fmt.Errorf("%s, run %d: %w", c.name, pair+1, err)
				}
				run.Pair = pair + 1
				progress("%-6s run %d at %s: %.2f s, %d parts, memory grew by %.0f MiB", c.name, run.Pair, nodeName(run.Endpoint), run.Seconds, run.Parts, run.Grown)
				runs = append(runs, run)
			}
		}
		return nil
	})
	if len(runs) > 0 {
		writeStreams(o, runs)
		err = errors.Join(err, b.save("rangestream.json", runs))
	}
	return err
}

// streamed reads everything at one node.
func (c *cluster) streamed(ctx context.Context, o *rangestreamOptions, node int) (streamRun, error) {
	run := streamRun{Side: c.name, Endpoint: node}
	client, err := c.connect(node)
	if err != nil {
		return run, err
	}
	defer client.Close()
	run.Grown, err = c.growth(func() error {
		began := time.Now()
		stream, err := pb.NewKVClient(client.ActiveConnection()).RangeStream(ctx, everything())
		if err != nil {
			return err
		}
		var count int64
		for {
			part, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			run.Parts++
			run.Keys += len(part.GetRangeResponse().GetKvs())
			count = max(count, part.GetRangeResponse().GetCount())
		}
		run.Seconds = time.Since(began).Seconds()
		if run.Keys != o.keys || count != int64(o.keys) {
			return fmt.Errorf("%d keys and the count %d, in place of %d", run.Keys, count, o.keys)
		}
		return nil
	})
	return run, err
}

func writeStreams(o *rangestreamOptions, runs []streamRun) {
	t := table.New(fmt.Sprintf("%d keys, %d bytes a value", o.keys, o.value), etcdSide, skeinSide, "Skein / etcd: median (lowest to highest)", "target")
	of := func(side string, f func(streamRun) float64) (all []float64) {
		for _, r := range runs {
			if r.Side == side {
				all = append(all, f(r))
			}
		}
		return all
	}
	row := func(name, format, target string, f func(streamRun) float64) {
		etcd, skein := of(etcdSide, f), of(skeinSide, f)
		t.Add(name, table.Figures(etcd, format), table.Figures(skein, format), table.Spread(skein, etcd), target)
	}
	row("time, s", "%.2f", "≤ 1", func(r streamRun) float64 { return r.Seconds })
	row("parts", "%.0f", "", func(r streamRun) float64 { return float64(r.Parts) })
	for i := range nodes {
		row(nodeName(i)+": memory grew by, MiB", "%.0f", "", func(r streamRun) float64 { return r.Grown[i] })
	}
	row("any node's at most, MiB", "%.0f", "Skein < 100", func(r streamRun) float64 { return slices.Max(r.Grown[:]) })
	t.Write(os.Stdout, fmt.Sprintf("RangeStream of everything, over %d ranges of Skein, at each endpoint in turn", o.ranges))
}
