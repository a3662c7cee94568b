package process

import (
	"context"
	"runtime"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
)

func TestGCPercent(t *testing.T) {
	const mib = 1 << 20
	for _, test := range []struct {
		live    uint64
		garbage int64
		want    int
	}{
		{0, 256 * mib, 400},
		{4 * mib, 256 * mib, 4000}, // a young heap
		{10 * mib, 256 * mib, 2560},
		{64 * mib, 256 * mib, 400},
		{128 * mib, 256 * mib, 200},
		{200 * mib, 256 * mib, 128},
		{800 * mib, 480 * mib, 60},
		{800 * mib, 32 * mib, 50}, // caches, and little load
		{256 * mib, 32 * mib, 50},
		{128 * mib, 32 * mib, 100},
		{64 * mib, 0, 100}, // a tiny budget
	} {
		if got := gcPercent(test.live, test.garbage); got != test.want {
			t.Errorf("%d living bytes: %d %%, want %d", test.live, got, test.want)
		}
	}
}

// TestGarbageBytes: garbage follows the load, at once up and by halves down, within its bounds.
func TestGarbageBytes(t *testing.T) {
	const mib = 1 << 20
	for _, test := range []struct{ before, allocated, most, want int64 }{
		{0, 0, 256 * mib, leastGarbage},
		{0, 50 * mib, 256 * mib, 100 * mib},
		{100 * mib, 60 * mib, 256 * mib, 120 * mib},
		{100 * mib, 40 * mib, 256 * mib, 80 * mib},
		{100 * mib, 10 * mib, 256 * mib, 50 * mib}, // a pause
		{40 * mib, 0, 256 * mib, leastGarbage},     // no load
		{0, 500 * mib, 256 * mib, 256 * mib},       // all that the budget has
		{0, 0, 16 * mib, 16 * mib},                 // a tiny budget
	} {
		if got := garbageBytes(test.before, test.allocated, test.most); got != test.want {
			t.Errorf("%d MiB after %d and %d allocated, at most %d: want %d", got/mib, test.before/mib, test.allocated/mib, test.most/mib, test.want/mib)
		}
	}
}

// TestPaceCollector: the setting follows the heap.
func TestPaceCollector(t *testing.T) {
	before := debug.SetGCPercent(-1)
	defer debug.SetGCPercent(before)
	runtime.GC() // what lives is known from here on
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			paceCollector(ctx, clock.Virtual(), 0)
		}()
		synctest.Wait()
		if got := debug.SetGCPercent(startGCPercent); got != startGCPercent {
			t.Errorf("begins with %d", got)
		}
		time.Sleep(2 * pacePeriod)
		synctest.Wait()
		if got := debug.SetGCPercent(startGCPercent); got != minGCPercent {
			t.Errorf("%d for a heap far beyond what garbage may take", got)
		}
		cancel()
		<-done
	})
}

// A program that allocates next to nothing gives its memory back once a minute, and may make
// as much garbage as any other when its work begins.
func TestIdleCollector(t *testing.T) {
	before := debug.SetGCPercent(-1)
	defer debug.SetGCPercent(before)
	runtime.GC()
	synctest.Test(t, func(t *testing.T) {
		var stats runtime.MemStats
		forced := func() uint32 {
			runtime.ReadMemStats(&stats)
			return stats.NumForcedGC
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			paceCollector(ctx, clock.Virtual(), 1<<40)
		}()
		began := forced()
		for minutes := range uint32(4) {
			if got := forced() - began; got > minutes || got+1 < minutes {
				t.Errorf("%d collections in %d minutes without work", got, minutes)
			}
			time.Sleep(idlePeriod + pacePeriod)
			synctest.Wait()
		}
		if forced() == began {
			t.Error("no collection")
		}
		if got := debug.SetGCPercent(startGCPercent); got != maxGCPercent {
			t.Errorf("%d %% for a program that allocates next to nothing, want %d", got, maxGCPercent)
		}
		cancel()
		<-done
	})
}
