package pipeapi

import "github.com/prometheus/client_golang/prometheus"

// Metrics are those of pipes. The operations themselves count as calls of etcd's KV service too.
type Metrics struct {
	// Open are the open pipes, Broken those that ended because the client broke the protocol or there were too many.
	Open   prometheus.Gauge
	Broken prometheus.Counter
	// Operations and Answers are how many of them each frame has.
	Operations, Answers prometheus.Histogram
	// Parts is what is taken of Options.PartBytes, Refused the transactions that it had no room for.
	Parts   prometheus.Gauge
	Refused prometheus.Counter
}

// NewMetrics makes the metrics and registers them; reg may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	sizes := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(1, 2, 11)})
	}
	m := &Metrics{
		Open:       prometheus.NewGauge(prometheus.GaugeOpts{Name: "skein_pipe_open", Help: "Pipes of clients that are open."}),
		Broken:     prometheus.NewCounter(prometheus.CounterOpts{Name: "skein_pipe_broken_total", Help: "Pipes ended because the client broke the protocol, or refused because there were too many."}),
		Operations: sizes("skein_pipe_frame_operations", "Operations in each frame of a client."),
		Answers:    sizes("skein_pipe_frame_answers", "Answers in each frame to a client."),
		Parts:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "skein_pipe_parts_bytes", Help: "Memory counted for the parts of large transactions that came by pipes and are not answered."}),
		Refused:    prometheus.NewCounter(prometheus.CounterOpts{Name: "skein_pipe_transactions_refused_total", Help: "Large transactions of pipes that were refused unseen: no room for their parts within the request timeout, or more parts than there ever is room for."}),
	}
	if reg != nil {
		reg.MustRegister(m.Open, m.Broken, m.Operations, m.Answers, m.Parts, m.Refused)
	}
	return m
}
