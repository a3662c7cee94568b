package process

import (
	"context"
	"os"
	"runtime/metrics"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/background"
)

// UseProcessors has goroutines run one at a time while one processor is enough for them, and on all of them otherwise. With a
// second processor at rest, Go wakes a thread for nearly each goroutine that becomes ready, to look whether it can take it over.
// A put of few clients readies dozens on its three nodes, each for some microseconds: a sixth of its CPU went there. GOMAXPROCS
// in the environment wins. The returned function ends it, with all processors.
//
// It is for a node that has started: its parts ask at their start for how many of them can run at a time.
func UseProcessors() (stop func()) {
	if os.Getenv("GOMAXPROCS") != "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { followNeed(ctx, clock.System(), newMeter().read, background.OneProcessor) })
	return func() {
		cancel()
		wg.Wait()
		background.OneProcessor(false)
	}
}

const (
	// lookEvery is how often the need is measured. Of each measure 1 - 1/memory counts at the next look: one collection of
	// garbage is no load, and half a second without a processor is short.
	lookEvery = 100 * time.Millisecond
	memory    = 4
	// enough is how much of one processor may be in use while there is one. So much in place of it with all of them leaves room
	// for the next pause: the same work takes a fifth more there.
	enough, enoughOfAll = 0.75, 0.6
	// A ready goroutine that has waited for more than a millisecond has waited longer than for a few others. On a machine that
	// is full of other work one in fifty has, whatever the number of processors. One that has waited for four met work that did
	// not pause, as an encoding of ten megabytes.
	long, mostLong     = time.Millisecond, 0.2
	longer, mostLonger = 4 * time.Millisecond, 0.01
	// leastWaits are too few to say anything.
	leastWaits = 4
	// One processor was enough for calmFor before there is one only. Where it then was not for as long as triedFor, this
	// doubles up to mostCalmFor: the change stops all goroutines for a moment.
	calmFor, mostCalmFor = 10 * time.Second, 5 * time.Minute
	triedFor             = 30 * time.Second
)

// usage is what the process has used since it began: processor time, and how many of those goroutines that Go measures waited
// for a processor, of them for how many it was long, or longer.
type usage struct {
	cpu                 time.Duration
	waits, long, longer uint64
}

// meter reads the process's usage.
type meter struct{ waits []metrics.Sample }

func newMeter() *meter { return &meter{[]metrics.Sample{{Name: "/sched/latencies:seconds"}}} }

func (m *meter) read() (u usage) {
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &r) == nil { // it cannot fail for the process itself
		u.cpu = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	metrics.Read(m.waits)
	h := m.waits[0].Value.Float64Histogram()
	for i, n := range h.Counts {
		u.waits += n
		if h.Buckets[i] >= long.Seconds() {
			u.long += n
		}
		if h.Buckets[i] >= longer.Seconds() {
			u.longer += n
		}
	}
	return u
}

// followNeed measures until ctx ends, and says whenever it changes whether one processor is enough. At first it is not.
func followNeed(ctx context.Context, c clock.Clock, read func() usage, one func(bool)) {
	n := need{rest: calmFor, busy: c.Now()}
	at, before := c.Now(), read()
	for clock.Sleep(ctx, c, clock.UntilNext(c, lookEvery)) == nil {
		now, u := c.Now(), read()
		was := n.one
		if n.look(now, now.Sub(at), u, before); n.one != was {
			one(n.one)
		}
		at, before = now, u
	}
}

// need is what the process needs of its processors.
type need struct {
	one bool
	// changed is when one changed last, busy when one processor was too little last, and rest how long after that all stay.
	changed, busy clock.Time
	rest          time.Duration
	// Sums over the last looks, of which earlier ones count less.
	time, cpu, waits, long, longer float64
}

// look takes in what was used in the time since the last look.
func (n *need) look(now clock.Time, took time.Duration, u, before usage) {
	sum := func(s *float64, add float64) { *s += add - *s/memory }
	sum(&n.time, took.Seconds())
	sum(&n.cpu, (u.cpu - before.cpu).Seconds())
	sum(&n.waits, float64(u.waits-before.waits))
	sum(&n.long, float64(u.long-before.long))
	sum(&n.longer, float64(u.longer-before.longer))
	most := enough
	if !n.one {
		most = enoughOfAll
	}
	many := func(waits, share float64) bool { return waits >= leastWaits && waits > share*n.waits }
	switch {
	case n.cpu > most*n.time || many(n.long, mostLong) || many(n.longer, mostLonger):
		n.busy = now
		if !n.one {
			return
		}
		if now.Sub(n.changed) < triedFor {
			n.rest = min(2*n.rest, mostCalmFor)
		} else {
			n.rest = calmFor
		}
		n.one, n.changed = false, now
	case !n.one && now.Sub(n.busy) >= n.rest:
		n.one, n.changed = true, now
	}
}
