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
	// paceBytes is how many bytes per second compactions write while L0 is no higher than
	// what starts a compaction. It is four times what 20,000 puts of 256 bytes per second
	// write. So L0 shrinks again by itself, while requests keep the processors.
	paceBytes = 24 << 20
	// paceBurst is written without a wait: a small compaction ends at once.
	paceBurst = 4 << 20
	// smallSublevels is how many sublevels of small tables count as one.
	smallSublevels = 4
	// paceFreeAt is how many sublevels of L0 beyond l0Compaction end all pacing. Up to
	// there each sublevel doubles the rate.
	paceFreeAt = 4
	// paceLook is how long a reading of L0 is used, and the longest wait.
	paceLook = 200 * time.Millisecond
	paceWait = 5 * time.Millisecond
	// l0Compaction is the number of sublevels of L0 that starts a compaction. It is low
	// because a read looks into every sublevel.
	l0Compaction = 4
)

// pace spreads the work of compactions over time. A compaction of L0 merges several
// memtables at once. At full speed it would take a processor from the requests for
// seconds, every few hundred thousand puts. Pebble leaves this to the scheduler, so the
// store can slow compactions down only in their writes.
//
// Compactions never fall behind because of pacing: each excess sublevel of L0 doubles the
// rate, until pacing ends.
type pace struct {
	ctx   context.Context
	clock clock.Clock
	db    atomic.Pointer[pebble.DB] // nil until the store is open

	mu     sync.Mutex
	until  clock.Time // what was written so far is paid for by then
	rate   float64    // bytes per second
	looked clock.Time
	// sublevels reads the height of L0. Tests replace it.
	sublevels func() int
}

// newPace paces a store with memtables of that many bytes.
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

// height is the number of sublevels of L0, counting those with a table of at least half a
// full memtable. Requested flushes, as for merges, copies and drains, make small tables.
// These are merged quickly and are no sign that compactions fall behind.
func height(sublevels int, bytes, memTable int64) int {
	full := memTable / 2
	return max(min(sublevels, int((bytes+full-1)/full)), sublevels/smallSublevels)
}

// paceRate is how many bytes per second compactions may write with that many sublevels in
// L0; infinite beyond paceFreeAt.
func paceRate(sublevels int) float64 {
	over := max(0, sublevels-l0Compaction)
	if over >= paceFreeAt {
		return math.Inf(1)
	}
	return float64(int(paceBytes) << over)
}

// wrote waits until n more bytes are due, at most until the store is closed. It adds
// waits that are too short for a timer to the next one.
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
