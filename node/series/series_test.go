package series

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/clock"
)

// A ring has a point every ten seconds, of what has happened since the one before, and no more than an hour of them.
func TestRing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		puts := prometheus.NewCounter(prometheus.CounterOpts{Name: "etcd_mvcc_put_total", Help: "x"})
		watchers := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "etcd_debugging_mvcc_watcher_total", Help: "x"}, []string{"a"})
		fsync := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "etcd_disk_wal_fsync_duration_seconds", Help: "x", Buckets: []float64{0.001, 0.002, 0.004}})
		reg.MustRegister(puts, watchers, fsync)
		puts.Add(1e6) // before the ring begins
		fsync.Observe(10)
		r := New(reg, clock.Virtual())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		defer func() { cancel(); <-done }()
		synctest.Wait()

		puts.Add(50)
		watchers.WithLabelValues("x").Set(3)
		watchers.WithLabelValues("y").Set(4)
		for range 100 {
			fsync.Observe(0.0015)
		}
		time.Sleep(Every + time.Millisecond)
		first := r.After(0)
		want(t, first, 0, "puts", 5)
		want(t, first, 0, "watchers", 7)
		want(t, first, 0, "fsync_p99_ms", 1.99)
		want(t, first, 0, "reads", 0) // there is no such metric here

		time.Sleep(Every) // nothing happens
		later := r.After(first.UnixMs[0])
		want(t, later, 0, "puts", 0)
		want(t, later, 0, "watchers", 7)
		want(t, later, 0, "fsync_p99_ms", 0)
		if len(later.UnixMs) != 1 || later.UnixMs[0] != first.UnixMs[0]+Every.Milliseconds() {
			t.Errorf("points at %v, the first at %v", later.UnixMs, first.UnixMs)
		}

		time.Sleep(2 * Most * Every)
		if all := r.After(0); len(all.UnixMs) != Most || len(all.Series) != 24 || len(all.Series[23].Values) != Most {
			t.Errorf("%d points of %d series", len(all.UnixMs), len(all.Series))
		}
	})
}

func want(t *testing.T, p Points, at int, name string, v float64) {
	t.Helper()
	for _, s := range p.Series {
		if s.Name == name {
			if got := s.Values[at]; fmt.Sprintf("%.4g", got) != fmt.Sprintf("%.4g", v) {
				t.Errorf("%s is %v, want %v", name, got, v)
			}
			return
		}
	}
	t.Errorf("there is no series %s", name)
}

// A percentile beyond the last bound is that bound, and of a histogram that has begun anew it is nothing.
func TestPercentile(t *testing.T) {
	is := reading{buckets: map[float64]uint64{1: 0, 2: 10}, count: 100}
	if got := percentile(reading{}, is); got != 2 {
		t.Errorf("beyond the last bound: %v", got)
	}
	if got := percentile(is, reading{}); got != 0 {
		t.Errorf("begun anew: %v", got)
	}
}
