package series

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/skeindb/skein/clock"
)

const (
	// Every lies between two points.
	Every = 10 * time.Second
	// Most is how many points are kept: an hour of them.
	Most = 360
)

// kind says what becomes of a metric.
type kind uint8

const (
	gauge kind = iota // the sum over its labels
	rate              // how much it grows in a second
	p99               // the 99th percentile of what came since the last point, in milliseconds
)

// measure is a series, and the metric that it is made of.
type measure struct {
	name, metric string
	kind         kind
	unit         float64 // what the metric is multiplied by; 0 is 1
}

var measures = []measure{
	{name: "puts", metric: "etcd_mvcc_put_total", kind: rate},
	{name: "reads", metric: "etcd_mvcc_range_total", kind: rate},
	{name: "txns", metric: "etcd_mvcc_txn_total", kind: rate},
	{name: "deletes", metric: "etcd_mvcc_delete_total", kind: rate},
	{name: "events", metric: "etcd_debugging_mvcc_events_total", kind: rate},
	{name: "client_in_bytes", metric: "etcd_network_client_grpc_received_bytes_total", kind: rate},
	{name: "client_out_bytes", metric: "etcd_network_client_grpc_sent_bytes_total", kind: rate},
	{name: "slow_requests", metric: "skein_etcdapi_slow_requests_total", kind: rate},
	{name: "request_p99_ms", metric: "etcd_server_request_duration_seconds", kind: p99},
	{name: "fsync_p99_ms", metric: "etcd_disk_wal_fsync_duration_seconds", kind: p99},
	{name: "apply_p99_ms", metric: "skein_raftgroup_apply_duration_seconds", kind: p99},
	{name: "log_bytes", metric: "etcd_disk_wal_write_bytes_total", kind: rate},
	{name: "cpu_percent", metric: "process_cpu_seconds_total", kind: rate, unit: 100},
	{name: "memory_bytes", metric: "process_resident_memory_bytes"},
	{name: "disk_bytes", metric: "etcd_mvcc_db_total_size_in_bytes"},
	{name: "keys", metric: "etcd_debugging_mvcc_keys_total"},
	{name: "leaders", metric: "skein_shard_leaders"},
	{name: "groups", metric: "skein_raftgroup_groups"},
	{name: "leader_changes", metric: "skein_raftgroup_leader_changes_total", kind: rate},
	{name: "connections", metric: "skein_etcdapi_open_connections"},
	{name: "watchers", metric: "etcd_debugging_mvcc_watcher_total"},
	{name: "slow_watchers", metric: "etcd_debugging_mvcc_slow_watcher_total"},
	{name: "pending_events", metric: "etcd_debugging_mvcc_pending_events_total"},
	{name: "leases", metric: "skein_lease_leases"},
}

// Points are what a ring has, as nodes send it to one another as JSON.
type Points struct {
	// UnixMs are the points by the node's clock, in the order in which they came.
	UnixMs []int64
	// Series have a value for each point.
	Series []Series
}

// Series is one measure.
type Series struct {
	Name   string
	Values []float64
}

// Ring is the last hour of a node.
type Ring struct {
	from  prometheus.Gatherer
	clock clock.Clock

	mu sync.Mutex
	// points are the last ones, the oldest first. Guarded by mu.
	points []point
}

type point struct {
	unixMs int64
	values []float64
}

// New returns an empty ring of the metrics.
func New(from prometheus.Gatherer, c clock.Clock) *Ring { return &Ring{from: from, clock: c} }

// Run takes a point every ten seconds until ctx ends.
func (r *Ring) Run(ctx context.Context) {
	before, at := r.read(), r.clock.Now()
	for clock.Sleep(ctx, r.clock, Every) == nil {
		now, then := r.read(), r.clock.Now()
		r.add(point{r.clock.Wall().UnixMilli(), valuesOf(before, now, then.Sub(at))})
		before, at = now, then
	}
}

func (r *Ring) add(p point) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.points) == Most {
		r.points = slices.Delete(r.points, 0, 1)
	}
	r.points = append(r.points, p)
}

// After returns the points whose time is later.
func (r *Ring) After(unixMs int64) Points {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := Points{Series: make([]Series, len(measures))}
	for i, m := range measures {
		out.Series[i].Name = m.name
	}
	for _, p := range r.points {
		if p.unixMs <= unixMs {
			continue
		}
		out.UnixMs = append(out.UnixMs, p.unixMs)
		for i, v := range p.values {
			out.Series[i].Values = append(out.Series[i].Values, v)
		}
	}
	return out
}

// reading is a metric at a moment: a sum over its labels, and for a histogram how many were at most so much.
type reading struct {
	sum     float64
	buckets map[float64]uint64
	count   uint64
}

// read reads the metrics of the series. What a collector cannot say now is left out, and so reads as nothing.
func (r *Ring) read() map[string]reading {
	families, _ := r.from.Gather()
	all := make(map[string]reading, len(measures))
	for _, f := range families {
		if slices.ContainsFunc(measures, func(m measure) bool { return m.metric == f.GetName() }) {
			all[f.GetName()] = readingOf(f)
		}
	}
	return all
}

func readingOf(f *dto.MetricFamily) reading {
	out := reading{buckets: map[float64]uint64{}}
	for _, m := range f.GetMetric() {
		out.sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetUntyped().GetValue()
		out.count += m.GetHistogram().GetSampleCount()
		for _, b := range m.GetHistogram().GetBucket() {
			out.buckets[b.GetUpperBound()] += b.GetCumulativeCount()
		}
	}
	return out
}

// valuesOf are the values of all series between two moments.
func valuesOf(before, now map[string]reading, passed time.Duration) []float64 {
	values := make([]float64, len(measures))
	for i, m := range measures {
		was, is, unit := before[m.metric], now[m.metric], m.unit
		if unit == 0 {
			unit = 1
		}
		switch m.kind {
		case gauge:
			values[i] = is.sum * unit
		case rate:
			if passed > 0 {
				values[i] = max(is.sum-was.sum, 0) * unit / passed.Seconds()
			}
		case p99:
			values[i] = 1000 * percentile(was, is)
		}
		if math.IsNaN(values[i]) || math.IsInf(values[i], 0) {
			values[i] = 0 // JSON has no such number
		}
	}
	return values
}

// percentile returns the 99th of what a histogram has counted between two readings, 0 if that is nothing. It lies within
// its bucket as Prometheus has it; beyond the last bound it is that bound.
func percentile(was, is reading) float64 {
	total := float64(is.count) - float64(was.count)
	if total <= 0 {
		return 0
	}
	bounds := make([]float64, 0, len(is.buckets))
	for b := range is.buckets {
		bounds = append(bounds, b)
	}
	slices.Sort(bounds)
	rank, low, below := 0.99*total, 0.0, 0.0
	for _, high := range bounds {
		upTo := float64(is.buckets[high]) - float64(was.buckets[high])
		if upTo >= rank && !math.IsInf(high, 1) {
			return low + (high-low)*(rank-below)/max(upTo-below, 1)
		}
		if !math.IsInf(high, 1) {
			low = high
		}
		below = upTo
	}
	return low
}
