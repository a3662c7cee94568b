package loadtest

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/clock"
)

// Workload says which requests are sent.
type Workload string

// The workloads. Mixed sends gets and puts by Config.ReadPercent. A Txn is a transaction
// of one compare, which holds, and Config.TxnKeys puts; the report counts it as one put.
const (
	Put   Workload = "put"
	Get   Workload = "get"
	Mixed Workload = "mixed"
	Txn   Workload = "txn"
	// Range reads pages of Config.PageKeys keys, each from a drawn key on.
	Range Workload = "range"
	// Lease is leases that come and go: each client grants one, puts a key with it, and revokes it, which deletes the key.
	// Each of the three is an operation.
	Lease Workload = "lease"
	// Kubernetes is what the API servers of a large cluster do; see Config.Kubernetes.
	Kubernetes Workload = "kubernetes"
)

// API says by which of the servers' APIs the requests go.
type API string

// The APIs. APIPipe sends the operations of many clients by a few streams of Skein's. Leases and watchers are etcd's calls with
// both.
const (
	APIEtcd API = "etcd"
	APIPipe API = "pipe"
)

// Dist says how keys are drawn.
type Dist string

// The distributions. Zipf's frequent keys are scattered over the key space. Sequential
// takes the keys in order, all clients together. Hot draws most operations from few
// neighbours, see Config.HotKeys. Tail puts each key behind the last one, all clients
// together, as a log or a queue does, and gets read near the end.
const (
	Uniform    Dist = "uniform"
	Zipf       Dist = "zipf"
	Sequential Dist = "sequential"
	Hot        Dist = "hot"
	Tail       Dist = "tail"
)

// Bounds of a Config.
const (
	maxClients    = 1 << 20
	maxKeys       = 1 << 32
	maxVerifyKeys = 1 << 26 // the ledger holds 16 bytes for each
	maxDuration   = 7 * 24 * time.Hour
	maxValueBytes = 64 << 20
	maxKeyBytes   = 64 << 10
	maxTotal      = 1 << 40
	maxRate       = 1e8
	maxTxnKeys    = 128 // etcd's own default bound of a transaction's operations
	maxPageKeys   = 100_000
	maxWatchers   = 10_000
)

// Config describes a run. Its JSON form is part of the report.
type Config struct {
	// Endpoints are addresses of client ports, as etcdctl takes them. Connection i uses
	// endpoint i modulo their number and no other one.
	Endpoints []string `json:"endpoints"`
	Access

	// API is by which API the requests go.
	API API `json:"api"`
	// Conns is the number of gRPC connections, over all endpoints. With APIPipe each has one pipe.
	Conns int `json:"conns"`
	// Clients is the number of requests that can be under way at once. Client i
	// uses connection i modulo Conns.
	Clients int `json:"clients"`
	// Duration is the measured time, Total the number of measured operations.
	// Exactly one of the two is set, the other is 0.
	Duration time.Duration `json:"duration_ns"`
	Total    int64         `json:"total"`
	// Rate is the offered load of an open loop in operations per second over all
	// clients; 0 means a closed loop.
	Rate     float64  `json:"rate_per_second"`
	Workload Workload `json:"workload"`
	// ReadPercent is the share of gets in workload Mixed, 0 to 100.
	ReadPercent int `json:"read_percent"`
	// Serializable makes gets serializable; they are then not checked for age.
	Serializable bool `json:"serializable"`
	// KeyBytes is the size of a key with its prefix, ValueBytes that of a value.
	KeyBytes   int `json:"key_bytes"`
	ValueBytes int `json:"value_bytes"`
	// Keys is the number of different keys.
	Keys int `json:"keys"`
	// KeyPrefix stands before each key. Empty, the keys spread evenly over all of
	// printable ASCII; otherwise over what lies below the prefix.
	KeyPrefix string `json:"key_prefix"`
	Dist      Dist   `json:"dist"`
	// ZipfSkew is the exponent s > 0 of Zipf: the k-th key has weight k^-s. YCSB's is 0.99.
	ZipfSkew float64 `json:"zipf_skew"`
	// TxnKeys is the number of keys that a Txn puts. They lie at even distances over the run's keys, and so in as many ranges
	// if there are as many.
	TxnKeys int `json:"txn_keys"`
	// PageKeys is the number of keys that a page of Range has at most.
	PageKeys int `json:"page_keys"`
	// HotKeys is the number of neighbouring keys that Hot draws HotPercent of the operations from. HotMove is how long
	// they stay hot until others are, far from them; 0 is for ever.
	HotKeys    int           `json:"hot_keys"`
	HotPercent int           `json:"hot_percent"`
	HotMove    time.Duration `json:"hot_move_ns"`
	// Watchers watch all keys of the run. How long each event takes to each of them, from before its put was sent, is
	// in the report.
	Watchers int `json:"watchers"`
	// Kubernetes is the cluster of workload Kubernetes, which uses neither the fields of keys and
	// values nor Fill: what it needs is always put before.
	Kubernetes KubernetesConfig `json:"kubernetes"`
	// Seed determines keys and kinds of the operations of each client.
	Seed uint64 `json:"seed"`
	// Fill writes each key once before anything else. Without it, gets of keys that were
	// never written find nothing.
	Fill bool `json:"fill"`
	// Warmup is how long the workload runs before it is measured; 0 is none.
	Warmup time.Duration `json:"warmup_ns"`
	// Timeout bounds each request, and so how long a run waits for the last answers after its end.
	Timeout time.Duration `json:"timeout_ns"`
	// Verify keeps a ledger of acknowledged puts and reads all keys at the end.
	Verify bool `json:"verify"`
	// Cleanup deletes the run's keys at the end, also of a run that was interrupted: all that it may have put,
	// whoever put them last.
	Cleanup bool `json:"cleanup,omitempty"`
	// ServerMetrics are the URLs of the servers' /metrics pages. If it is empty, the
	// servers' CPU time is not reported.
	ServerMetrics []string `json:"server_metrics"`
	// DataPath is a path whose file system is recorded in the report: one on the
	// servers' disk, if they run on this machine.
	DataPath string `json:"data_path"`
	// SLO is what the run must reach, in the words of Objectives; empty is nothing. Report.SLO says what became of it.
	SLO string `json:"slo,omitempty"`
	// Live prints a line per second during the run.
	Live bool `json:"-"`
	// Clock is the source of time.
	Clock clock.Clock `json:"-"`
}

// DefaultConfig returns complete settings except the endpoints: puts of 256 bytes from
// 1,000 clients over 100 connections for 10 s.
func DefaultConfig() Config {
	return Config{
		API:         APIEtcd,
		Conns:       100,
		Clients:     1000,
		Duration:    10 * time.Second,
		Workload:    Put,
		ReadPercent: 90,
		KeyBytes:    32,
		ValueBytes:  256,
		Keys:        100_000,
		Dist:        Uniform,
		ZipfSkew:    1.1,
		TxnKeys:     1,
		PageKeys:    100,
		HotKeys:     1,
		HotPercent:  90,
		Seed:        1,
		Timeout:     10 * time.Second,
		Kubernetes:  KubernetesConfig{Nodes: 1000, Pods: 10_000, Watchers: 3, Mix: DefaultMix},
		DataPath:    ".",
		Clock:       clock.System(),
	}
}

// Validate returns all errors of the Config at once. It changes nothing.
func (c *Config) Validate() error {
	var wrong []error
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	if len(c.Endpoints) == 0 || slices.Contains(c.Endpoints, "") {
		bad("endpoints: at least one, and none empty")
	}
	switch {
	case c.API != APIEtcd && c.API != APIPipe:
		bad("api: %q is none of etcd, pipe", c.API)
	case c.API == APIPipe && c.Workload == Lease:
		bad("api: the pipe carries no leases, and workload lease is nothing else; take --api etcd for it")
	}
	if c.Clients < 1 || c.Clients > maxClients {
		bad("clients: %d is not between 1 and %d", c.Clients, maxClients)
	}
	if c.Conns < 1 || c.Conns > c.Clients {
		bad("conns: %d is not between 1 and the number of clients, %d", c.Conns, c.Clients)
	}
	if (c.Duration != 0) == (c.Total != 0) {
		bad("one of duration and total must be given, and not both")
	}
	if c.Duration < 0 || c.Duration > maxDuration {
		bad("duration: %s is not between 0 and %s", c.Duration, maxDuration)
	}
	if c.Total < 0 || c.Total > maxTotal {
		bad("total: %d is not between 0 and %d", c.Total, int64(maxTotal))
	}
	if !(c.Rate >= 0 && c.Rate <= maxRate) {
		bad("rate: %g is not between 0 and %g per second", c.Rate, maxRate)
	}
	if c.Warmup < 0 || c.Warmup > maxDuration {
		bad("warmup: %s is not between 0 and %s", c.Warmup, maxDuration)
	}
	if c.Timeout <= 0 || c.Timeout > time.Hour {
		bad("timeout: %s is not between 0 and 1h", c.Timeout)
	}
	if c.Clock == nil {
		bad("clock: none given")
	}
	if c.SLO != "" {
		if _, err := ParseObjectives(c.SLO); err != nil {
			wrong = append(wrong, err)
		}
	}
	wrong = append(wrong, c.validateWorkload()...)
	for _, u := range c.ServerMetrics {
		if p, err := url.Parse(u); err != nil || p.Host == "" || !strings.HasPrefix(p.Scheme, "http") {
			bad("server-metrics: %q is no http:// or https:// URL", u)
		}
	}
	return errors.Join(wrong...)
}

// validateWorkload checks workload, keys and values.
func (c *Config) validateWorkload() []error {
	var wrong []error
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	if !slices.Contains([]Workload{Put, Get, Mixed, Txn, Range, Lease, Kubernetes}, c.Workload) {
		bad("workload: %q is none of put, get, mixed, txn, range, lease, kubernetes", c.Workload)
	}
	if c.Workload == Kubernetes {
		return append(wrong, c.Kubernetes.validate(c.Clients)...)
	}
	if c.ReadPercent < 0 || c.ReadPercent > 100 {
		bad("read-percent: %d is not between 0 and 100", c.ReadPercent)
	}
	if !slices.Contains([]Dist{Uniform, Zipf, Sequential, Hot, Tail}, c.Dist) {
		bad("dist: %q is none of uniform, zipf, sequential, hot, tail", c.Dist)
	}
	if c.Dist == Zipf && !(c.ZipfSkew > 0 && c.ZipfSkew <= 10) {
		bad("zipf-skew: %g is not above 0 and at most 10", c.ZipfSkew)
	}
	if c.ValueBytes < 0 || c.ValueBytes > maxValueBytes {
		bad("value-size: %d is not between 0 and %d", c.ValueBytes, maxValueBytes)
	}
	if c.Verify && c.ValueBytes < stampBytes {
		bad("value-size: %d is less than the %d bytes by which verify knows a value", c.ValueBytes, stampBytes)
	}
	wrong = append(wrong, c.validateKinds()...)
	switch {
	case c.Keys < 1 || c.Keys > maxKeys:
		bad("keys: %d is not between 1 and %d", c.Keys, int64(maxKeys))
	case c.Verify && c.Keys > maxVerifyKeys:
		bad("keys: %d is more than the %d that verify can hold in memory", c.Keys, maxVerifyKeys)
	case c.KeyBytes > maxKeyBytes:
		bad("key-size: %d is more than %d", c.KeyBytes, maxKeyBytes)
	case c.KeyBytes < 1+len(c.KeyPrefix) || digitsPower(c.KeyBytes-len(c.KeyPrefix)) < uint64(c.Keys):
		bad("key-size: %d bytes, %d of them prefix, are too few for %d different keys",
			c.KeyBytes, len(c.KeyPrefix), c.Keys)
	}
	return wrong
}

// validateKinds checks what only some workloads and distributions have.
func (c *Config) validateKinds() []error {
	var wrong []error
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	switch {
	case c.TxnKeys < 1 || c.TxnKeys > maxTxnKeys:
		bad("txn-keys: %d is not between 1 and %d", c.TxnKeys, maxTxnKeys)
	case c.Workload == Txn && c.TxnKeys > c.Keys:
		bad("txn-keys: %d is more than the number of keys, %d", c.TxnKeys, c.Keys)
	}
	if c.TxnKeys > 1 && c.Verify {
		bad("verify: it knows transactions of one key only, and txn-keys is %d", c.TxnKeys)
	}
	if c.PageKeys < 1 || c.PageKeys > maxPageKeys {
		bad("page-keys: %d is not between 1 and %d", c.PageKeys, maxPageKeys)
	}
	if c.Dist == Hot && (c.HotKeys < 1 || c.HotKeys > c.Keys) {
		bad("hot-keys: %d is not between 1 and the number of keys, %d", c.HotKeys, c.Keys)
	}
	if c.HotPercent < 0 || c.HotPercent > 100 {
		bad("hot-percent: %d is not between 0 and 100", c.HotPercent)
	}
	if c.HotMove < 0 || c.HotMove > maxDuration {
		bad("hot-move: %s is not between 0 and %s", c.HotMove, maxDuration)
	}
	if c.Dist == Tail && (c.Workload == Get || c.Workload == Range || c.TxnKeys > 1) {
		bad("dist: tail makes new keys one by one, and workload %s with txn-keys %d does not", c.Workload, c.TxnKeys)
	}
	if c.Dist == Tail && c.Fill {
		bad("fill: with dist tail there is nothing to fill: each put makes a new key")
	}
	if c.Workload == Lease && c.Verify {
		bad("verify: workload lease leaves no key to verify")
	}
	switch {
	case c.Watchers < 0 || c.Watchers > maxWatchers:
		bad("watchers: %d is not between 0 and %d", c.Watchers, maxWatchers)
	case c.Watchers == 0:
	case c.Workload != Put && c.Workload != Mixed && c.Workload != Txn:
		bad("watchers: workload %s puts nothing that they could measure", c.Workload)
	case c.Verify:
		bad("watchers: they and verify need the same place in the values; give one of them")
	case c.ValueBytes < stampBytes:
		bad("value-size: %d is less than the %d bytes by which watchers know a value", c.ValueBytes, stampBytes)
	}
	return wrong
}

// keysEach is how many keys a put of the workload puts.
func (c *Config) keysEach() int {
	if c.Workload == Txn {
		return c.TxnKeys
	}
	return 1
}
