package main

import (
	"fmt"
	"time"
)

// alert is an alerting rule.
type alert struct {
	name string
	// expr has SKEIN for the selector of series.
	expr string
	// lasts is how long the expression holds before the alert fires.
	lasts    time.Duration
	severity string
	summary  string
}

// Severities: somebody has to get up for a critical one. A warning waits for the morning.
const (
	critical = "critical"
	warning  = "warning"
)

func alerts() []alert {
	var all []alert
	for _, part := range [][]alert{quorumAlerts(), placementAlerts(), requestAlerts(), diskAlerts(), safetyAlerts()} {
		all = append(all, part...)
	}
	return all
}

func quorumAlerts() []alert {
	return []alert{
		{
			"SkeinNodeDown", `up{SKEIN} == 0`, 3 * time.Minute, warning,
			"{{ $labels.instance }} of {{ $labels.job }} is not reached.",
		},
		{
			"SkeinMostNodesDown", `sum by (job) (up{SKEIN} == bool 1) < (count by (job) (up{SKEIN}) + 1) / 2`, 2 * time.Minute, critical,
			"{{ $labels.job }}: only {{ $value }} nodes are reached.",
		},
		{
			"SkeinNoLeader", `etcd_server_has_leader{SKEIN} == 0`, time.Minute, critical,
			"{{ $labels.instance }} knows no leader of placement: nothing is written.",
		},
		{
			"SkeinRangesWithoutQuorum", `min by (job) (skein_ranges_without_quorum{SKEIN}) > 0`, time.Minute, critical,
			"{{ $labels.job }}: {{ $value }} ranges have no quorum, and their keys cannot be read or written.",
		},
		{
			"SkeinRangesUnderReplicated", `max by (job) (skein_placement_ranges_under_replicated{SKEIN}) > 0`, 30 * time.Minute, warning,
			"{{ $labels.job }}: {{ $value }} ranges have fewer live voters than they are to have.",
		},
		{
			"SkeinManyLeaderChanges", `increase(etcd_server_leader_changes_seen_total{SKEIN}[15m]) >= 4`, 5 * time.Minute, warning,
			"{{ $labels.instance }} has seen {{ $value }} changes of placement's leader in 15 minutes.",
		},
		{
			"SkeinFailedProposals", `rate(etcd_server_proposals_failed_total{SKEIN}[15m]) > 5`, 15 * time.Minute, warning,
			"{{ $labels.instance }}: {{ $value }} proposals fail each second.",
		},
		{
			"SkeinPeersSlow", `histogram_quantile(0.99, rate(etcd_network_peer_round_trip_time_seconds_bucket{SKEIN}[5m])) > 0.15`, 10 * time.Minute, warning,
			"{{ $labels.instance }}: the way to {{ $labels.To }} and back takes {{ $value }} s.",
		},
		{
			"SkeinPeerUnreached", `etcd_network_known_peers{SKEIN} - on (job, instance, Local, Remote) etcd_network_active_peers{SKEIN} > 0`, 10 * time.Minute, warning,
			"{{ $labels.instance }} has no session with the node {{ $labels.Remote }}.",
		},
	}
}

func placementAlerts() []alert {
	return []alert{
		{
			"SkeinPlacementPaused", `max by (job) (skein_placement_paused{SKEIN}) == 1`, 30 * time.Minute, warning,
			"{{ $labels.job }}: placement is paused, and nothing is repaired.",
		},
		{
			"SkeinReplicaQuarantined", `skein_raftgroup_quarantined_replicas{SKEIN} > 0`, 5 * time.Minute, critical,
			"{{ $labels.instance }} has closed {{ $value }} replicas, which it cannot trust or read.",
		},
		{
			"SkeinReplicasDisagree", `skein_shard_replicas_in_doubt{SKEIN} > 0`, 5 * time.Minute, critical,
			"{{ $labels.instance }}: {{ $value }} replicas answer nothing, because the replicas of their range differ.",
		},
		{
			"SkeinHoldTooOld", `time() - min by (job) (skein_placement_oldest_hold_timestamp_seconds{SKEIN} > 0) > 2 * 86400`, 15 * time.Minute, warning,
			"{{ $labels.job }}: old versions are held since {{ $value | humanizeDuration }}.",
		},
		{
			"SkeinVersionsDiffer", `count by (job) (count by (job, version) (skein_version{SKEIN})) > 1`, 24 * time.Hour, warning,
			"{{ $labels.job }}: the nodes run {{ $value }} versions.",
		},
	}
}

func requestAlerts() []alert {
	return []alert{
		{
			"SkeinFailedRequests", `100 * sum by (job, instance, grpc_service, grpc_method) (rate(grpc_server_handled_total{SKEIN,grpc_code=~"` + serverFaults + `"}[5m]))` +
				` / sum by (job, instance, grpc_service, grpc_method) (rate(grpc_server_handled_total{SKEIN}[5m])) > 5`, 5 * time.Minute, critical,
			"{{ $labels.instance }}: {{ $value }} % of {{ $labels.grpc_service }}/{{ $labels.grpc_method }} fail.",
		},
		{
			"SkeinSlowWrites", `histogram_quantile(0.99, sum by (job, instance, type, le) (rate(etcd_server_request_duration_seconds_bucket{SKEIN,type=~"Put|DeleteRange|Txn"}[5m]))) > 1`, 10 * time.Minute, warning,
			"{{ $labels.instance }}: a hundredth of {{ $labels.type }} takes over {{ $value }} s.",
		},
		{
			"SkeinConnectionsRefused", `increase(skein_etcdapi_rejected_connections_total{SKEIN}[5m]) > 0`, 5 * time.Minute, warning,
			"{{ $labels.instance }} has closed {{ $value }} connections of clients in 5 minutes: {{ $labels.cause }}.",
		},
		{
			"SkeinFewFiles", `os_fd_used{SKEIN} / os_fd_limit{SKEIN} > 0.8`, 10 * time.Minute, warning,
			"{{ $labels.instance }} has {{ $value | humanizePercentage }} of the files open that it may open.",
		},
		{
			"SkeinWatchersLag", `etcd_debugging_mvcc_slow_watcher_total{SKEIN} > 0`, 15 * time.Minute, warning,
			"{{ $labels.instance }}: {{ $value }} watchers do not keep up.",
		},
	}
}

func diskAlerts() []alert {
	return []alert{
		{
			"SkeinDiskFull", `skein_engine_space_full{SKEIN} == 1 or skein_wal_full{SKEIN} == 1`, 0, critical,
			"{{ $labels.instance }} has no room on its disk and refuses writes.",
		},
		{
			"SkeinDiskNearlyFull", `100 * last_over_time(etcd_mvcc_db_total_size_in_bytes{SKEIN}[5m]) / last_over_time(etcd_server_quota_backend_bytes{SKEIN}[5m]) > 90`, 10 * time.Minute, critical,
			"{{ $labels.instance }}: the store has {{ $value }} % of what it may have.",
		},
		{
			"SkeinDiskSoonFull", `predict_linear(etcd_mvcc_db_total_size_in_bytes{SKEIN}[4h], 4 * 3600) > etcd_server_quota_backend_bytes{SKEIN}`, 10 * time.Minute, warning,
			"{{ $labels.instance }}: at its present growth the store is full in 4 hours.",
		},
		{
			"SkeinSlowFsync", `histogram_quantile(0.99, rate(etcd_disk_wal_fsync_duration_seconds_bucket{SKEIN}[5m])) > 0.5`, 10 * time.Minute, warning,
			"{{ $labels.instance }}: a hundredth of the fsyncs takes over {{ $value }} s.",
		},
		{
			"SkeinSlowCommits", `histogram_quantile(0.99, rate(etcd_disk_backend_commit_duration_seconds_bucket{SKEIN}[5m])) > 0.25`, 10 * time.Minute, warning,
			"{{ $labels.instance }}: a hundredth of the commits to the store takes over {{ $value }} s.",
		},
		{
			"SkeinDiskHangs", `skein_raftgroup_wal_stalled{SKEIN} == 1 or skein_raftgroup_apply_stalled{SKEIN} == 1`, time.Minute, critical,
			"{{ $labels.instance }}: its disk makes no progress.",
		},
		{
			"SkeinWritesStall", `rate(skein_engine_write_stall_seconds_total{SKEIN}[5m]) > 0.1`, 10 * time.Minute, warning,
			"{{ $labels.instance }}: writes wait for flushes and compactions.",
		},
		{
			"SkeinLogPinned", `skein_wal_live_bytes{SKEIN} > skein_wal_target_bytes{SKEIN}`, 30 * time.Minute, warning,
			"{{ $labels.instance }}: something keeps {{ $value | humanize1024 }}B of the log from being shortened.",
		},
	}
}

func safetyAlerts() []alert {
	return []alert{
		{
			"SkeinAlarm", `max by (job, server_id, alarm_type) (etcd_debugging_server_alarms{SKEIN}) > 0`, 0, critical,
			"{{ $labels.job }}: the alarm {{ $labels.alarm_type }} of the node {{ $labels.server_id }} is raised.",
		},
		{
			"SkeinInsecure", `skein_insecure{SKEIN} == 1`, time.Hour, warning,
			"{{ $labels.instance }} is open to the network without TLS.",
		},
		{
			"SkeinCertificateFilesUnusable", `increase(skein_certificate_files_unusable_total{SKEIN}[1h]) > 0`, 0, warning,
			"{{ $labels.instance }}: a certificate file of the {{ $labels.side }} side was changed and cannot be used.",
		},
		{
			"SkeinCertificateEndsSoon", certificateHas(30*24*time.Hour, 5), 0, warning,
			"{{ $labels.instance }}: a certificate of it ends in {{ $value | humanizeDuration }}.",
		},
		{
			"SkeinCertificateEnds", certificateHas(2*24*time.Hour, 10), 0, critical,
			"{{ $labels.instance }}: a certificate of it ends in {{ $value | humanizeDuration }}, or has ended if that is below 0.",
		},
		{
			"SkeinAuditLost", `increase(skein_audit_lost_total{SKEIN}[15m]) > 0 or increase(skein_audit_write_errors_total{SKEIN}[15m]) > 0`, 0, warning,
			"{{ $labels.instance }} cannot write its audit log.",
		},
	}
}

// certificateHas is the time that is left of the certificate that a node has to renew first. It has a value only if that is less than left,
// and less than one part of the certificate's life: a certificate for days is renewed later than one for years. Doctor warns by the same
// measure.
func certificateHas(left time.Duration, part int) string {
	const ends, starts = `skein_certificate_end_timestamp_seconds{SKEIN}`, `skein_certificate_start_timestamp_seconds{SKEIN}`
	return fmt.Sprintf("(%s > 0) - time() < clamp_max((%[1]s - %s) / %d, %d)", ends, starts, part, int(left.Seconds()))
}
