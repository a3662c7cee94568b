package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"
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
	set.IntVar(&o.streams, "streams", 30, "streams that they share, over one connection to each endpoint")
	set.IntVar(&o.steps, "steps", 4, "steps between the highest rate that was borne and the lowest that was not")
	set.IntVar(&o.first, "first-rate", 100, "puts a second to begin with; later pairs begin at half of what was found")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.DurationVar(&o.over, "over", 3*time.Second, "time of one step")
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
	// keptShare is how much of a rate must have been put, and how much of the events
	// received, for the rate to count as sustained.
	keptShare = 0.98
)

// The names of the figures.
const (
	rateBorne     = "highest rate, puts/s"
	quietP50      = "put p50 at half of it without watchers, ms"
	watchedP50    = "put p50 at half of it with watchers, ms"
	quietP99      = "put p99 at half of it without watchers, ms"
	watchedP99    = "put p99 at half of it with watchers, ms"
	slowerP50     = "p50 with / without"
	slowerP99     = "p99 with / without"
	delayP99      = "event p99 at half of it, ms"
	serversEvent  = "servers' CPU an event at half of it, µs"
	clientEvent   = "client's CPU an event at half of it, µs"
	commonQuiet   = "put p50 at half of etcd's without watchers, ms"
	commonWatched = "put p50 at half of etcd's with watchers, ms"
	commonSlower  = "p50 with / without, at half of etcd's"
	commonServers = "servers' CPU an event at half of etcd's, µs"
)

// watchRate searches the highest put rate at which the watchers' events come in time,
// on each side by turns. Then it measures puts at half of it, and at half of etcd's.
func watchRate(ctx context.Context, b *bench, o watchOptions) error {
	var runs map[string][]figureSet
	err := b.eachSide(ctx, watchPrefix, func(sides map[string]*side) (err error) {
		begin := map[string]int{etcdSide: o.first, skeinSide: o.first}
		common := 0 // etcd's highest rate in this pair
		runs, err = paired(o.pairs, []string{etcdSide, skeinSide}, func(name string, _ int) (figureSet, error) {
			s := &watchSide{watchOptions: o, side: sides[name]}
			s.first = begin[name]
			borne, err := s.search(ctx)
			if err != nil {
				return nil, err
			}
			if name == etcdSide {
				common = borne
			}
			begin[name] = max(borne/2, 1)
			return s.atHalf(ctx, borne, common)
		})
		return err
	})
	if err != nil {
		return err
	}
	for _, side := range runs {
		ratio(side, slowerP50, watchedP50, quietP50)
		ratio(side, slowerP99, watchedP99, quietP99)
		ratio(side, commonSlower, commonWatched, commonQuiet)
	}
	writePairs(os.Stdout, fmt.Sprintf("%d watchers, p99 of the delay ≤ %v", o.watchers, o.limit), runs, []string{
		rateBorne, quietP50, watchedP50, slowerP50, quietP99, watchedP99, slowerP99, delayP99, serversEvent, clientEvent,
		commonQuiet, commonWatched, commonSlower, commonServers,
	})
	return b.save("watch.json", runs)
}

// watchSide is one side while it is measured.
type watchSide struct {
	watchOptions
	*side
}

// search doubles the rate until it is not sustained, and halves the interval. It takes
// at most maxDoublings plus steps attempts.
func (s *watchSide) search(ctx context.Context) (borne int, err error) {
	refused := 0
	for i := 0; borne == 0 || refused == 0; i++ {
		rate := 2 * borne
		switch {
		case i == maxDoublings:
			return 0, fmt.Errorf("%d puts a second are borne, %d are not: begin elsewhere", borne, refused)
		case i == 0:
			rate = s.first
		case borne == 0:
			rate = refused / 2
		}
		if rate < 2 {
			return 0, errors.New("not even two puts a second are borne")
		}
		ok, err := s.bears(ctx, rate)
		if err != nil {
			return 0, err
		}
		if ok {
			borne = rate
		} else {
			refused = rate
		}
	}
	for range s.steps {
		middle := (borne + refused) / 2
		ok, err := s.bears(ctx, middle)
		if err != nil {
			return 0, err
		}
		if ok {
			borne = middle
		} else {
			refused = middle
		}
	}
	return borne, nil
}

// atHalf measures puts without and with watchers at half of a rate, and at half of
// another one unless that is the same.
func (s *watchSide) atHalf(ctx context.Context, rate, common int) (figureSet, error) {
	quiet, watched, err := s.beside(ctx, rate/2)
	if err != nil {
		return nil, err
	}
	f := figureSet{
		rateBorne: float64(rate),
		quietP50:  milli(quiet.took, 500), watchedP50: milli(watched.took, 500),
		quietP99: milli(quiet.took, 990), watchedP99: milli(watched.took, 990),
		delayP99:     micros(watched.delay(990)) / 1e3,
		serversEvent: watched.each(watched.servers), clientEvent: watched.each(watched.client),
	}
	if common != rate {
		if quiet, watched, err = s.beside(ctx, common/2); err != nil {
			return nil, err
		}
	}
	f[commonQuiet], f[commonWatched], f[commonServers] = milli(quiet.took, 500), milli(watched.took, 500), watched.each(watched.servers)
	return f, nil
}

func milli(took []time.Duration, ofThousand int) float64 {
	return micros(quantile(took, ofThousand)) / 1e3
}

// beside puts at a rate without watchers and with them.
func (s *watchSide) beside(ctx context.Context, rate int) (quiet, watched stepResult, err error) {
	if quiet, err = s.step(ctx, rate, 0); err != nil {
		return quiet, watched, err
	}
	if watched, err = s.step(ctx, rate, s.watchers); err != nil {
		return quiet, watched, err
	}
	if quiet.failed+watched.failed > 0 {
		return quiet, watched, fmt.Errorf("%d puts failed at %d a second: %w", quiet.failed+watched.failed, rate, errors.Join(quiet.err, watched.err))
	}
	return quiet, watched, nil
}

// bears says whether the events of a rate come in time. It tries a failed rate once
// more: one bad moment of the machine is not the side's fault.
func (s *watchSide) bears(ctx context.Context, rate int) (bool, error) {
	for range 2 {
		r, err := s.step(ctx, rate, s.watchers)
		if err != nil {
			return false, err
		}
		ok := r.delay(990) <= s.limit && r.failed == 0 && r.rate >= keptShare*float64(rate)
		progress("%-6s %6d puts/s: %.0f made, %d failed, events p50 %v p99 %v, put p50 %.1f ms, CPU servers %.0f%% client %.0f%%: %v", s.name, rate,
			r.rate, r.failed, r.delay(500), r.delay(990), milli(r.took, 500), 100*r.servers.Seconds()/r.over.Seconds(), 100*r.client.Seconds()/r.over.Seconds(), ok)
		if ok {
			return true, nil
		}
	}
	return false, nil
}

// stepResult is what one rate brought.
type stepResult struct {
	putRun
	watchers int
	delays   *delays
	// servers and client are the processor time while the rate was put and delivered,
	// which took over.
	servers, client, over time.Duration
}

// delay is the time within which so many of a thousand events came.
func (r *stepResult) delay(ofThousand int) time.Duration {
	return r.delays.quantile(ofThousand, len(r.took)*r.watchers)
}

// each is the part of a time per event, in µs.
func (r *stepResult) each(of time.Duration) float64 {
	return micros(of) / float64(max(1, len(r.took)*r.watchers))
}

// step puts at a rate for a while, with so many watchers, and then lets the side come
// to rest.
func (s *watchSide) step(ctx context.Context, rate, watchers int) (r stepResult, err error) {
	step, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := openWatchers(step, s.endpoints(), watchPrefix, watchers, s.streams)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	begin := time.Now()
	servers, client, err := s.cpus()
	if err != nil {
		return r, err
	}
	r.watchers = watchers
	if r.putRun, err = steadyPuts(step, s.clients[:], rate, s.over, s.value); err != nil {
		return r, err
	}
	w.drain(step, len(r.took)*watchers)
	if r.servers, r.client, err = s.cpus(); err != nil {
		return r, err
	}
	r.servers, r.client, r.over = r.servers-servers, r.client-client, time.Since(begin)
	if r.delays, err = w.end(); err != nil {
		return r, err
	}
	_, err = s.settle(ctx)
	return r, err
}
