package sequencer

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the metrics of one node's sequencer.
type Metrics struct {
	// Allocated counts revisions allocated by this node, Batches the batches of nodes that
	// they were for, and Refusals the batches that it refused.
	Allocated prometheus.Counter
	Batches   prometheus.Counter
	Refusals  prometheus.Counter
	// Revision and Ceiling are the sequencer's, 0 on all other nodes.
	Revision prometheus.Gauge
	Ceiling  prometheus.Gauge
	// CeilingWaits counts batches that were found waiting for a ceiling.
	CeilingWaits    prometheus.Counter
	ReadIndexRounds prometheus.Counter
}

// NewMetrics returns the metrics, registered with r unless it is nil.
func NewMetrics(r prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &Metrics{
		Allocated:       counter("skein_placement_allocated_revisions_total", "Revisions allocated by this node."),
		Batches:         counter("skein_placement_allocation_batches_total", "Batches of nodes answered by this node."),
		Refusals:        counter("skein_placement_allocation_refusals_total", "Batches of nodes refused by this node."),
		Revision:        gauge("skein_placement_revision", "Last revision allocated by this node, 0 if it is not the sequencer."),
		Ceiling:         gauge("skein_placement_ceiling_revision", "Committed ceiling of revisions, 0 if this node is not the sequencer."),
		CeilingWaits:    counter("skein_placement_ceiling_waits_total", "Times that batches were found waiting for a ceiling to be committed."),
		ReadIndexRounds: counter("skein_placement_read_index_rounds_total", "ReadIndex rounds begun because the leader lease did not hold."),
	}
	if r != nil {
		r.MustRegister(m.Allocated, m.Batches, m.Refusals, m.Revision, m.Ceiling, m.CeilingWaits, m.ReadIndexRounds)
	}
	return m
}

// observe takes over what an input has changed.
func (m *Metrics) observe(c *allocator, out *output) {
	for i := range out.answers {
		a := &out.answers[i]
		if a.err != nil {
			m.Refusals.Inc()
			continue
		}
		m.Batches.Inc()
		if a.repeated {
			continue
		}
		m.Allocated.Add(float64(a.batch.Total()))
	}
	if c.phase == following {
		m.Revision.Set(0)
		m.Ceiling.Set(0)
		return
	}
	m.Revision.Set(float64(c.last))
	m.Ceiling.Set(float64(c.ceiling))
	if c.raising && len(c.waiting) > 0 && c.waiting[0].confirmed {
		m.CeilingWaits.Inc()
	}
}
