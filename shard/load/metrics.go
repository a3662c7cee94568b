package load

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the package's metrics, summed over all ranges of the node.
type Metrics struct {
	// Splits counts automatic splits by their cause: size or load.
	Splits *prometheus.CounterVec
	// Unsplit counts how often a range exceeded a bound and was not split, by the reason.
	Unsplit *prometheus.CounterVec
}

// NewMetrics makes the metrics and registers them, if reg is not nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Splits: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "skein_shard_automatic_splits_total",
			Help: "Splits that this node's leaders have made automatically, by their cause.",
		}, []string{"cause"}),
		Unsplit: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "skein_shard_splits_left_total",
			Help: "Times that a range was found too large or too hot and left as it is, by the reason: " +
				"one key has most of its bytes or load, the load moves along the keys, requests span it, or the attempt failed.",
		}, []string{"reason"}),
	}
	if reg != nil {
		reg.MustRegister(m.Splits, m.Unsplit)
	}
	return m
}
