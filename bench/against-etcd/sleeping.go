package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// sleepingOptions are the command line of the measure.
type sleepingOptions struct {
	ranges, clients, firsts, value int
	rest, over                     time.Duration
}

func sleepingFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o sleepingOptions
	set.IntVar(&o.ranges, "ranges", 10_000, "ranges")
	set.IntVar(&o.clients, "clients", 64, "clients that write each range once")
	set.IntVar(&o.firsts, "first-writes", 30, "sleeping ranges that are written at the end, one after the other")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.DurationVar(&o.rest, "rest", time.Minute, "from the moment when all sleep to the measurement")
	set.DurationVar(&o.over, "over", time.Minute, "how long CPU is measured")
	return func(ctx context.Context, b *bench) error { return sleeping(ctx, b, o) }
}

// asleepLimit bounds the wait until all ranges sleep, createLimit the wait until all
// ranges exist.
const (
	asleepLimit = 5 * time.Minute
	createLimit = 10 * time.Minute
	mebibyte    = 1 << 20
	// writeTries bounds the attempts for a key when all keys are written once.
	writeTries = 5
)

// slept is the state of an unused cluster.
type slept struct {
	Ranges  int           `json:"ranges"`
	Created time.Duration `json:"created_ns"` // from the start of the processes until each range had a leader
	Wrote   time.Duration `json:"wrote_ns"`   // each key once
	// Asleep is how long it took from then until all slept. Awake is how many groups did
	// not, over all nodes.
	Asleep time.Duration `json:"asleep_ns"`
	Awake  int           `json:"awake_groups"`
	Nodes  [nodes]rested `json:"nodes"`
	// Firsts are the first writes to sleeping ranges.
	Firsts []time.Duration `json:"first_writes_ns"`
}

// rested is one node of an unused cluster.
type rested struct {
	CPUPercent float64 `json:"cpu_percent"` // of a core
	Resident   float64 `json:"resident_mib"`
	// Go is the memory that Go's runtime has from the machine, including what is free
	// but not returned. Live is the memory of objects after a collection.
	Go   float64 `json:"go_mib"`
	Live float64 `json:"live_heap_mib"`
}

func sleeping(ctx context.Context, b *bench, o sleepingOptions) error {
	if o.ranges < 1 || o.clients < 1 || o.firsts < 1 {
		return fmt.Errorf("sleeping: %d ranges, %d clients, %d first writes: at least one of each", o.ranges, o.clients, o.firsts)
	}
	var keys [][]byte
	var found []slept
	// The larger one goes first: it determines the keys for both.
	for _, ranges := range []int{o.ranges, 1} {
		c := b.skein("--initial-ranges", strconv.Itoa(ranges), "--enable-pprof")
		began := time.Now()
		err := b.with(ctx, []*cluster{c}, func() error {
			s, err := c.rest(ctx, o, ranges, began, &keys)
			found = append(found, s)
			return err
		})
		if err != nil {
			return err
		}
	}
	writeSleeping(o, found[0], found[1])
	return b.save("sleeping.json", found)
}

// rest writes each key once, lets the cluster sleep and measures it. Without keys it
// uses the first key of each range.
func (c *cluster) rest(ctx context.Context, o sleepingOptions, ranges int, began time.Time, keys *[][]byte) (slept, error) {
	s := slept{Ranges: ranges}
	if err := c.created(ctx, ranges); err != nil {
		return s, err
	}
	s.Created = time.Since(began)
	progress("%d ranges lead after %s", ranges, s.Created)
	if *keys == nil {
		list, err := c.ranges(ctx)
		if err != nil {
			return s, err
		}
		if len(list) != ranges {
			return s, fmt.Errorf("%d ranges in place of %d", len(list), ranges)
		}
		*keys = firstKeys(list)
	}
	clients, err := c.connectAll()
	if err != nil {
		return s, err
	}
	defer closeAll(clients)
	began = time.Now()
	if err := writeOnce(ctx, o, clients, *keys); err != nil {
		return s, err
	}
	s.Wrote = time.Since(began)
	progress("%d keys written after %s", len(*keys), s.Wrote)
	if s.Awake, err = c.asleep(ctx); err != nil {
		return s, err
	}
	s.Asleep = time.Since(began) - s.Wrote
	progress("%d groups awake, %s after the last write", s.Awake, s.Asleep)
	if err := sleep(ctx, o.rest); err != nil {
		return s, err
	}
	if s.Nodes, err = c.measureRest(ctx, o.over); err != nil {
		return s, err
	}
	s.Firsts, err = firstWrites(ctx, o, clients, *keys)
	return s, err
}

// created waits until each range has a leader.
func (c *cluster) created(ctx context.Context, ranges int) error {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	return waitUntil(ctx, pollEvery, func() error {
		leaders, err := c.sum(ctx, "skein_shard_leaders")
		if err == nil && leaders < ranges {
			err = fmt.Errorf("%d of %d ranges have a leader", leaders, ranges)
		}
		return err
	})
}

// sum is a gauge over all nodes.
func (c *cluster) sum(ctx context.Context, name string) (int, error) {
	var sum float64
	for i := range c.founders() {
		p, err := c.metrics(ctx, i)
		if err != nil {
			return 0, err
		}
		v, ok := p[name]
		if !ok {
			return 0, fmt.Errorf("metrics of %s: no %s", nodeName(i), name)
		}
		sum += v
	}
	return int(sum), nil
}

// firstKeys returns the first key of each range; the first range has none.
func firstKeys(list []rangeState) [][]byte {
	var keys [][]byte
	for _, r := range list {
		key := r.Start
		if len(key) == 0 {
			key = []byte{0}
		}
		keys = append(keys, bytes.Clone(key))
	}
	return keys
}

// writeOnce puts each key, at the endpoints by turns.
func writeOnce(ctx context.Context, o sleepingOptions, clients [nodes]*clientv3.Client, keys [][]byte) error {
	value := strings.Repeat("v", o.value)
	return inParallel(ctx, len(keys), o.clients, func(ctx context.Context, i int) error {
		for try := 1; ; try++ {
			err := putOnce(ctx, clients[i%nodes], keys[i], value)
			if err == nil {
				return nil
			}
			if try == writeTries {
				return fmt.Errorf("put of %q, tried %d times: %w", keys[i], try, err)
			}
			progress("put of %q: %v", keys[i], err)
		}
	})
}

func putOnce(ctx context.Context, client *clientv3.Client, key []byte, value string) error {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	_, err := client.Put(ctx, string(key), value)
	return err
}

// asleep waits until only the groups that never sleep are awake: until their number was
// the same and small for a while. It returns the number, even if the wait failed.
func (c *cluster) asleep(ctx context.Context) (awake int, err error) {
	const same = 10 // seconds
	limit := time.Now().Add(asleepLimit)
	for seen := 0; ; {
		now, err := c.sum(ctx, "skein_raftgroup_awake_groups")
		if err != nil {
			return 0, err
		}
		if now != awake || now > 2*nodes {
			awake, seen = now, 0
		}
		if seen++; seen > same || time.Now().After(limit) {
			return awake, nil
		}
		if err := sleep(ctx, time.Second); err != nil {
			return 0, err
		}
	}
}

// measureRest measures the nodes, without a request to them meanwhile.
func (c *cluster) measureRest(ctx context.Context, over time.Duration) (out [nodes]rested, err error) {
	var before [nodes]time.Duration
	for i := range nodes {
		if before[i], err = cpuTime(c.pid(i)); err != nil {
			return out, err
		}
	}
	began := time.Now()
	if err := sleep(ctx, over); err != nil {
		return out, err
	}
	if took := time.Since(began); took > over+over/10 {
		return out, fmt.Errorf("%s took %s: the machine stood still, and what was measured means nothing", over, took)
	}
	for i := range nodes {
		after, err := cpuTime(c.pid(i))
		if err != nil {
			return out, err
		}
		out[i].CPUPercent = (after - before[i]).Seconds() / time.Since(began).Seconds() * 100
	}
	for i := range nodes {
		p, err := c.metrics(ctx, i)
		if err != nil {
			return out, err
		}
		out[i].Resident = p["process_resident_memory_bytes"] / mebibyte
		out[i].Go = (p["go_memstats_sys_bytes"] - p["go_memstats_heap_released_bytes"]) / mebibyte
		if err := c.collect(ctx, i); err != nil {
			return out, err
		}
		if p, err = c.metrics(ctx, i); err != nil {
			return out, err
		}
		out[i].Live = p["go_memstats_heap_alloc_bytes"] / mebibyte
		progress("%s: CPU %.2f %%, resident %.0f MiB, Go %.0f MiB, live %.0f MiB", nodeName(i), out[i].CPUPercent, out[i].Resident, out[i].Go, out[i].Live)
	}
	return out, nil
}

// collect makes a node collect its garbage, so that only the needed memory is left.
func (c *cluster) collect(ctx context.Context, i int) error {
	body, err := c.get(ctx, i, "/debug/pprof/heap?gc=1")
	if err != nil {
		return fmt.Errorf("collect at %s: %w", nodeName(i), err)
	}
	defer body.Close()
	// Nobody reads the profile; only the collection before it is wanted.
	_, err = io.Copy(io.Discard, body)
	return err
}

// firstWrites writes to sleeping ranges, which lie far from each other.
func firstWrites(ctx context.Context, o sleepingOptions, clients [nodes]*clientv3.Client, keys [][]byte) ([]time.Duration, error) {
	value := strings.Repeat("w", o.value)
	n := min(o.firsts, len(keys))
	took := make([]time.Duration, 0, n)
	for i := range n {
		began := time.Now()
		err := putOnce(ctx, clients[i%nodes], keys[i*len(keys)/n], value)
		if err != nil {
			return took, fmt.Errorf("first write: %w", err)
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}

func writeSleeping(o sleepingOptions, many, one slept) {
	t := table.New("", fmt.Sprintf("%d ranges", many.Ranges), "one range", "more", "target")
	for i := range nodes {
		a, b := many.Nodes[i], one.Nodes[i]
		for _, f := range []struct {
			name, target string
			a, b         float64
		}{
			{"CPU, % of a core", "< 5", a.CPUPercent, b.CPUPercent},
			{"resident, MiB", "< 200 more", a.Resident, b.Resident},
			{"of it Go's, MiB", "", a.Go, b.Go},
			{"live heap, MiB", "", a.Live, b.Live},
		} {
			t.Add(nodeName(i)+": "+f.name, table.Number(f.a), table.Number(f.b), table.Number(f.a-f.b), f.target)
		}
	}
	seconds := func(name string, a, b time.Duration, target string) {
		t.Add(name, table.Number(a.Seconds()), table.Number(b.Seconds()), table.Number((a - b).Seconds()), target)
	}
	t.Add("groups awake then, over all nodes", fmt.Sprint(many.Awake), fmt.Sprint(one.Awake))
	seconds("start until each range leads, s", many.Created, one.Created, "< 60")
	seconds(fmt.Sprintf("%d keys written once, s", many.Ranges), many.Wrote, one.Wrote, "")
	seconds("last write until all sleep, s", many.Asleep, one.Asleep, "")
	for _, f := range []struct {
		name string
		of   func([]time.Duration) time.Duration
	}{{"median", middle}, {"longest", slices.Max[[]time.Duration]}} {
		t.Add(fmt.Sprintf("first write to a sleeping range, %s of %d, ms", f.name, len(many.Firsts)),
			table.Number(millis(f.of(many.Firsts))), table.Number(millis(f.of(one.Firsts))), "", "< 1000")
	}
	t.Write(os.Stdout, fmt.Sprintf("%d keys on %d nodes, CPU over %s, %s after all slept", many.Ranges, nodes, o.over, o.rest))
}

func middle(of []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(of))[len(of)/2]
}
