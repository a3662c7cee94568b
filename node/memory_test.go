package node

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
		live, allocated uint64
		garbage         int64
		want            int
	}{
		{0, 100 * mib, 256 * mib, 400},
		{4 * mib, 100 * mib, 256 * mib, 4000}, // a young heap
		{10 * mib, 100 * mib, 256 * mib, 2560},
		{64 * mib, 100 * mib, 256 * mib, 400},
		{128 * mib, 100 * mib, 256 * mib, 200},
		{200 * mib, 100 * mib, 256 * mib, 128},
		{800 * mib, 100 * mib, 256 * mib, 100},
		{64 * mib, 100 * mib, 0, 100}, // a tiny budget
		{128 * mib, 9 * mib, 256 * mib, 200},
		{128 * mib, 8 * mib, 256 * mib, 50}, // 30 times 8 MiB a minute
		{8 * mib, 0, 256 * mib, 50},
	} {
		if got := gcPercent(test.live, test.allocated, test.garbage); got != test.want {
			t.Errorf("%d living bytes, %d allocated: %d %%, want %d", test.live, test.allocated, got, test.want)
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

func TestIdleCollector(t *testing.T) {
	before := debug.SetGCPercent(-1)
	defer debug.SetGCPercent(before)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			paceCollector(ctx, clock.Virtual(), 1<<40)
		}()
		time.Sleep(2 * pacePeriod)
		synctest.Wait()
		if got := debug.SetGCPercent(startGCPercent); got != idleGCPercent {
			t.Errorf("%d for a program that allocates next to nothing", got)
		}
		cancel()
		<-done
	})
}
