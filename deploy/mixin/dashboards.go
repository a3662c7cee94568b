package main

func dashboards() []dashboard {
	return []dashboard{overview(), ranges(), storage(), network(), clients()}
}

// all is the selector of the series of the chosen nodes, whole that of the cluster.
const (
	all   = `job="$job",instance=~"$instance"`
	whole = `job="$job"`
)

// rate is the rate of a counter of the chosen nodes, by labels.
func rate(metric, by string) string {
	return "sum by (" + by + ") (rate(" + metric + "{" + all + "}[$__rate_interval]))"
}

// quantile is one of a histogram of the chosen nodes, by labels.
func quantile(q, metric, by string) string {
	if by != "" {
		by += ", "
	}
	return "histogram_quantile(" + q + ", sum by (" + by + "le) (rate(" + metric + "_bucket{" + all + "}[$__rate_interval])))"
}

// each is a gauge of each chosen node.
func each(metric string) target { return target{metric + "{" + all + "}", "{{instance}}"} }

// byNode is a counter's rate on each chosen node.
func byNode(metric string) target { return target{rate(metric, "instance"), "{{instance}}"} }

// p99 is the hundredth of a histogram's values on each chosen node.
func p99(metric string) target { return target{quantile("0.99", metric, "instance"), "{{instance}}"} }

func overview() dashboard {
	return dashboard{"skein-overview", "Skein / Overview", []row{
		{"Is it well?", []panel{
			number("Nodes reached", "", `sum(up{`+whole+`})`),
			number("Nodes that know a leader", "Of the placement group. Without one nothing is written.", `sum(etcd_server_has_leader{`+whole+`})`),
			number("Ranges without a quorum", "Their keys cannot be read or written.", `min(skein_ranges_without_quorum{`+whole+`})`),
			number("Ranges that lack a voter", "", `max(skein_placement_ranges_under_replicated{`+whole+`})`),
			number("Placement paused", "1: nothing is repaired.", `max(skein_placement_paused{`+whole+`})`),
			number("Keys", "", `sum(etcd_debugging_mvcc_keys_total{`+whole+`})`),
		}},
		{"Requests", []panel{
			graph("Requests", "reqps", "", target{rate("grpc_server_handled_total", "grpc_method"), "{{grpc_method}}"}),
			graph("Requests that failed", "reqps", "By code. Those of clients, such as a key that is not there, are among them.",
				target{`sum by (grpc_code) (rate(grpc_server_handled_total{` + all + `,grpc_code!="OK"}[$__rate_interval])) or vector(0)`, "{{grpc_code}}"}),
			graph("Time of requests, 99 of 100", "s", "", target{quantile("0.99", "etcd_server_request_duration_seconds", "type"), "{{type}}"}),
		}},
		{"Nodes", []panel{
			graph("Processor", "short", "Cores.", byNode("process_cpu_seconds_total")),
			graph("Memory", "bytes", "", each("process_resident_memory_bytes")),
			graph("Time of fsync, 99 of 100", "s", "Each write waits for one on a majority.", p99("etcd_disk_wal_fsync_duration_seconds")),
			graph("Ranges led", "short", "", each("skein_shard_leaders")),
			graph("Size of the store", "bytes", "", each("etcd_mvcc_db_total_size_in_bytes"), target{`etcd_server_quota_backend_bytes{` + all + `}`, "{{instance}}, at most"}),
			graph("Changes of placement's leader", "short", "", target{`increase(etcd_server_leader_changes_seen_total{` + all + `}[$__rate_interval])`, "{{instance}}"}),
		}},
	}}
}

func ranges() dashboard {
	return dashboard{"skein-ranges", "Skein / Ranges and placement", []row{
		{"Ranges", []panel{
			graph("Ranges", "short", "", target{`max(skein_placement_ranges{` + whole + `})`, "ranges"}),
			graph("Leaders", "short", "", each("skein_shard_leaders")),
			graph("Replicas", "short", "", each("skein_shard_replicas")),
			graph("Groups awake", "short", "An idle range sleeps and costs nothing.", each("skein_raftgroup_awake_groups")),
			graph("Changes of leaders", "short", "Over all groups.", byNode("skein_raftgroup_leader_changes_total")),
			graph("Splits and merges", "short", "", target{rate("skein_shard_splits_total", "instance"), "splits, {{instance}}"}, target{rate("skein_shard_merges_total", "instance"), "merges, {{instance}}"}),
		}},
		{"Placement", []panel{
			graph("Operations under way", "short", "", target{`max(skein_placement_operations_under_way{` + whole + `})`, "operations"}),
			graph("Ranges in need", "short", "", target{`min(skein_ranges_without_quorum{` + whole + `})`, "without a quorum"}, target{`max(skein_placement_ranges_under_replicated{` + whole + `})`, "lack a voter"}),
			graph("Copies of ranges received", "short", "", target{rate("skein_raftgroup_snapshots_received_total", "instance"), "{{instance}}"}),
			graph("Copies that failed", "short", "", byNode("skein_raftgroup_snapshots_failed_total")),
			graph("Holds of old versions", "short", "Backups and loads make them.", target{`max(skein_placement_holds{` + whole + `})`, "holds"}),
			graph("Quarantined and disagreeing replicas", "short", "", target{`skein_raftgroup_quarantined_replicas{` + all + `}`, "quarantined, {{instance}}"}, target{`skein_shard_replicas_in_doubt{` + all + `}`, "disagree, {{instance}}"}),
		}},
		{"Revisions", []panel{
			graph("Revisions allocated", "short", "By the node that leads placement.", byNode("skein_placement_allocated_revisions_total")),
			graph("Time for a revision, 99 of 100", "s", "", p99("skein_placement_sequence_seconds")),
			graph("Requests that got no revision", "short", "", byNode("skein_placement_sequence_errors_total")),
		}},
	}}
}

func storage() dashboard {
	return dashboard{"skein-storage", "Skein / Log and store", []row{
		{"Log", []panel{
			graph("Time of fsync, 99 of 100", "s", "", p99("etcd_disk_wal_fsync_duration_seconds")),
			graph("Written", "Bps", "", target{`sum by (instance) (rate(etcd_disk_wal_write_bytes_total{` + all + `}[$__rate_interval]))`, "{{instance}}"}),
			graph("Length", "bytes", "Above its target for long: something needs its old entries.", each("skein_wal_live_bytes"), target{`skein_wal_target_bytes{` + all + `}`, "{{instance}}, target"}),
			graph("Records that share an fsync", "short", "", target{`sum by (instance) (rate(skein_wal_appends_per_fsync_sum{` + all + `}[$__rate_interval])) / sum by (instance) (rate(skein_wal_appends_per_fsync_count{` + all + `}[$__rate_interval]))`, "{{instance}}"}),
			graph("Waits to be written", "bytes", "", each("skein_wal_queue_bytes")),
			graph("Disk hangs", "short", "1 while the log or the store makes no progress.", target{`max by (instance) (skein_raftgroup_wal_stalled{` + all + `} or skein_raftgroup_apply_stalled{` + all + `})`, "{{instance}}"}),
		}},
		{"Store", []panel{
			graph("Size", "bytes", "", each("etcd_mvcc_db_total_size_in_bytes")),
			graph("In use", "bytes", "", each("etcd_mvcc_db_total_size_in_use_in_bytes")),
			graph("Free on the disk", "bytes", "", each("skein_engine_disk_available_bytes")),
			graph("Time of commits, 99 of 100", "s", "", p99("etcd_disk_backend_commit_duration_seconds")),
			graph("Flushed and compacted", "Bps", "", target{rate("skein_engine_flush_bytes_total", "instance"), "flushed, {{instance}}"}, target{rate("skein_engine_compaction_bytes_total", "instance"), "compacted, {{instance}}"}),
			graph("To be compacted", "bytes", "", each("skein_engine_compaction_debt_bytes")),
			graph("Writes waited", "s", "For flushes or compactions.", byNode("skein_engine_write_stall_seconds_total")),
			graph("Blocks found in the cache", "percentunit", "", target{rate("skein_engine_block_cache_hits_total", "instance") + " / (" + rate("skein_engine_block_cache_hits_total", "instance") + " + " + rate("skein_engine_block_cache_misses_total", "instance") + ")", "{{instance}}"}),
			graph("Old versions removed", "short", "", byNode("etcd_debugging_mvcc_db_compaction_keys_total")),
		}},
	}}
}

func network() dashboard {
	pair := func(metric string) target { return target{metric + "{" + all + "}", "{{instance}} to {{Remote}}"} }
	return dashboard{"skein-network", "Skein / Between nodes", []row{
		{"Peers", []panel{
			graph("Sessions", "short", "0: no session with that node.", pair("etcd_network_active_peers")),
			graph("Way there and back, 99 of 100", "s", "", target{quantile("0.99", "etcd_network_peer_round_trip_time_seconds", "instance, To"), "{{instance}} to {{To}}"}),
			graph("Messages that did not leave", "short", "", target{rate("etcd_network_peer_sent_failures_total", "instance, To"), "{{instance}} to {{To}}"}),
			graph("Sessions that broke", "short", "", target{rate("etcd_network_peer_received_failures_total", "instance, From"), "{{instance}} from {{From}}"}),
			graph("Calls around a broken link", "short", "", byNode("skein_transport_detours_total")),
			graph("Peers alive", "short", "", each("skein_raftgroup_peers_alive")),
		}},
		{"Bytes", []panel{
			graph("Sent", "Bps", "", target{rate("etcd_network_peer_sent_bytes_total", "instance"), "{{instance}}"}),
			graph("Received", "Bps", "", target{rate("etcd_network_peer_received_bytes_total", "instance"), "{{instance}}"}),
			graph("Wait to be sent", "bytes", "", target{`sum by (instance, class) (skein_transport_queue_bytes{` + all + `})`, "{{instance}}, {{class}}"}),
		}},
		{"Raft", []panel{
			graph("Proposals that wait", "short", "", each("etcd_server_proposals_pending")),
			graph("Proposals that failed", "short", "", byNode("etcd_server_proposals_failed_total")),
			graph("Liveness messages sent late", "short", "", byNode("etcd_server_heartbeat_send_failures_total")),
			graph("Slow batches of entries", "short", "Over 100 ms.", byNode("etcd_server_slow_apply_total")),
			graph("Confirmed reads that were repeated or failed", "short", "", target{rate("etcd_server_slow_read_indexes_total", "instance"), "repeated, {{instance}}"}, target{rate("etcd_server_read_indexes_failed_total", "instance"), "failed, {{instance}}"}),
			graph("Elections", "short", "", byNode("skein_raftgroup_elections_total")),
		}},
	}}
}

func clients() dashboard {
	return dashboard{"skein-clients", "Skein / Clients, watchers and leases", []row{
		{"Operations", []panel{
			graph("Puts", "reqps", "", byNode("etcd_mvcc_put_total")),
			graph("Ranges", "reqps", "", byNode("etcd_mvcc_range_total")),
			graph("Deletes and transactions", "reqps", "", target{rate("etcd_mvcc_delete_total", "instance"), "deletes, {{instance}}"}, target{rate("etcd_mvcc_txn_total", "instance"), "transactions, {{instance}}"}),
			graph("Requests over several ranges", "reqps", "", target{rate("skein_router_multi_range_reads_total", "instance"), "reads, {{instance}}"}, target{rate("skein_router_multi_range_txns_total", "instance"), "transactions, {{instance}}"}),
			graph("Waits for locks", "reqps", "Of transactions over several ranges.", byNode("skein_shard_lock_waits_total")),
			graph("Slow requests", "reqps", "", byNode("skein_etcdapi_slow_requests_total")),
		}},
		{"Connections", []panel{
			graph("Open", "short", "", each("skein_etcdapi_open_connections")),
			graph("Sent to clients", "Bps", "", byNode("etcd_network_client_grpc_sent_bytes_total")),
			graph("Open files", "short", "", each("os_fd_used")),
		}},
		{"Watchers", []panel{
			graph("Watchers", "short", "", each("etcd_debugging_mvcc_watcher_total")),
			graph("Watchers that read history", "short", "Those that do not keep up, and those that begin in the past.", each("etcd_debugging_mvcc_slow_watcher_total")),
			graph("Events sent", "short", "", byNode("etcd_debugging_mvcc_events_total")),
			graph("Events that wait for clients", "short", "", each("etcd_debugging_mvcc_pending_events_total")),
			graph("Bytes that wait for clients", "bytes", "", each("skein_watch_queued_bytes")),
			graph("Bytes that wait for lower revisions", "bytes", "", each("skein_watch_pending_bytes")),
		}},
		{"Leases", []panel{
			graph("Leases", "short", "", target{`max(skein_lease_leases{` + whole + `})`, "leases"}),
			graph("Granted and revoked", "short", "Each node applies all of them.", target{`max(rate(etcd_debugging_lease_granted_total{` + whole + `}[$__rate_interval]))`, "granted"}, target{`max(rate(etcd_debugging_lease_revoked_total{` + whole + `}[$__rate_interval]))`, "revoked"}),
			graph("Expired", "short", "", target{`sum(rate(etcd_debugging_server_lease_expired_total{` + whole + `}[$__rate_interval]))`, "expired"}),
		}},
	}}
}
