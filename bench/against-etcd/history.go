package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/bench/against-etcd/rawwatch"
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
	// historyLimit bounds one watcher's whole run. historyFillers is how many puts are
	// under way while the history is made.
	historyLimit   = 10 * time.Minute
	historyFillers = 64
)

// history lets one watcher follow all puts from revision 1, at each endpoint in turn.
// An unmeasured one runs first at each, to warm the caches.
func history(ctx context.Context, b *bench, o historyOptions) error {
	total := o.mebibytes << 20 / o.value
	var runs map[string][]figureSet
	err := b.eachSide(ctx, historyPrefix, func(sides map[string]*side) (err error) {
		for _, name := range []string{etcdSide, skeinSide} {
			if err := sides[name].fillHistory(ctx, total, o.value); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		runs, err = paired(o.pairs, []string{etcdSide, skeinSide}, func(name string, pair int) (figureSet, error) {
			return sides[name].followed(ctx, pair%nodes, total, o.value)
		})
		return err
	})
	if err != nil {
		return err
	}
	writePairs(os.Stdout, fmt.Sprintf("one watcher from revision 1, %d events of %d bytes", total, o.value), runs,
		[]string{"events, 1/s", "whole, s", "first event, ms", "servers' CPU an event, µs", "client's CPU an event, µs"})
	return b.save("history.json", runs)
}

// fillHistory puts the values and warms each endpoint up.
func (s *side) fillHistory(ctx context.Context, total, value int) error {
	progress("%s: %d puts of %d bytes", s.name, total, value)
	if err := fill(ctx, s.clients[:], historyPrefix, total, value); err != nil {
		return fmt.Errorf("fill: %w", err)
	}
	if _, err := s.settle(ctx); err != nil {
		return err
	}
	for node := range nodes {
		f, err := s.followed(ctx, node, total, value)
		if err != nil {
			return fmt.Errorf("warm up: %w", err)
		}
		progress("%s: warm-up at %s  %v", s.name, nodeName(node), f)
	}
	return nil
}

// followed is one run at a node, after which the side comes to rest.
func (s *side) followed(ctx context.Context, node, total, value int) (figureSet, error) {
	servers, client, err := s.cpus()
	if err != nil {
		return nil, err
	}
	first, whole, err := follow(ctx, s.clientURL(node), total, value)
	if err != nil {
		return nil, err
	}
	serversAfter, clientAfter, err := s.cpus()
	if err != nil {
		return nil, err
	}
	if _, err := s.settle(ctx); err != nil {
		return nil, err
	}
	return figureSet{
		"events, 1/s": float64(total) / whole.Seconds(), "whole, s": whole.Seconds(), "first event, ms": micros(first) / 1e3,
		"servers' CPU an event, µs": micros(serversAfter-servers) / float64(total),
		"client's CPU an event, µs": micros(clientAfter-client) / float64(total),
	}, nil
}

// scattered gives the i-th of total puts its key. Keys of neighbouring revisions lie
// far from each other, as with many writers. The factor is a prime.
func scattered(i, total int) int { return i * 7919 % total }

// fill puts the values in all ranges, through all clients.
func fill(ctx context.Context, clients []*clientv3.Client, prefix string, total, valueBytes int) error {
	value := strings.Repeat("v", valueBytes)
	return inParallel(ctx, total, historyFillers, func(ctx context.Context, i int) error {
		ctx, cancel := context.WithTimeout(ctx, askLimit)
		defer cancel()
		_, err := clients[i%len(clients)].Put(ctx, spanKey(prefix, scattered(i, total)), value)
		return err
	})
}

// follow watches from revision 1 until it has received all events, with values of so
// many bytes. It returns how long the first and all of them took.
func follow(ctx context.Context, endpoint string, total, value int) (first, whole time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, historyLimit)
	defer cancel()
	conn, err := rawwatch.Connect(endpoint)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	begin, had := time.Now(), 0
	short := 0
	take := func(events int) {
		if first == 0 {
			first = time.Since(begin)
		}
		if had += events; had >= total && whole == 0 {
			whole = time.Since(begin)
			cancel()
		}
	}
	event := func(v []byte) {
		if len(v) != value {
			short++
		}
	}
	request := &pb.WatchCreateRequest{
		Key: []byte(historyPrefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(historyPrefix)), StartRevision: 1,
	}
	stream, err := rawwatch.Open(ctx, conn, request, 1, take, event)
	if err == nil {
		err = stream.Receive()
	}
	switch {
	case had > total || short > 0:
		return 0, 0, fmt.Errorf("%d of %d events came, %d with a wrong value", had, total, short)
	case whole == 0:
		return 0, 0, fmt.Errorf("the watch ended after %d of %d events: %w", had, total, err)
	}
	return first, whole, nil
}
