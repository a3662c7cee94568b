package wal

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the log's figures. A Metrics serves one Log.
type Metrics struct {
	fsyncSeconds   prometheus.Histogram
	writtenBytes   prometheus.Gauge
	batchBytes     prometheus.Histogram
	appendsPerSync prometheus.Histogram
	liveBytes      prometheus.Gauge
	targetBytes    prometheus.Gauge
	segments       *prometheus.GaugeVec
	queueBytes     prometheus.Gauge
	cacheBytes     prometheus.Gauge
	diskReads      prometheus.Counter
	rewritten      prometheus.Counter
	full           prometheus.Gauge
}

// NewMetrics makes the metrics and registers them; a nil registerer leaves them
// unregistered.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "skein", Subsystem: "wal", Name: name, Help: help}
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "skein", Subsystem: "wal", Name: name, Help: help, Buckets: buckets,
		})
	}
	m := &Metrics{
		// Name and buckets are etcd's, whose dashboards and alerts read it.
		fsyncSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "etcd", Subsystem: "disk", Name: "wal_fsync_duration_seconds",
			Help:    "The latency distributions of fsync called by WAL.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
		// A gauge because it is one in etcd.
		writtenBytes: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "etcd", Subsystem: "disk", Name: "wal_write_bytes_total", Help: "Total number of bytes written in WAL.",
		}),
		batchBytes: histogram("batch_bytes", "Bytes of one write to the log, which serves every group that was waiting.",
			prometheus.ExponentialBuckets(128, 4, 10)),
		appendsPerSync: histogram("appends_per_fsync", "Records that one fsync made durable.",
			prometheus.ExponentialBuckets(1, 2, 16)),
		liveBytes: prometheus.NewGauge(prometheus.GaugeOpts(opts("live_bytes", "Length of the log from the oldest segment that is needed."))),
		targetBytes: prometheus.NewGauge(prometheus.GaugeOpts(opts("target_bytes",
			"Length beyond which the log is shortened. One that stays longer is pinned: something still needs its old entries."))),
		segments: prometheus.NewGaugeVec(prometheus.GaugeOpts(opts("segments", "Segment files by state: live, prepared, dead.")),
			[]string{"state"}),
		queueBytes: prometheus.NewGauge(prometheus.GaugeOpts(opts("queue_bytes", "Bytes submitted and not yet written."))),
		cacheBytes: prometheus.NewGauge(prometheus.GaugeOpts(opts("entry_cache_bytes", "Bytes of entries held in memory."))),
		diskReads:  prometheus.NewCounter(prometheus.CounterOpts(opts("record_reads_total", "Records read back from a segment because their entries were not in memory."))),
		rewritten:  prometheus.NewCounter(prometheus.CounterOpts(opts("rewritten_bytes_total", "Bytes written again at the head to free old segments."))),
		full:       prometheus.NewGauge(prometheus.GaugeOpts(opts("full", "1 while the disk has no room for the reserve segment."))),
	}
	if reg != nil {
		reg.MustRegister(m.fsyncSeconds, m.writtenBytes, m.batchBytes, m.appendsPerSync, m.liveBytes, m.targetBytes, m.segments,
			m.queueBytes, m.cacheBytes, m.diskReads, m.rewritten, m.full)
	}
	return m
}
