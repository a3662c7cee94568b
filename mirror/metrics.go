package mirror

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics shows the status of a mirror to Prometheus. It has nothing before the first Set.
type Metrics struct {
	mu     sync.Mutex
	status *Status
}

// Set replaces the status; Options.Progress brings one each second.
func (m *Metrics) Set(s Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status = &s
}

// gauge is one metric.
type gauge struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*Status) float64
}

func newGauge(name, help string, kind prometheus.ValueType, value func(*Status) float64) gauge {
	return gauge{prometheus.NewDesc("skein_mirror_"+name, help, nil, nil), kind, value}
}

var gauges = []gauge{
	newGauge("position_revision", "Revision up to which the target has everything.", prometheus.GaugeValue, func(s *Status) float64 { return float64(s.Position) }),
	newGauge("source_revision", "Highest revision that the source is known to have.", prometheus.GaugeValue, func(s *Status) float64 { return float64(s.Source) }),
	newGauge("spooled_revision", "Revision up to which the spool has everything.", prometheus.GaugeValue, func(s *Status) float64 { return float64(s.Spooled) }),
	newGauge("spool_bytes", "Size of the spool.", prometheus.GaugeValue, func(s *Status) float64 { return float64(s.SpoolBytes) }),
	newGauge("lag_seconds", "How long ago the source made the first revision that the target lacks.", prometheus.GaugeValue, func(s *Status) float64 { return s.LagSeconds }),
	newGauge("verified_keys_total", "Keys that were compared and equal, since the start.", prometheus.CounterValue, func(s *Status) float64 { return float64(s.VerifiedKeys) }),
	newGauge("verified_pages_total", "Pages of keys that were compared and equal, since the start.", prometheus.CounterValue, func(s *Status) float64 { return float64(s.VerifiedPages) }),
	newGauge("passes_total", "Whole comparisons, since the start.", prometheus.CounterValue, func(s *Status) float64 { return float64(s.Passes) }),
	newGauge("verified_revision", "Revision at which the last whole comparison began, 0 for none.", prometheus.GaugeValue, func(s *Status) float64 { return float64(s.VerifiedFrom) }),
	newGauge("compared", "1 once all keys were compared since the mirror began: before that no cut-over can be requested.", prometheus.GaugeValue, func(s *Status) float64 {
		if s.Compared {
			return 1
		}
		return 0
	}),
	newGauge("waits", "1 while the mirror waits out an error.", prometheus.GaugeValue, func(s *Status) float64 {
		if s.Waiting != "" {
			return 1
		}
		return 0
	}),
}

var stepDesc = prometheus.NewDesc("skein_mirror_step", "1 for the step that the mirror is at.", []string{"step"}, nil)

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(out chan<- *prometheus.Desc) {
	out <- stepDesc
	for i := range gauges {
		out <- gauges[i].desc
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	s := m.status
	m.mu.Unlock()
	if s == nil {
		return
	}
	out <- prometheus.MustNewConstMetric(stepDesc, prometheus.GaugeValue, 1, string(s.Step))
	for i := range gauges {
		out <- prometheus.MustNewConstMetric(gauges[i].desc, gauges[i].kind, gauges[i].value(s))
	}
}
