package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// rebuildOptions are the command line of the measure.
type rebuildOptions struct {
	ranges, mebibytes, value int
	rate                     float64
	put                      int
	limit                    int64
	deadAfter, over, patient time.Duration
	election                 time.Duration
}

func rebuildFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o rebuildOptions
	set.IntVar(&o.ranges, "ranges", 1000, "ranges")
	set.IntVar(&o.mebibytes, "mebibytes", 2048, "data, on each of the three nodes")
	set.IntVar(&o.value, "value-size", 8192, "bytes of a value of it")
	set.Float64Var(&o.rate, "rate", 300, "puts a second beside")
	set.IntVar(&o.put, "put-size", 256, "bytes of their values")
	set.Int64Var(&o.limit, "limit", 64<<20, "bytes a second that a node takes and sends for copies (--copy-bytes-per-second)")
	set.DurationVar(&o.deadAfter, "dead-after", 45*time.Second, "--node-dead-after: what comes before the rebuilding is to be over then")
	set.DurationVar(&o.over, "over", 15*time.Second, "how long puts are measured before the kill, and again before the rebuilding")
	set.DurationVar(&o.patient, "patience", 20*time.Minute, "how long rebuilding may take")
	set.DurationVar(&o.election, "election-timeout", time.Second, "--election-timeout; the longest one is twice as long")
	return func(ctx context.Context, b *bench) error {
		if o.ranges < 1 || o.perRange() < 1 || o.rate <= 0 || o.limit < mebibyte || o.over < time.Second {
			return errors.New("rebuild: at least a range, a value for each, a rate, a MiB a second, and a second to measure")
		}
		return rebuild(ctx, b, o)
	}
}

// perRange is how many keys each range has.
func (o *rebuildOptions) perRange() int { return o.mebibytes * mebibyte / o.value / o.ranges }

const (
	// leadWithin is how long ranges may be without a leader beyond the longest election
	// timeout, which is raft's: random, up to twice the configured one.
	leadWithin  = 3 * time.Second
	electionMax = 2
	leadPoll    = 20 * time.Millisecond
	// copyPoll lies between two polls of the copied bytes: each takes a ms of every
	// node.
	copyPoll  = time.Second
	leadLimit = 2 * time.Minute
	// rateOff is by how much the rate of rebuilding may be off the limit.
	// foregroundSlower is how much slower the puts beside it may be.
	rateOff          = 0.2
	foregroundSlower = 2
	// joiner is the joining node.
	joiner = nodes
)

// rebuilt is the result of the measure. Times are since the kill.
type rebuilt struct {
	Ranges int     `json:"ranges"`
	Led    int     `json:"led_by_killed"` // ranges that the killed node led
	Bytes  float64 `json:"bytes"`         // that the fourth node received as tables
	// Leaders is when every range had a leader, Answered when each had answered a put.
	Leaders  time.Duration `json:"leaders_ns"`
	Answered time.Duration `json:"answered_ns"`
	Joined   time.Duration `json:"joined_ns"`
	Begin    time.Duration `json:"begin_ns"` // first copy
	End      time.Duration `json:"end_ns"`   // last replica a voter
	// Steady is the rate in bytes a second between a tenth and nine tenths of all bytes.
	Steady float64 `json:"steady_bytes_per_second"`
	// Whole, Alone and Beside are p99 of the puts: with the whole cluster, with two
	// nodes, and beside the rebuilding.
	Whole  time.Duration `json:"whole_p99_ns"`
	Alone  time.Duration `json:"alone_p99_ns"`
	Beside time.Duration `json:"beside_p99_ns"`
	Failed int           `json:"failed"`
	// Slow are the slowest hundredth of the puts beside, to find out what delayed them.
	Slow []slowPut `json:"slow"`
}

// slowPut is a put that took long.
type slowPut struct {
	Due time.Duration `json:"due_ns"` // since the kill
	Ms  float64       `json:"ms"`
	Key string        `json:"key"`
}

func (r *rebuilt) rate() float64 { return r.Bytes / (r.End - r.Begin).Seconds() }

func rebuild(ctx context.Context, b *bench, o rebuildOptions) error {
	keys := numbered(o.ranges * o.perRange())
	c, err := b.elastic(keys, borders(len(keys), o.ranges), "--node-dead-after", o.deadAfter.String(),
		"--copy-bytes-per-second", strconv.FormatInt(o.limit, 10), "--election-timeout", strconv.FormatInt(o.election.Milliseconds(), 10))
	if err != nil {
		return err
	}
	var r rebuilt
	err = b.with(ctx, []*cluster{c}, func() error {
		p := pace{endpoints: c.endpoints(), conns: 6, clients: 64, keys: keys, pick: evenlyOf(len(keys)), value: o.put, rate: o.rate}
		if err := c.created(ctx, o.ranges); err != nil {
			return err
		}
		if err := c.filled(ctx, p, func(int) int { return o.value }); err != nil {
			return err
		}
		if err := c.sunk(ctx, o, keys); err != nil {
			return err
		}
		r, err = c.rebuilding(ctx, o, p)
		return err
	})
	if err != nil {
		return err
	}
	writeRebuild(o, &r)
	return b.save("rebuild.json", r)
}

// filled fills a cluster and waits until it is at rest.
func (c *cluster) filled(ctx context.Context, p pace, size func(int) int) error {
	began := time.Now()
	if err := p.fill(ctx, size); err != nil {
		return err
	}
	progress("filled after %v", time.Since(began).Round(time.Second))
	const tries = 5
	for try := 1; ; try++ {
		_, err := c.settle(ctx)
		if err == nil || try == tries || ctx.Err() != nil {
			return err
		}
	}
}

const (
	// debtLeft is the part of the data that stores may still have to compact when a
	// measure begins. sinkRounds is how often they are made to compact.
	debtLeft   = 0.15
	sinkRounds = 10
	// atRest is how long no compaction may run before the cluster counts as at rest.
	atRest = 3 * time.Second
)

// sunk waits until the data have reached their final levels. Data that came in key
// order stay in the upper levels of a store until a compaction becomes due. That can
// happen during a measure, and then takes minutes. To make it due, sunk puts a key of
// each range and makes a merge, which flushes memtables.
func (c *cluster) sunk(ctx context.Context, o rebuildOptions, keys [][]byte) error {
	client, err := c.connect(0)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	a, err := c.admin(0)
	if err != nil {
		return err
	}
	defer a.close()
	for round := 1; ; round++ {
		debt, err := c.total(ctx, "skein_engine_compaction_debt_bytes")
		if err != nil {
			return err
		}
		progress("stores have %.0f MiB to compact", debt/mebibyte)
		if debt <= debtLeft*float64(nodes*o.mebibytes)*mebibyte {
			_, err := c.settle(ctx)
			return err
		}
		if round > sinkRounds {
			return fmt.Errorf("rebuild: %.0f MiB to compact after %d rounds", debt/mebibyte, sinkRounds)
		}
		err = inParallel(ctx, o.ranges, 64, func(ctx context.Context, i int) error {
			return putOnce(ctx, client, keys[i*o.perRange()], "here")
		})
		if err != nil {
			return err
		}
		if err := c.splitAndMerge(ctx, a, keys[o.perRange()/2]); err != nil {
			return err
		}
		if err := c.compacted(ctx); err != nil {
			return err
		}
	}
}

// splitAndMerge splits the first range at a key, and merges it again.
func (c *cluster) splitAndMerge(ctx context.Context, a *admin, at []byte) error {
	list, err := c.ranges(ctx)
	if err != nil {
		return err
	}
	if err := a.split(ctx, at); err != nil {
		return err
	}
	// The left part keeps the id. A merge soon after a split is refused for a moment.
	return waitUntil(ctx, time.Second, func() error {
		if err := a.merge(ctx, list[0].ID); err != nil {
			return err
		}
		now, err := c.ranges(ctx)
		if err == nil && len(now) != len(list) {
			err = fmt.Errorf("%d ranges, %d wanted", len(now), len(list))
		}
		return err
	})
}

// compacted waits until stores compact nothing more.
func (c *cluster) compacted(ctx context.Context) error {
	since, last := time.Now(), -1.0
	return waitUntil(ctx, time.Second, func() error {
		now, err := c.total(ctx, "skein_engine_compaction_bytes_total")
		if err != nil {
			return err
		}
		if now != last {
			since, last = time.Now(), now
		}
		if time.Since(since) < atRest {
			return errors.New("stores compact yet")
		}
		return nil
	})
}

func (c *cluster) rebuilding(ctx context.Context, o rebuildOptions, p pace) (r rebuilt, err error) {
	victim, err := c.placementLeader(ctx)
	if err != nil {
		return r, err
	}
	list, err := c.ranges(ctx)
	if err != nil {
		return r, err
	}
	by, nobody := led(list)
	if nobody > 0 || len(list) != o.ranges {
		return r, fmt.Errorf("%d ranges, %d of them without a leader", len(list), nobody)
	}
	r.Ranges, r.Led = o.ranges, by[victim]
	// The load knows which nodes stay.
	p.endpoints = slices.Delete(p.endpoints, victim, victim+1)
	l, err := p.start(ctx)
	if err != nil {
		return r, err
	}
	defer l.stop()
	if err := sleep(ctx, o.over+o.over/3); err != nil {
		return r, err
	}
	killed := l.now()
	r.Whole = l.p99(killed-o.over, killed)
	if err := c.kill(victim); err != nil {
		return r, err
	}
	progress("%s, which led placement and %d ranges, is killed", nodeName(victim), r.Led)
	if err := c.led(ctx, o, l, killed, &r); err != nil {
		return r, err
	}
	if err := c.copied(ctx, o, l, killed, &r); err != nil {
		return r, err
	}
	end := l.now()
	l.stop()
	r.Failed, err = l.failures(0, end)
	if r.Failed > 0 {
		progress("%d puts failed: %v", r.Failed, err)
	}
	return r, c.checkWhole(ctx, o, victim)
}

// placementLeader is the node that leads placement.
func (c *cluster) placementLeader(ctx context.Context) (int, error) {
	clients, err := c.connectAll()
	if err != nil {
		return 0, err
	}
	defer closeAll(clients)
	return c.leader(ctx, clients)
}

// led waits until each range has a leader, and then until each has answered a put.
func (c *cluster) led(ctx context.Context, o rebuildOptions, l *pacedLoad, killed time.Duration, r *rebuilt) error {
	limited, cancel := context.WithTimeout(ctx, leadLimit)
	defer cancel()
	err := waitUntil(limited, leadPoll, func() error {
		if err := c.alive(); err != nil {
			return err
		}
		n, err := c.total(limited, "skein_shard_leaders")
		if err == nil && int(n) < o.ranges {
			err = fmt.Errorf("%.0f of %d ranges have a leader", n, o.ranges)
		}
		return err
	})
	if err != nil {
		return err
	}
	r.Leaders = l.now() - killed
	var clients []*clientv3.Client
	defer func() {
		for _, client := range clients {
			_ = client.Close()
		}
	}()
	for i, p := range c.running {
		if p == nil {
			continue
		}
		client, err := c.connect(i)
		if err != nil {
			return err
		}
		clients = append(clients, client)
	}
	err = inParallel(limited, o.ranges, 64, func(ctx context.Context, i int) error {
		return putOnce(ctx, clients[i%len(clients)], l.keys[i*o.perRange()], "here")
	})
	r.Answered = l.now() - killed
	progress("each range has a leader after %v, and has answered a put after %v", r.Leaders, r.Answered)
	return err
}

// copied lets a fourth node join, and waits until it has all replicas of the killed
// node.
func (c *cluster) copied(ctx context.Context, o rebuildOptions, l *pacedLoad, killed time.Duration, r *rebuilt) error {
	if err := sleep(ctx, 2*time.Second); err != nil {
		return err
	}
	from := l.now()
	if err := sleep(ctx, o.over); err != nil {
		return err
	}
	r.Alone = l.p99(from, l.now())
	if err := c.startNode(joiner); err != nil {
		return err
	}
	if err := c.waitNode(ctx, joiner); err != nil {
		return err
	}
	r.Joined = l.now() - killed
	if r.Joined > o.deadAfter {
		return fmt.Errorf("rebuild: the fourth node joined after %v, when the lost one was to be rebuilt: give a longer --dead-after", r.Joined)
	}
	progress("%s has joined after %v", nodeName(joiner), r.Joined)
	samples, err := c.arriving(ctx, o, l, killed, r)
	if err != nil {
		return err
	}
	r.Beside = l.p99(killed+r.Begin, killed+r.End)
	l.each(killed+r.Begin, killed+r.End, func(p *put) {
		if took := p.acked() - p.due; took >= r.Beside {
			r.Slow = append(r.Slow, slowPut{p.due - killed, millis(took), string(l.keys[p.key])})
		}
	})
	low, high := samples.at(r.Bytes/10), samples.at(r.Bytes*9/10)
	if high.at > low.at {
		r.Steady = (high.bytes - low.bytes) / (high.at - low.at).Seconds()
	}
	progress("%.0f MiB in %v, %.1f MiB/s; p99 of puts %v, %v before the kill", r.Bytes/mebibyte, r.End-r.Begin, r.rate()/mebibyte, r.Beside, r.Whole)
	return nil
}

// arrived is how many bytes had come at a time.
type arrived struct {
	at    time.Duration // since the kill
	bytes float64
}

type arrivals []arrived

// at returns the first record with at least so many bytes.
func (a arrivals) at(bytes float64) arrived {
	i := slices.IndexFunc(a, func(x arrived) bool { return x.bytes >= bytes })
	return a[max(i, 0)]
}

// arriving observes the fourth node until it has a replica of each range and nothing is
// under way.
func (c *cluster) arriving(ctx context.Context, o rebuildOptions, l *pacedLoad, killed time.Duration, r *rebuilt) (arrivals, error) {
	ctx, cancel := context.WithTimeout(ctx, o.deadAfter+o.patient)
	defer cancel()
	var all arrivals
	told := time.Now()
	err := waitUntil(ctx, copyPoll, func() error {
		if err := c.alive(); err != nil {
			return err
		}
		page, err := c.metrics(ctx, joiner)
		if err != nil {
			return err
		}
		bytes, replicas := page["skein_engine_ingest_bytes_total"], int(page["skein_shard_replicas"])
		at, under := l.now()-killed, 0.0
		// Each poll of the full state costs a node some ms of CPU; in between, one node's
		// answer is enough.
		if r.Begin == 0 || replicas >= o.ranges {
			if under, err = c.total(ctx, operationsUnderWay); err != nil {
				return err
			}
		}
		if under > 0 && r.Begin == 0 {
			r.Begin = at
		}
		all = append(all, arrived{at, bytes})
		if time.Since(told) > 5*time.Second {
			told = time.Now()
			progress("%v: %d replicas, %.0f MiB", at.Round(time.Second), replicas, bytes/mebibyte)
		}
		if replicas < o.ranges || under > 0 {
			return fmt.Errorf("%d of %d replicas are there, %.0f operations are under way", replicas, o.ranges, under)
		}
		r.End, r.Bytes = at, bytes
		return nil
	})
	return all, err
}

// checkWhole checks that each range has three replicas, none of them on the killed
// node.
func (c *cluster) checkWhole(ctx context.Context, o rebuildOptions, victim int) error {
	list, err := c.ranges(ctx)
	if err != nil {
		return err
	}
	if len(list) != o.ranges {
		return fmt.Errorf("rebuild: %d ranges in place of %d", len(list), o.ranges)
	}
	for _, g := range list {
		if len(g.Replicas) != nodes || slices.Contains(g.Replicas, nodeName(victim)) {
			return fmt.Errorf("rebuild: range %d has replicas on %v", g.ID, g.Replicas)
		}
	}
	return nil
}

func writeRebuild(o rebuildOptions, r *rebuilt) {
	longest := electionMax * o.election
	t := table.New("", "", "target")
	t.Add(fmt.Sprintf("ranges that the killed node led, of %d", r.Ranges), fmt.Sprint(r.Led))
	t.Add("every range has a leader, ms after the kill", table.Number(millis(r.Leaders)), fmt.Sprintf("≤ %d", (longest+leadWithin).Milliseconds()))
	t.Add("every range has answered a put, ms after the kill", table.Number(millis(r.Answered)))
	t.Add("the fourth node has joined, s after the kill", table.Number(r.Joined.Seconds()))
	t.Add("rebuilding begins, s after the kill", table.Number(r.Begin.Seconds()))
	t.Add("rebuilding took, s", table.Number((r.End - r.Begin).Seconds()))
	t.Add("bytes that came, MiB", table.Number(r.Bytes/mebibyte))
	limit := float64(o.limit) / mebibyte
	t.Add("rate, MiB/s", table.Number(r.rate()/mebibyte), fmt.Sprintf("%s to %s", table.Number(limit*(1-rateOff)), table.Number(limit*(1+rateOff))))
	t.Add("rate between a tenth and nine tenths, MiB/s", table.Number(r.Steady/mebibyte))
	t.Add("put p99 before the kill, ms", table.Number(millis(r.Whole)))
	t.Add("put p99 on two nodes, ms", table.Number(millis(r.Alone)))
	t.Add("put p99 beside the rebuilding, ms", table.Number(millis(r.Beside)))
	t.Add("beside it / before the kill", table.Number(float64(r.Beside)/float64(r.Whole)), fmt.Sprintf("≤ %d", foregroundSlower))
	t.Add("beside it / on two nodes", table.Number(float64(r.Beside)/float64(r.Alone)))
	t.Add("puts that failed", fmt.Sprint(r.Failed))
	t.Write(os.Stdout, fmt.Sprintf("%d ranges with %d MiB, %g puts a second; one node of three is killed and rebuilt on a fourth", o.ranges, o.mebibytes, o.rate))
}
