package process

import (
	"context"
	"io/fs"
	"math"
	"os"
	"runtime"
	"runtime/metrics"
	"strconv"
	"strings"
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
	if os.Getenv("GOMAXPROCS") != "" || runtime.GOMAXPROCS(0) == 1 {
		return func() {}
	}
	machine := os.DirFS("/")
	return useProcessors(clock.System(), newMeter().read, func() bool { return crowded(machine) }, background.OneProcessor)
}

func useProcessors(c clock.Clock, read func() usage, crowded func() bool, one func(bool)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	one(false) // from here on GOMAXPROCS is what this says
	wg.Go(func() { followNeed(ctx, c, read, crowded, one) })
	return func() {
		cancel()
		wg.Wait()
		one(false)
	}
}

const (
	// The need is measured often while more than inUse of a processor is used. Such a look also shows whether something held the
	// processor at that moment.
	lookInUse, lookAtRest = 20 * time.Millisecond, 100 * time.Millisecond
	inUse                 = 0.1
	// A measure counts for about span. One collection of garbage is no load, and half a second without a processor is short.
	span = 400 * time.Millisecond
	// enough is how much of one processor may be in use while there is one. So much in place of it with all of them leaves room
	// for the next pause: the same work takes a fifth more there.
	enough, enoughOfAll = 0.75, 0.6
	// A ready goroutine that has waited for more than a millisecond has waited for dozens of others. On a machine that is full
	// of other work one in fifty has, whatever the number of processors. So few as leastLong say nothing.
	long, mostLong = time.Millisecond, 0.2
	leastLong      = 4
	// A look that comes so late met work that does not pause, as an encoding of ten megabytes, or a system call. Packets that
	// came meanwhile waited too, and Go counts no waits of what it has not seen. Two looks of a hundred may, within about heldSpan.
	// While the machine has more threads to run than processors, its scheduler makes looks late too, and more threads would wait
	// as well. So it may be more of them then; but others may not keep a node from running.
	held, mostHeld, mostHeldOnCrowded = 4 * time.Millisecond, 0.02, 0.2
	heldSpan                          = 5 * time.Second
	leastHeld                         = 3.5
	// A collection of garbage has a quarter of the processors, and they cannot become more before it ends. One that took more than
	// this could last for half a second.
	mostMarked = 100 * time.Millisecond
	// A look so late says that the process stood still, and nothing of the time before.
	stopped = time.Second
	// There is one processor once it would have been enough for calmFor. If it then is not for as long as triedFor, the next wait
	// is twice as long, up to mostCalmFor: a change stops all goroutines for a moment.
	calmFor, mostCalmFor = 10 * time.Second, 5 * time.Minute
	triedFor             = 30 * time.Second
)

// usage is what the process has used since it began. cpu is processor time, and marking the part of collections of garbage. waits
// counts the goroutines that waited for a processor, and long those that did for long. Go counts one of eight.
type usage struct {
	cpu, marking             time.Duration
	collections, waits, long uint64
}

// meter reads the process's usage, in some microseconds.
type meter struct{ samples []metrics.Sample }

func newMeter() *meter {
	return &meter{[]metrics.Sample{
		{Name: "/sched/latencies:seconds"},
		{Name: "/gc/cycles/total:gc-cycles"},
		{Name: "/cpu/classes/gc/mark/assist:cpu-seconds"},
		{Name: "/cpu/classes/gc/mark/dedicated:cpu-seconds"},
		{Name: "/cpu/classes/gc/mark/idle:cpu-seconds"},
	}}
}

func (m *meter) read() (u usage) {
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &r) == nil { // it cannot fail for the process itself
		u.cpu = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	metrics.Read(m.samples)
	h := m.samples[0].Value.Float64Histogram()
	for i, n := range h.Counts {
		u.waits += n
		if h.Buckets[i] >= long.Seconds() {
			u.long += n
		}
	}
	u.collections = m.samples[1].Value.Uint64()
	for _, s := range m.samples[2:] {
		u.marking += time.Duration(s.Value.Float64() * float64(time.Second))
	}
	return u
}

// crowded says whether the machine has more threads to run than processors, by Linux's /proc/loadavg. This is the whole machine,
// also within a container. It is false where the system does not say.
func crowded(files fs.FS) bool {
	average, err := fs.ReadFile(files, "proc/loadavg")
	online, cerr := fs.ReadFile(files, "sys/devices/system/cpu/online")
	fields := strings.Fields(string(average))
	if err != nil || cerr != nil || len(fields) < 4 {
		return false
	}
	ready, _, _ := strings.Cut(fields[3], "/")
	n, err := strconv.Atoi(ready)
	return err == nil && n > listed(strings.TrimSpace(string(online)))
}

// listed counts the numbers of a list such as "0-3,8"; what is no such list has very many.
func listed(list string) (n int) {
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.Atoi(first)
		to, lerr := strconv.Atoi(last)
		if err != nil || lerr != nil || to < from {
			return math.MaxInt
		}
		n += to - from + 1
	}
	return n
}

// followNeed measures until ctx ends, and says whenever it changes whether one processor is enough. At first it is not.
func followNeed(ctx context.Context, c clock.Clock, read func() usage, crowded func() bool, one func(bool)) {
	at, before := c.Now(), read()
	n := need{rest: calmFor, busy: at, crowded: crowded}
	if before.collections > 0 {
		n.marked = before.marking / time.Duration(before.collections)
	}
	for {
		pause := clock.UntilNext(c, n.every())
		if clock.Sleep(ctx, c, pause) != nil {
			return
		}
		now, u := c.Now(), read()
		was := n.one
		n.look(now, now.Sub(at), pause, u, before)
		if at, before = now, u; n.one != was {
			one(n.one)
			at, before = c.Now(), read() // the change may have waited for a collection of garbage
		}
	}
}

// need is what the process needs of its processors.
type need struct {
	one bool
	// changed is when one changed last, busy when one processor was too little last, and rest how long after that all stay.
	changed, busy clock.Time
	rest          time.Duration
	// Sums in which what was earlier counts less: seconds, seconds of processor time and waits over about span, looks over
	// about heldSpan. late are the looks that came late, and held those of them while the machine was not crowded.
	time, cpu, waits, long float64
	looks, late, held      float64
	// marked is the processor time of the last collection of garbage.
	marked time.Duration
	// crowded says whether the machine is.
	crowded func() bool
}

// every is how often to look.
func (n *need) every() time.Duration {
	if n.cpu > inUse*n.time {
		return lookInUse
	}
	return lookAtRest
}

// look takes in what was used in the time since the last look, which was to come after a pause.
func (n *need) look(now clock.Time, took, pause time.Duration, u, before usage) {
	sum := func(s *float64, over time.Duration, add float64) {
		*s = *s*math.Exp(-float64(took)/float64(over)) + add
	}
	sum(&n.time, span, took.Seconds())
	sum(&n.cpu, span, (u.cpu - before.cpu).Seconds())
	sum(&n.waits, span, float64(u.waits-before.waits))
	sum(&n.long, span, float64(u.long-before.long))
	sum(&n.looks, heldSpan, 1)
	late, alone := 0.0, 0.0
	if took-pause > held {
		if late = 1; !n.crowded() {
			alone = 1
		}
	}
	sum(&n.late, heldSpan, late)
	sum(&n.held, heldSpan, alone)
	if c := u.collections - before.collections; c > 0 {
		n.marked = (u.marking - before.marking) / time.Duration(c)
	}
	if took > stopped {
		n.busy = now
	}
	most := enough
	if !n.one {
		most = enoughOfAll
	}
	heldUp := n.held > max(leastHeld, mostHeld*n.looks) || n.late > max(leastHeld, mostHeldOnCrowded*n.looks)
	switch {
	case n.cpu > most*n.time, n.long > max(leastLong, mostLong*n.waits), heldUp, n.marked > mostMarked:
		n.busy = now
		if !n.one {
			return
		}
		if now.Sub(n.changed) < triedFor {
			n.rest = min(2*n.rest, mostCalmFor)
		} else {
			n.rest = max(n.rest/2, calmFor)
		}
		n.one, n.changed = false, now
	case !n.one && now.Sub(n.busy) >= n.rest:
		n.one, n.changed = true, now
	}
}
