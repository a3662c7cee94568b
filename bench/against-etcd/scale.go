package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// scaleOptions are the command line of the measure.
type scaleOptions struct {
	sizes, ranges  string
	ofNode         int
	rate           float64
	clients, turns int
	turn, warmup   time.Duration
	rest           time.Duration
	evenWithin     time.Duration
}

func scaleFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o scaleOptions
	set.StringVar(&o.sizes, "nodes", "3,5,7,9", "nodes of the clusters that have the same load for each node, separated by commas; empty for none")
	set.IntVar(&o.ofNode, "ranges-of-node", 8, "ranges for each node of those")
	set.Float64Var(&o.rate, "rate", 300, "puts a second for each node of those")
	set.StringVar(&o.ranges, "ranges", "1,16,256,4096", "ranges of the clusters of three nodes, separated by commas; empty for none")
	set.IntVar(&o.clients, "clients", 256, "clients that load those as fast as they answer")
	set.IntVar(&o.turns, "turns", 5, "turns of each cluster")
	set.DurationVar(&o.turn, "turn", 20*time.Second, "how long a turn measures")
	set.DurationVar(&o.warmup, "warmup", 3*time.Second, "unmeasured load before each turn")
	set.DurationVar(&o.rest, "rest", 20*time.Second, "how long the nodes of a load for each node are measured without it")
	set.DurationVar(&o.evenWithin, "even-within", time.Minute, "how long is waited for placement to spread the leaders, and then for the last transfers")
	return func(ctx context.Context, b *bench) error { return scale(ctx, b, o) }
}

// scaleKind is a cluster of a size, and what loads it.
type scaleKind struct {
	name                   string
	nodes, ranges, clients int
	rate                   float64 // 0 is as fast as it answers
}

// A scaleRun is what one turn gave.
type scaleRun struct {
	Turn int
	rowTurn
	// Sequencer is the node that had the sequencer at the end, counted from 0. Batch is how many revisions a node
	// got from it at a time, in the mean, 0 if it has moved.
	Sequencer int
	Batch     float64
	// Leads and Replicas are the ranges of each node, RestMicros its processor time in a second before the load.
	Leads, Replicas []int
	RestMicros      []float64 `json:",omitempty"`
	// Marks say why the figures may be those of another load, or of another cluster, than was meant.
	Marks []string `json:",omitempty"`
}

// scale measures what a put costs the servers in larger clusters and with more ranges. Each turn has a new cluster and no
// other beside it: idle ones of nine nodes would take much of a small machine. A turn that fails ends no other one: the
// measure takes long, and its tables are of the turns that there are.
func scale(ctx context.Context, b *bench, o scaleOptions) error {
	kinds, err := o.kinds()
	if err != nil {
		return fmt.Errorf("scale: %w", err)
	}
	runs := map[string][]scaleRun{}
	var wrong []error
	for turn := range o.turns {
		for _, k := range shuffled(kinds) {
			if ctx.Err() != nil {
				break
			}
			r, err := b.scaleTurn(ctx, o, k, turn+1)
			if err != nil {
				err = fmt.Errorf("%s, turn %d: %w", k.name, turn+1, err)
				progress("%v", err)
				wrong = append(wrong, err)
				continue
			}
			runs[k.name] = append(runs[k.name], r)
			progress("%-20s turn %d  %+v", k.name, turn+1, r)
		}
	}
	if len(runs) > 0 {
		writeScale(os.Stdout, kinds, runs)
		wrong = append(wrong, b.save("scale.json", runs))
	}
	return errors.Join(append(wrong, ctx.Err())...)
}

// kinds are the clusters that the command line asks for.
func (o *scaleOptions) kinds() (all []scaleKind, err error) {
	sizes, err1 := counts(o.sizes)
	ranges, err2 := counts(o.ranges)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	if o.turns < 1 || o.ofNode < 1 || o.clients < 1 || o.rate <= 0 || o.rest <= 0 {
		return nil, fmt.Errorf("%d turns, %d ranges for each node, %d clients, %v puts a second, %v of rest: more than none of each", o.turns, o.ofNode, o.clients, o.rate, o.rest)
	}
	for _, n := range sizes {
		if n < nodes || n > roomNodes {
			return nil, fmt.Errorf("--nodes %s: a cluster has %d to %d nodes here", o.sizes, nodes, roomNodes)
		}
		all = append(all, scaleKind{
			name:  fmt.Sprintf("%d nodes, %d ranges", n, n*o.ofNode),
			nodes: n, ranges: n * o.ofNode, clients: 32 * n, rate: o.rate * float64(n),
		})
	}
	for _, n := range ranges {
		all = append(all, scaleKind{name: fmt.Sprintf("%d ranges", n), nodes: nodes, ranges: n, clients: o.clients})
	}
	return all, nil
}

// counts reads numbers above 0 that commas separate.
func counts(text string) (all []int, err error) {
	if text == "" {
		return nil, nil
	}
	for field := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(field))
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q in %q is no number above 0", field, text)
		}
		all = append(all, n)
	}
	return all, nil
}

// scaleTurn starts a cluster, lays it out, and loads it.
func (b *bench) scaleTurn(ctx context.Context, o scaleOptions, k scaleKind, turn int) (r scaleRun, err error) {
	c := b.skein(append(slices.Clone(keepRanges), "--initial-ranges", strconv.Itoa(k.ranges))...)
	c.size, c.alone = k.nodes, true
	// Each turn has a directory: that of an earlier one may have been kept.
	c.dir = fmt.Sprintf("%s-%s-%d", c.dir, strings.NewReplacer(" ", "-", ",", "").Replace(k.name), turn)
	err = b.with(ctx, []*cluster{c}, func() error {
		if err := c.laidForScale(ctx, o, k); err != nil {
			return err
		}
		// The first turn puts each key once, and is not counted. A put without success is a mark of the turn, and not
		// its end.
		load, accept := rowsOptions{warmup: o.warmup, rate: k.rate}, "--max-failures=1000000000"
		if _, err := c.turn(ctx, b, load, "put", k.clients, time.Second, true, accept); err != nil {
			return err
		}
		if k.rate > 0 {
			if r.RestMicros, err = c.atRest(ctx, o.rest); err != nil {
				return err
			}
		}
		before, err := c.layout(ctx)
		if err != nil {
			return err
		}
		if r.rowTurn, err = c.turn(ctx, b, load, "put", k.clients, o.turn, false, accept); err != nil {
			return err
		}
		after, err := c.layout(ctx)
		r.Turn = turn
		r.laidOut(k, before, after)
		return err
	})
	return r, err
}

// laidOut takes in how the cluster was laid out before and after the load.
func (r *scaleRun) laidOut(k scaleKind, before, after layout) {
	r.Leads, r.Replicas = before.holds(k.nodes)
	r.Sequencer = after.sequencer
	mark := func(wrong bool, format string, args ...any) {
		if wrong {
			r.Marks = append(r.Marks, fmt.Sprintf(format, args...))
		}
	}
	moved := before.sequencer != after.sequencer
	if batches := after.batches - before.batches; !moved && batches > 0 {
		r.Batch = (after.revisions - before.revisions) / batches
	}
	mark(moved, "the sequencer went from %s to %s", nodeName(before.sequencer), nodeName(after.sequencer))
	if n := before.otherLeaders(after); n > 0 {
		mark(true, "%d ranges have another leader than before", n)
	}
	mark(r.Failed > 0, "%d puts failed, or were due and never sent", r.Failed)
	mark(r.PerSecond < 0.95*k.rate, "%.0f puts a second were made of %.0f: a lower --rate lets the machine follow", r.PerSecond, k.rate)
}

// A layout is who leads what in a cluster.
type layout struct {
	ranges []rangeState
	// sequencer is the node with the sequencer, counted from 0. It has allocated so many revisions since its start, in so many batches.
	sequencer          int
	revisions, batches float64
}

func (c *cluster) layout(ctx context.Context) (l layout, err error) {
	if l.ranges, err = c.ranges(ctx); err != nil {
		return l, err
	}
	var have []string
	for i := range c.founders() {
		p, err := c.metrics(ctx, i)
		if err != nil {
			return l, err
		}
		if p["skein_placement_ceiling_revision"] > 0 {
			have = append(have, nodeName(i))
			l.sequencer = i
			l.revisions, l.batches = p["skein_placement_allocated_revisions_total"], p["skein_placement_allocation_batches_total"]
		}
	}
	if len(have) != 1 {
		return l, fmt.Errorf("of %d nodes %d have the sequencer: %v", c.founders(), len(have), have)
	}
	return l, nil
}

// holds returns how many ranges each node leads, and of how many it has a replica.
func (l layout) holds(size int) (leads, replicas []int) {
	leads, replicas = make([]int, size), make([]int, size)
	for _, r := range l.ranges {
		for n := range size {
			if r.leads(n) {
				leads[n]++
			}
			if slices.Contains(r.Replicas, nodeName(n)) {
				replicas[n]++
			}
		}
	}
	return leads, replicas
}

// otherLeaders counts the ranges that another node leads in the later layout.
func (l layout) otherLeaders(later layout) (n int) {
	leaders := map[uint64]string{}
	for _, r := range l.ranges {
		leaders[r.ID] = r.Leader
	}
	for _, r := range later.ranges {
		if leaders[r.ID] != r.Leader {
			n++
		}
	}
	return n
}

// A transfer has a node lead a range, counted from 0.
type transfer struct {
	of uint64
	to int
}

// evening returns transfers that bring the nodes closer to as many leads each. There is none if a single one cannot.
func (l layout) evening(size int) (all []transfer) {
	leads, _ := l.holds(size)
	for _, r := range l.ranges {
		from, to := -1, -1
		for n := range size {
			if r.leads(n) {
				from = n
			}
			if slices.Contains(r.Replicas, nodeName(n)) && (to < 0 || leads[n] < leads[to]) {
				to = n
			}
		}
		if from >= 0 && to >= 0 && leads[from] > leads[to]+1 {
			leads[from]--
			leads[to]++
			all = append(all, transfer{r.ID, to})
		}
	}
	return all
}

// laidForScale waits until each node leads its share, and has placement leave it so. Otherwise leads and sequencer would move
// under the load: after 45 s of one that comes from one node, after 75 s of one that leaves the sequencer's node at ease.
// The load for each node compares the sequencer's node with the others, so there all lead the same number.
func (c *cluster) laidForScale(ctx context.Context, o scaleOptions, k scaleKind) error {
	if err := c.created(ctx, k.ranges); err != nil {
		return err
	}
	if err := c.evenLeaders(ctx, o.evenWithin); err != nil {
		return err
	}
	if err := c.command(ctx, "placement", "pause"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.evenWithin)
	defer cancel()
	return waitUntil(ctx, time.Second, func() error {
		l, err := c.layout(ctx)
		if err != nil {
			return err
		}
		var wrong []error
		if k.rate > 0 {
			for _, t := range l.evening(k.nodes) {
				wrong = append(wrong, fmt.Errorf("range %d is to be led by %s", t.of, nodeName(t.to)),
					c.command(ctx, "range", "transfer-leader", strconv.FormatUint(t.of, 10), "--to", nodeName(t.to)))
			}
		}
		// With fewer ranges than nodes the sequencer goes where placement would bring it: to the first one's leader.
		if leader := l.ranges[0].Leader; k.ranges < k.nodes && leader != nodeName(l.sequencer) {
			wrong = append(wrong, fmt.Errorf("%s has the sequencer, and %s leads", nodeName(l.sequencer), leader),
				c.command(ctx, "placement", "transfer-leader", "--to", leader))
		}
		return errors.Join(wrong...)
	})
}

// atRest returns each node's processor time in a second, in µs.
func (c *cluster) atRest(ctx context.Context, over time.Duration) (each []float64, err error) {
	before, err := c.cpuEach()
	if err != nil {
		return nil, err
	}
	if err := sleep(ctx, over); err != nil {
		return nil, err
	}
	after, err := c.cpuEach()
	for i := range after {
		each = append(each, micros(after[i]-before[i])/over.Seconds())
	}
	return each, err
}

// evenLeaders waits until no node leads more than twice as many ranges as another.
func (c *cluster) evenLeaders(ctx context.Context, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	return waitUntil(ctx, time.Second, func() error {
		list, err := c.ranges(ctx)
		if err != nil {
			return err
		}
		leads, _ := layout{ranges: list}.holds(c.founders())
		if least, most := slices.Min(leads), slices.Max(leads); len(list) >= c.founders() && most > 2*least {
			return fmt.Errorf("of %d ranges a node leads %d and another %d", len(list), least, most)
		}
		return nil
	})
}
