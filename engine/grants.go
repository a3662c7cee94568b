package engine

import (
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/skeindb/skein/clock"
)

// grantAgain is after how long a refused compaction is looked at again: more may be allowed by then, though
// none has ended.
const grantAgain = 100 * time.Millisecond

// grants lets Pebble run as many compactions at a time as its CompactionConcurrencyRange allows. Pebble's own
// scheduler looks ten times a second whether one may begin, also in a store at rest, which wakes an idle
// process as often as its heartbeats do. This one looks only while a compaction waits.
//
// Pebble holds its lock while it calls TrySchedule and UpdateGetAllowedWithoutPermission, and takes it in
// GetWaitingCompaction and Schedule. So mu is not held over the latter two.
type grants struct {
	clock clock.Clock
	db    pebble.DBForCompaction // set before any other call

	mu      sync.Mutex // guards what follows
	running int
	closed  bool
	// granting says that a goroutine asks Pebble what waits; free tells the others when it has ended.
	granting bool
	free     *sync.Cond
	// again looks at what was refused; nil while nothing waits.
	again clock.Timer
}

func newGrants(c clock.Clock) *grants {
	g := &grants{clock: c}
	g.free = sync.NewCond(&g.mu)
	return g
}

// Register implements pebble.CompactionScheduler.
func (g *grants) Register(_ int, db pebble.DBForCompaction) { g.db = db }

// Unregister implements pebble.CompactionScheduler. Pebble is not called any more once it returns.
func (g *grants) Unregister() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.restLocked()
	for g.granting {
		g.free.Wait()
	}
}

// TrySchedule implements pebble.CompactionScheduler.
func (g *grants) TrySchedule() (bool, pebble.CompactionGrantHandle) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return false, nil
	case g.running < g.db.GetAllowedWithoutPermission():
		g.running++
		return true, g
	}
	g.waitLocked()
	return false, nil
}

// UpdateGetAllowedWithoutPermission implements pebble.CompactionScheduler.
func (g *grants) UpdateGetAllowedWithoutPermission() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.again != nil {
		g.again.Reset(0)
	}
}

// Started, MeasureCPU and CumulativeStats implement pebble.CompactionGrantHandle.
func (g *grants) Started()                                                {}
func (g *grants) MeasureCPU(pebble.CompactionGoroutineKind)               {}
func (g *grants) CumulativeStats(stats pebble.CompactionGrantHandleStats) {}

// Done implements pebble.CompactionGrantHandle: a compaction has ended.
func (g *grants) Done() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	g.grantLocked()
}

// look grants what was refused, if it is allowed by now.
func (g *grants) look() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.grantLocked()
}

// grantLocked grants what waits and is allowed. It looks again later unless nothing waits.
func (g *grants) grantLocked() {
	for g.granting {
		g.free.Wait()
	}
	if g.closed {
		return
	}
	g.restLocked()
	g.granting = true
	waits := true
	for waits && !g.closed && g.running < g.db.GetAllowedWithoutPermission() {
		g.mu.Unlock()
		waits, _ = g.db.GetWaitingCompaction()
		g.mu.Lock()
		if !waits {
			break
		}
		g.running++ // now, because Pebble may call Done before Schedule has returned
		g.mu.Unlock()
		taken := g.db.Schedule(g)
		g.mu.Lock()
		if !taken {
			g.running--
			break
		}
	}
	g.granting = false
	g.free.Broadcast()
	if waits && !g.closed {
		g.waitLocked()
	}
}

func (g *grants) waitLocked() {
	if g.again == nil {
		g.again = g.clock.AfterFunc(grantAgain, g.look)
	}
}

func (g *grants) restLocked() {
	if g.again != nil {
		g.again.Stop()
		g.again = nil
	}
}
