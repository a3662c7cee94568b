package process

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// UseMemoryBudget has the garbage collector use the process's memory budget instead of
// saving memory that nobody else gets: a quarter of it may be garbage. By default Go lets
// garbage grow with the live heap. Then a busy small heap is collected all the time, which
// takes a seventh of a node's CPU. Three nodes took 79 µs of CPU per put with Go's 100 and
// 69 µs with 400 (medians of three runs by turns). A fixed higher percentage would have a
// large heap, of 10,000 ranges, take five times what it needs. Few collections also help
// latency: a collection takes all idle processors and more, and requests wait meanwhile.
// GOGC and GOMEMLIMIT win. The returned function ends it.
func UseMemoryBudget(budgetBytes int64) (stop func()) {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(budgetBytes + budgetBytes/4)
	}
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { paceCollector(ctx, clock.System(), budgetBytes/4) })
	return func() {
		cancel()
		wg.Wait()
	}
}

// The bounds of a heap's growth before a collection, in percent of the live heap. A heap of a few
// MiB has just begun to grow and is no measure; Go's own 100 is the least. startGCPercent is the
// setting of a new process.
const (
	maxGCPercent   = 4000
	startGCPercent = 400
	minGCPercent   = 100
	// pacePeriod is how often the collector is set.
	pacePeriod = 2 * time.Second
	// idlePeriod is after how long without a collection one is made all the same, and what
	// it frees is given back: a node without work takes no longer to make little garbage.
	// Less room for garbage would give it back as well, but a node whose work begins would
	// collect a heap of few MiB twenty times a second until the next pacePeriod.
	idlePeriod = time.Minute
)

// paceCollector keeps the garbage near garbageBytes until ctx ends.
func paceCollector(ctx context.Context, c clock.Clock, garbageBytes int64) {
	percent := startGCPercent
	debug.SetGCPercent(percent)
	heap := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/cycles/total:gc-cycles"}}
	cycles, collected := uint64(0), c.Now()
	for clock.Sleep(ctx, c, pacePeriod) == nil {
		metrics.Read(heap)
		if n := heap[1].Value.Uint64(); n != cycles {
			cycles, collected = n, c.Now()
		} else if c.Now().Sub(collected) >= idlePeriod {
			debug.FreeOSMemory() // begins with a collection
			continue
		}
		want := gcPercent(heap[0].Value.Uint64(), garbageBytes)
		// Setting it stops the program for a moment.
		if math.Abs(float64(want-percent)) >= float64(percent)/8 {
			percent = want
			debug.SetGCPercent(percent)
		}
	}
}

// gcPercent returns by how much a heap with so many living bytes may grow until it is
// collected.
func gcPercent(liveBytes uint64, garbageBytes int64) int {
	if liveBytes == 0 {
		return startGCPercent
	}
	return int(min(max(float64(garbageBytes)/float64(liveBytes)*100, minGCPercent), maxGCPercent))
}
