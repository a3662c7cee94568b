package node

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
)

// etcdMetrics has the names, types and labels of etcd; conformance/etcdmetrics makes it of a running one.
const etcdMetrics = "testdata/etcd-3.7.3-metrics.tsv"

// notHere says why metrics of etcd are not there. A key that ends with _ is for all names that begin so.
var notHere = map[string]string{
	"etcd_debugging_disk_backend_commit_":                              "a step of bbolt, which is not there",
	"etcd_debugging_mvcc_index_compaction_pause_duration_milliseconds": "there is no index in memory",
	"etcd_debugging_snap_save_":                                        "there is no file with a snapshot of the v2 state",
	"etcd_debugging_store_":                                            "there is no v2 store",
	"etcd_disk_backend_defrag_duration_seconds":                        "there is nothing to defragment: the store compacts itself, see `skein_engine_compactions_total`",
	"etcd_disk_defrag_inflight":                                        "there is nothing to defragment",
	"etcd_disk_backend_snapshot_duration_seconds":                      "with --metrics=extensive `grpc_server_handling_seconds` has the method Snapshot",
	"etcd_disk_wal_write_duration_seconds":                             "`skein_raftgroup_append_duration_seconds` has write and fsync together",
	"etcd_mvcc_db_open_read_transactions":                              "reads open none; `skein_engine_snapshots` has what holds memory back",
	"etcd_mvcc_hash_duration_seconds":                                  "with --metrics=extensive `grpc_server_handling_seconds` has the method Hash",
	"etcd_mvcc_hash_rev_duration_seconds":                              "with --metrics=extensive `grpc_server_handling_seconds` has the method HashKV",
	"etcd_server_apply_duration_seconds":                               "`skein_raftgroup_apply_duration_seconds` has the batches in which entries are applied",
	"etcd_server_range_duration_seconds":                               "`skein_shard_request_seconds` with the kind read",
	"etcd_server_feature_enabled":                                      "there are no feature gates",
	"etcd_server_learner_promote_":                                     "`grpc_server_handled_total` has the method MemberPromote with its codes",
	"etcd_snap_db_":                                                    "copies of ranges are tables that the store takes over: `skein_engine_ingest_duration_seconds`",
	"etcd_snap_fsync_duration_seconds":                                 "there is no file with a snapshot of the v2 state",
	"promhttp_":                                                        "Prometheus's own `up` and `scrape_duration_seconds` tell of scrapes",
}

// otherwise says where a metric with a name of etcd's means something else here.
var otherwise = map[string]string{
	"etcd_cluster_version":                         "etcd's version that is spoken",
	"etcd_debugging_mvcc_compact_revision":         "as far as the node has heard",
	"etcd_debugging_mvcc_current_revision":         "as far as the node has heard",
	"etcd_debugging_mvcc_db_compaction_":           "of the ranges on the node",
	"etcd_debugging_mvcc_keys_total":               "of the ranges that the node leads: the sum over all nodes is the number of keys",
	"etcd_debugging_mvcc_total_put_size_in_bytes":  "by clients of the node: sum over all nodes",
	"etcd_debugging_server_lease_expired_total":    "by the node that leads placement",
	"etcd_disk_backend_commit_duration_seconds":    "commits to the store do not sync: the wal does. The buckets begin at 10 µs",
	"etcd_mvcc_delete_total":                       "by clients of the node: sum over all nodes",
	"etcd_mvcc_put_total":                          "by clients of the node: sum over all nodes",
	"etcd_mvcc_range_total":                        "by clients of the node: sum over all nodes. Compares of transactions are none",
	"etcd_mvcc_txn_total":                          "by clients of the node: sum over all nodes",
	"etcd_network_disconnected_peers_total":        "the main session with the peer ended",
	"etcd_network_peer_received_failures_total":    "sessions with the peer that broke",
	"etcd_network_peer_sent_failures_total":        "messages that did not leave for the peer",
	"etcd_network_snapshot_":                       "copies of ranges, of which several are under way at a time",
	"etcd_server_has_leader":                       "of the placement group, whose leader allocates revisions",
	"etcd_server_heartbeat_send_failures_total":    "liveness messages that were sent late",
	"etcd_server_is_leader":                        "of the placement group",
	"etcd_server_leader_changes_seen_total":        "of the placement group; `skein_raftgroup_leader_changes_total` has all groups",
	"etcd_server_proposals_":                       "over all groups of the node; one proposal may carry many requests",
	"etcd_server_quota_backend_bytes":              "without a quota it is what the disk leaves the store",
	"etcd_server_read_indexes_failed_total":        "over all groups; most reads need none",
	"etcd_server_slow_apply_total":                 "batches of entries, over --warning-apply-duration",
	"etcd_server_slow_read_indexes_total":          "over all groups; most reads need none",
	"etcd_server_snapshot_apply_in_progress_total": "copies of ranges: it may be above 1",
	"etcd_disk_wal_fsync_duration_seconds":         "one log for all groups of the node",
	"etcd_disk_wal_write_bytes_total":              "one log for all groups of the node",
	"etcd_server_version":                          "etcd's version that is spoken; `skein_version` is Skein's own",
	"etcd_debugging_mvcc_slow_watcher_total":       "watchers that read history",
}

// unseen are the types of vectors of which a node alone shows nothing, and that are no counters with a name in _total.
var unseen = map[string]string{
	"etcd_debugging_server_alarms": "gauge",
	"etcd_network_active_peers":    "gauge",
	"etcd_network_known_peers":     "gauge",

	"etcd_network_peer_round_trip_time_seconds": "histogram",

	"etcd_network_snapshot_send_success": "counter", "etcd_network_snapshot_receive_success": "counter",
	"etcd_network_snapshot_send_failures": "counter", "etcd_network_snapshot_receive_failures": "counter",
	"etcd_network_snapshot_send_inflights_total": "gauge", "etcd_network_snapshot_receive_inflights_total": "gauge",
	"etcd_network_snapshot_send_total_duration_seconds": "histogram", "etcd_network_snapshot_receive_total_duration_seconds": "histogram",
}

// seenLate are the types of metrics that a node shows a few seconds after its start: they are seen or not.
var seenLate = map[string]string{"skein_ranges_without_quorum": "gauge", "skein_placement_ranges_pending": "gauge"}

// metric is one row of a table.
type metric struct{ name, kind, labels, help string }

var (
	descLine  = regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: ("(?:[^"\\]|\\.)*"), .*constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	constName = regexp.MustCompile(`([a-zA-Z_]+)=`)
)

// describe returns the metrics of a collector by their names, without those of Go, which are of its version. types are
// those that are known.
func describe(t *testing.T, c prometheus.Collector, types map[string]string) map[string]metric {
	t.Helper()
	ch := make(chan *prometheus.Desc)
	go func() {
		c.Describe(ch)
		close(ch)
	}()
	all := map[string]metric{}
	for d := range ch {
		m := descLine.FindStringSubmatch(d.String())
		if m == nil {
			t.Errorf("no description: %s", d)
			continue
		}
		row := metric{name: m[1], kind: types[m[1]]}
		if strings.HasPrefix(row.name, "go_") {
			continue
		}
		var err error
		if row.help, err = strconv.Unquote(m[2]); err != nil {
			t.Errorf("help of %s: %v", row.name, err)
		}
		if row.kind == "" {
			row.kind = cmp.Or(unseen[row.name], seenLate[row.name])
		} else if unseen[row.name] != "" {
			t.Errorf("%s is seen: remove it from unseen", row.name)
		}
		if row.kind == "" && strings.HasSuffix(row.name, "_total") {
			row.kind = "counter" // a vector without a value yet
		}
		var labels []string
		for _, n := range constName.FindAllStringSubmatch(m[3], -1) {
			labels = append(labels, n[1])
		}
		if m[4] != "" {
			labels = append(labels, strings.Split(m[4], ",")...)
		}
		slices.Sort(labels)
		row.labels = strings.Join(labels, ",")
		all[row.name] = row
	}
	return all
}

// typesOf returns the types of what is gathered.
func typesOf(t *testing.T, g prometheus.Gatherer) map[string]string {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	types := map[string]string{}
	for _, f := range families {
		types[f.GetName()] = strings.ToLower(dto.MetricType_name[int32(f.GetType())])
	}
	return types
}

// measured starts a node with everything that has metrics, and returns them.
func measured(t *testing.T) map[string]metric {
	t.Helper()
	free, err := ports.Unused(2)
	if err != nil {
		t.Fatal(err)
	}
	client, peer := fmt.Sprint("http://127.0.0.1:", free[0]), fmt.Sprint("http://127.0.0.1:", free[1])
	dir := t.TempDir()
	cfg, _, err := config.Load([]string{
		"--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer,
		"--metrics", "extensive", "--audit-log", filepath.Join(dir, "audit"),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	n, err := Start(t.Context(), cfg, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{client}, Context: ctx})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Put(ctx, "k", "v"); err != nil {
		t.Fatal(err)
	}
	types := typesOf(t, n.metrics)
	all := describe(t, n.metrics, types)
	// What is described is what a scrape shows.
	resp, err := http.Get(client + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	page, err := io.ReadAll(resp.Body)
	if resp.Body.Close(); err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`).FindAllSubmatch(page, -1) {
		if row, ok := all[string(m[1])]; !strings.HasPrefix(string(m[1]), "go_") && (!ok || row.kind != string(m[2])) {
			t.Errorf("a scrape shows %s, a %s, and it is described as %+v", m[1], m[2], row)
		}
	}
	if !bytes.Contains(page, []byte("\nos_fd_used ")) || bytes.Contains(page, []byte("\nos_fd_used 0\n")) {
		t.Error("no file is open")
	}
	return all
}

// TestMetricsDocs: docs/METRICS.md has every metric of a running node, and every name of etcd: there, with etcd's type and
// labels, or why not. SKEIN_REWRITE=1 in the environment writes it anew.
func TestMetricsDocs(t *testing.T) {
	ours := measured(t)
	text := metricsPage(t, ours, describe(t, &mirror.Metrics{}, nil), readEtcdMetrics(t))
	const path = "../docs/METRICS.md"
	if os.Getenv("SKEIN_REWRITE") != "" {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(b) != text {
		t.Error("docs/METRICS.md is not what a node shows: run SKEIN_REWRITE=1 go test ./node -run TestMetricsDocs")
	}
}

func readEtcdMetrics(t *testing.T) []metric {
	t.Helper()
	b, err := os.ReadFile(etcdMetrics)
	if err != nil {
		t.Fatal(err)
	}
	var all []metric
	for line := range strings.Lines(string(b)) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		all = append(all, metric{name: f[0], kind: f[1], labels: f[2]})
	}
	if len(all) < 100 {
		t.Fatalf("etcd has only %d metrics", len(all))
	}
	return all
}

// said returns what a table says of a name, and notes that it was needed.
func said(table map[string]string, name string, needed map[string]bool) string {
	for prefix := name; prefix != ""; {
		if s, ok := table[prefix]; ok {
			needed[prefix] = true
			return s
		}
		i := strings.LastIndexByte(strings.TrimSuffix(prefix, "_"), '_')
		prefix = prefix[:i+1]
	}
	return ""
}

// metricsPage is docs/METRICS.md.
func metricsPage(t *testing.T, ours, mirrors map[string]metric, etcds []metric) string {
	t.Helper()
	var b strings.Builder
	b.WriteString(`# Metrics

Every node serves these as /metrics at its client URLs and at --listen-metrics-urls. [MONITORING.md](MONITORING.md) says which
matter, and what to do. The page is rendered from what a running node describes, and from a list of a running etcd's
(SKEIN_REWRITE=1 go test ./node -run TestMetricsDocs). Beside them there are those of Go (go_…). No metric has a range as a label:
a cluster may have 100,000.

## Skein's own, and those of the process

| metric | type | labels | meaning |
| --- | --- | --- | --- |
`)
	rest := maps.Clone(ours)
	for i := range etcds {
		delete(rest, etcds[i].name)
	}
	for _, name := range slices.Sorted(maps.Keys(rest)) {
		if m := rest[name]; strings.HasPrefix(name, "etcd_") || strings.HasPrefix(name, "grpc_") {
			t.Errorf("%s has a name like etcd's, and etcd has none", name)
		} else {
			b.WriteString(m.row(t))
		}
	}
	b.WriteString("\n`skein mirror start --metrics-listen HOST:PORT` serves those of a mirror, all gauges but the totals:\n\n| metric | labels | meaning |\n| --- | --- | --- |\n")
	for _, name := range slices.Sorted(maps.Keys(mirrors)) {
		m := mirrors[name]
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", m.name, m.labels, m.help)
	}
	fmt.Fprintf(&b, "\n## etcd's names\n\nAll %d of etcd 3.7.3. Those that are there have etcd's type and labels.\n\n| metric | type | labels | here |\n| --- | --- | --- | --- |\n", len(etcds))
	needed := map[string]bool{}
	for i := range etcds {
		e := &etcds[i]
		m, there := ours[e.name]
		why := said(notHere, e.name, needed)
		switch {
		case !there && why == "":
			t.Errorf("%s is not there, and nothing says why", e.name)
		case there && why != "":
			t.Errorf("%s is there, and this says that it is not: %s", e.name, why)
		case there && (e.kind != "?" && e.kind != m.kind || e.labels != m.labels):
			t.Errorf("%s is a %s with the labels %q, and with etcd a %s with %q", e.name, m.kind, m.labels, e.kind, e.labels)
		}
		kind, here := e.kind, "no: "+why
		if there {
			kind, here = m.kind, "yes"
			if other := said(otherwise, e.name, needed); other != "" {
				here += ", " + other
			}
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", e.name, strings.Trim(kind, "?"), e.labels, here)
	}
	for _, table := range []map[string]string{notHere, otherwise} {
		for name := range table {
			if !needed[name] {
				t.Errorf("what is said of %s is of no metric", name)
			}
		}
	}
	return b.String()
}

func (m *metric) row(t *testing.T) string {
	t.Helper()
	if m.kind == "" {
		t.Errorf("nobody knows the type of %s: give it a value, or a name that ends with _total", m.name)
	}
	return fmt.Sprintf("| `%s` | %s | %s | %s |\n", m.name, m.kind, m.labels, m.help)
}

// sumOf returns the sum of a metric without histograms over registries and labels.
func sumOf(t *testing.T, name string, regs ...*prometheus.Registry) (sum float64) {
	t.Helper()
	for _, reg := range regs {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if f.GetName() == name {
					sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	return sum
}

// TestClusterMetrics: keys are counted once over all nodes, however many replicas and ranges there are, and every node
// knows the revision. A pause of placement, a learner and users are told.
func TestClusterMetrics(t *testing.T) {
	regs := map[keyspace.NodeID]*prometheus.Registry{}
	var mu sync.Mutex
	bubble(t, 3, borders(3), func(o *Options) {
		mu.Lock()
		defer mu.Unlock()
		regs[o.Self] = prometheus.NewRegistry()
		o.Registry = regs[o.Self]
	}, func(r *rig) {
		all := func() []*prometheus.Registry {
			mu.Lock()
			defer mu.Unlock()
			return slices.Collect(maps.Values(regs))
		}
		const keys = 30
		var rev int64
		for i := range 2 * keys {
			rev = r.mustPut(r.nodes[i%3], fmt.Sprint(keyOf(i%3), i%keys), "v")
		}
		r.wait(time.Minute, "the keys are counted", func() bool {
			return sumOf(r.t, "etcd_debugging_mvcc_keys_total", all()...) == keys
		})
		r.wait(time.Minute, "every node knows the revision", func() bool {
			return sumOf(r.t, "etcd_debugging_mvcc_current_revision", all()...) == float64(3*rev)
		})
		if got := sumOf(r.t, "etcd_debugging_auth_revision", all()...); got != 3 {
			r.t.Errorf("the auth revisions of three nodes without users are %v in all", got)
		}
		if got := sumOf(r.t, "skein_placement_paused", all()...); got != 0 {
			r.t.Errorf("%v nodes are paused", got)
		}
		r.pause()
		r.wait(time.Minute, "one node says that placement is paused", func() bool {
			return sumOf(r.t, "skein_placement_paused", all()...) == 1
		})
		r.publish(r.nodes...)
		if _, _, err := r.nodes[0].core.Members(1, true).MemberAdd(r.t.Context(), []string{peerURL("n4")}, true); err != nil {
			r.t.Fatal(err)
		}
		n := r.joiner("n4")
		if err := r.join(r.t.Context(), n, r.nodes[0]); err != nil {
			r.t.Fatal(err)
		}
		r.announced(n)
		r.wait(time.Minute, "the learner says so", func() bool { return sumOf(r.t, "etcd_server_is_learner", all()...) == 1 })
		r.stop(r.nodes...)
	})
}
