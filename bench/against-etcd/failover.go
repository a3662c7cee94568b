package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// failoverOptions are the command line of the measure.
type failoverOptions struct {
	kills, etcdKills int
	ranges           int
	rate             float64
	deadline         time.Duration
	down, calm       time.Duration
	value            int
}

func failoverFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o failoverOptions
	set.IntVar(&o.kills, "kills", 20, "kills of Skein's node that leads placement")
	set.IntVar(&o.etcdKills, "etcd-kills", 20, "kills of etcd's leader")
	set.IntVar(&o.ranges, "ranges", 8, "ranges; of etcd, as many prefixes of keys")
	set.Float64Var(&o.rate, "rate", 20, "puts a second, to each range at each endpoint")
	set.DurationVar(&o.deadline, "deadline", time.Second, "of each put")
	set.DurationVar(&o.down, "down", 8*time.Second, "how long a killed node stays away")
	set.DurationVar(&o.calm, "calm", 5*time.Second, "how long all must serve again before the next kill")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	return func(ctx context.Context, b *bench) error { return failover(ctx, b, o) }
}

// The borders of the ranges are single letters, and so are the prefixes of the keys.
const maxFailoverRanges = 26

// recoverLimit bounds the wait for a whole cluster after a node's return.
const recoverLimit = 3 * time.Minute

// killed is the result of one kill.
type killed struct {
	Side string `json:"side"`
	Node int    `json:"node"` // counted from 0
	// Led is how many ranges the node led. Most is how many the node with the most led.
	// They are -1 with etcd.
	Led  int `json:"led"`
	Most int `json:"most"`
	// At is the time of the kill since the load began. Gaps has the longest gap of each
	// range until the node was started again.
	At   time.Duration `json:"at_ns"`
	Gaps []gap         `json:"gaps"`
	// Back is when the node was started again, BackGaps are those from then until the
	// cluster was whole.
	Back     time.Duration `json:"back_ns"`
	BackGaps []gap         `json:"back_gaps"`
}

// longest returns the longest of some gaps, and which range had it.
func longest(gaps []gap) (int, time.Duration) {
	which := 0
	for i, g := range gaps {
		if g.Length > gaps[which].Length {
			which = i
		}
	}
	return which, gaps[which].Length
}

func failover(ctx context.Context, b *bench, o failoverOptions) error {
	if o.ranges < 1 || o.ranges > maxFailoverRanges || o.rate <= 0 {
		return fmt.Errorf("failover: %d ranges, %g puts a second: there may be %d ranges, and the rate is above 0", o.ranges, o.rate, maxFailoverRanges)
	}
	var keys, prefixes []string
	for i := range o.ranges {
		prefixes = append(prefixes, string(rune('a'+i)))
	}
	keys = prefixes[1:]
	skein := b.skein()
	if len(keys) > 0 {
		splits, err := b.splitFile(keys)
		if err != nil {
			return err
		}
		skein = b.skein("--initial-split-keys", splits)
	}
	var all []killed
	var wrong []error
	for _, side := range []struct {
		c     *cluster
		kills int
	}{{b.etcd(), o.etcdKills}, {skein, o.kills}} {
		if side.kills == 0 {
			continue
		}
		// One after the other: an idle cluster's heartbeats would disturb the survivors
		// of the other.
		err := b.with(ctx, []*cluster{side.c}, func() error {
			kills, err := side.c.killing(ctx, o, side.kills, prefixes)
			all = append(all, kills...)
			return err
		})
		wrong = append(wrong, err)
		if err != nil {
			break
		}
	}
	if len(all) > 0 {
		writeFailover(o, all)
		wrong = append(wrong, b.save("failover.json", all))
	}
	return errors.Join(wrong...)
}

// killing loads the cluster and kills its leader, again and again.
func (c *cluster) killing(ctx context.Context, o failoverOptions, kills int, prefixes []string) ([]killed, error) {
	clients, err := c.connectAll()
	if err != nil {
		return nil, err
	}
	defer closeAll(clients)
	l := newSteadyLoad(o, clients, prefixes)
	stop := l.start(ctx)
	defer stop()
	var all []killed
	for n := range kills {
		if err := c.whole(ctx, o, clients, l); err != nil {
			return all, err
		}
		k, err := c.killOnce(ctx, o, clients, l)
		if err != nil {
			return all, err
		}
		which, worst := longest(k.Gaps)
		_, after := longest(k.BackGaps)
		progress("%-6s kill %2d: %s, led %d of %d: gap %d ms (range %s), %d ms after it was back",
			c.name, n+1, nodeName(k.Node), k.Led, len(prefixes), worst.Milliseconds(), prefixes[which], after.Milliseconds())
		all = append(all, k)
	}
	stop()
	l.tell()
	return all, nil
}

// whole waits until all nodes are healthy, each range has a leader, and no range had to
// wait long for a while.
func (c *cluster) whole(ctx context.Context, o failoverOptions, clients [nodes]*clientv3.Client, l *steadyLoad) error {
	ctx, cancel := context.WithTimeout(ctx, recoverLimit)
	defer cancel()
	if err := c.waitHealthy(ctx); err != nil {
		return err
	}
	calmSince := l.now()
	return waitUntil(ctx, pollEvery, func() error {
		if err := c.alive(); err != nil {
			return err
		}
		if _, err := c.leader(ctx, clients); err != nil {
			calmSince = l.now()
			return err
		}
		now := l.now()
		for i := range l.ledgers {
			if g := l.ledgers[i].gap(calmSince, now); g.Length > o.calm/5 {
				calmSince = now
				return fmt.Errorf("%s: range %s waited %s", c.name, l.prefixes[i], g.Length)
			}
		}
		if now-calmSince < o.calm {
			return fmt.Errorf("%s: serves since %s", c.name, now-calmSince)
		}
		return nil
	})
}

// killOnce kills the leading node, starts it again and returns the result.
func (c *cluster) killOnce(ctx context.Context, o failoverOptions, clients [nodes]*clientv3.Client, l *steadyLoad) (killed, error) {
	k := killed{Side: c.name, Led: -1, Most: -1}
	var err error
	if c.name == skeinSide {
		k.Node, k.Led, k.Most, err = c.busiest(ctx, o, clients, l)
	} else {
		k.Node, err = c.leader(ctx, clients)
	}
	if err != nil {
		return k, err
	}
	k.At = l.now()
	if err := c.kill(k.Node); err != nil {
		return k, err
	}
	if err := sleep(ctx, o.down); err != nil {
		return k, err
	}
	if err := c.alive(); err != nil {
		return k, err
	}
	k.Back = l.now()
	for i := range l.ledgers {
		k.Gaps = append(k.Gaps, l.ledgers[i].gap(k.At, k.Back))
	}
	if err := c.startNode(k.Node); err != nil {
		return k, err
	}
	if err := c.whole(ctx, o, clients, l); err != nil {
		return k, err
	}
	for i := range l.ledgers {
		// A gap that the kill began does not count for the return.
		k.BackGaps = append(k.BackGaps, l.ledgers[i].gap(max(k.Back, k.Gaps[i].Begin+k.Gaps[i].Length), l.now()))
	}
	return k, nil
}

// busiest returns the node that leads placement, how many ranges it leads, and the most
// that any node leads. It tries to make these equal: it restarts a node that leads
// more, in good order, and the others then lead its ranges. It stops trying after a
// while, because the third node may lead them.
func (c *cluster) busiest(ctx context.Context, o failoverOptions, clients [nodes]*clientv3.Client, l *steadyLoad) (node, own, most int, err error) {
	const tries = 4
	for try := 0; ; try++ {
		list, err := c.ranges(ctx)
		if err != nil {
			return 0, 0, 0, err
		}
		by, nobody := led(list)
		if nobody > 0 || len(list) != len(l.prefixes) {
			return 0, 0, 0, fmt.Errorf("%d ranges, %d of them without a leader", len(list), nobody)
		}
		if node, err = c.leader(ctx, clients); err != nil {
			return 0, 0, 0, err
		}
		most = slices.Max(by[:])
		if by[node] == most || try == tries {
			return node, by[node], most, nil
		}
		if err := c.restart(slices.Index(by[:], most)); err != nil {
			return 0, 0, 0, err
		}
		if err := c.whole(ctx, o, clients, l); err != nil {
			return 0, 0, 0, err
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// steadyLoad puts to each range at each endpoint. Each put is independent of the fate
// of those before it.
type steadyLoad struct {
	o        failoverOptions
	clients  [nodes]*clientv3.Client
	prefixes []string
	ledgers  []ledger
	began    time.Time
}

func newSteadyLoad(o failoverOptions, clients [nodes]*clientv3.Client, prefixes []string) *steadyLoad {
	return &steadyLoad{o: o, clients: clients, prefixes: prefixes, ledgers: make([]ledger, len(prefixes)), began: time.Now()}
}

func (l *steadyLoad) now() time.Duration { return time.Since(l.began) }

// start begins the load. stop, which may be called twice, ends it and waits for it.
func (l *steadyLoad) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	every := time.Duration(float64(time.Second) / l.o.rate)
	streams := len(l.prefixes) * nodes
	for i := range l.prefixes {
		for j := range nodes {
			// Evenly over the interval, so that a range's writes do not come in threes.
			offset := every * time.Duration(j*len(l.prefixes)+i) / time.Duration(streams)
			wg.Go(func() { l.stream(ctx, &wg, i, j, offset, every) })
		}
	}
	return func() { cancel(); wg.Wait() }
}

// stream puts to range i at endpoint j until ctx is done.
func (l *steadyLoad) stream(ctx context.Context, wg *sync.WaitGroup, i, j int, offset, every time.Duration) {
	if sleep(ctx, offset) != nil {
		return
	}
	value := strings.Repeat("v", l.o.value)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for n := 0; ; n++ {
		// The deadline bounds how many puts are under way.
		wg.Go(func() { l.put(ctx, i, j, fmt.Sprintf("%s%031d", l.prefixes[i], n%1000*nodes+j), value) })
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (l *steadyLoad) put(ctx context.Context, i, j int, key, value string) {
	ctx, cancel := context.WithTimeout(ctx, l.o.deadline)
	defer cancel()
	if _, err := l.clients[j].Put(ctx, key, value); err != nil {
		if !errors.Is(err, context.Canceled) {
			l.ledgers[i].fail(err)
		}
		return
	}
	l.ledgers[i].ack(l.now())
}

// tell reports how many puts there were, and why some failed.
func (l *steadyLoad) tell() {
	acked, wrong := 0, map[string]int{}
	for i := range l.ledgers {
		acked += len(l.ledgers[i].acks)
		for text, n := range l.ledgers[i].wrong {
			wrong[text] += n
		}
	}
	progress("%d puts acknowledged", acked)
	for _, text := range slices.Sorted(maps.Keys(wrong)) {
		progress("%7d failed: %s", wrong[text], text)
	}
}

func writeFailover(o failoverOptions, kills []killed) {
	t := table.New("kill", "node", "ranges it led", "most of one node", "longest gap, ms", "shortest of the ranges, ms", "after its return, ms")
	sums := table.New("longest gap after a kill, ms", "kills", "median", "lowest", "highest", "over 2 s", "highest after a return")
	for _, side := range []string{etcdSide, skeinSide} {
		var worst, back []float64
		over := 0
		for _, k := range kills {
			if k.Side != side {
				continue
			}
			_, most := longest(k.Gaps)
			least := slices.MinFunc(k.Gaps, func(a, b gap) int { return int(a.Length - b.Length) }).Length
			_, after := longest(k.BackGaps)
			worst, back = append(worst, millis(most)), append(back, millis(after))
			if most > 2*time.Second {
				over++
			}
			ledText, mostText := "", ""
			if k.Led >= 0 {
				ledText, mostText = fmt.Sprint(k.Led), fmt.Sprint(k.Most)
			}
			t.Add(fmt.Sprintf("%s %d", side, len(worst)), nodeName(k.Node), ledText, mostText,
				fmt.Sprintf("%.0f", millis(most)), fmt.Sprintf("%.0f", millis(least)), fmt.Sprintf("%.0f", millis(after)))
		}
		if len(worst) > 0 {
			sums.Add(side, fmt.Sprint(len(worst)), fmt.Sprintf("%.0f", table.Median(worst)), fmt.Sprintf("%.0f", slices.Min(worst)),
				fmt.Sprintf("%.0f", slices.Max(worst)), fmt.Sprint(over), fmt.Sprintf("%.0f", slices.Max(back)))
		}
	}
	t.Write(os.Stdout, fmt.Sprintf("kill -9 of the leader (Skein: of placement), %d ranges, %g puts a second to each range at each of %d endpoints", o.ranges, o.rate, nodes))
	sums.Write(os.Stdout, "The longest gap of any range, over all kills; the target is ≤ 2 s")
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
