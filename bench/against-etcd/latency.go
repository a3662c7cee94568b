package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// latencyOptions are the command line of the measure.
type latencyOptions struct {
	pairs, puts, warmup, value int
}

func latencyFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o latencyOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.puts, "puts", 3000, "puts at each endpoint")
	set.IntVar(&o.warmup, "warmup", 300, "unmeasured puts before them")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	return func(ctx context.Context, b *bench) error { return latency(ctx, b, o) }
}

// latencyRun is the result of one client at one endpoint.
type latencyRun struct {
	Pair     int    `json:"pair"`
	Side     string `json:"side"`
	Endpoint int    `json:"endpoint"` // nodes are counted from 0
	// Leader is etcd's leader, or the node that leads placement. Range leads the range
	// of the keys, and is the same with etcd.
	Leader int `json:"leader"`
	Range  int `json:"range_leader"`

	P50  float64 `json:"p50_us"`
	P99  float64 `json:"p99_us"`
	Mean float64 `json:"mean_us"`
	// Stages are Skein's own means by its histograms, in µs for each put.
	Stages *stages `json:"stages,omitempty"`
}

// stages are parts of a put by the clocks of Skein's nodes. Each but the first and
// Append is part of the one before it or parallel to it.
type stages struct {
	Gateway  float64 `json:"gateway_us"`  // from the request's arrival to the answer, at the gateway
	Range    float64 `json:"range_us"`    // the same at the range's leader
	Evaluate float64 `json:"evaluate_us"` // within Range
	Sequence float64 `json:"sequence_us"` // within Range: the revision
	Append   float64 `json:"append_us"`   // within the rest of Range: the leader's own log, beside those of its peers
}

// prefixes are the prefixes of the keys, each in a range of its own. With more ranges
// than nodes each node leads some.
var prefixes = []string{"a", "b", "c", "d", "e", "f"}

// splitFile writes the keys at which all ranges but the first begin.
func (b *bench) splitFile(keys []string) (string, error) {
	file := filepath.Join(b.dir, "split-keys")
	if err := os.WriteFile(file, []byte(strings.Join(keys, "\n")+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("split keys: %w", err)
	}
	return file, nil
}

func latency(ctx context.Context, b *bench, o latencyOptions) error {
	if o.pairs < 1 || o.puts < 1 || o.warmup < 0 {
		return fmt.Errorf("latency: %d pairs of %d puts, %d before: at least one of each", o.pairs, o.puts, o.warmup)
	}
	splits, err := b.splitFile(prefixes[1:])
	if err != nil {
		return err
	}
	etcd, skein, empty := b.etcd(), b.skein("--initial-split-keys", splits), b.empty(o.value)
	var runs []latencyRun
	err = b.with(ctx, []*cluster{etcd, skein, empty}, func() error {
		for pair := range o.pairs {
			for _, side := range []func() ([]latencyRun, error){
				func() ([]latencyRun, error) { return etcd.latencies(ctx, o, false) },
				func() ([]latencyRun, error) { return skein.latencies(ctx, o, true) },
				func() ([]latencyRun, error) { return empty.emptyLatency(ctx, o) },
			} {
				more, err := side()
				if err != nil {
					return err
				}
				for _, r := range more {
					r.Pair = pair
					progress("%s", r)
					runs = append(runs, r)
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	writeLatencies(os.Stdout, o, runs)
	return b.save("latency.json", runs)
}

func (r latencyRun) String() string {
	return fmt.Sprintf("%-6s pair %d  %-38s at %s  p50 %.0f µs, p99 %.0f µs", r.Side, r.Pair+1, r.kind(), nodeName(r.Endpoint), r.P50, r.P99)
}

// errMoved says that a leader has changed during a run.
var errMoved = errors.New("leaders moved while it was measured, each time")

// latencies measures at all endpoints. For Skein it first uses keys of a range that is
// led beside placement, and then of one that is not. It starts over if leaders move
// meanwhile.
func (c *cluster) latencies(ctx context.Context, o latencyOptions, ranges bool) ([]latencyRun, error) {
	clients, err := c.connectAll()
	if err != nil {
		return nil, err
	}
	defer closeAll(clients)
	const tries = 3
	for range tries {
		before, err := c.roles(ctx, clients, ranges)
		if err != nil {
			return nil, err
		}
		runs, err := c.atAll(ctx, clients, o, before)
		if err != nil {
			return nil, err
		}
		after, err := c.roles(ctx, clients, ranges)
		if err != nil {
			return nil, err
		}
		if slices.Equal(before, after) {
			return runs, nil
		}
		progress("%s: leaders moved; again", c.name)
	}
	return nil, fmt.Errorf("%s: %w", c.name, errMoved)
}

// role is the leaders for keys with a prefix.
type role struct {
	prefix      string
	leader, own int // of the cluster, of the keys' range
}

// roles returns the cases to measure: one for etcd; for Skein one for keys that are led
// beside placement and one for others.
func (c *cluster) roles(ctx context.Context, clients [nodes]*clientv3.Client, ranges bool) ([]role, error) {
	leader, err := c.leader(ctx, clients)
	if err != nil {
		return nil, err
	}
	if !ranges {
		return []role{{prefixes[0], leader, leader}}, nil
	}
	list, err := c.ranges(ctx)
	if err != nil {
		return nil, err
	}
	return pickRoles(list, leader)
}

// pickRoles finds the first range that node leader leads, and the first that another
// node leads.
func pickRoles(list []rangeState, leader int) ([]role, error) {
	if len(list) != len(prefixes) {
		return nil, fmt.Errorf("%d ranges in place of %d", len(list), len(prefixes))
	}
	var beside, apart []role
	for i, r := range list {
		for n := range nodes {
			switch {
			case !r.leads(n):
			case n == leader:
				beside = append(beside, role{prefixes[i], leader, n})
			default:
				apart = append(apart, role{prefixes[i], leader, n})
			}
		}
	}
	if len(beside) == 0 || len(apart) == 0 {
		return nil, fmt.Errorf("of %d ranges the leader of placement, %s, leads %d", len(list), nodeName(leader), len(beside))
	}
	return []role{beside[0], apart[0]}, nil
}

// atAll measures each role at each endpoint.
func (c *cluster) atAll(ctx context.Context, clients [nodes]*clientv3.Client, o latencyOptions, roles []role) ([]latencyRun, error) {
	var runs []latencyRun
	for _, r := range roles {
		for i, client := range clients {
			run, err := c.atOne(ctx, client, o, r, i)
			if err != nil {
				return nil, fmt.Errorf("%s, endpoint %s: %w", c.name, nodeName(i), err)
			}
			runs = append(runs, run)
		}
	}
	return runs, nil
}

func (c *cluster) atOne(ctx context.Context, client *clientv3.Client, o latencyOptions, r role, i int) (latencyRun, error) {
	run := latencyRun{Side: c.name, Endpoint: i, Leader: r.leader, Range: r.own}
	if _, err := puts(ctx, client, r.prefix, o.warmup, o.value); err != nil {
		return run, err
	}
	var before, after [2]page
	if err := c.pages(ctx, &before, i, r.own); err != nil {
		return run, err
	}
	took, err := puts(ctx, client, r.prefix, o.puts, o.value)
	if err != nil {
		return run, err
	}
	if err := c.pages(ctx, &after, i, r.own); err != nil {
		return run, err
	}
	slices.Sort(took)
	run.P50, run.P99, run.Mean = micros(took[len(took)/2]), micros(took[len(took)*99/100]), micros(total(took))/float64(len(took))
	if c.name == skeinSide {
		run.Stages = &stages{
			Gateway:  after[0].perOp(before[0], "etcd_server_request_duration_seconds", `{success="true",type="Put"}`, o.puts),
			Range:    after[1].perOp(before[1], "skein_shard_request_seconds", `{kind="write"}`, o.puts),
			Evaluate: after[1].perOp(before[1], "skein_shard_evaluate_seconds", "", o.puts),
			Sequence: after[1].perOp(before[1], "skein_shard_sequence_seconds", "", o.puts),
			Append:   after[1].perOp(before[1], "skein_raftgroup_append_duration_seconds", "", o.puts),
		}
	}
	return run, nil
}

// pages reads the metrics of gateway and range leader.
func (c *cluster) pages(ctx context.Context, to *[2]page, of ...int) (err error) {
	for n, i := range of {
		if to[n], err = c.metrics(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// emptyLatency measures at one server that answers at once.
func (c *cluster) emptyLatency(ctx context.Context, o latencyOptions) ([]latencyRun, error) {
	client, err := c.connect(0)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	run, err := c.atOne(ctx, client, o, role{prefix: prefixes[0]}, 0)
	return []latencyRun{run}, err
}

// puts puts values one after the other and returns how long each took.
func puts(ctx context.Context, client *clientv3.Client, prefix string, n, valueBytes int) ([]time.Duration, error) {
	value := strings.Repeat("v", valueBytes)
	took := make([]time.Duration, 0, n)
	for i := range n {
		key := fmt.Sprintf("%s%031d", prefix, i)
		begin := time.Now()
		// clientv3 retries as long as it may while nobody can be reached.
		ctx, cancel := context.WithTimeout(ctx, askLimit)
		_, err := client.Put(ctx, key, value)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("put: %w", err)
		}
		took = append(took, time.Since(begin))
	}
	return took, nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func total(of []time.Duration) (sum time.Duration) {
	for _, d := range of {
		sum += d
	}
	return sum
}
