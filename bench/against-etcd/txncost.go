package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// costOptions are the command line of txn and leaseput.
type costOptions struct {
	pairs, calls, warmup, value int
}

func costFlags(work func(context.Context, *bench, costOptions) error) func(*flag.FlagSet) func(context.Context, *bench) error {
	return func(set *flag.FlagSet) func(context.Context, *bench) error {
		var o costOptions
		set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
		set.IntVar(&o.calls, "calls", 1000, "calls of each kind at each endpoint")
		set.IntVar(&o.warmup, "warmup", 100, "unmeasured calls before them")
		set.IntVar(&o.value, "value-size", 256, "bytes of a value")
		return func(ctx context.Context, b *bench) error {
			if o.pairs < 1 || o.calls < 1 || o.warmup < 0 {
				return fmt.Errorf("%d pairs of %d calls, %d before: at least one of each", o.pairs, o.calls, o.warmup)
			}
			return work(ctx, b, o)
		}
	}
}

const costPrefix = "cost/"

// A kind of call is compared with another one at the same endpoint, by turns.
type callKind struct {
	name string
	do   func(ctx context.Context, client *clientv3.Client, i int) error
}

// costs measures kinds of calls at each endpoint of a side, the kinds by turns, and
// returns each one's p50 in µs, the mean over the endpoints.
func costs(ctx context.Context, o costOptions, clients [nodes]*clientv3.Client, kinds []callKind) (figureSet, error) {
	// One kind's share of calls is made in so many parts: a slow moment meets them all.
	const parts = 10
	f := figureSet{}
	for node, client := range clients {
		took := make([][]time.Duration, len(kinds))
		for part := range parts + 1 {
			calls := max(1, o.calls/parts)
			if part == 0 {
				calls = o.warmup
			}
			for k, kind := range kinds {
				more, err := measured(ctx, calls, func(ctx context.Context, i int) error { return kind.do(ctx, client, part*calls+i) })
				if err != nil {
					return nil, fmt.Errorf("%s at %s: %w", kind.name, nodeName(node), err)
				}
				if part > 0 {
					took[k] = append(took[k], more...)
				}
			}
		}
		for k, kind := range kinds {
			f[kind.name] += micros(quantile(took[k], 500)) / nodes
		}
	}
	return f, nil
}

// Transactions of two puts, whose keys lie in one range or in two. To etcd they are the
// same.
func txnCost(ctx context.Context, b *bench, o costOptions) error {
	value := strings.Repeat("v", o.value)
	two := func(first, second int) func(context.Context, *clientv3.Client, int) error {
		return func(ctx context.Context, client *clientv3.Client, i int) error {
			a, b := spanKey(costPrefix, first+i*len(spans)), spanKey(costPrefix, second+i*len(spans))
			if first == second {
				b += "+"
			}
			_, err := client.Txn(ctx).Then(clientv3.OpPut(a, value), clientv3.OpPut(b, value)).Commit()
			return err
		}
	}
	kinds := []callKind{{"txn within one range, p50 µs", two(1, 1)}, {"txn over two ranges, p50 µs", two(1, 6)}}
	return b.compareCosts(ctx, o, "txn", kinds, func(*clientv3.Client) error { return nil }, "two ranges / one")
}

// Puts with a lease beside puts without.
func leasePut(ctx context.Context, b *bench, o costOptions) error {
	value := strings.Repeat("v", o.value)
	leases := map[*clientv3.Client]clientv3.LeaseID{}
	put := func(first int, lease bool) func(context.Context, *clientv3.Client, int) error {
		return func(ctx context.Context, client *clientv3.Client, i int) error {
			var options []clientv3.OpOption
			if lease {
				options = append(options, clientv3.WithLease(leases[client]))
			}
			// 1,000 keys are what a lease bears in kube-apiserver.
			_, err := client.Put(ctx, spanKey(costPrefix, first+i%1000*len(spans)), value, options...)
			return err
		}
	}
	grant := func(client *clientv3.Client) error {
		const seconds = 24 * 3600
		got, err := client.Grant(ctx, seconds)
		if err == nil {
			leases[client] = got.ID
		}
		return err
	}
	kinds := []callKind{{"put, p50 µs", put(2, false)}, {"put with a lease, p50 µs", put(2, true)}}
	return b.compareCosts(ctx, o, "leaseput", kinds, grant, "with a lease / without")
}

// compareCosts runs both sides by turns and prints the second kind beside the first.
func (b *bench) compareCosts(ctx context.Context, o costOptions, name string, kinds []callKind, prepare func(*clientv3.Client) error, quotient string) error {
	var runs map[string][]figureSet
	err := b.eachSide(ctx, costPrefix, func(clients map[string][nodes]*clientv3.Client) (err error) {
		for _, all := range clients {
			for _, client := range all {
				err = errors.Join(err, prepare(client))
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		runs, err = paired(o.pairs, []string{etcdSide, skeinSide}, func(side string, _ int) (figureSet, error) {
			return costs(ctx, o, clients[side], kinds)
		})
		return err
	})
	if err != nil {
		return err
	}
	for _, side := range runs {
		ratio(side, quotient, kinds[1].name, kinds[0].name)
	}
	writePairs(os.Stdout, fmt.Sprintf("one client at each endpoint, %d calls", o.calls), runs, []string{kinds[0].name, kinds[1].name, quotient})
	return b.save(name+".json", runs)
}
