package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// watchOptions are the command line of the measure.
type watchOptions struct {
	pairs, watchers, streams, steps, value, first int
	over, limit                                   time.Duration
}

func watchFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o watchOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.watchers, "watchers", 1000, "watchers of the one prefix")
	set.IntVar(&o.streams, "streams", 30, "streams, each with a connection of its own, that they share")
	set.IntVar(&o.steps, "steps", 5, "steps between the highest rate that was borne and the lowest that was not")
	set.IntVar(&o.first, "first-rate", 100, "puts a second to begin with")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.DurationVar(&o.over, "over", 5*time.Second, "time of one step")
	set.DurationVar(&o.limit, "limit", 100*time.Millisecond, "what p99 of the delay from put to event may be")
	return func(ctx context.Context, b *bench) error {
		switch {
		case o.pairs < 1 || o.watchers < 1 || o.streams < 1 || o.steps < 0 || o.first < 1 || o.value < stampBytes:
			return fmt.Errorf("watch: at least one of each, and values of %d bytes", stampBytes)
		case o.over < time.Second || o.limit < time.Millisecond || o.limit > maxDelay/2:
			return fmt.Errorf("watch: steps of a second at least, and a limit between 1 ms and %v", maxDelay/2)
		}
		return watchRate(ctx, b, o)
	}
}

const (
	watchPrefix = "watch/"
	// maxDoublings bounds the search for a rate that is too high.
	maxDoublings = 12
	// keptShare is how much of a rate must have been put, and of the events have come,
	// for the rate to be borne.
	keptShare = 0.98
)

// The names of the figures.
const (
	rateBorne   = "highest rate, puts/s"
	quietP50    = "put p50 at half of it without watchers, ms"
	watchedP50  = "put p50 at half of it with watchers, ms"
	quietP99    = "put p99 at half of it without watchers, ms"
	watchedP99  = "put p99 at half of it with watchers, ms"
	slowerP50   = "p50 with / without"
	slowerP99   = "p99 with / without"
	quietKept   = "puts/s at half of it without watchers"
	watchedKept = "puts/s at half of it with watchers"
)

// watchRate looks for the highest put rate at which the watchers' events come in time,
// on each side by turns, and then what puts take at half of it.
func watchRate(ctx context.Context, b *bench, o watchOptions) error {
	var runs map[string][]figureSet
	err := b.eachSide(ctx, watchPrefix, func(clients map[string][nodes]*clientv3.Client) (err error) {
		endpoints := map[string][]string{}
		for side, all := range clients {
			for _, client := range all {
				endpoints[side] = append(endpoints[side], client.Endpoints()...)
			}
		}
		runs, err = paired(o.pairs, []string{etcdSide, skeinSide}, func(side string, _ int) (figureSet, error) {
			s := &watchSide{watchOptions: o, name: side, clients: clients[side], endpoints: endpoints[side]}
			return s.measure(ctx)
		})
		return err
	})
	if err != nil {
		return err
	}
	for _, side := range runs {
		ratio(side, slowerP50, watchedP50, quietP50)
		ratio(side, slowerP99, watchedP99, quietP99)
	}
	writePairs(os.Stdout, fmt.Sprintf("%d watchers, p99 of the delay ≤ %v", o.watchers, o.limit), runs,
		[]string{rateBorne, quietKept, watchedKept, quietP50, watchedP50, slowerP50, quietP99, watchedP99, slowerP99})
	return b.save("watch.json", runs)
}

// watchSide is one side while it is measured.
type watchSide struct {
	watchOptions
	name      string
	clients   [nodes]*clientv3.Client
	endpoints []string
}

// measure doubles the rate until it is not borne, and halves what lies between.
func (s *watchSide) measure(ctx context.Context) (figureSet, error) {
	borne, refused := 0, s.first
	for i := 0; ; i++ {
		ok, err := s.bears(ctx, refused)
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		if i == maxDoublings {
			return nil, fmt.Errorf("%d puts a second are borne: begin higher", refused)
		}
		borne, refused = refused, 2*refused
	}
	for range s.steps {
		middle := (borne + refused) / 2
		ok, err := s.bears(ctx, middle)
		if err != nil {
			return nil, err
		}
		if ok {
			borne = middle
		} else {
			refused = middle
		}
	}
	if borne < 2 {
		return nil, errors.New("not even two puts a second are borne: begin lower")
	}
	quiet, err := s.step(ctx, borne/2, 0)
	if err != nil {
		return nil, err
	}
	watched, err := s.step(ctx, borne/2, s.watchers)
	if err != nil {
		return nil, err
	}
	milli := func(took []time.Duration, of int) float64 { return micros(quantile(took, of)) / 1e3 }
	return figureSet{
		rateBorne: float64(borne),
		quietKept: quiet.rate, watchedKept: watched.rate,
		quietP50: milli(quiet.took, 500), watchedP50: milli(watched.took, 500),
		quietP99: milli(quiet.took, 990), watchedP99: milli(watched.took, 990),
	}, nil
}

// bears says whether the events of a rate come in time.
func (s *watchSide) bears(ctx context.Context, rate int) (bool, error) {
	r, err := s.step(ctx, rate, s.watchers)
	if err != nil {
		return false, err
	}
	p99 := r.delays.quantile(990, len(r.took)*s.watchers)
	ok := p99 <= s.limit && r.rate >= keptShare*float64(rate)
	progress("%-6s %6d puts/s: %.0f made, p50 of the delay %v, p99 %v: %v", s.name, rate, r.rate, r.delays.quantile(500, len(r.took)*s.watchers), p99, ok)
	return ok, nil
}

// stepResult is what one rate brought.
type stepResult struct {
	rate   float64 // puts a second that were made
	took   []time.Duration
	delays *delays
}

// step puts at a rate for a while, with so many watchers.
func (s *watchSide) step(ctx context.Context, rate, watchers int) (r stepResult, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := openWatchers(ctx, s.endpoints, watchPrefix, watchers, s.streams)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if r.took, r.rate, err = steadyPuts(ctx, s.clients[:], rate, s.over, s.value); err != nil {
		return r, err
	}
	w.drain(ctx, len(r.took)*watchers)
	r.delays = w.delays()
	return r, nil
}
