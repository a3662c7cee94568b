package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// reshapeOptions are the command line of the measure.
type reshapeOptions struct {
	splits, merges        int
	ranges, keys          int
	conns, clients, value int
	rate, share           float64
	warmup, over, space   time.Duration
	seed                  uint64
}

func reshapeFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o reshapeOptions
	set.IntVar(&o.splits, "splits", 20, "splits, one after the other")
	set.IntVar(&o.merges, "merges", 20, "merges behind them, one after the other")
	set.IntVar(&o.ranges, "ranges", 8, "ranges to begin with")
	set.IntVar(&o.keys, "keys", 100_000, "different keys")
	set.IntVar(&o.conns, "conns", 30, "connections")
	set.IntVar(&o.clients, "clients", 600, "clients, which bound the puts under way")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.Float64Var(&o.rate, "rate", 0, "puts a second; 0 is a part of the most that was measured before")
	set.Float64Var(&o.share, "share", 0.5, "that part")
	set.DurationVar(&o.warmup, "warmup", 5*time.Second, "unmeasured load before each measurement")
	set.DurationVar(&o.over, "over", 10*time.Second, "how long the most is measured")
	set.DurationVar(&o.space, "space", 12*time.Second, "from one change to the next")
	set.Uint64Var(&o.seed, "seed", 1, "of what is split and merged")
	return func(ctx context.Context, b *bench) error {
		switch {
		case o.splits < 0 || o.merges < 0 || o.splits+o.merges < 1 || o.ranges+o.splits <= o.merges:
			return fmt.Errorf("reshape: %d ranges, %d splits, %d merges: at least one change, and a range must be left", o.ranges, o.splits, o.merges)
		case o.ranges < 1 || o.keys < 2*(o.ranges+o.splits):
			return fmt.Errorf("reshape: %d keys for %d ranges: at least two for each", o.keys, o.ranges+o.splits)
		case o.rate < 0 || o.share <= 0 || o.over < time.Second || o.space < reshapeBefore+reshapeAround:
			return fmt.Errorf("reshape: a rate, a part of it, a second to measure the most, and %v between changes", reshapeBefore+reshapeAround)
		}
		return reshape(ctx, b, o)
	}
}

const (
	// reshapeAround is the time around a change whose puts are evaluated, half of it
	// before the change. reshapeBefore lies before that, for comparison.
	reshapeAround = 5 * time.Second
	reshapeBefore = 5 * time.Second
	// rateKept is the part of the rate that must have been put around each change.
	rateKept = 0.8
	// refusedLimit bounds how often a change may fail and be requested again.
	refusedLimit = 5
)

// The targets.
const (
	reshapeSlower     = 2
	reshapeStandstill = 200 * time.Millisecond
)

// reshaped is one split or merge under load. Times are since the load began.
type reshaped struct {
	Kind string `json:"kind"` // split or merge
	// Low, Middle and High are the numbers of the keys at which the left range begins,
	// the right one, and the next one.
	Low    int           `json:"low"`
	Middle int           `json:"middle"`
	High   int           `json:"high"`
	Begin  time.Duration `json:"begin_ns"`
	End    time.Duration `json:"end_ns"`
	// Before and Around are p99; Rate is the rate of the puts around it.
	Before time.Duration `json:"before_p99_ns"`
	Around time.Duration `json:"around_p99_ns"`
	Rate   float64       `json:"around_rate"`
	Failed int           `json:"failed"` // puts from its own time before to its time around
	// Left and Right are the longest gaps between acknowledged puts to the keys of each
	// range, from the begin of the change until a second after its end. Idle is the
	// longer one of the two in an equal time before.
	Left  time.Duration `json:"left_gap_ns"`
	Right time.Duration `json:"right_gap_ns"`
	Idle  time.Duration `json:"idle_gap_ns"`
	// Course is p99 in ms of the puts that were due in each 100 ms of the time around
	// it.
	Course []float64 `json:"course_p99_ms"`
}

func (r *reshaped) ratio() float64     { return float64(r.Around) / float64(r.Before) }
func (r *reshaped) gap() time.Duration { return max(r.Left, r.Right) }

// reshaping is the measure while it runs.
type reshaping struct {
	reshapeOptions
	c      *cluster
	admin  *admin
	load   *pacedLoad
	random *rand.Rand
	keys   [][]byte
	// list are the ranges. borders are the numbers of the keys at which they begin,
	// ascending.
	list    []rangeState
	borders []int
	refused int
}

func reshape(ctx context.Context, b *bench, o reshapeOptions) error {
	r := &reshaping{reshapeOptions: o, keys: numbered(o.keys), borders: borders(o.keys, o.ranges), random: rand.New(rand.NewPCG(o.seed, 0))}
	var err error
	if r.c, err = b.elastic(r.keys, r.borders); err != nil {
		return err
	}
	var all []reshaped
	most, rate, failed := 0.0, o.rate, 0
	err = b.with(ctx, []*cluster{r.c}, func() (err error) {
		p := pace{endpoints: r.c.endpoints(), conns: o.conns, clients: o.clients, keys: r.keys, pick: evenlyOf(o.keys), value: o.value}
		if most, err = r.prepare(ctx, p); err != nil {
			return err
		}
		if rate == 0 {
			rate = most * o.share
		}
		p.rate = rate
		all, failed, err = r.run(ctx, p)
		return err
	})
	if len(all) > 0 {
		writeReshape(o, all, most, rate, failed)
		err = errors.Join(err, b.save("reshape.json", all))
	}
	if failed > 0 {
		err = errors.Join(err, fmt.Errorf("%d puts failed", failed))
	}
	return err
}

// prepare fills the cluster and measures its highest rate, unless a rate is given.
func (r *reshaping) prepare(ctx context.Context, p pace) (most float64, err error) {
	if err := p.fill(ctx, func(int) int { return r.value }); err != nil {
		return 0, err
	}
	if r.rate == 0 {
		if most, err = p.most(ctx, r.warmup, r.over); err != nil {
			return 0, err
		}
		progress("%.0f puts a second at most", most)
	}
	_, err = r.c.settle(ctx)
	return most, err
}

// run makes the changes under load.
func (r *reshaping) run(ctx context.Context, p pace) (all []reshaped, failed int, err error) {
	if r.admin, err = r.c.admin(0); err != nil {
		return nil, 0, err
	}
	defer r.admin.close()
	if r.load, err = p.start(ctx); err != nil {
		return nil, 0, err
	}
	defer r.load.stop()
	if r.list, err = r.c.ranges(ctx); err == nil && len(r.list) != len(r.borders) {
		err = fmt.Errorf("reshape: there are %d ranges, and should be %d", len(r.list), len(r.borders))
	}
	if err != nil {
		return nil, 0, err
	}
	if err := sleep(ctx, r.warmup); err != nil {
		return nil, 0, err
	}
	for len(all) < r.splits+r.merges {
		change, err := r.next(ctx, len(all) >= r.splits)
		if err != nil {
			return all, 0, err
		}
		if change == nil {
			continue
		}
		all = append(all, *change)
		progress("%-5s %2d in %4d ms: p99 %6.2f ms before, %6.2f ms around it, gaps %3d and %3d ms (%d ms before), %.0f puts/s, %d failed", change.Kind, len(all),
			(change.End - change.Begin).Milliseconds(), millis(change.Before), millis(change.Around),
			change.Left.Milliseconds(), change.Right.Milliseconds(), change.Idle.Milliseconds(), change.Rate, change.Failed)
	}
	end := r.load.now()
	r.load.stop()
	failed, ferr := r.load.failures(0, end)
	if failed > 0 {
		progress("failed: %v", ferr)
	}
	return all, failed, nil
}

// next waits until a change has a time of its own, makes it, and evaluates its effect
// afterwards; nil if the change failed.
func (r *reshaping) next(ctx context.Context, merge bool) (*reshaped, error) {
	// The effects of the last change have ended by now: at least its half of the time
	// around it.
	if err := sleep(ctx, r.space-reshapeAround/2); err != nil {
		return nil, err
	}
	if err := r.c.alive(); err != nil {
		return nil, err
	}
	change, err := r.change(ctx, merge)
	if err != nil {
		return nil, err
	}
	// The half behind it, and the second of its gaps.
	if err := sleep(ctx, max(reshapeAround/2, time.Second)+pollEvery); err != nil {
		return nil, err
	}
	done, err := r.happened(ctx, change)
	if err != nil || !done {
		return nil, err
	}
	r.judge(change)
	if change.Rate < rateKept*r.load.rate {
		return nil, fmt.Errorf("reshape: %.0f puts a second of %.0f were answered around a %s: the machine does not bear the rate, and what is measured means nothing",
			change.Rate, r.load.rate, change.Kind)
	}
	return change, nil
}

// change splits one of the widest ranges in the middle, or merges two neighbours.
func (r *reshaping) change(ctx context.Context, merge bool) (*reshaped, error) {
	if merge {
		i := r.random.IntN(len(r.borders) - 1)
		s := &reshaped{Kind: "merge", Low: r.borders[i], Middle: r.borders[i+1], High: r.end(i + 1), Begin: r.load.now()}
		err := r.admin.merge(ctx, r.list[i].ID)
		s.End = r.load.now()
		return s, err
	}
	width := func(i int) int { return r.end(i) - r.borders[i] }
	var widest []int
	for i := range r.borders {
		if len(widest) > 0 && width(i) > width(widest[0])+1 {
			widest = widest[:0]
		}
		if len(widest) == 0 || width(i) >= width(widest[0])-1 {
			widest = append(widest, i)
		}
	}
	i := widest[r.random.IntN(len(widest))]
	s := &reshaped{Kind: "split", Low: r.borders[i], Middle: r.borders[i] + width(i)/2, High: r.end(i), Begin: r.load.now()}
	err := r.admin.split(ctx, r.keys[s.Middle])
	s.End = r.load.now()
	return s, err
}

// end is the number of the key at which the range behind the i-th begins.
func (r *reshaping) end(i int) int {
	if i+1 < len(r.borders) {
		return r.borders[i+1]
	}
	return len(r.keys)
}

// happened says whether the change was made, and records it.
func (r *reshaping) happened(ctx context.Context, s *reshaped) (bool, error) {
	list, err := r.c.ranges(ctx)
	if err != nil {
		return false, err
	}
	want := slices.Clone(r.borders)
	if s.Kind == "merge" {
		want = slices.DeleteFunc(want, func(b int) bool { return b == s.Middle })
	} else {
		want = append(want, s.Middle)
		slices.Sort(want)
	}
	switch len(list) {
	case len(want):
		r.list, r.borders = list, want
		return true, nil
	case len(r.borders):
		progress("%s of %d to %d came to nothing after %v", s.Kind, s.Low, s.High, s.End-s.Begin)
		if r.refused++; r.refused > refusedLimit {
			return false, errors.New("reshape: too many changes came to nothing")
		}
		return false, nil
	}
	return false, fmt.Errorf("reshape: %d ranges behind a %s, and %d before", len(list), s.Kind, len(r.borders))
}

// judge evaluates the puts around a change.
func (r *reshaping) judge(s *reshaped) {
	from := s.Begin - reshapeAround/2
	to := max(s.End, s.Begin+reshapeAround/2)
	s.Before = r.load.p99(from-reshapeBefore, from)
	s.Around = r.load.p99(from, to)
	s.Rate = r.load.madeRate(from, to)
	for at := from; at < to; at += reshapeAround / 50 {
		s.Course = append(s.Course, millis(r.load.p99(at, at+reshapeAround/50)))
	}
	s.Failed, _ = r.load.failures(from-reshapeBefore, to)
	after := s.End + time.Second
	s.Left, s.Right = r.load.gap(s.Low, s.Middle, s.Begin, after), r.load.gap(s.Middle, s.High, s.Begin, after)
	earlier := from - (after - s.Begin)
	s.Idle = max(r.load.gap(s.Low, s.Middle, earlier, from), r.load.gap(s.Middle, s.High, earlier, from))
}

func writeReshape(o reshapeOptions, all []reshaped, most, rate float64, failed int) {
	t := table.New("change", "took, ms", "p99 before, ms", "p99 around it, ms", "ratio", "gap of the left range, ms", "of the right one, ms", "before it, ms", "puts/s", "failed")
	sums := table.New("", "median", "lowest", "highest", "target")
	var ratios []float64
	for i := range all {
		s := &all[i]
		ratios = append(ratios, s.ratio())
		t.Add(fmt.Sprintf("%s %d", s.Kind, i+1), table.Number(millis(s.End-s.Begin)), table.Number(millis(s.Before)), table.Number(millis(s.Around)), table.Number(s.ratio()),
			table.Number(millis(s.Left)), table.Number(millis(s.Right)), table.Number(millis(s.Idle)), table.Number(s.Rate), fmt.Sprint(s.Failed))
	}
	row := func(name, kind, target string, of func(*reshaped) float64) {
		var v []float64
		for i := range all {
			if kind == "" || all[i].Kind == kind {
				v = append(v, of(&all[i]))
			}
		}
		if len(v) > 0 {
			sums.Add(name, table.Number(table.Median(v)), table.Number(slices.Min(v)), table.Number(slices.Max(v)), target)
		}
	}
	row("p99 around / before, all", "", fmt.Sprintf("≤ %d", reshapeSlower), (*reshaped).ratio)
	row("p99 around / before, splits", "split", "", (*reshaped).ratio)
	row("p99 around / before, merges", "merge", "", (*reshaped).ratio)
	row("longest gap of the two ranges of a merge, ms", "merge", fmt.Sprintf("< %d", reshapeStandstill.Milliseconds()), func(s *reshaped) float64 { return millis(s.gap()) })
	row("longest gap of the two parts of a split, ms", "split", "", func(s *reshaped) float64 { return millis(s.gap()) })
	row("longest gap before, ms", "", "", func(s *reshaped) float64 { return millis(s.Idle) })
	row("a split took, ms", "split", "", func(s *reshaped) float64 { return millis(s.End - s.Begin) })
	row("a merge took, ms", "merge", "", func(s *reshaped) float64 { return millis(s.End - s.Begin) })
	row("puts made, a second", "", "", func(s *reshaped) float64 { return s.Rate })
	t.Write(os.Stdout, fmt.Sprintf("Each change under %.0f puts a second (most: %.0f), %d ranges at the begin", rate, most, o.ranges))
	sums.Write(os.Stdout, fmt.Sprintf("Splits and merges under load; %d puts failed, target 0", failed))
	progress("ratios: %s", table.Figures(ratios, "%.2f"))
}
