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

// expiryOptions are the command line of the measure.
type expiryOptions struct {
	pairs, leases, keys, rate, value int
	ttl, before, during              time.Duration
}

func expiryFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o expiryOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.leases, "leases", 10_000, "leases that expire within about a second")
	set.IntVar(&o.keys, "keys", 1, "keys of each lease")
	set.IntVar(&o.rate, "rate", 500, "puts a second meanwhile")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.DurationVar(&o.ttl, "ttl", 40*time.Second, "time to live of the leases: longer than it takes to attach their keys")
	set.DurationVar(&o.before, "before", 5*time.Second, "time of puts before anything expires")
	set.DurationVar(&o.during, "during", 20*time.Second, "time of puts from when the leases expire")
	return func(ctx context.Context, b *bench) error {
		switch {
		case o.pairs < 1 || o.leases < 1 || o.keys < 1 || o.rate < 1 || o.value < stampBytes:
			return fmt.Errorf("expiry: at least one of each, and values of %d bytes", stampBytes)
		case o.before < time.Second || o.during < time.Second || o.ttl < o.before+5*time.Second || o.ttl%time.Second != 0:
			return errors.New("expiry: puts for a second at least, and whole seconds to live, five more than before")
		}
		return expiry(ctx, b, o)
	}
}

// The names of the figures.
const (
	calmP50      = "put p50 before, ms"
	calmP99      = "put p99 before, ms"
	calmMost     = "slowest put before, ms"
	expiringP50  = "put p50 while leases expire, ms"
	expiringP99  = "put p99 while leases expire, ms"
	expiringMost = "slowest put while leases expire, ms"
	keptRate     = "puts/s while leases expire"
	lastGone     = "last key gone after the TTL, s"
)

// expiry puts at a steady rate while many leases expire.
func expiry(ctx context.Context, b *bench, o expiryOptions) error {
	var runs map[string][]figureSet
	err := b.eachSide(ctx, watchPrefix, func(sides map[string]*side) (err error) {
		runs, err = paired(o.pairs, []string{etcdSide, skeinSide}, func(side string, _ int) (figureSet, error) {
			return o.measure(ctx, sides[side].clients[:])
		})
		return err
	})
	if err != nil {
		return err
	}
	writePairs(os.Stdout, fmt.Sprintf("%d leases of %d keys, %d puts/s", o.leases, o.keys, o.rate), runs,
		[]string{calmP50, expiringP50, calmP99, expiringP99, calmMost, expiringMost, keptRate, lastGone})
	return b.save("expiry.json", runs)
}

func (o *expiryOptions) measure(ctx context.Context, clients []*clientv3.Client) (figureSet, error) {
	ids := make([]clientv3.LeaseID, o.leases)
	if err := o.each(ctx, func(ctx context.Context, i int) (err error) {
		ids[i], err = o.attach(ctx, clients[i%len(clients)], i)
		return err
	}); err != nil {
		return nil, fmt.Errorf("attach keys: %w", err)
	}
	// They expire together, not in the order of the grants.
	renewed := time.Now()
	if err := o.each(ctx, func(ctx context.Context, i int) error {
		ctx, cancel := context.WithTimeout(ctx, askLimit)
		defer cancel()
		_, err := clients[i%len(clients)].KeepAliveOnce(ctx, ids[i])
		return err
	}); err != nil {
		return nil, fmt.Errorf("renew (they need a longer --ttl if some are gone): %w", err)
	}
	calm, err := steadyPuts(ctx, clients, o.rate, o.before, o.value)
	if err != nil {
		return nil, err
	}
	time.Sleep(time.Until(renewed.Add(o.ttl)))
	gone := make(chan error, 1)
	var last time.Duration
	go func() {
		var err error
		last, err = o.awaitGone(ctx, clients[0], renewed.Add(o.ttl))
		gone <- err
	}()
	expiring, err := steadyPuts(ctx, clients, o.rate, o.during, o.value)
	if err = errors.Join(err, calm.err, expiring.err, <-gone); err != nil {
		return nil, err
	}
	milli := func(took []time.Duration, of int) float64 { return micros(quantile(took, of)) / 1e3 }
	return figureSet{
		calmP50: milli(calm.took, 500), calmP99: milli(calm.took, 990), calmMost: milli(calm.took, 1000),
		expiringP50: milli(expiring.took, 500), expiringP99: milli(expiring.took, 990), expiringMost: milli(expiring.took, 1000),
		keptRate: expiring.rate, lastGone: last.Seconds(),
	}, nil
}

// each calls f for all leases, 64 at a time.
func (o *expiryOptions) each(ctx context.Context, f func(ctx context.Context, i int) error) error {
	return inParallel(ctx, o.leases, 64, f)
}

// attach grants a lease and attaches its keys, which lie in all ranges.
func (o *expiryOptions) attach(ctx context.Context, client *clientv3.Client, i int) (clientv3.LeaseID, error) {
	const opsOfTxn = 100
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	got, err := client.Grant(ctx, int64(o.ttl/time.Second))
	if err != nil {
		return 0, err
	}
	value := strings.Repeat("v", o.value)
	for from := 0; from < o.keys; from += opsOfTxn {
		var puts []clientv3.Op
		for k := from; k < min(from+opsOfTxn, o.keys); k++ {
			n := i*o.keys + k
			puts = append(puts, clientv3.OpPut(leasedKey(n%len(spans), n), value, clientv3.WithLease(got.ID)))
		}
		if len(puts) == 1 {
			_, err = client.Do(ctx, puts[0])
		} else {
			_, err = client.Txn(ctx).Then(puts...).Commit()
		}
		if err != nil {
			return 0, err
		}
	}
	return got.ID, nil
}

// leasedKey is a key behind all others of its range.
func leasedKey(span, n int) string { return fmt.Sprintf("%s%c~%08d", watchPrefix, spans[span], n) }

// awaitGone waits until no leased key is left, and returns when that was.
func (o *expiryOptions) awaitGone(ctx context.Context, client *clientv3.Client, since time.Time) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, o.during+time.Minute)
	defer cancel()
	err := waitUntil(ctx, pollEvery, func() error {
		left := int64(0)
		for c := range spans {
			prefix := fmt.Sprintf("%s%c~", watchPrefix, spans[c])
			got, err := client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
			if err != nil {
				return err
			}
			left += got.Count
		}
		if left > 0 {
			return fmt.Errorf("%d keys are left", left)
		}
		return nil
	})
	return time.Since(since), err
}
