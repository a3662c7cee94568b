package engine

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/skeindb/skein/clock"
)

const (
	// paceBytes is how many bytes per second compactions write while L0 is no higher
	// than what starts a compaction. Four times what 20,000 puts of 256 bytes per
	// second bring to a node: fast enough to come down again by itself, slow enough
	// to leave the processors to the requests.
	paceBytes = 24 << 20
	// paceBurst is written without a wait: a small compaction is over at once.
	paceBurst = 4 << 20
	// smallSublevels is how many sublevels of small tables count as one.
	smallSublevels = 4
	// paceFreeAt is how many sublevels of L0 beyond l0Compaction end all pacing. Up
	// to there each doubles the rate.
	paceFreeAt = 4
	// paceLook is how long a look at L0 holds, and the longest wait.
	paceLook = 200 * time.Millisecond
	paceWait = 5 * time.Millisecond
	// l0Compaction is the number of sublevels of L0 that starts a compaction. A read
	// looks into every sublevel, so that compaction begins early.
	l0Compaction = 4
)

// pace spreads the work of compactions over time. A compaction of L0 merges some
// memtables at once, and at full speed it takes a processor from the requests for
// seconds, every few hundred thousand puts. Pebble leaves that to the scheduler;
// writing is the one place where the store can slow it down.
//
// Compactions never fall behind for it: the rate doubles with each sublevel that L0
// is too high, and soon there is none.
type pace struct {
	ctx   context.Context
	clock clock.Clock
	db    atomic.Pointer[pebble.DB] // nil until the store is open

	mu     sync.Mutex
	until  clock.Time // what was written so far is paid for by then
	rate   float64    // bytes per second
	looked clock.Time
	// sublevels looks at L0. For tests.
	sublevels func() int
}

// newPace paces a store whose memtables have so many bytes.
func newPace(ctx context.Context, c clock.Clock, memTable int64) *pace {
	p := &pace{ctx: ctx, clock: c, until: math.MinInt64}
	p.sublevels = func() int {
		if db := p.db.Load(); db != nil {
			l0 := &db.Metrics().Levels[0]
			return height(int(l0.Sublevels), l0.TablesSize, memTable)
		}
		return 0
	}
	return p
}

// height is how many sublevels L0 has where each is the table of a full memtable, half as
// large as that at least. Those of flushes that were asked for (merges, copies and drains ask
// for some one after the other) are small: they are merged in no time, and say nothing of
// more being written than compactions keep up with.
func height(sublevels int, bytes, memTable int64) int {
	full := memTable / 2
	return max(min(sublevels, int((bytes+full-1)/full)), sublevels/smallSublevels)
}

// paceRate is how many bytes per second compactions may write while L0 has so many
// sublevels; infinite beyond paceFreeAt.
func paceRate(sublevels int) float64 {
	over := max(0, sublevels-l0Compaction)
	if over >= paceFreeAt {
		return math.Inf(1)
	}
	return float64(int(paceBytes) << over)
}

// wrote waits until n more bytes are due, at most until the store is closed. Waits
// that are too short for a timer are left for the next call.
func (p *pace) wrote(n int) {
	if d := p.charge(n); d >= paceWait {
		_ = clock.Sleep(p.ctx, p.clock, d)
	}
}

// charge returns how long the writer of n bytes has to wait.
func (p *pace) charge(n int) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.Now()
	if p.rate == 0 || now.Sub(p.looked) >= paceLook {
		p.rate, p.looked = paceRate(p.sublevels()), now
	}
	if math.IsInf(p.rate, 1) {
		p.until = now
		return 0
	}
	takes := func(bytes int) time.Duration { return time.Duration(float64(bytes) / p.rate * float64(time.Second)) }
	p.until = max(p.until, now.Add(-takes(paceBurst))).Add(takes(n))
	return min(p.until.Sub(now), paceLook)
}
