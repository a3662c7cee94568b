package watch

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// A revision larger than a page, in several ranges, comes whole to a lagging watcher. One beyond
// the bound cancels that watcher and nobody else. One at a time may be four times as large, so one
// of several watchers waits.
func TestLaggingWatcherGetsALargeRevisionWhole(t *testing.T) {
	for _, bound := range []int64{64 << 20, 1000, 300} {
		change := func(c *Config) { c.RecentBytes, c.PendingBytes, c.RevisionBytes = 1, 1, bound }
		quiet(t, change, func(t *testing.T, w *world, h *Hub) {
			w.write("c0")
			w.wg.Wait()
			w.mu.Lock()
			w.pageRevs = 1
			large := w.rev + 1
			w.mu.Unlock()
			w.write("aa", "ab", "ac", "ad", "ae", "af", "ag", "ah", "ai", "aj")
			w.wg.Wait()
			w.write("aa")
			w.wg.Wait()
			time.Sleep(time.Second)
			s := h.NewStream()
			defer s.Close()
			all, _, err := s.Watch(t.Context(), 1, Request{Start: 2})
			if err != nil {
				t.Fatal(err)
			}
			later, _, err := s.Watch(t.Context(), 2, Request{Start: large + 1})
			if err != nil {
				t.Fatal(err)
			}
			most, _, err := s.Watch(t.Context(), 3, Request{Span: keyspace.Span{Start: []byte("aa"), End: []byte("aj")}, Start: 2})
			if err != nil {
				t.Fatal(err)
			}
			got := map[*Watcher]int{}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			ended := map[*Watcher]bool{}
			for got[later] == 0 || (got[all] < 12 || got[most] < 10) && (!ended[all] || !ended[most]) {
				d, err := s.Next(ctx)
				if err != nil {
					t.Fatalf("with a bound of %d: %v, %v", bound, got, err)
				}
				if n := len(d.Events); n > 0 && d.Events[0].Kv.ModRevision == int64(large) && (n < 9 || d.Watcher == all && n < 10) {
					t.Errorf("%d of 10 events of a revision", n)
				}
				got[d.Watcher] += len(d.Events)
				if d.TooLarge != 0 {
					ended[d.Watcher] = true
					if d.TooLarge != large || d.Watcher == later || d.Watcher == all && got[all] != 1 || got[most] != 0 {
						t.Errorf("watcher %d ended at revision %d after %v events", d.Watcher.ID, d.TooLarge, got)
					}
				}
			}
			if ended[all] != (bound == 300) || ended[most] != (bound == 300) || h.largest.Load() {
				t.Errorf("with a bound of %d watchers ended: %v, a large one is being read: %t", bound, ended, h.largest.Load())
			}
		})
	}
}

// lateClock has timers that are a little late, like real ones.
type lateClock struct{ clock.Clock }

type lateTimer struct{ clock.Timer }

const late = 400 * time.Microsecond

func (c lateClock) NewTimer(d time.Duration) clock.Timer {
	return lateTimer{c.Clock.NewTimer(d + late)}
}

func (t lateTimer) Reset(d time.Duration) bool { return t.Timer.Reset(d + late) }

// A feeding replica that applies nothing any more is left for the leader, even if the leader is
// asked again and again and resolves more each time. The next question is due with the fourth tick
// after the one before, just before its answer is as old. A deadline counted from the last answer
// would never come.
func TestReplicaThatIsStuckIsLeft(t *testing.T) {
	const (
		answer = tick / 2
		every  = 500 * time.Microsecond
		writes = 4000
	)
	quiet(t, func(c *Config) { c.Clock = lateClock{c.Clock} }, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		o := watchAll(ctx, h, &wg, &observer{name: "all"})
		w.mu.Lock()
		r := w.of("aa")
		r.leader, r.at[2] = 2, len(r.log)
		w.stuck, w.slowest, w.answer = 1, 200*time.Microsecond, answer
		w.mu.Unlock()
		for range writes {
			w.write("aa")
			time.Sleep(every)
		}
		if o.count() < writes*3/4 {
			t.Errorf("%d of %d events were told while they were written", o.count(), writes)
		}
		cancel()
		wg.Wait()
	})
}
