package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// bulkOptions are the command line of the measure.
type bulkOptions struct {
	pairs, keys, value, clients, calls int
	scattered                          bool
	sides                              string
}

func bulkFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o bulkOptions
	set.IntVar(&o.pairs, "pairs", 1, "how often each side is filled")
	set.IntVar(&o.keys, "keys", 4_000_000, "keys, a multiple of 100")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value, which are random; a key has 15 more")
	set.IntVar(&o.clients, "clients", 16, "clients, with a connection each")
	set.IntVar(&o.calls, "calls", 100_000, "random gets, and random puts, of the filled store")
	set.BoolVar(&o.scattered, "scattered", false, "make the transactions in another order than that of their keys")
	set.StringVar(&o.sides, "sides", "etcd,skein,skein-spread,skein-1GiB",
		"what is measured, of "+strings.Join(bulkNames(bulkSides), ", ")+"; ratios are to the first")
	return func(ctx context.Context, b *bench) error { return bulk(ctx, b, &o) }
}

// A bulkSide is a server of one node, and where the keys of a transaction lie.
type bulkSide struct {
	name   string
	skein  bool
	spread bool // over all bulkSpans, which are ranges of Skein; else beside each other
	flags  []string
}

var bulkSides = []bulkSide{
	{name: etcdSide},
	{name: "etcd-spread", spread: true},
	{name: skeinSide, skein: true},
	{name: "skein-spread", skein: true, spread: true},
	{name: "skein-1GiB", skein: true, flags: []string{"--memory-budget-bytes", "1073741824"}},
}

func bulkNames(sides []bulkSide) (names []string) {
	for _, s := range sides {
		names = append(names, s.name)
	}
	return names
}

const (
	bulkSpans = 16
	bulkPage  = 500
	// callsOfPage is how many gets are made for each page.
	callsOfPage = 20
	// bulkCounts is how often all keys are counted.
	bulkCounts = 5
	// bulkSettle bounds the wait until a filled store has come to rest.
	bulkSettle = 15 * time.Minute
	// bulkPause lies between that and the reading of its memory.
	bulkPause = 10 * time.Second
)

// The names of the figures.
const (
	bulkTxn     = "txn of 100 puts"
	bulkKeys    = "keys a second"
	bulkGap     = "longest time without an answered txn, ms"
	bulkRest    = "from the last key until the store rests, s"
	bulkFull    = "memory then, MiB"
	bulkGet     = "random get"
	bulkPut     = "random put"
	bulkCount   = "count of all keys"
	bulkPages   = "page of 500"
	bulkEnd     = "memory at the end, MiB"
	bulkEndAnon = "of it not of files, MiB"
	bulkDisk    = "disk at the end, MiB"
)

// bulk fills a store of one node by large transactions and reads it, each side alone on the machine.
func bulk(ctx context.Context, b *bench, o *bulkOptions) error {
	// A transaction stays below etcd's bound of 1.5 MiB.
	const mostValue = mebibyte / fillTxnPuts
	// The transactions would be no permutation if the factor divided their number.
	txns := o.keys / fillTxnPuts
	if min(o.pairs, o.clients, o.value) < 1 || o.calls < callsOfPage || o.value > mostValue ||
		o.keys <= bulkPage*bulkSpans || o.keys%fillTxnPuts != 0 || txns%shuffle == 0 {
		return fmt.Errorf("bulk: at least one of each, %d calls, more than %d keys, a multiple of %d, and values of at most %d bytes",
			callsOfPage, bulkPage*bulkSpans, fillTxnPuts, mostValue)
	}
	sides := map[string]bulkSide{}
	var order []string
	for name := range strings.SplitSeq(o.sides, ",") {
		i := slices.Index(bulkNames(bulkSides), name)
		if i < 0 || slices.Contains(order, name) {
			return fmt.Errorf("bulk: --sides %s: each once, of %s", o.sides, strings.Join(bulkNames(bulkSides), ", "))
		}
		sides[name], order = bulkSides[i], append(order, name)
	}
	runs, err := paired(o.pairs, order, func(side string, _ int) (figureSet, error) { return o.run(ctx, b, sides[side]) })
	if err != nil {
		return err
	}
	names := slices.Concat([]string{bulkKeys}, callNames(bulkTxn), []string{bulkGap, bulkRest, bulkFull},
		callNames(bulkGet), callNames(bulkPut), callNames(bulkPages), []string{fmt.Sprintf(callP50, bulkCount), bulkEnd, bulkEndAnon, bulkDisk})
	writeSides(os.Stdout, fmt.Sprintf("%d keys, values of %d bytes, %d clients", o.keys, o.value, o.clients), order, runs, names)
	return b.save("bulk.json", runs)
}

// run measures one side with an empty store at the beginning.
func (o *bulkOptions) run(ctx context.Context, b *bench, s bulkSide) (f figureSet, err error) {
	c := b.cluster(s.name, etcdBinary, 0, etcdArgs((&stored{keys: o.keys, value: o.value}).quota()...))
	if s.skein {
		flags := slices.Concat(s.flags, strings.Fields(b.skeinFlags))
		if s.spread {
			file, err := b.splitFile(bulkBorders())
			if err != nil {
				return nil, err
			}
			flags = append(flags, "--initial-split-keys", file)
		}
		c = b.cluster(s.name, skeinBinary, 100, etcdArgs(flags...))
	}
	c.size = 1
	f = figureSet{}
	return f, b.with(ctx, []*cluster{c}, func() error {
		if s.skein && s.spread {
			if err := c.created(ctx, bulkSpans); err != nil {
				return err
			}
		}
		clients, done, err := c.connectSome(o.clients)
		if err != nil {
			return err
		}
		defer done()
		if err := o.fill(ctx, c, s, clients, f); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
		if err := o.points(ctx, c, s, clients, f); err != nil {
			return err
		}
		return o.whole(ctx, c, clients[0], f)
	})
}

const bulkPrefix = "bulk/"

// key is a key by its number: the first 100 are those of the first transaction, and so on.
func (s *bulkSide) key(n int) string {
	if s.spread {
		return fmt.Sprintf("%s%x%09d", bulkPrefix, n%bulkSpans, n/bulkSpans)
	}
	return fmt.Sprintf("%s%010d", bulkPrefix, n)
}

// page is a range of bulkPage keys that begins at a key with a random number.
func (s *bulkSide) page(random *rand.Rand, keys int) (from, end string) {
	numbers := bulkPage
	if s.spread {
		numbers *= bulkSpans
	}
	n := random.IntN(keys - numbers)
	return s.key(n), s.key(n + numbers)
}

// bulkBorders are the first keys of all spans but the first.
func bulkBorders() (keys []string) {
	for i := 1; i < bulkSpans; i++ {
		keys = append(keys, fmt.Sprintf("%s%x", bulkPrefix, i))
	}
	return keys
}

// fill puts all keys, and waits until the store has come to rest.
func (o *bulkOptions) fill(ctx context.Context, c *cluster, s bulkSide, clients []*clientv3.Client, f figureSet) error {
	txns := o.keys / fillTxnPuts
	r, err := c.calls(ctx, txns, o.clients, func(ctx context.Context, i int) error {
		at := i
		if o.scattered {
			at = i * shuffle % txns
		}
		random := rand.New(rand.NewPCG(5, uint64(i)))
		var puts []clientv3.Op
		for n := at * fillTxnPuts; n < (at+1)*fillTxnPuts; n++ {
			puts = append(puts, clientv3.OpPut(s.key(n), string(cut(random, o.value))))
		}
		_, err := clients[i%len(clients)].Txn(ctx).Then(puts...).Commit()
		return err
	})
	if err != nil {
		return err
	}
	r.into(f, bulkTxn)
	f[bulkKeys], f[bulkGap] = f[fmt.Sprintf(callRate, bulkTxn)]*fillTxnPuts, millis(r.without())
	progress("%s: %d keys after %s", c.name, o.keys, r.over.Round(time.Millisecond))
	ended := time.Now()
	if _, err := c.settleWithin(ctx, bulkSettle); err != nil {
		return err
	}
	f[bulkRest] = time.Since(ended).Seconds()
	all, _, err := c.restingMemory(ctx, bulkSettle, bulkPause)
	if err == nil {
		f[bulkFull] = table.Mean(all...)
	}
	return err
}

// points gets and puts known keys, and reads pages, at random.
func (o *bulkOptions) points(ctx context.Context, c *cluster, s bulkSide, clients []*clientv3.Client, f figureSet) error {
	for _, kind := range []struct {
		name string
		n    int
		do   func(ctx context.Context, client *clientv3.Client, random *rand.Rand) error
	}{
		{bulkGet, o.calls, func(ctx context.Context, client *clientv3.Client, random *rand.Rand) error {
			got, err := client.Get(ctx, s.key(random.IntN(o.keys)))
			if err == nil && (len(got.Kvs) != 1 || len(got.Kvs[0].Value) != o.value) {
				err = fmt.Errorf("%d keys, or another size of the value", len(got.Kvs))
			}
			return err
		}},
		{bulkPut, o.calls, func(ctx context.Context, client *clientv3.Client, random *rand.Rand) error {
			_, err := client.Put(ctx, s.key(random.IntN(o.keys)), string(cut(random, o.value)))
			return err
		}},
		{bulkPages, o.calls / callsOfPage, func(ctx context.Context, client *clientv3.Client, random *rand.Rand) error {
			from, end := s.page(random, o.keys)
			got, err := client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(bulkPage))
			if err == nil && (len(got.Kvs) != bulkPage || got.Count != bulkPage) {
				err = fmt.Errorf("%d keys and the count %d", len(got.Kvs), got.Count)
			}
			return err
		}},
	} {
		r, err := c.calls(ctx, kind.n, o.clients, func(ctx context.Context, i int) error {
			return kind.do(ctx, clients[i%len(clients)], rand.New(rand.NewPCG(6, uint64(i))))
		})
		if err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
		r.into(f, kind.name)
		if _, err := c.settleWithin(ctx, bulkSettle); err != nil {
			return err
		}
	}
	return nil
}

// whole counts all keys, and looks at what the store takes.
func (o *bulkOptions) whole(ctx context.Context, c *cluster, client *clientv3.Client, f figureSet) error {
	r, err := c.calls(ctx, bulkCounts, 1, func(ctx context.Context, _ int) error {
		got, err := client.Get(ctx, bulkPrefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err == nil && got.Count != int64(o.keys) {
			err = fmt.Errorf("%d keys are counted, in place of %d", got.Count, o.keys)
		}
		return err
	})
	if err != nil {
		return err
	}
	r.into(f, bulkCount)
	all, anonymous, err := c.restingMemory(ctx, bulkSettle, bulkPause)
	if err != nil {
		return err
	}
	_, taken, err := sizeOf(filepath.Join(c.dir, nodeName(0)))
	f[bulkEnd], f[bulkEndAnon], f[bulkDisk] = table.Mean(all...), table.Mean(anonymous...), float64(taken)/mebibyte
	return err
}
