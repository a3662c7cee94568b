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
	"github.com/skeindb/skein/internal/background"
)

// UseMemoryBudget has the garbage collector use as much of the process's memory budget as saves work: garbage
// may be what the process allocates within garbageFor, but mostGarbage at most. By default Go lets garbage grow
// with the live heap. Then a busy small heap is collected all the time, which takes a seventh of a node's CPU.
// Three nodes took 79 µs of CPU per put with Go's 100 and 69 µs with 400 (medians of three runs by turns). A
// fixed higher percentage would have a large heap, of 10,000 ranges, take five times what it needs, and a fixed
// amount would have a node with little to do keep garbage for nothing. Few collections also help latency: a
// collection takes all idle processors and more, and requests wait meanwhile. GOGC and GOMEMLIMIT win. The
// returned function ends it.
func UseMemoryBudget(budgetBytes int64) (stop func()) {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(budgetBytes + budgetBytes/4)
	}
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { paceCollector(ctx, clock.System(), budgetBytes) })
	return func() {
		cancel()
		wg.Wait()
	}
}

// The bounds of a heap's growth before a collection, in percent of the live heap. A heap of a few
// MiB has just begun to grow and is no measure. Go's own 100 is the least of a heap up to
// largeHeapBytes. startGCPercent is the setting of a new process.
const (
	maxGCPercent   = 4000
	startGCPercent = 400
	minGCPercent   = 100
	// A larger heap may grow by half, or by largeHeapBytes. Without cgo the block cache is in it, and as much garbage
	// again would double the process.
	minLargeGCPercent = 50
	largeHeapBytes    = 128 << 20
	// leastGarbage may be there at any load, but for the smallest budgets. A heap of 40 MiB, of a
	// small store, is collected in some 30 ms of CPU.
	leastGarbage = 32 << 20
	// garbageFor is how long a process allocates between two collections, within the bounds.
	garbageFor = 4 * time.Second
	// pacePeriod is how often the collector is set.
	pacePeriod = 2 * time.Second
	// idlePeriod is after how long without a collection one is made all the same, and what
	// it frees is given back: a node without work takes no longer to make little garbage.
	// Less room for garbage would give it back as well, but a node whose work begins would
	// collect a heap of few MiB twenty times a second until the next pacePeriod.
	idlePeriod = time.Minute
)

// mostGarbage returns how much garbage there may be beside a heap with so many living bytes: a quarter of the budget, and a
// sixth where the heap is large.
func mostGarbage(liveBytes uint64, budgetBytes int64) int64 {
	if liveBytes > largeHeapBytes {
		return budgetBytes / 6
	}
	return budgetBytes / 4
}

// paceCollector keeps the garbage near what is allocated within garbageFor, and below mostGarbage,
// until ctx ends. The least that a heap may grow comes first.
func paceCollector(ctx context.Context, c clock.Clock, budgetBytes int64) {
	percent := startGCPercent
	debug.SetGCPercent(percent)
	heap := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/cycles/total:gc-cycles"}, {Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(heap)
	allocs, garbage := heap[2].Value.Uint64(), int64(0)
	cycles, collected := uint64(0), c.Now()
	for clock.Sleep(ctx, c, pacePeriod) == nil {
		metrics.Read(heap)
		garbage = garbageBytes(garbage, int64(heap[2].Value.Uint64()-allocs), mostGarbage(heap[0].Value.Uint64(), budgetBytes))
		allocs = heap[2].Value.Uint64()
		if n := heap[1].Value.Uint64(); n != cycles {
			cycles, collected = n, c.Now()
		} else if c.Now().Sub(collected) >= idlePeriod {
			background.RunBeside(debug.FreeOSMemory) // begins with a collection
			continue
		}
		want := gcPercent(heap[0].Value.Uint64(), garbage)
		// Setting it stops the program for a moment.
		if math.Abs(float64(want-percent)) >= float64(percent)/8 {
			percent = want
			debug.SetGCPercent(percent)
		}
	}
}

// garbageBytes returns how much garbage there may be, after it was before and so many bytes were allocated in a
// pacePeriod. It grows at once and falls by halves: load comes in bursts.
func garbageBytes(before, allocated, most int64) int64 {
	return min(max(allocated*int64(garbageFor/pacePeriod), before/2, leastGarbage), most)
}

// gcPercent returns by how much a heap with so many living bytes may grow until it is
// collected.
func gcPercent(liveBytes uint64, garbageBytes int64) int {
	if liveBytes == 0 {
		return startGCPercent
	}
	live := float64(liveBytes)
	least := max(min(live*minGCPercent/100, largeHeapBytes), live*minLargeGCPercent/100)
	return int(min(max(float64(garbageBytes), least)/live*100, maxGCPercent))
}
