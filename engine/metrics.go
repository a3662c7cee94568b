package engine

import (
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/clock"
)

// Metrics are the measurements of one Engine.
type Metrics struct {
	commitSeconds prometheus.Histogram
	commitBytes   prometheus.Counter

	flushes, flushFailures prometheus.Counter
	flushBytes             prometheus.Counter
	flushSeconds           prometheus.Histogram
	compactions            prometheus.Counter
	compactionFailures     prometheus.Counter
	compactionBytes        prometheus.Counter
	stalls                 prometheus.Counter
	stallSeconds           prometheus.Counter
	noSpace                prometheus.Counter
	ingests, ingestBytes   prometheus.Counter
	ingestSeconds          prometheus.Histogram
	exports, exportBytes   prometheus.Counter
	spaceFull, availBytes  prometheus.Gauge

	// e is the source of Collect's figures; it is set while an Engine is open.
	e atomic.Pointer[Engine]
	// quotaBytes is that engine's QuotaBytes.
	quotaBytes func() int64

	stall struct {
		sync.Mutex
		since clock.Time // 0: no stall
	}
}

// Metrics that are read from Pebble on demand.
var (
	descTotal = prometheus.NewDesc("etcd_mvcc_db_total_size_in_bytes",
		"Total size of the underlying database physically allocated in bytes.", nil, nil)
	descInUse = prometheus.NewDesc("etcd_mvcc_db_total_size_in_use_in_bytes",
		"Total size of the underlying database logically in use in bytes.", nil, nil)
	descQuota = prometheus.NewDesc("etcd_server_quota_backend_bytes",
		"The size at which the store takes no more data: its quota, or what the disk leaves it. Absent where the disk does not tell.", nil, nil)
	descMemTables = prometheus.NewDesc("skein_engine_memtable_bytes",
		"Memory of the memtables.", nil, nil)
	descCacheBytes = prometheus.NewDesc("skein_engine_block_cache_bytes",
		"Size of the block cache's contents.", nil, nil)
	descCacheHits = prometheus.NewDesc("skein_engine_block_cache_hits_total",
		"Blocks that were found in the cache.", nil, nil)
	descCacheMisses = prometheus.NewDesc("skein_engine_block_cache_misses_total",
		"Blocks that had to be read.", nil, nil)
	descReadAmp = prometheus.NewDesc("skein_engine_read_amplification_sublevels",
		"Sorted runs that a read may have to look into.", nil, nil)
	descDebt = prometheus.NewDesc("skein_engine_compaction_debt_bytes",
		"Bytes that compactions still have to rewrite.", nil, nil)
	descTables = prometheus.NewDesc("skein_engine_tables",
		"Live tables.", nil, nil)
	descSnapshots = prometheus.NewDesc("skein_engine_snapshots",
		"Open snapshots that still hold memtables back.", nil, nil)
	descZombies = prometheus.NewDesc("skein_engine_zombie_table_bytes",
		"Size of the tables that only open iterators and snapshots still need.", nil, nil)
)

// NewMetrics returns the metrics of an engine, registered with r unless it is nil.
func NewMetrics(r prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	histogram := func(name, help string, first float64, n int) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(first, 2, n),
		})
	}
	m := &Metrics{
		commitSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "etcd_disk_backend_commit_duration_seconds",
			Help: "The latency distributions of commits to the store. They do not sync: the wal does.",
			// etcd's buckets begin at 1 ms, a sync; these begin at a memory write.
			Buckets: prometheus.ExponentialBuckets(1e-5, 2, 20),
		}),
		commitBytes:        counter("skein_engine_commit_bytes_total", "Bytes of committed batches."),
		flushes:            counter("skein_engine_flushes_total", "Flushes of memtables that ended."),
		flushFailures:      counter("skein_engine_flush_failures_total", "Flushes that failed and are tried again."),
		flushBytes:         counter("skein_engine_flush_bytes_total", "Bytes of the tables that flushes wrote."),
		flushSeconds:       histogram("skein_engine_flush_duration_seconds", "Time of flushes.", 1e-3, 15),
		compactions:        counter("skein_engine_compactions_total", "Compactions that ended."),
		compactionFailures: counter("skein_engine_compaction_failures_total", "Compactions that failed."),
		compactionBytes:    counter("skein_engine_compaction_bytes_total", "Bytes of the tables that compactions wrote."),
		stalls:             counter("skein_engine_write_stalls_total", "Times that commits had to wait for flushes or compactions."),
		stallSeconds:       counter("skein_engine_write_stall_seconds_total", "Time that commits had to wait for flushes or compactions."),
		noSpace:            counter("skein_engine_no_space_errors_total", "Flushes and compactions that found the disk full."),
		ingests:            counter("skein_engine_ingests_total", "Ingests of raft snapshots."),
		ingestBytes:        counter("skein_engine_ingest_bytes_total", "Bytes of ingested tables."),
		ingestSeconds:      histogram("skein_engine_ingest_duration_seconds", "Time of ingests until they are durable.", 1e-3, 15),
		exports:            counter("skein_engine_export_tables_total", "Tables written for raft snapshots."),
		exportBytes:        counter("skein_engine_export_bytes_total", "Bytes of the tables written for raft snapshots."),
		spaceFull:          gauge("skein_engine_space_full", "1 while writes are refused for want of disk space."),
		availBytes:         gauge("skein_engine_disk_available_bytes", "Free space of the disk, if it is known."),
	}
	if r != nil {
		r.MustRegister(m)
	}
	return m
}

func (m *Metrics) own() []prometheus.Collector {
	return []prometheus.Collector{
		m.commitSeconds, m.commitBytes, m.flushes, m.flushFailures, m.flushBytes, m.flushSeconds,
		m.compactions, m.compactionFailures, m.compactionBytes, m.stalls, m.stallSeconds, m.noSpace,
		m.ingests, m.ingestBytes, m.ingestSeconds, m.exports, m.exportBytes, m.spaceFull, m.availBytes,
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.own() {
		c.Describe(ch)
	}
	for _, d := range []*prometheus.Desc{
		descTotal, descInUse, descQuota, descMemTables, descCacheBytes, descCacheHits, descCacheMisses,
		descReadAmp, descDebt, descTables, descSnapshots, descZombies,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.own() {
		c.Collect(ch)
	}
	e := m.e.Load()
	if e == nil || e.Err() != nil {
		return
	}
	p := e.db.Metrics()
	all := p.Total()
	gauge := func(d *prometheus.Desc, v float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v)
	}
	counter := func(d *prometheus.Desc, v float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v)
	}
	gauge(descTotal, float64(p.DiskSpaceUsage()))
	gauge(descInUse, float64(all.TablesSize))
	if quota := m.quotaBytes(); quota > 0 {
		gauge(descQuota, float64(quota))
	}
	gauge(descMemTables, float64(p.MemTable.Size+p.MemTable.ZombieSize))
	gauge(descCacheBytes, float64(p.BlockCache.Size))
	counter(descCacheHits, float64(p.BlockCache.Hits))
	counter(descCacheMisses, float64(p.BlockCache.Misses))
	gauge(descReadAmp, float64(p.ReadAmp()))
	gauge(descDebt, float64(p.Compact.EstimatedDebt))
	gauge(descTables, float64(all.TablesCount))
	gauge(descSnapshots, float64(p.Snapshots.Count))
	gauge(descZombies, float64(p.Table.ZombieSize))
}

func (m *Metrics) attach(e *Engine) { m.e.Store(e) }

func (m *Metrics) detach(e *Engine) { m.e.CompareAndSwap(e, nil) }

func (m *Metrics) flush(i *pebble.FlushInfo) {
	m.flushes.Inc()
	m.flushSeconds.Observe(i.TotalDuration.Seconds())
	var n uint64
	for _, t := range i.Output {
		n += t.Size
	}
	if i.Ingest {
		n = 0 // an ingested table was written earlier
	} else if n == 0 && i.Err != nil && i.InputBytes > 0 {
		m.flushFailures.Inc()
	}
	m.flushBytes.Add(float64(n))
}

func (m *Metrics) compaction(i pebble.CompactionInfo) {
	m.compactions.Inc()
	if i.Err != nil {
		m.compactionFailures.Inc()
		return
	}
	for _, t := range i.Output.Tables {
		m.compactionBytes.Add(float64(t.Size))
	}
}

func (m *Metrics) stallBegin(e *Engine) {
	m.stalls.Inc()
	m.stall.Lock()
	defer m.stall.Unlock()
	m.stall.since = e.clock.Now()
}

func (m *Metrics) stallEnd(e *Engine) {
	m.stall.Lock()
	defer m.stall.Unlock()
	if m.stall.since != 0 {
		m.stallSeconds.Add(e.clock.Now().Sub(m.stall.since).Seconds())
		m.stall.since = 0
	}
}

// DiskBytes returns how much disk the store takes, and how much of that its newest state
// uses. They are etcd's dbSize and dbSizeInUse.
func (e *Engine) DiskBytes() (total, inUse int64) {
	m := e.db.Metrics()
	all := m.Total()
	return int64(m.DiskSpaceUsage()), all.TablesSize
}
