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
		set.IntVar(&o.calls, "calls", 2000, "calls of each kind at each endpoint")
		set.IntVar(&o.warmup, "warmup", 1000, "unmeasured calls before each run, that touch each key once")
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

// costs measures kinds of calls at each endpoint of a side, the kinds by turns. It
// returns each kind's p50 in µs, the mean over the endpoints.
func costs(ctx context.Context, o costOptions, clients [nodes]*clientv3.Client, kinds []callKind) (figureSet, error) {
	// Each kind's calls are made in several parts, so that a slow moment meets all
	// kinds.
	const parts = 10
	f := figureSet{}
	for node, client := range clients {
		took := make([][]time.Duration, len(kinds))
		for part := range parts + 1 {
			calls, first := max(1, o.calls/parts), o.warmup+(part-1)*max(1, o.calls/parts)
			if part == 0 {
				calls, first = o.warmup, 0
			}
			for k, kind := range kinds {
				more, err := measured(ctx, calls, func(ctx context.Context, i int) error { return kind.do(ctx, client, first+i) })
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

// Transactions of two puts, with keys in one range or in two. To etcd they are the
// same. All ranges have their turn, and so do pairs of ranges with one leader and with
// two.
func txnCost(ctx context.Context, b *bench, o costOptions) error {
	value := strings.Repeat("v", o.value)
	two := func(apart bool) func(context.Context, *clientv3.Client, int) error {
		return func(ctx context.Context, client *clientv3.Client, i int) error {
			at := i
			if apart {
				at += 1 + i/len(spans)%(len(spans)-1) // 1 to 7 ranges further
			}
			// No call puts a key of the call before it; that would be another measure.
			first, second := spanKey(costPrefix, i), spanKey(costPrefix, at)+"+"
			_, err := client.Txn(ctx).Then(clientv3.OpPut(first, value), clientv3.OpPut(second, value)).Commit()
			return err
		}
	}
	kinds := []callKind{{"txn within one range, p50 µs", two(false)}, {"txn over two ranges, p50 µs", two(true)}}
	return b.compareCosts(ctx, o, "txn", kinds, func(*clientv3.Client) error { return nil }, "two ranges / one")
}

// Puts with a lease beside puts without. Each kind has 1,000 keys of its own over all
// ranges, as many as a lease has in kube-apiserver.
func leasePut(ctx context.Context, b *bench, o costOptions) error {
	const keys = 1000
	value := strings.Repeat("v", o.value)
	leases := map[*clientv3.Client]clientv3.LeaseID{}
	plain := func(ctx context.Context, client *clientv3.Client, i int) error {
		_, err := client.Put(ctx, spanKey(costPrefix, i%keys), value)
		return err
	}
	leased := func(ctx context.Context, client *clientv3.Client, i int) error {
		_, err := client.Put(ctx, spanKey(costPrefix, keys+i%keys), value, clientv3.WithLease(leases[client]))
		return err
	}
	grant := func(client *clientv3.Client) error {
		const seconds = 24 * 3600
		call, cancel := context.WithTimeout(ctx, askLimit)
		defer cancel()
		got, err := client.Grant(call, seconds)
		if err == nil {
			leases[client] = got.ID
		}
		return err
	}
	kinds := []callKind{{"put, p50 µs", plain}, {"put with a lease, p50 µs", leased}}
	return b.compareCosts(ctx, o, "leaseput", kinds, grant, "with a lease / without")
}

// compareCosts runs both sides by turns and prints the second kind beside the first.
func (b *bench) compareCosts(ctx context.Context, o costOptions, name string, kinds []callKind, prepare func(*clientv3.Client) error, quotient string) error {
	var runs map[string][]figureSet
	err := b.eachSide(ctx, costPrefix, func(sides map[string]*side) (err error) {
		for _, s := range sides {
			for _, client := range s.clients {
				err = errors.Join(err, prepare(client))
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		runs, err = paired(o.pairs, []string{etcdSide, skeinSide}, func(name string, _ int) (figureSet, error) {
			f, err := costs(ctx, o, sides[name].clients, kinds)
			if err == nil {
				_, err = sides[name].settle(ctx)
			}
			return f, err
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
