package driver

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the metrics of one node's Driver.
type Metrics struct {
	// Decisions counts what this node has decided while it led, by reason and kind;
	// OperationsEnded what it has executed, by kind and how that ended: done or given-up.
	Decisions       *prometheus.CounterVec
	OperationsEnded *prometheus.CounterVec
	// The others are of the leader, as of its last look. They count operations under way,
	// ranges that wait for a decision by their need, ranges with fewer live voters than the
	// replication factor, and ranges without a quorum. They are 0 on all other nodes.
	OperationsUnderWay prometheus.Gauge
	Pending            *prometheus.GaugeVec
	UnderReplicated    prometheus.Gauge
	Stopped            prometheus.Gauge
	// Paused is 1 while the settings have the leader decide nothing.
	Paused prometheus.Gauge
}

// forgetDecisions sets what only a leader knows to nothing.
func (m *Metrics) forgetDecisions() {
	for _, g := range []prometheus.Gauge{m.OperationsUnderWay, m.UnderReplicated, m.Stopped, m.Paused} {
		g.Set(0)
	}
	m.Pending.Reset()
}

// NewMetrics returns the metrics, registered with r unless it is nil.
func NewMetrics(r prometheus.Registerer) *Metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &Metrics{
		Decisions:          counters("skein_placement_decisions_total", "Decisions of this node about ranges, while it led placement.", "reason", "kind"),
		OperationsEnded:    counters("skein_placement_operations_ended_total", "Operations on ranges that this node has executed, by what they were and how they ended.", "kind", "outcome"),
		OperationsUnderWay: gauge("skein_placement_operations_under_way", "Operations on ranges under way, 0 if this node does not lead placement."),
		Pending: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "skein_placement_ranges_pending", Help: "Ranges that wait for something to be done, by what they need.",
		}, []string{"need"}),
		UnderReplicated: gauge("skein_placement_ranges_under_replicated", "Ranges with fewer live voters than the replication factor, 0 if this node does not lead placement."),
		Stopped:         gauge("skein_placement_ranges_without_quorum", "Ranges without a live quorum, 0 if this node does not lead placement."),
		Paused:          gauge("skein_placement_paused", "1 while placement decides nothing by itself, repairs included, because it was paused; 0 if this node does not lead placement."),
	}
	if r != nil {
		r.MustRegister(m.Decisions, m.OperationsEnded, m.OperationsUnderWay, m.Pending, m.UnderReplicated, m.Stopped, m.Paused)
	}
	return m
}
