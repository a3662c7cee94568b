package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// fourthOptions are the command line of the measure.
type fourthOptions struct {
	ranges, mebibytes, keys, put int
	rate                         float64
	spread                       int
	settled, watch, patient      time.Duration
	seed                         uint64
}

func fourthFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o fourthOptions
	set.IntVar(&o.ranges, "ranges", 64, "ranges")
	set.IntVar(&o.mebibytes, "mebibytes", 1024, "data, on each of the three nodes")
	set.IntVar(&o.keys, "keys", 256, "keys of each range")
	set.IntVar(&o.spread, "spread", 8, "how many times as large as the smallest the largest range is, and as loaded")
	set.Float64Var(&o.rate, "rate", 1000, "puts a second")
	set.IntVar(&o.put, "put-size", 256, "bytes of their values")
	set.DurationVar(&o.settled, "settled", 90*time.Second, "how long nothing may be under way before the node joins, and then before it counts as the end")
	set.DurationVar(&o.watch, "watch", 3*time.Minute, "how long what happens afterwards is watched")
	set.DurationVar(&o.patient, "patience", 30*time.Minute, "how long it may take")
	set.Uint64Var(&o.seed, "seed", 1, "of the ranges' sizes and loads")
	return func(ctx context.Context, b *bench) error {
		if o.ranges < 1 || o.keys < 1 || o.spread < 1 || o.rate <= 0 || o.mebibytes*mebibyte/o.ranges/o.keys < 1 {
			return errors.New("fourth: at least a range, a key and a byte for each, a spread of 1, and a rate")
		}
		return fourth(ctx, b, o)
	}
}

const (
	// shareBand is the part of the mean by which a node's bytes and leaders may be off
	// it at the end; one range is allowed in any case.
	shareBand = 0.05
	// movesBeyond is the part of the least moves by which there may be more.
	movesBeyond = 0.1
	lookEvery   = time.Second
)

// weights are 1 to spread, one for each range, in a random order.
func (o *fourthOptions) weights(salt uint64) []float64 {
	out := make([]float64, o.ranges)
	for i, at := range rand.New(rand.NewPCG(o.seed, salt)).Perm(o.ranges) {
		out[at] = 1 + float64(o.spread-1)*float64(i)/float64(max(1, o.ranges-1))
	}
	return out
}

// held is the load of each node at a time.
type held struct {
	At      time.Duration `json:"at_ns"` // since the fourth node was started
	Bytes   []float64     `json:"mib"`
	Leaders []int         `json:"leaders"`
	// Even says whether every node was within its band.
	Even    bool    `json:"even"`
	Decided float64 `json:"decided"` // by placement so far
}

// taken is the result of the measure.
type taken struct {
	Before, After held
	// Joined is when the fourth node was healthy. Even is when every node was within its
	// band and stayed so. Last is when the last operation ended. All are times since the
	// fourth node was started.
	Joined time.Duration `json:"joined_ns"`
	Even   time.Duration `json:"even_ns"`
	Last   time.Duration `json:"last_ns"`
	// Least and LeastLeads are the fewest moves, and changes of leaders, that bring
	// every node into its band. Moves and Leads were decided. Net is the number of
	// replicas that changed their node.
	Least, LeastLeads int
	Moves, Leads, Net int
	// Decisions are all decisions, by reason and kind; Afterwards those since the end.
	Decisions  map[string]float64 `json:"decisions"`
	Afterwards map[string]float64 `json:"afterwards"`
	Failed     int                `json:"failed"`
	Looks      []held             `json:"looks"`
}

const decisionsTotal = "skein_placement_decisions_total"

func fourth(ctx context.Context, b *bench, o fourthOptions) error {
	keys := numbered(o.ranges * o.keys)
	c, err := b.elastic(keys, borders(len(keys), o.ranges))
	if err != nil {
		return err
	}
	sizes, loads := o.weights(1), o.weights(2)
	var sum float64
	sums := make([]float64, o.ranges) // of the loads up to and including a range
	for i, w := range loads {
		sum += w
		sums[i] = sum
	}
	pick := func(r *rand.Rand) int {
		return min(sort.SearchFloat64s(sums, r.Float64()*sum), o.ranges-1)*o.keys + r.IntN(o.keys)
	}
	one := float64(o.mebibytes*mebibyte) / float64(o.keys)
	var all float64
	for _, w := range sizes {
		all += w
	}
	var t taken
	err = b.with(ctx, []*cluster{c}, func() error {
		p := pace{endpoints: c.endpoints(), conns: 6, clients: 64, keys: keys, pick: pick, value: o.put, rate: o.rate}
		if err := c.created(ctx, o.ranges); err != nil {
			return err
		}
		if err := c.filled(ctx, p, func(i int) int { return int(one * sizes[i/o.keys] / all) }); err != nil {
			return err
		}
		t, err = c.taking(ctx, o, p)
		return err
	})
	if err != nil {
		return err
	}
	writeFourth(o, &t)
	return b.save("fourth.json", t)
}

// taking loads the cluster, lets a fourth node join, and observes.
func (c *cluster) taking(ctx context.Context, o fourthOptions, p pace) (t taken, err error) {
	l, err := p.start(ctx)
	if err != nil {
		return t, err
	}
	defer l.stop()
	if err := c.calm(ctx, o.settled, o.patient); err != nil {
		return t, err
	}
	first, err := c.ranges(ctx)
	if err != nil {
		return t, err
	}
	t.Before = holding(first, nodes)
	t.Least, t.LeastLeads = least(first)
	progress("before: %s; at least %d moves", t.Before.text(), t.Least)
	decided, err := c.totals(ctx, decisionsTotal)
	if err != nil {
		return t, err
	}
	began := time.Now()
	if err := c.startNode(joiner); err != nil {
		return t, err
	}
	if err := c.waitNode(ctx, joiner); err != nil {
		return t, err
	}
	t.Joined = time.Since(began)
	if err := c.spreading(ctx, o, began, &t); err != nil {
		return t, err
	}
	ended, err := c.totals(ctx, decisionsTotal)
	if err != nil {
		return t, err
	}
	progress("at rest; %v of watching", o.watch)
	if err := c.watched(ctx, o, began, &t); err != nil {
		return t, err
	}
	end, err := c.totals(ctx, decisionsTotal)
	if err != nil {
		return t, err
	}
	t.Decisions, t.Afterwards = since(decided, end), since(ended, end)
	t.Moves, t.Leads = ofKind(t.Decisions, "move"), ofKind(t.Decisions, "transfer")
	last, err := c.ranges(ctx)
	if err != nil {
		return t, err
	}
	t.After, t.Net = holding(last, mostNodes), elsewhere(first, last)
	t.After.At = time.Since(began)
	stopped := l.now()
	l.stop()
	t.Failed, err = l.failures(0, stopped)
	if t.Failed > 0 {
		progress("%d puts failed: %v", t.Failed, err)
	}
	return t, nil
}

// spreading observes every second until the nodes are even and nothing has been under
// way for long.
func (c *cluster) spreading(ctx context.Context, o fourthOptions, began time.Time, t *taken) error {
	ctx, cancel := context.WithTimeout(ctx, o.patient)
	defer cancel()
	told := time.Now()
	return waitUntil(ctx, lookEvery, func() error {
		busy, err := c.look(ctx, began, t)
		if err != nil {
			return err
		}
		now := t.Looks[len(t.Looks)-1]
		if time.Since(told) > 10*time.Second {
			told = time.Now()
			progress("%v: %s, %d operations under way", now.At.Round(time.Second), now.text(), busy)
		}
		if rest := now.At - max(t.Last, t.Joined); busy > 0 || rest < o.settled {
			return fmt.Errorf("%d operations are under way, and nothing was for %v: %s", busy, rest, now.text())
		}
		return nil
	})
}

// watched goes on observing for a while.
func (c *cluster) watched(ctx context.Context, o fourthOptions, began time.Time, t *taken) error {
	for end := time.Now().Add(o.watch); time.Now().Before(end); {
		if _, err := c.look(ctx, began, t); err != nil {
			return err
		}
		if err := sleep(ctx, lookEvery); err != nil {
			return err
		}
	}
	return nil
}

// look records the load of each node, and how many operations are under way.
func (c *cluster) look(ctx context.Context, began time.Time, t *taken) (busy int, err error) {
	if err := c.alive(); err != nil {
		return 0, err
	}
	list, err := c.ranges(ctx)
	if err != nil {
		return 0, err
	}
	under, err := c.total(ctx, operationsUnderWay)
	if err != nil {
		return 0, err
	}
	decided, err := c.total(ctx, decisionsTotal)
	if err != nil {
		return 0, err
	}
	h := holding(list, mostNodes)
	h.At, h.Decided = time.Since(began), decided
	// The count also covers operations between two observations.
	if n := len(t.Looks); under > 0 || n > 0 && decided > t.Looks[n-1].Decided {
		t.Last = h.At
	}
	if n := len(t.Looks); h.Even && (n == 0 || !t.Looks[n-1].Even) {
		t.Even = h.At
	}
	t.Looks = append(t.Looks, h)
	return int(under), nil
}

// holding sums up the load of the first n nodes.
func holding(list []rangeState, n int) held {
	h := held{Bytes: make([]float64, n), Leaders: make([]int, n), Even: true}
	var sum, leaders float64
	replicas := 0
	for _, r := range list {
		for i := range n {
			if slices.Contains(r.Replicas, nodeName(i)) {
				h.Bytes[i] += float64(r.Bytes) / mebibyte
				sum += float64(r.Bytes) / mebibyte
				replicas++
			}
			if r.leads(i) {
				h.Leaders[i]++
				leaders++
			}
		}
	}
	one := sum / float64(max(1, replicas))
	for i := range n {
		h.Even = h.Even && within(h.Bytes[i], sum/float64(n), one) && within(float64(h.Leaders[i]), leaders/float64(n), 1)
	}
	return h
}

// within says whether a value is close enough to the mean.
func within(v, mean, one float64) bool { return math.Abs(v-mean) <= max(shareBand*mean, one) }

func (h *held) text() string {
	return fmt.Sprintf("MiB %s, leaders %v", table.Figures(h.Bytes, "%.0f"), h.Leaders)
}

// least is a lower bound of the moves of replicas, and of leaders, that bring each
// node into its band after an empty one has joined. The largest ranges fill the empty
// node. It gets no range twice.
func least(list []rangeState) (moves, leads int) {
	var sizes []float64
	var sum float64
	replicas := 0
	for _, r := range list {
		sizes = append(sizes, float64(r.Bytes))
		sum += float64(r.Bytes) * float64(len(r.Replicas))
		replicas += len(r.Replicas)
	}
	slices.Sort(sizes)
	slices.Reverse(sizes)
	mean, one := sum/mostNodes, sum/float64(max(1, replicas))
	missing := mean - max(shareBand*mean, one)
	for moves < len(sizes) && missing > 0 {
		missing -= sizes[moves]
		moves++
	}
	meanLeads := float64(len(list)) / mostNodes
	return moves, int(math.Ceil(meanLeads - max(shareBand*meanLeads, 1)))
}

// elsewhere counts the replicas that are on other nodes than before.
func elsewhere(before, after []rangeState) (n int) {
	was := map[uint64][]string{}
	for _, r := range before {
		was[r.ID] = r.Replicas
	}
	for _, r := range after {
		for _, node := range r.Replicas {
			if !slices.Contains(was[r.ID], node) {
				n++
			}
		}
	}
	return n
}

// since is the increase of some sums.
func since(before, after map[string]float64) map[string]float64 {
	out := map[string]float64{}
	for labels, v := range after {
		if v > before[labels] {
			out[labels] = v - before[labels]
		}
	}
	return out
}

// ofKind counts decisions of a kind.
func ofKind(decisions map[string]float64, kind string) (n int) {
	for labels, v := range decisions {
		if strings.Contains(labels, `kind="`+kind) {
			n += int(v)
		}
	}
	return n
}

func writeFourth(o fourthOptions, t *taken) {
	nodesTable := table.New("", "MiB before", "MiB then", "of the mean", "leaders before", "leaders then", "of the mean")
	var sum, leaders float64
	for i := range t.After.Bytes {
		sum += t.After.Bytes[i]
		leaders += float64(t.After.Leaders[i])
	}
	n := float64(len(t.After.Bytes))
	for i := range t.After.Bytes {
		before, leadersBefore := "", ""
		if i < len(t.Before.Bytes) {
			before, leadersBefore = table.Number(t.Before.Bytes[i]), fmt.Sprint(t.Before.Leaders[i])
		}
		nodesTable.Add(nodeName(i), before, table.Number(t.After.Bytes[i]), fmt.Sprintf("%.3f", t.After.Bytes[i]*n/sum),
			leadersBefore, fmt.Sprint(t.After.Leaders[i]), fmt.Sprintf("%.3f", float64(t.After.Leaders[i])*n/leaders))
	}
	nodesTable.Write(os.Stdout, fmt.Sprintf("A fourth node joins: %d ranges, the largest %d times the smallest, %g puts a second", o.ranges, o.spread, o.rate))
	s := table.New("", "", "target")
	s.Add("all within max(5 %, one range) of the mean in the end", fmt.Sprint(t.After.Even), "true")
	s.Add("moves of replicas", fmt.Sprint(t.Moves), fmt.Sprintf("≤ %.1f", float64(t.Least)*(1+movesBeyond)))
	s.Add("the least that would do", fmt.Sprint(t.Least))
	s.Add("replicas that are elsewhere than before", fmt.Sprint(t.Net))
	s.Add("changes of leaders without a move", fmt.Sprint(t.Leads))
	s.Add("leaders that the new node needs at least", fmt.Sprint(t.LeastLeads))
	s.Add("joined, s after its start", table.Number(t.Joined.Seconds()))
	s.Add("within the bands for good, s after its start", table.Number(t.Even.Seconds()))
	s.Add("last operation, s after its start", table.Number(t.Last.Seconds()))
	s.Add(fmt.Sprintf("decisions in %v behind the end", o.watch), fmt.Sprint(ofKind(t.Afterwards, "")), "0")
	s.Add("puts that failed", fmt.Sprint(t.Failed))
	s.Write(os.Stdout, "What it took")
	d := table.New("decisions", "all", "behind the end")
	for _, labels := range slices.Sorted(maps.Keys(t.Decisions)) {
		d.Add(strings.Trim(labels, "{}"), table.Number(t.Decisions[labels]), table.Number(t.Afterwards[labels]))
	}
	d.Write(os.Stdout, "Decisions by reason and kind")
}
