package pipeline

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the package's metrics, summed over all pipelines of the node.
type Metrics struct {
	// LockWaits counts requests, reads included, that waited for a lock.
	LockWaits prometheus.Counter
	// OldSequencer counts reads and batches whose revision came from a sequencer that has a
	// successor.
	OldSequencer prometheus.Counter

	pendingBytes                     prometheus.Gauge
	evaluateSeconds, sequenceSeconds prometheus.Histogram
	batchRequests                    prometheus.Histogram
	refused, cuts                    prometheus.Counter
}

// NewMetrics makes the metrics and registers them, if reg is not nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.00001, 2, 20),
		})
	}
	m := &Metrics{
		pendingBytes: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "skein_shard_pending_bytes", Help: "Requests between arrival and answer.",
		}),
		evaluateSeconds: seconds("skein_shard_evaluate_seconds", "One pass of evaluation: what waits at one range."),
		sequenceSeconds: seconds("skein_shard_sequence_seconds", "From asking for a batch's revisions to the answer."),
		batchRequests: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "skein_shard_batch_transactions", Help: "Transactions of one proposed entry.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 13),
		}),
		refused:      counter("skein_shard_proposals_refused_total", "Proposals for which the group had no room and which were offered again."),
		cuts:         counter("skein_shard_pipeline_cuts_total", "Pipelines that were discarded within a term."),
		OldSequencer: counter("skein_shard_old_sequencer_total", "Reads and batches refused because their revision came from a sequencer that has a successor."),
		LockWaits:    counter("skein_shard_lock_waits_total", "Requests that waited for the lock of a transaction over several ranges."),
	}
	if reg != nil {
		reg.MustRegister(m.pendingBytes, m.evaluateSeconds, m.sequenceSeconds, m.batchRequests, m.refused, m.cuts, m.LockWaits, m.OldSequencer)
	}
	return m
}
