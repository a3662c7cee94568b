package shard

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/pipeline"
	"github.com/skeindb/skein/shard/rangefeed"
)

// Metrics are the package's metrics, summed over all replicas of the node.
type Metrics struct {
	leaders, replicas, doubts         prometheus.Gauge
	committed, failed                 prometheus.Counter
	noops                             prometheus.Counter
	readWaits, readRestarts           prometheus.Counter
	splits, merges, maintenanceErrors prometheus.Counter
	pushes, tablesDropped             prometheus.Counter
	applied                           prometheus.Counter
	resolvedQuestions                 prometheus.Counter
	requestSeconds                    *prometheus.HistogramVec
	pipeline                          *pipeline.Metrics
	reads                             *eval.ReadMetrics
	load                              *load.Metrics
	feeds                             *rangefeed.Metrics
	// readSeconds and writeSeconds are those of requestSeconds.
	readSeconds, writeSeconds prometheus.Observer

	// What etcd says of its compactions, under its names.
	removePauses, removeTotals prometheus.Histogram
	removedLast, compacted     prometheus.Gauge
	removed                    prometheus.Counter

	// scraped are asked at each scrape; NewStore sets them.
	scraped atomic.Pointer[scraped]
}

// scraped are figures of etcd's that a Store has in other forms.
type scraped struct {
	floor func() keyspace.Revision
	keys  func() int64
}

// NewMetrics makes the metrics and registers them, if reg is not nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &Metrics{
		leaders:           gauge("skein_shard_leaders", "Ranges that this node leads."),
		replicas:          gauge("skein_shard_replicas", "Replicas of ranges on this node."),
		doubts:            gauge("skein_shard_replicas_in_doubt", "Replicas that answer nothing: replicas of their range have different hashes, and no majority agrees yet."),
		committed:         counter("skein_shard_writes_answered_total", "Requests of the pipeline that were answered without an error."),
		failed:            counter("skein_shard_writes_failed_total", "Requests of the pipeline that were answered with an error."),
		noops:             counter("skein_shard_entries_without_effect_total", "Entries that were applied as no-ops."),
		readWaits:         counter("skein_shard_read_waits_total", "Reads that waited for a change under way."),
		readRestarts:      counter("skein_shard_read_restarts_total", "Reads that started over."),
		splits:            counter("skein_shard_splits_total", "Splits that were applied here."),
		merges:            counter("skein_shard_merges_total", "Ranges that were absorbed by a neighbour here."),
		maintenanceErrors: counter("skein_shard_maintenance_errors_total", "Steps of maintenance that failed."),
		pushes:            counter("skein_shard_pushes_total", "Locks about which their transaction's coordinator was asked."),
		tablesDropped:     counter("skein_shard_bad_tables_dropped_total", "Bad tables, or parts of them, that were dropped from the store because no replica has keys in them."),
		applied:           counter("skein_shard_applied_transactions_total", "Transactions that were applied."),
		resolvedQuestions: counter("skein_shard_resolved_questions_total",
			"Questions for a range's resolved revision."),
		requestSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "skein_shard_request_seconds", Help: "From arrival to answer.",
			Buckets: prometheus.ExponentialBuckets(0.00005, 2, 20),
		}, []string{"kind"}),
	}
	m.pipeline, m.reads = pipeline.NewMetrics(reg), eval.NewReadMetrics(reg)
	m.load, m.feeds = load.NewMetrics(reg), rangefeed.NewMetrics(reg)
	m.addCompaction(reg)
	m.readSeconds, m.writeSeconds = m.requestSeconds.WithLabelValues("read"), m.requestSeconds.WithLabelValues("write")
	if reg != nil {
		reg.MustRegister(m.leaders, m.replicas, m.doubts, m.tablesDropped, m.committed, m.failed,
			m.noops, m.readWaits, m.readRestarts,
			m.splits, m.merges, m.maintenanceErrors, m.applied, m.pushes,
			m.requestSeconds, m.resolvedQuestions)
	}
	return m
}

// addCompaction makes and registers the metrics that have etcd's names, and its odd
// buckets: milliseconds, of which its dashboards know.
func (m *Metrics) addCompaction(reg prometheus.Registerer) {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "etcd_debugging", Subsystem: "mvcc", Name: name, Help: help}
	}
	millis := func(name, help string, first float64, count int) prometheus.Histogram {
		o := opts(name, help)
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: o.Namespace, Subsystem: o.Subsystem, Name: o.Name, Help: o.Help,
			Buckets: prometheus.ExponentialBuckets(first, 2, count),
		})
	}
	m.removePauses = millis("db_compaction_pause_duration_milliseconds", "One step of removing old versions.", 1, 13)
	m.removeTotals = millis("db_compaction_total_duration_milliseconds", "Removing the old versions of all ranges on this node that a compaction lets go.", 100, 14)
	m.removedLast = prometheus.NewGauge(prometheus.GaugeOpts(opts("db_compaction_last", "The unix time at which a range's old versions were last removed. Resets to 0 on start.")))
	m.removed = prometheus.NewCounter(prometheus.CounterOpts(opts("db_compaction_keys_total", "Old versions that were removed.")))
	asked := func(name, help string, value func(*scraped) int64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts(opts(name, help)), func() float64 {
			if s := m.scraped.Load(); s != nil {
				return float64(value(s))
			}
			return 0
		})
	}
	revision := asked("current_revision", "The current revision of the store, as far as this node has heard.", func(s *scraped) int64 { return max(1, int64(s.floor())) })
	keys := asked("keys_total", "Keys of the ranges that this node leads. Those that are being counted are left out.", func(s *scraped) int64 { return s.keys() })
	m.compacted = prometheus.NewGauge(prometheus.GaugeOpts(opts("compact_revision", "The compacted revision as far as this node has heard, -1 before the first compaction.")))
	if reg != nil {
		reg.MustRegister(m.removePauses, m.removeTotals, m.removedLast, m.removed, m.compacted, revision, keys)
	}
}
