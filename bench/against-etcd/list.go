package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/time/rate"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// listOptions are the command line of the measure.
type listOptions struct {
	filling
	pairs, page, pages int
	rate               float64
	age                time.Duration
}

func listFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o listOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.keys, "keys", 1_000_000, "keys")
	set.IntVar(&o.value, "value-size", 100, "bytes of a value")
	set.IntVar(&o.ranges, "ranges", 16, "Skein's ranges")
	set.IntVar(&o.page, "page", 500, "keys of a page")
	set.IntVar(&o.pages, "pages", 0, "pages of a run at most; 0 is the whole list")
	set.Float64Var(&o.rate, "rate", 500, "puts a second beside it")
	set.DurationVar(&o.age, "age", 2*time.Second, "how long writes go on before the list begins at the revision before them")
	return func(ctx context.Context, b *bench) error { return list(ctx, b, &o) }
}

// listRun is one list, page by page.
type listRun struct {
	Pair  int     `json:"pair"`
	Side  string  `json:"side"`
	Pages int     `json:"pages"`
	First float64 `json:"first_ms"`
	P50   float64 `json:"p50_ms"`
	P99   float64 `json:"p99_ms"`
	Mean  float64 `json:"mean_ms"`
	// Puts is how many puts were answered meanwhile.
	Puts int `json:"puts"`
}

func list(ctx context.Context, b *bench, o *listOptions) error {
	if o.page < 1 || o.rate <= 0 {
		return fmt.Errorf("list: pages of %d keys, %v puts a second: above 0", o.page, o.rate)
	}
	var runs []listRun
	err := b.filled(ctx, &o.filling, func(sides []*cluster) error {
		for pair := range o.pairs {
			for _, c := range sides {
				run, err := c.listed(ctx, o)
				if err != nil {
					return fmt.Errorf("%s, run %d: %w", c.name, pair+1, err)
				}
				run.Pair = pair + 1
				progress("%-6s run %d: %d pages, first %.1f ms, p50 %.2f ms, p99 %.2f ms, mean %.2f ms, %d puts", c.name, run.Pair, run.Pages, run.First, run.P50, run.P99, run.Mean, run.Puts)
				runs = append(runs, run)
			}
		}
		return nil
	})
	if len(runs) > 0 {
		writeLists(o, runs)
		err = errors.Join(err, b.save("list.json", runs))
	}
	return err
}

// listed writes to a side and lists the state before those writes.
func (c *cluster) listed(ctx context.Context, o *listOptions) (run listRun, err error) {
	clients, err := c.connectAll()
	if err != nil {
		return run, err
	}
	defer closeAll(clients)
	now, err := clients[0].Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithCountOnly())
	if err != nil {
		return run, err
	}
	writing, stop := context.WithCancel(ctx)
	type wrote struct {
		puts int
		err  error
	}
	done := make(chan wrote, 1)
	go func() {
		n, err := o.write(writing, clients[1])
		done <- wrote{n, err}
	}()
	if err = sleep(ctx, o.age); err == nil {
		run, err = o.pageThrough(ctx, clients, now.Header.Revision, now.Count)
	}
	stop()
	w := <-done
	run.Side, run.Puts = c.name, w.puts
	return run, errors.Join(err, w.err)
}

// write puts values until ctx is done, and returns their number.
func (o *listOptions) write(ctx context.Context, client *clientv3.Client) (int, error) {
	value, pace := strings.Repeat("w", o.value), rate.NewLimiter(rate.Limit(o.rate), 1)
	for n := 0; ; n++ {
		// Puts far from each other, again and again: 611,953 is prime.
		key := o.key(n * 611_953 % o.keys)
		if pace.Wait(ctx) != nil {
			return n, nil
		}
		if _, err := client.Put(ctx, key, value); err != nil {
			if ctx.Err() != nil {
				return n, nil
			}
			return n, fmt.Errorf("put: %w", err)
		}
	}
}

// pageThrough lists as kube-apiserver does, at the endpoints by turns as its client
// does: limit, revision, the key to continue from, and the remaining count.
func (o *listOptions) pageThrough(ctx context.Context, clients [nodes]*clientv3.Client, rev, left int64) (run listRun, err error) {
	var took []time.Duration
	for key, more := "\x00", true; more && (o.pages == 0 || len(took) < o.pages); {
		began := time.Now()
		page, err := clients[len(took)%nodes].Get(ctx, key, clientv3.WithFromKey(), clientv3.WithLimit(int64(o.page)), clientv3.WithRev(rev))
		if err != nil {
			return run, fmt.Errorf("page %d: %w", len(took)+1, err)
		}
		took = append(took, time.Since(began))
		if page.Count != left || len(page.Kvs) != int(min(int64(o.page), left)) {
			return run, fmt.Errorf("page %d: %d keys and the count %d, where %d remain", len(took), len(page.Kvs), page.Count, left)
		}
		left -= int64(len(page.Kvs))
		if more = page.More; more != (left > 0) {
			return run, fmt.Errorf("page %d: more %v, where %d remain", len(took), more, left)
		}
		if more {
			key = string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
		}
	}
	run = listRun{Pages: len(took), First: millis(took[0]), Mean: millis(total(took)) / float64(len(took))}
	slices.Sort(took)
	run.P50, run.P99 = millis(took[len(took)/2]), millis(took[len(took)*99/100])
	return run, nil
}

func writeLists(o *listOptions, runs []listRun) {
	t := table.New(fmt.Sprintf("%d keys, pages of %d", o.keys, o.page), etcdSide, skeinSide, "Skein / etcd: median (lowest to highest)", "target")
	of := func(side string, f func(listRun) float64) (all []float64) {
		for _, r := range runs {
			if r.Side == side {
				all = append(all, f(r))
			}
		}
		return all
	}
	for _, m := range []struct {
		name, format, target string
		f                    func(listRun) float64
	}{
		{"time per page, mean, ms", "%.2f", "≤ 1", func(r listRun) float64 { return r.Mean }},
		{"p50, ms", "%.2f", "≤ 1", func(r listRun) float64 { return r.P50 }},
		{"p99, ms", "%.2f", "", func(r listRun) float64 { return r.P99 }},
		{"first page, ms", "%.1f", "", func(r listRun) float64 { return r.First }},
		{"pages", "%.0f", "", func(r listRun) float64 { return float64(r.Pages) }},
		{"puts meanwhile", "%.0f", "", func(r listRun) float64 { return float64(r.Puts) }},
	} {
		etcd, skein := of(etcdSide, m.f), of(skeinSide, m.f)
		t.Add(m.name, table.Figures(etcd, m.format), table.Figures(skein, m.format), table.Spread(skein, etcd), m.target)
	}
	t.Write(os.Stdout, fmt.Sprintf("Lists at a revision of %s before, over %d ranges of Skein, %.0f puts a second beside them", o.age, o.ranges, o.rate))
}
