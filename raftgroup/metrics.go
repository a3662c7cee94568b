package raftgroup

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Metrics are the measurements of one Host.
type Metrics struct {
	passGroups, frameBytes, frameMessages                                          prometheus.Histogram
	appendSeconds, applySeconds, applyGroups                                       prometheus.Histogram
	groups, awake, leaders, proposalBytes, inboundBytes                            prometheus.Gauge
	proposals, dropped, failed, full, inboundDropped, sendFailed                   prometheus.Counter
	committed, applied, pending                                                    prometheus.Gauge
	overloadDropped, refused                                                       prometheus.Counter
	quarantined                                                                    prometheus.Gauge
	leaderChanges, elections, wakes, sleeps, leaseLost                             prometheus.Counter
	leasesDropped                                                                  prometheus.Counter
	voteRefused, votesBuffered, logReads, logReadsDeferred, readIndexes, malformed prometheus.Counter
	snapshotsSent, snapshotsReceived, snapshotsFailed                              prometheus.Counter
	snapshotBytes, truncations, cutOffs, forcedFlushes                             prometheus.Counter
	peersAlive, walStalled, applyStalled                                           prometheus.Gauge

	// These are etcd's alone.
	slowApplies, slowReads, failedReads, heartbeatFailures prometheus.Counter
	installing                                             prometheus.Gauge
	sends, receives                                        copyMetrics
}

// copyMetrics are etcd's metrics of snapshots in one direction, by peer.
type copyMetrics struct {
	succeeded, failed *prometheus.CounterVec
	underWay          *prometheus.GaugeVec
	seconds           *prometheus.HistogramVec
}

func newCopyMetrics(r prometheus.Registerer, verb, what, label string) copyMetrics {
	name := "etcd_network_snapshot_" + verb + "_"
	counter := func(end, help string) *prometheus.CounterVec {
		return register(r, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name + end, Help: help}, []string{label}))
	}
	return copyMetrics{
		succeeded: counter("success", "Total number of successful snapshot "+what),
		failed:    counter("failures", "Total number of snapshot "+verb+" failures"),
		underWay: register(r, prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: name + "inflights_total", Help: "Total number of inflight snapshot " + what,
		}, []string{label})),
		seconds: register(r, prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name + "total_duration_seconds", Help: "Total latency distributions of v3 snapshot " + what, Buckets: prometheus.ExponentialBuckets(0.1, 2, 10),
		}, []string{label})),
	}
}

// begin notes that a snapshot is under way. The result notes how it has ended.
func (m *copyMetrics) begin(peer keyspace.NodeID, c clock.Clock) (end func(error)) {
	id, start := peer.String(), c.Now()
	m.underWay.WithLabelValues(id).Inc()
	return func(err error) {
		m.underWay.WithLabelValues(id).Dec()
		if err != nil {
			m.failed.WithLabelValues(id).Inc()
			return
		}
		m.succeeded.WithLabelValues(id).Inc()
		m.seconds.WithLabelValues(id).Observe(c.Now().Sub(start).Seconds())
	}
}

// NewMetrics returns metrics registered with r; nil registers nowhere.
func NewMetrics(r prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return register(r, prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help}))
	}
	gauge := func(name, help string) prometheus.Gauge {
		return register(r, prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help}))
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return register(r, prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}))
	}
	counts, bytes := prometheus.ExponentialBuckets(1, 2, 12), prometheus.ExponentialBuckets(64, 4, 10)
	seconds := prometheus.ExponentialBuckets(0.0001, 2, 16)
	return &Metrics{
		passGroups:    histogram("skein_raftgroup_pass_groups", "Groups that one pass of a worker served.", counts),
		frameBytes:    histogram("skein_raftgroup_frame_bytes", "Size of frames sent to peers.", bytes),
		frameMessages: histogram("skein_raftgroup_frame_messages", "Messages in frames sent to peers.", counts),
		appendSeconds: histogram("skein_raftgroup_append_duration_seconds", "Time from a pass's wal batch to its durability.", seconds),
		applySeconds:  histogram("skein_raftgroup_apply_duration_seconds", "Time of one engine batch of applied entries.", seconds),
		applyGroups:   histogram("skein_raftgroup_apply_groups", "Groups that shared one engine batch.", counts),

		groups:        gauge("skein_raftgroup_groups", "Open groups."),
		awake:         gauge("skein_raftgroup_awake_groups", "Groups that are ticked."),
		leaders:       gauge("skein_raftgroup_leaders", "Groups that lead here."),
		proposalBytes: gauge("skein_raftgroup_proposal_bytes", "Bytes of proposals that are not applied yet."),
		inboundBytes:  gauge("skein_raftgroup_inbound_bytes", "Bytes of received entries that wait for a worker."),
		quarantined:   gauge("skein_raftgroup_quarantined_replicas", "Replicas of this node that are closed until they are replaced: their state cannot be trusted or read."),
		peersAlive:    gauge("skein_raftgroup_peers_alive", "Peers that send liveness messages and report healthy disks."),
		walStalled:    gauge("skein_raftgroup_wal_stalled", "1 while this node's wal makes no progress."),
		applyStalled:  gauge("skein_raftgroup_apply_stalled", "1 while this node's store makes no progress on entries to apply."),

		// Names and types are etcd's: its dashboards and alerts read them. One entry of
		// Skein's may carry several requests.
		committed: gauge("etcd_server_proposals_committed_total", "The total number of consensus proposals committed, over all groups of the node, in this run."),
		applied:   gauge("etcd_server_proposals_applied_total", "The total number of consensus proposals applied, over all groups of the node, in this run."),
		pending:   gauge("etcd_server_proposals_pending", "The current number of pending proposals to commit, over all groups that the node leads."),
		failed:    counter("etcd_server_proposals_failed_total", "The total number of failed proposals seen: not appended, or left without an answer by a lost leadership."),

		slowApplies:       counter("etcd_server_slow_apply_total", "The total number of slow apply requests (likely overloaded from slow disk): batches of entries that took longer than warning-apply-duration."),
		slowReads:         counter("etcd_server_slow_read_indexes_total", "The total number of pending read indexes not in sync with leader's or timed out read index requests."),
		failedReads:       counter("etcd_server_read_indexes_failed_total", "The total number of failed read indexes seen."),
		heartbeatFailures: counter("etcd_server_heartbeat_send_failures_total", "The total number of liveness messages that were sent late (likely overloaded from slow disk)."),
		installing:        gauge("etcd_server_snapshot_apply_in_progress_total", "Snapshots of ranges that are being installed."),
		sends:             newCopyMetrics(r, "send", "sends", "To"),
		receives:          newCopyMetrics(r, "receive", "receives", "From"),

		proposals:        counter("skein_raftgroup_proposals_total", "Proposals that raft accepted."),
		dropped:          counter("skein_raftgroup_proposals_dropped_total", "Proposals that were certainly not appended."),
		full:             counter("skein_raftgroup_proposals_refused_total", "Proposals refused because a bound was reached."),
		refused:          counter("skein_raftgroup_refused_entries_total", "Committed entries that broke a rule and did nothing. The log has a line for each."),
		inboundDropped:   counter("skein_raftgroup_inbound_dropped_total", "Received messages dropped because their worker lags, mostly MsgApps over the bound in bytes."),
		overloadDropped:  counter("skein_raftgroup_overload_dropped_total", "Received MsgApps dropped because the wal's queue was over its bound."),
		sendFailed:       counter("skein_raftgroup_frames_dropped_total", "Frames that the bus rejected."),
		leaderChanges:    counter("skein_raftgroup_leader_changes_total", "Changes of leader seen, over all groups."),
		elections:        counter("skein_raftgroup_elections_total", "Elections begun here."),
		wakes:            counter("skein_raftgroup_wakes_total", "Groups woken."),
		sleeps:           counter("skein_raftgroup_sleeps_total", "Groups put to sleep."),
		leasesDropped:    counter("skein_raftgroup_leases_dropped_total", "How often all leases were dropped because the machine may have been paused."),
		leaseLost:        counter("skein_raftgroup_lease_lost_total", "Leases that ended while the group kept leading."),
		voteRefused:      counter("skein_raftgroup_votes_refused_total", "Votes and pre-votes dropped because of a promise."),
		votesBuffered:    counter("skein_raftgroup_votes_buffered_total", "Votes buffered for replicas that were not open."),
		logReadsDeferred: counter("skein_raftgroup_log_reads_deferred_total", "Log reads deferred because the worker's pass had read its share."),
		logReads:         counter("skein_raftgroup_log_reads_total", "Log reads by workers that may have touched the disk."),
		readIndexes:      counter("skein_raftgroup_read_indexes_total", "ReadIndex rounds begun."),
		malformed:        counter("skein_raftgroup_malformed_frames_total", "Frames that could not be decoded."),

		snapshotsSent:     counter("skein_raftgroup_snapshots_sent_total", "Snapshots that their receivers installed."),
		snapshotsReceived: counter("skein_raftgroup_snapshots_received_total", "Snapshots installed here."),
		snapshotsFailed:   counter("skein_raftgroup_snapshots_failed_total", "Snapshots that failed here, sent or received."),
		snapshotBytes:     counter("skein_raftgroup_snapshot_sent_bytes_total", "Bytes of tables sent."),
		truncations:       counter("skein_raftgroup_truncations_total", "Truncations of logs."),
		cutOffs:           counter("skein_raftgroup_cut_offs_total", "Truncations past entries that a follower needed."),
		forcedFlushes:     counter("skein_raftgroup_forced_flushes_total", "Engine flushes requested because the wal was long, applied entries waited long, or a disk was full."),
	}
}

func register[C prometheus.Collector](r prometheus.Registerer, c C) C {
	if r != nil {
		r.MustRegister(c)
	}
	return c
}
