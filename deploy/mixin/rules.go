package main

import (
	"fmt"
	"strings"
	"time"
)

// selector is of all series of Skein. A mixin's user may have another one.
const selector = `job=~".*skein.*"`

// rule is a recording rule.
type rule struct{ record, expr string }

// rules are what several panels and people ask, and what takes Prometheus long.
func rules() []rule {
	return []rule{
		{"job_method:skein_requests:rate5m", `sum by (job, grpc_service, grpc_method) (rate(grpc_server_handled_total{SKEIN}[5m]))`},
		{"job_method:skein_failed_requests:rate5m", `sum by (job, grpc_service, grpc_method) (rate(grpc_server_handled_total{SKEIN,grpc_code=~"` + serverFaults + `"}[5m]))`},
		{"job_type:skein_request_seconds:p99_rate5m", `histogram_quantile(0.99, sum by (job, type, le) (rate(etcd_server_request_duration_seconds_bucket{SKEIN}[5m])))`},
		{"instance:skein_fsync_seconds:p99_rate5m", `histogram_quantile(0.99, sum by (job, instance, le) (rate(etcd_disk_wal_fsync_duration_seconds_bucket{SKEIN}[5m])))`},
		{"job:skein_keys:sum", `sum by (job) (etcd_debugging_mvcc_keys_total{SKEIN})`},
		{"job:skein_db_bytes:sum", `sum by (job) (etcd_mvcc_db_total_size_in_bytes{SKEIN})`},
		{"job:skein_revisions:rate5m", `sum by (job) (rate(skein_placement_allocated_revisions_total{SKEIN}[5m]))`},
	}
}

// serverFaults are the codes of failures that are not the client's.
const serverFaults = "Unknown|ResourceExhausted|Internal|Unavailable|DataLoss|DeadlineExceeded"

// query puts the selector into an expression, in which SKEIN stands for it.
func query(expr string) string { return strings.ReplaceAll(expr, "SKEIN", selector) }

func rulesFile() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\ngroups:\n  - name: skein.rules\n    rules:\n", written)
	for _, r := range rules() {
		fmt.Fprintf(&b, "      - record: %s\n        expr: |-\n          %s\n", r.record, query(r.expr))
	}
	return b.String()
}

func alertsFile(all []alert) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\ngroups:\n  - name: skein\n    rules:\n", written)
	for i := range all {
		a := &all[i]
		fmt.Fprintf(&b, "      - alert: %s\n        expr: |-\n          %s\n", a.name, query(a.expr))
		if a.lasts > 0 {
			fmt.Fprintf(&b, "        for: %s\n", promDuration(a.lasts))
		}
		fmt.Fprintf(&b, "        labels:\n          severity: %s\n", a.severity)
		fmt.Fprintf(&b, "        annotations:\n          summary: %q\n          runbook_url: %s#%s\n", a.summary, monitoring, strings.ToLower(a.name))
	}
	return b.String()
}

// monitoring is where the alerts are explained.
const monitoring = "https://github.com/skeindb/skein/blob/main/docs/MONITORING.md"

// promDuration writes whole seconds as Prometheus does.
func promDuration(d time.Duration) string {
	for _, u := range []struct {
		unit time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "m"}} {
		if d%u.unit == 0 {
			return fmt.Sprintf("%d%s", d/u.unit, u.name)
		}
	}
	return fmt.Sprintf("%ds", d/time.Second)
}
