package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// pipeOptions are the command line of the measure.
type pipeOptions struct {
	pairs                    int
	turn, warmup, settle     time.Duration
	etcdClients, pipeClients string
	prefix, workloads        string
	p99                      time.Duration
}

func pipeFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o pipeOptions
	set.IntVar(&o.pairs, "pairs", 5, "turns of each side with each number of clients")
	set.DurationVar(&o.turn, "turn", 5*time.Second, "length of a turn")
	set.DurationVar(&o.warmup, "warmup", time.Second, "unmeasured load before each turn")
	set.DurationVar(&o.settle, "settle", 110*time.Second, "unmeasured load of 16 clients of each side at the beginning: by then Skein's placement has followed it")
	set.StringVar(&o.workloads, "workloads", "put,get", "workloads of loadtest")
	set.StringVar(&o.etcdClients, "etcd-clients", "32,64,128,256,1000", "numbers of clients of etcd's unary calls, on at most 100 connections")
	set.StringVar(&o.pipeClients, "pipe-clients", "64,128,256,512,1000", "numbers of clients of Skein's pipe, on one connection to each node")
	set.StringVar(&o.prefix, "prefix", "/registry/", "stands before each key")
	set.DurationVar(&o.p99, "p99", 50*time.Millisecond, "a number of clients counts if the p99 of its turns is no longer, in the median")
	return func(ctx context.Context, b *bench) error { return pipe(ctx, b, o) }
}

// pipeKind is one row of the measure: who sends what.
type pipeKind struct {
	side, workload string
	clients        int
}

func (k pipeKind) String() string { return fmt.Sprintf("%s %s/%d", k.side, k.workload, k.clients) }

// kinds are a workload's rows of both sides: one client first.
func (o *pipeOptions) kinds(workload string) (kinds []pipeKind, err error) {
	for _, s := range []struct{ side, clients string }{{etcdSide, o.etcdClients}, {skeinSide, o.pipeClients}} {
		all, err := counts(s.clients)
		if err != nil {
			return nil, fmt.Errorf("pipe: clients of %s: %w", s.side, err)
		}
		for _, n := range append([]int{1}, all...) {
			kinds = append(kinds, pipeKind{s.side, workload, n})
		}
	}
	return kinds, nil
}

// pipe compares etcd's unary calls to etcd with Skein's pipe, each with one client and with the number of clients at which it is
// fastest. All keys of Skein are in one range, as etcd's are.
func pipe(ctx context.Context, b *bench, o pipeOptions) error {
	workloads := strings.Split(o.workloads, ",")
	kinds := map[string][]pipeKind{}
	for _, workload := range workloads {
		var err error
		if kinds[workload], err = o.kinds(workload); err != nil {
			return err
		}
	}
	sides := map[string]*cluster{etcdSide: b.etcd(), skeinSide: b.skein(keepRanges...)}
	turns := map[string][]rowTurn{}
	err := b.with(ctx, []*cluster{sides[etcdSide], sides[skeinSide]}, func() error {
		for side, c := range sides {
			progress("%s gets its keys, and used to the load", side)
			if _, err := c.pipeTurn(ctx, b, o, pipeKind{side, "put", 16}, o.settle, "--fill=true"); err != nil {
				return err
			}
		}
		for i := range o.pairs {
			for _, workload := range workloads {
				for _, k := range shuffled(kinds[workload]) {
					t, err := sides[k.side].pipeTurn(ctx, b, o, k, o.turn, "--fill=false")
					if err != nil {
						return fmt.Errorf("%v, pair %d: %w", k, i+1, err)
					}
					turns[k.String()] = append(turns[k.String()], t)
					progress("%-16v pair %d  %+v", k, i+1, t)
				}
			}
		}
		return nil
	})
	for _, workload := range workloads {
		o.write(workload, kinds[workload], turns)
	}
	if saved := b.save("pipe.json", turns); err == nil {
		err = saved
	}
	return err
}

// pipeTurn loads a side by its own API. One client of etcd's calls goes to etcd's leader: the pipe goes there by itself.
func (c *cluster) pipeTurn(ctx context.Context, b *bench, o pipeOptions, k pipeKind, length time.Duration, more ...string) (rowTurn, error) {
	endpoints, conns := c.all(c.clientURL, ""), min(k.clients, 100)
	api := "etcd"
	switch {
	case k.side == skeinSide:
		api, conns = "pipe", min(k.clients, nodes)
	case k.clients == 1:
		clients, err := c.connectAll()
		if err != nil {
			return rowTurn{}, err
		}
		leader, err := c.leader(ctx, clients)
		closeAll(clients)
		if err != nil {
			return rowTurn{}, err
		}
		endpoints = c.clientURL(leader)
	}
	return c.loaded(ctx, b, length, o.warmup, append(more, "--endpoints", endpoints, "--api", api, "--workload", k.workload,
		"--clients", strconv.Itoa(k.clients), "--conns", strconv.Itoa(conns), "--key-prefix", o.prefix)...)
}

// write prints all turns of a workload, and the ratios of the fastest numbers of clients and of one client.
func (o *pipeOptions) write(workload string, kinds []pipeKind, turns map[string][]rowTurn) {
	of := func(k pipeKind, f func(rowTurn) float64) (all []float64) {
		for _, t := range turns[k.String()] {
			all = append(all, f(t))
		}
		return all
	}
	rate, p50, p99 := func(t rowTurn) float64 { return t.PerSecond }, func(t rowTurn) float64 { return t.P50Millis }, func(t rowTurn) float64 { return t.P99Millis }
	servers, units := func(t rowTurn) float64 { return t.ServersMicros }, func(t rowTurn) float64 { return t.LoadMicros }
	out := table.New(workload, "a second: all", "median", "p50, ms", "p99, ms", "servers' CPU each, µs: all", "median", "loadtest's, µs", "machine busy, %")
	fastest := map[string]pipeKind{}
	for _, k := range kinds {
		if len(turns[k.String()]) == 0 {
			continue
		}
		out.Add(k.String(), strings.Join(table.Numbers(of(k, rate)), " "), table.Number(table.Median(of(k, rate))), table.Number(table.Median(of(k, p50))), table.Number(table.Median(of(k, p99))),
			strings.Join(table.Numbers(of(k, servers)), " "), table.Number(table.Median(of(k, servers))), table.Number(table.Median(of(k, units))),
			table.Number(table.Median(of(k, func(t rowTurn) float64 { return 100 * t.MachineBusy }))))
		best, known := fastest[k.side]
		if table.Median(of(k, p99)) <= float64(o.p99)/1e6 && (!known || table.Median(of(k, rate)) > table.Median(of(best, rate))) {
			fastest[k.side] = k
		}
	}
	out.Write(os.Stdout, "Every turn, and medians")
	a, b := fastest[skeinSide], fastest[etcdSide]
	if a.clients == 0 || b.clients == 0 {
		return
	}
	out = table.New(workload, "pipe / etcd: median (lowest to highest)")
	out.Add(fmt.Sprintf("a second, %d clients / %d", a.clients, b.clients), table.Spread(of(a, rate), of(b, rate)))
	out.Add("servers' CPU of each, the same", table.Spread(of(a, servers), of(b, servers)))
	a.clients, b.clients = 1, 1
	out.Add("one client: p50", table.Spread(of(a, p50), of(b, p50)))
	out.Add("one client: servers' CPU", table.Spread(of(a, servers), of(b, servers)))
	out.Write(os.Stdout, "The pipe against etcd's unary calls")
}
