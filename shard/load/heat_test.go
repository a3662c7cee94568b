package load

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/load/heat"
)

// heated is a host whose meter has a heat map, and what that has kept.
type heated struct {
	*host
	mu      sync.Mutex
	minutes map[int64]heat.Counts
	flushes atomic.Int64
}

func (h *heated) Flush(context.Context) error {
	h.flushes.Add(1)
	return nil
}

// sum is what was kept of all minutes.
func (h *heated) sum() (all heat.Counts, minutes int) {
	h.meter.cfg.Heat.Flush()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.minutes {
		all.Writes, all.Reads, all.Bytes = all.Writes+c.Writes, all.Reads+c.Reads, all.Bytes+c.Bytes
	}
	return all, len(h.minutes)
}

// heatedHost runs a test with a leader of everything and a heat map. The test ends the meter by stop.
func heatedHost(t *testing.T, test func(t *testing.T, h *heated, stop func())) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &heated{host: &host{state: State{Generation: 1, Leads: true}}, minutes: map[int64]heat.Counts{}}
		h.meter = NewMeter(Config{
			Clock: clock.Virtual(), Store: h, MaxBytes: -1, MaxLoad: -1, Some: func(int) []*Range { return nil }, Metrics: NewMetrics(nil),
			Heat: heat.NewRecorder(func(at int64, c heat.Column) {
				h.mu.Lock()
				defer h.mu.Unlock()
				all := h.minutes[at]
				for _, cell := range c {
					all.Writes, all.Reads, all.Bytes = all.Writes+cell.Writes, all.Reads+cell.Reads, all.Bytes+cell.Bytes
				}
				h.minutes[at] = all
			}),
		})
		h.r = h.meter.Range(1, &h.host.mu, h, zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { h.meter.Run(ctx) })
		stop := sync.OnceFunc(func() {
			cancel()
			wg.Wait()
		})
		test(t, h, stop)
		stop()
	})
}

// request counts a request of each kind.
func (h *heated) request(key string) {
	h.host.mu.Lock()
	defer h.host.mu.Unlock()
	span := keyspace.Single([]byte(key))
	if h.r.Wrote(100) {
		h.r.Look(Request{Span: span, Writes: true, Bytes: 100})
	}
	if h.r.Read() {
		h.r.Look(Request{Span: span})
	}
	if h.r.ReadHere() {
		h.r.Look(Request{Span: span})
	}
}

// The heat map gets each request once: over minutes, over rests, without samples, and up to the end. Reads of followers are no
// load by which a range is split, and are in the map.
func TestHeatGetsEachRequest(t *testing.T) {
	heatedHost(t, func(t *testing.T, h *heated, stop func()) {
		var made uint64
		check := func(what string) {
			t.Helper()
			if got, _ := h.sum(); got != (heat.Counts{Writes: made, Reads: 2 * made, Bytes: 100 * made}) {
				t.Errorf("%s: %v of %d requests of each kind", what, got, made)
			}
		}
		for i := range 1000 {
			h.request(fmt.Sprintf("k%03d", i))
			made++
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(2 * time.Second)
		check("slow")
		for range 3 {
			for range 100_000 {
				h.request("k")
				made++
			}
			time.Sleep(time.Second)
		}
		time.Sleep(2 * time.Second)
		check("quick")
		time.Sleep((restTicks + 2) * tick)
		synctest.Wait()
		h.set(func() {
			if h.r.metered {
				t.Error("it is measured at rest")
			}
		})
		h.request("k")
		made++
		time.Sleep(2 * time.Second)
		check("behind a rest")
		h.set(func() { h.state.Leads = false })
		for range 100 {
			h.host.mu.Lock()
			if h.r.ReadHere() {
				h.r.Look(Request{Span: keyspace.Single([]byte("k"))})
			}
			h.host.mu.Unlock()
		}
		time.Sleep(2 * time.Second)
		got, minutes := h.sum()
		if got.Reads != 2*made+100 || minutes < 3 {
			t.Errorf("a follower's reads: %v in %d minutes", got, minutes)
		}
		for range 7 {
			h.request("k")
			made++
		}
		stop()
		if got, _ := h.sum(); got.Writes != made || got.Reads != 2*made+100 {
			t.Errorf("at the end: %v, and %d requests were made", got, made)
		}
	})
}

// A range that ends, as one that is absorbed by its neighbour, hands on what it has served.
func TestHeatOfARangeThatEnds(t *testing.T) {
	heatedHost(t, func(t *testing.T, h *heated, _ func()) {
		h.request("k")
		time.Sleep(3 * time.Second)
		h.request("k")
		h.set(func() { h.state.Stopped = true })
		time.Sleep(3 * time.Second)
		if got, _ := h.sum(); got.Writes != 2 {
			t.Errorf("%v of 2 writes", got)
		}
	})
}

// The store is asked to write what it has of the map if it does not by itself, and not at rest.
func TestHeatIsSaved(t *testing.T) {
	heatedHost(t, func(t *testing.T, h *heated, _ func()) {
		for range 11 * 60 {
			h.request("k")
			time.Sleep(time.Second)
		}
		if n := h.flushes.Load(); n < 2 || n > 11 {
			t.Errorf("%d flushes in 11 minutes", n)
		}
		before := h.flushes.Load()
		for range 11 * 60 {
			h.request("k")
			h.meter.Flushed()
			time.Sleep(time.Second)
		}
		time.Sleep(time.Hour)
		if n := h.flushes.Load() - before; n > 1 {
			t.Errorf("%d flushes though the store writes by itself", n)
		}
	})
}

// BenchmarkTally counts writes as a leader does for each put, with a heat map and without.
func BenchmarkTally(b *testing.B) {
	for name, of := range map[string]*heat.Recorder{"without": nil, "with": heat.NewRecorder(func(int64, heat.Column) {})} {
		b.Run(name, func(b *testing.B) {
			h := &host{state: State{Generation: 1, Leads: true}}
			m := NewMeter(Config{Clock: clock.System(), Store: h, MaxBytes: -1, MaxLoad: -1, Some: func(int) []*Range { return nil }, Metrics: NewMetrics(nil), Heat: of})
			h.r = m.Range(1, &h.mu, h, zap.NewNop())
			q := Request{Span: keyspace.Single([]byte("/registry/pods/default/some-pod-name")), Writes: true, Bytes: 256}
			n, began := 0, measure.CPU()
			for b.Loop() {
				h.mu.Lock()
				if h.r.Wrote(256) {
					h.r.Look(q)
				}
				h.mu.Unlock()
				// A leader of 100,000 puts a second, whose meter ticks.
				if n++; n%100_000 == 0 {
					m.turnHeat(b.Context(), 0)
					m.serve(&h.r)
				}
			}
			b.ReportMetric(float64(measure.CPU()-began)/float64(n), "cpu-ns/op")
		})
	}
}
