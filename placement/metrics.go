package placement

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/sequencer"
)

// Metrics are the package's metrics on one node.
type Metrics struct {
	// HasLeader and LeaderChanges are etcd's: whether the node knows a leader of the
	// placement group, and how many it has seen come.
	HasLeader     prometheus.Gauge
	LeaderChanges prometheus.Counter
	IsLeader      prometheus.Gauge
	// Sequencer are those of this node's sequencer.
	Sequencer *sequencer.Metrics
	// BatchRequests is the number of requests in one of this node's batches,
	// BatchRevisions that of revisions; SequenceSeconds how long a request waited for
	// its answer from its arrival on.
	BatchRequests   prometheus.Histogram
	BatchRevisions  prometheus.Histogram
	SequenceSeconds prometheus.Histogram
	// SequenceErrors counts requests that got no revision.
	SequenceErrors prometheus.Counter
	// LogFollowers is how many gateways follow this node's allocation log.
	LogFollowers prometheus.Gauge
	// MapVersion is the version of the node's copy of the range map, Ranges their
	// number in it.
	MapVersion prometheus.Gauge
	Ranges     prometheus.Gauge
	// Holds is how many holds of old versions there are in it, and OldestHold when the oldest was made, in seconds since
	// 1970, 0 if there is none.
	Holds      prometheus.Gauge
	OldestHold prometheus.Gauge
	// ClusterVersion is the one in the node's copy of the map, 0 for none.
	ClusterVersion prometheus.Gauge
	// IsLearner and AuthRevision are etcd's, of the node's copy of the map.
	IsLearner, AuthRevision prometheus.Gauge
	// LeasesGranted, LeasesRevoked and LeaseTTLs are etcd's: applied here, by whichever node
	// leads.
	LeasesGranted prometheus.Counter
	LeasesRevoked prometheus.Counter
	LeaseTTLs     prometheus.Histogram
	// Driver are those of this node's driver.
	Driver *driver.Metrics
}

// NewMetrics returns the metrics, registered with r unless it is nil.
func NewMetrics(r prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	sizes := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(1, 2, 13),
		})
	}
	m := &Metrics{
		HasLeader:      gauge("etcd_server_has_leader", "Whether or not a leader exists. 1 is existence, 0 is not."),
		LeaderChanges:  counter("etcd_server_leader_changes_seen_total", "The number of leader changes seen."),
		IsLeader:       gauge("etcd_server_is_leader", "Whether or not this member is a leader. 1 if is, 0 otherwise."),
		Sequencer:      sequencer.NewMetrics(r),
		BatchRequests:  sizes("skein_placement_batch_requests", "Requests for revisions that one batch of this node carried."),
		BatchRevisions: sizes("skein_placement_batch_revisions", "Revisions that one batch of this node asked for."),
		SequenceSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "skein_placement_sequence_seconds", Help: "Time from a request for revisions to its answer.",
			Buckets: prometheus.ExponentialBuckets(0.000_02, 2, 18),
		}),
		SequenceErrors: counter("skein_placement_sequence_errors_total", "Requests for revisions that got none."),
		LogFollowers:   gauge("skein_placement_log_followers", "Gateways that follow this node's allocation log."),
		MapVersion:     gauge("skein_placement_map_version", "Version of this node's copy of the range map."),
		Ranges:         gauge("skein_placement_ranges", "Ranges in this node's copy of the range map."),
		Holds:          gauge("skein_placement_holds", "Holds of old versions in this node's copy of the range map."),
		OldestHold:     gauge("skein_placement_oldest_hold_timestamp_seconds", "When the oldest hold of old versions was made, in seconds since 1970, 0 for none."),
		ClusterVersion: gauge("skein_placement_cluster_version", "Cluster version in this node's copy of the range map, 0 for none."),
		IsLearner:      gauge("etcd_server_is_learner", "Whether or not this member is a learner. 1 if is, 0 otherwise."),
		AuthRevision:   gauge("etcd_debugging_auth_revision", "The current revision of auth store."),
		LeasesGranted:  counter("etcd_debugging_lease_granted_total", "The total number of granted leases."),
		LeasesRevoked:  counter("etcd_debugging_lease_revoked_total", "The total number of revoked leases."),
		LeaseTTLs: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "etcd_debugging_lease_ttl_total", Help: "Bucketed histogram of lease TTLs.",
			// 1 second -> 3 months
			Buckets: prometheus.ExponentialBuckets(1, 2, 24),
		}),
		Driver: driver.NewMetrics(r),
	}
	if r != nil {
		r.MustRegister(m.HasLeader, m.LeaderChanges, m.IsLeader, m.BatchRequests, m.BatchRevisions,
			m.SequenceSeconds, m.SequenceErrors, m.LogFollowers, m.MapVersion, m.Ranges, m.Holds, m.OldestHold, m.ClusterVersion,
			m.IsLearner, m.AuthRevision, m.LeasesGranted, m.LeasesRevoked, m.LeaseTTLs)
	}
	return m
}
