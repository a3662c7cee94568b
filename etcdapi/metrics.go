package etcdapi

import (
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/keyspace"
)

// maxClientVersions bounds the label client_api_version, whose values clients choose.
const maxClientVersions = 32

// Metrics are the face's metrics, under etcd's names.
type Metrics struct {
	SentBytes, ReceivedBytes prometheus.Counter
	// ClientRequests by type (unary, stream) and client_api_version.
	ClientRequests *prometheus.CounterVec
	// RequestSeconds by type (Range, Put …) and success.
	RequestSeconds *prometheus.HistogramVec
	// Started and Handled are the usual counters of gRPC servers.
	Started, Handled *prometheus.CounterVec
	// MessagesReceived and MessagesSent count the messages of all calls; a unary call has one each
	// way.
	MessagesReceived, MessagesSent *prometheus.CounterVec
	// HandlingSeconds are the times of calls by method, nil unless they were asked for.
	HandlingSeconds *prometheus.HistogramVec
	// Ranges, Puts and Deletes count what requests have asked for and got, those of transactions too;
	// Txns counts the transactions of several of them. PutBytes is the size of all pairs put.
	Ranges, Puts, Deletes, Txns prometheus.Counter
	PutBytes                    prometheus.Gauge
	// ServerID is 1 for the node's own id.
	ServerID *prometheus.GaugeVec
	// HealthSuccess and HealthFailures count /health.
	HealthSuccess, HealthFailures prometheus.Counter
	// HealthCheck and HealthChecks are for /livez and /readyz.
	HealthCheck  *prometheus.GaugeVec
	HealthChecks *prometheus.CounterVec
	// OpenConnections are the open client connections. RejectedConnections are those that were
	// closed before they spoke, by cause.
	OpenConnections     prometheus.Gauge
	RejectedConnections *prometheus.CounterVec
	// StreamFailures counts failed streams by Type (send) and API. The watch histograms have the
	// times to send a response of events, the same per event, an answer to a request, and progress.
	StreamFailures                                                                 *prometheus.CounterVec
	WatchSendSeconds, WatchEventSeconds, WatchControlSeconds, WatchProgressSeconds prometheus.Histogram
	// SlowRequests counts the unary calls beyond the warning threshold.
	SlowRequests prometheus.Counter

	versions struct {
		sync.RWMutex
		seen map[string]bool
	}
	// known returns the alarms, which are read at each scrape; New sets it.
	known atomic.Pointer[func() []Alarm]
}

var descAlarms = prometheus.NewDesc("etcd_debugging_server_alarms",
	"Alarms for every member in cluster. 1 for 'server_id' label with current ID. 2 for 'alarm_type' label with type of this alarm",
	[]string{"server_id", "alarm_type"}, nil)

// alarmCollector tells of the alarms.
type alarmCollector struct{ m *Metrics }

// Describe implements prometheus.Collector.
func (alarmCollector) Describe(ch chan<- *prometheus.Desc) { ch <- descAlarms }

// Collect implements prometheus.Collector.
func (c alarmCollector) Collect(ch chan<- prometheus.Metric) {
	known := c.m.known.Load()
	if known == nil {
		return
	}
	type alarm struct {
		member keyspace.NodeID
		kind   pb.AlarmType
	}
	told := map[alarm]bool{} // one may be raised by its cause and by a client
	for _, a := range (*known)() {
		if k := (alarm{a.Member, a.Type}); !told[k] {
			told[k] = true
			ch <- prometheus.MustNewConstMetric(descAlarms, prometheus.GaugeValue, 1, a.Member.String(), a.Type.String())
		}
	}
}

// TimeMethods has the times of all methods measured, as etcd does with --metrics=extensive. It comes before New.
func (m *Metrics) TimeMethods(reg prometheus.Registerer) {
	m.HandlingSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "grpc_server_handling_seconds",
		Help: "Histogram of response latency (seconds) of gRPC that had been application-level handled by the server.", Buckets: prometheus.DefBuckets,
	}, []string{"grpc_type", "grpc_service", "grpc_method"})
	if reg != nil {
		reg.MustRegister(m.HandlingSeconds)
	}
}

// countOps counts the operations of a transaction's branch that was executed, and returns how many there were.
func (m *Metrics) countOps(r *pb.TxnRequest, resp *pb.TxnResponse) (n int) {
	ops := r.GetFailure()
	if resp.GetSucceeded() {
		ops = r.GetSuccess()
	}
	for i, op := range ops {
		n++
		switch q := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			m.Ranges.Inc()
		case *pb.RequestOp_RequestPut:
			m.countPut(q.RequestPut)
		case *pb.RequestOp_RequestDeleteRange:
			m.Deletes.Inc()
		case *pb.RequestOp_RequestTxn:
			n--
			if i < len(resp.GetResponses()) {
				n += m.countOps(q.RequestTxn, resp.GetResponses()[i].GetResponseTxn())
			}
		}
	}
	return n
}

// countTxn counts an executed transaction. etcd does not count those of one operation.
func (m *Metrics) countTxn(r *pb.TxnRequest, resp *pb.TxnResponse) {
	if m.countOps(r, resp) > 1 {
		m.Txns.Inc()
	}
}

func (m *Metrics) countPut(r *pb.PutRequest) {
	m.Puts.Inc()
	m.PutBytes.Add(float64(len(r.GetKey()) + len(r.GetValue())))
}

// NewMetrics makes the metrics and registers them; reg may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	loop := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "etcd_debugging_server_watch_send_loop_" + name + "_duration_seconds", Help: help,
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		})
	}
	m := &Metrics{
		SentBytes:      counter("etcd_network_client_grpc_sent_bytes_total", "The total number of bytes sent to grpc clients."),
		ReceivedBytes:  counter("etcd_network_client_grpc_received_bytes_total", "The total number of bytes received from grpc clients."),
		ClientRequests: vec("etcd_server_client_requests_total", "The total number of client requests per client version.", "type", "client_api_version"),
		RequestSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "etcd_server_request_duration_seconds",
			Help: "Response latency distribution in seconds for each type.", Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}, []string{"type", "success"}),
		Started:          vec("grpc_server_started_total", "Total number of RPCs started on the server.", "grpc_type", "grpc_service", "grpc_method"),
		Handled:          vec("grpc_server_handled_total", "Total number of RPCs completed on the server, regardless of success or failure.", "grpc_type", "grpc_service", "grpc_method", "grpc_code"),
		MessagesReceived: vec("grpc_server_msg_received_total", "Total number of RPC stream messages received on the server.", "grpc_type", "grpc_service", "grpc_method"),
		MessagesSent:     vec("grpc_server_msg_sent_total", "Total number of gRPC stream messages sent by the server.", "grpc_type", "grpc_service", "grpc_method"),
		ServerID: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "etcd_server_id",
			Help: "Server or member ID in hexadecimal format. 1 for 'server_id' label with current ID.",
		}, []string{"server_id"}),
		Ranges:  counter("etcd_mvcc_range_total", "Total number of ranges that clients of this member have got."),
		Puts:    counter("etcd_mvcc_put_total", "Total number of puts that clients of this member have made."),
		Deletes: counter("etcd_mvcc_delete_total", "Total number of deletes that clients of this member have made."),
		Txns:    counter("etcd_mvcc_txn_total", "Total number of txns of several operations that clients of this member have made."),
		PutBytes: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "etcd_debugging_mvcc_total_put_size_in_bytes",
			Help: "The total size of the key-value pairs that clients of this member have put.",
		}),
		HealthSuccess:  counter("etcd_server_health_success", "The total number of successful health checks"),
		HealthFailures: counter("etcd_server_health_failures", "The total number of failed health checks"),
		HealthCheck: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "etcd_server_healthcheck",
			Help: "The result of each kind of healthcheck.",
		}, []string{"type", "name"}),
		HealthChecks: vec("etcd_server_healthchecks_total", "The total number of each kind of healthcheck.", "type", "name", "status"),
		OpenConnections: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "skein_etcdapi_open_connections",
			Help: "Client connections that are open.",
		}),
		StreamFailures:       vec("etcd_network_server_stream_failures_total", "The total number of stream failures from the local server.", "Type", "API"),
		WatchSendSeconds:     loop("watch_stream", "The total duration in seconds of running through the send loop watch stream response all events."),
		WatchControlSeconds:  loop("control_stream", "The total duration in seconds of running through the send loop control stream response."),
		WatchProgressSeconds: loop("progress", "The total duration in seconds of running through the progress loop control stream response."),
		WatchEventSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "etcd_debugging_server_watch_send_loop_watch_stream_duration_per_event_seconds",
			Help:    "The average duration in seconds of running through the send loop watch stream response, per event.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
		RejectedConnections: vec("skein_etcdapi_rejected_connections_total", "Client connections closed before their first request, by cause.", "cause"),
		SlowRequests:        counter("skein_etcdapi_slow_requests_total", "Unary calls that took longer than warning-unary-request-duration."),
	}
	m.versions.seen = make(map[string]bool)
	if reg != nil {
		reg.MustRegister(m.SentBytes, m.ReceivedBytes, m.ClientRequests, m.RequestSeconds, m.Started, m.Handled, m.MessagesReceived,
			m.MessagesSent, m.ServerID, m.Ranges, m.Puts, m.Deletes, m.Txns, m.PutBytes, alarmCollector{m}, m.HealthSuccess,
			m.HealthFailures, m.HealthCheck, m.HealthChecks, m.OpenConnections, m.RejectedConnections, m.SlowRequests,
			m.StreamFailures, m.WatchSendSeconds, m.WatchEventSeconds, m.WatchControlSeconds, m.WatchProgressSeconds)
		reg.MustRegister(versionGauges()...)
	}
	return m
}

// versionGauges are the constant metrics of versions.
func versionGauges() []prometheus.Collector {
	one := func(name, help, label, value string) prometheus.Collector {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{label: value}})
		g.Set(1)
		return g
	}
	return []prometheus.Collector{
		one("etcd_server_version", "Which version is running. 1 for 'server_version' label with current version.", "server_version", EtcdVersion),
		one("etcd_server_go_version", "Which Go version server is running with. 1 for 'server_go_version' label with current version.", "server_go_version", runtime.Version()),
		one("etcd_cluster_version", "Which version is running. 1 for 'cluster_version' label with current cluster version", "cluster_version", "3.7"),
		one("skein_version", "Which version of Skein is running. 1 for 'version' label with current version.", "version", SkeinVersion),
	}
}

// clientVersion returns the label for a client's version. A bounded number of short ones are kept;
// the others become "other".
func (m *Metrics) clientVersion(v string) string {
	m.versions.RLock()
	known := m.versions.seen[v]
	m.versions.RUnlock()
	if known {
		return v
	}
	if len(v) > 32 || strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "other"
	}
	m.versions.Lock()
	defer m.versions.Unlock()
	if len(m.versions.seen) >= maxClientVersions {
		return "other"
	}
	m.versions.seen[v] = true
	return v
}

// methodMetrics are one method's counters, looked up once and not per call.
type methodMetrics struct {
	kind, service, method string
	rule                  auth.Rule
	audited               bool // set by New
	started, ok           prometheus.Counter
	received, sent        prometheus.Counter
	handled               *prometheus.CounterVec
	// succeeded and failed are nil for methods without a histogram, and handling without --metrics=extensive.
	succeeded, failed, handling prometheus.Observer
}

// etcd's histogram covers the KV service.
const timedService = "etcdserverpb.KV"

// methodTable makes the counters of all methods of a server by their full names, so that each
// exists from the start.
func methodTable(m *Metrics, services map[string]grpc.ServiceInfo) map[string]*methodMetrics {
	table := make(map[string]*methodMetrics)
	for service, info := range services {
		for _, method := range info.Methods {
			kind := "unary"
			switch {
			case method.IsClientStream && method.IsServerStream:
				kind = "bidi_stream"
			case method.IsClientStream:
				kind = "client_stream"
			case method.IsServerStream:
				kind = "server_stream"
			}
			full := "/" + service + "/" + method.Name
			mm := &methodMetrics{
				kind: kind, service: service, method: method.Name, handled: m.Handled,
				rule:     auth.RuleOf(full),
				started:  m.Started.WithLabelValues(kind, service, method.Name),
				received: m.MessagesReceived.WithLabelValues(kind, service, method.Name),
				sent:     m.MessagesSent.WithLabelValues(kind, service, method.Name),
				ok:       m.Handled.WithLabelValues(kind, service, method.Name, codes.OK.String()),
			}
			if service == timedService && kind == "unary" {
				mm.succeeded = m.RequestSeconds.WithLabelValues(method.Name, strconv.FormatBool(true))
				mm.failed = m.RequestSeconds.WithLabelValues(method.Name, strconv.FormatBool(false))
			}
			if m.HandlingSeconds != nil {
				mm.handling = m.HandlingSeconds.WithLabelValues(kind, service, method.Name)
			}
			table[full] = mm
		}
	}
	return table
}

// done counts a finished call.
func (mm *methodMetrics) done(code codes.Code, took time.Duration) {
	if code == codes.OK {
		mm.ok.Inc()
	} else {
		mm.handled.WithLabelValues(mm.kind, mm.service, mm.method, code.String()).Inc()
	}
	if mm.handling != nil {
		mm.handling.Observe(took.Seconds())
	}
	switch {
	case mm.succeeded == nil:
	case code == codes.OK:
		mm.succeeded.Observe(took.Seconds())
	default:
		mm.failed.Observe(took.Seconds())
	}
}
