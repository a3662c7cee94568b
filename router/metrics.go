package router

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what the router does.
type Metrics struct {
	// Failed counts failed attempts by kind; clients do not notice most of them.
	Failed *prometheus.CounterVec
	// Refreshes counts loads of the range map.
	Refreshes prometheus.Counter
	// MultiRangeReads counts reads over several ranges.
	MultiRangeReads prometheus.Counter
	// Txns counts transactions over several ranges, and Restarts their attempts that were given up.
	Txns, Restarts prometheus.Counter
}

// NewMetrics returns the metrics, registered unless reg is nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "skein_router_failed_attempts_total",
			Help: "Failed attempts of requests to ranges, by kind of error.",
		}, []string{"kind"}),
		Refreshes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "skein_router_map_refreshes_total",
			Help: "Loads of the range map from placement.",
		}),
		MultiRangeReads: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "skein_router_multi_range_reads_total",
			Help: "Reads that went to several ranges.",
		}),
		Txns: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "skein_router_multi_range_txns_total",
			Help: "Transactions and deletes over several ranges.",
		}),
		Restarts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "skein_router_txn_restarts_total",
			Help: "Attempts of transactions over several ranges that were given up and repeated.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.Failed, m.Refreshes, m.MultiRangeReads, m.Txns, m.Restarts)
	}
	return m
}
