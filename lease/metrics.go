package lease

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the package's metrics on one node.
type Metrics struct {
	// Renewed and Expired are etcd's, counted by the node that leads.
	Renewed prometheus.Counter
	Expired prometheus.Counter
	// Leases is the number of leases where this node leads, 0 elsewhere.
	Leases prometheus.Gauge
	// Failures counts attempts to end a lease that failed and are made again.
	Failures prometheus.Counter
}

// NewMetrics returns the metrics, registered with r unless it is nil.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		Renewed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_debugging_lease_renewed_total", Help: "The number of renewed leases seen by the leader.",
		}),
		Expired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_debugging_server_lease_expired_total", Help: "The total number of expired leases.",
		}),
		Leases: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "skein_lease_leases", Help: "Leases whose time is counted here: all of them on the node that leads, none elsewhere.",
		}),
		Failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "skein_lease_end_failures_total", Help: "Attempts to delete the keys of an ended lease that failed and are made again.",
		}),
	}
	if r != nil {
		r.MustRegister(m.Renewed, m.Expired, m.Leases, m.Failures)
	}
	return m
}
