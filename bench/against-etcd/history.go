package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// historyOptions are the command line of the measure.
type historyOptions struct {
	pairs, mebibytes, value int
}

func historyFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o historyOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.mebibytes, "mebibytes", 100, "bytes of all values, in MiB")
	set.IntVar(&o.value, "value-size", 1024, "bytes of a value")
	return func(ctx context.Context, b *bench) error {
		if o.pairs < 1 || o.mebibytes < 1 || o.value < 1 {
			return fmt.Errorf("history: %d pairs over %d MiB of values of %d bytes: at least one of each", o.pairs, o.mebibytes, o.value)
		}
		return history(ctx, b, o)
	}
}

const (
	historyPrefix = "history/"
	// historyLimit bounds one watcher's whole way, historyFillers is how many puts are under way
	// while the history is made.
	historyLimit   = 10 * time.Minute
	historyFillers = 64
)

// history lets one watcher follow from revision 1 through all that was put, at each
// endpoint in turn. An unmeasured one goes first: the caches are warm.
func history(ctx context.Context, b *bench, o historyOptions) error {
	total := o.mebibytes << 20 / o.value
	var runs map[string][]figureSet
	err := b.eachSide(ctx, historyPrefix, func(clients map[string][nodes]*clientv3.Client) (err error) {
		for side, all := range clients {
			progress("%s: %d puts of %d bytes", side, total, o.value)
			if err := fill(ctx, all[:], historyPrefix, total, o.value); err != nil {
				return fmt.Errorf("%s: fill: %w", side, err)
			}
			for _, client := range all {
				if _, err := follow(ctx, client, total); err != nil {
					return fmt.Errorf("%s: warm up: %w", side, err)
				}
			}
		}
		runs, err = paired(o.pairs, []string{etcdSide, skeinSide}, func(side string, pair int) (figureSet, error) {
			took, err := follow(ctx, clients[side][pair%nodes], total)
			return figureSet{"events, 1/s": float64(total) / took.Seconds(), "whole, s": took.Seconds()}, err
		})
		return err
	})
	if err != nil {
		return err
	}
	writePairs(os.Stdout, fmt.Sprintf("one watcher from revision 1, %d events of %d bytes", total, o.value), runs, []string{"events, 1/s", "whole, s"})
	return b.save("history.json", runs)
}

// fill puts so many values, in all ranges, through all clients.
func fill(ctx context.Context, clients []*clientv3.Client, prefix string, total, valueBytes int) error {
	value := strings.Repeat("v", valueBytes)
	var workers sync.WaitGroup
	errs := make([]error, historyFillers)
	for w := range historyFillers {
		workers.Go(func() {
			for i := w; i < total && errs[w] == nil; i += historyFillers {
				put, cancel := context.WithTimeout(ctx, askLimit)
				_, errs[w] = clients[w%len(clients)].Put(put, spanKey(prefix, i), value)
				cancel()
			}
		})
	}
	workers.Wait()
	return errors.Join(errs...)
}

// follow watches from revision 1 until it has had all events, and returns how long that
// took.
func follow(ctx context.Context, client *clientv3.Client, total int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, historyLimit)
	defer cancel()
	begin, had := time.Now(), 0
	for resp := range client.Watch(ctx, historyPrefix, clientv3.WithPrefix(), clientv3.WithRev(1)) {
		if err := resp.Err(); err != nil {
			return 0, err
		}
		if had += len(resp.Events); had >= total {
			return time.Since(begin), nil
		}
	}
	return 0, fmt.Errorf("the watch ended after %d of %d events: %w", had, total, ctx.Err())
}
