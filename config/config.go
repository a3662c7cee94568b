package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/internal/limits"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi"
)

// Bounds of what may be configured. They exist so that a slip of the keyboard is
// refused at the start and not found out under load.
const (
	// MaxElectionTimeout is etcd's bound of the election timeout.
	MaxElectionTimeout = 50 * time.Second
	// MaxMaxRequestBytes bounds max-request-bytes: what a request writes is one entry of the
	// log, and a put of more would be refused whenever it comes.
	MaxMaxRequestBytes = rangeapi.MaxRequestBytes
	// MaxMaxTxnOps bounds max-txn-ops: a transaction is evaluated under latches.
	MaxMaxTxnOps = 1 << 20
	// MaxInitialRanges bounds how many ranges a new cluster begins with.
	MaxInitialRanges = 10_000
	// MinMemoryBytes is the smallest memory budget that a node can work with: sixteen of the
	// largest requests. MaxMemoryBytes is the largest that is meant.
	MinMemoryBytes = 64 << 20
	MaxMemoryBytes = 16 << 40
	// The bounds of DefaultMemoryBytes.
	leastMemoryBytes = 256 << 20
	mostMemoryBytes  = 4 << 30
	// MinRangeMaxBytes is the smallest range-max-bytes but 0: below it ranges are made
	// faster than they fill.
	MinRangeMaxBytes = 1 << 20
	// MinRangeMergeAfter is the shortest range-merge-after but 0: with less, ranges would be
	// split for one load and merged before the next.
	MinRangeMergeAfter = fsm.MinMergeAfter
	// MaxShutdownDelay bounds shutdown-delay: whoever waits for longer has forgotten the unit.
	MaxShutdownDelay = time.Hour
	// MinCopyBytes is the smallest copy-bytes-per-second: below it a copy of a range that is
	// written to never ends.
	MinCopyBytes = 1 << 20
)

// The defaults of auth-token-ttl and bcrypt-cost, etcd's.
const (
	defaultAuthTokenTTL = 300 * time.Second
	defaultBcryptCost   = 10
)

// The states of initial-cluster-state.
const (
	// StateNew bootstraps a cluster.
	StateNew = "new"
	// StateExisting joins one that runs, which was told of the node before.
	StateExisting = "existing"
)

// ConsoleMode says what the console of a node can do.
type ConsoleMode string

// The modes of the console.
const (
	// ConsoleReadOnly shows the cluster and its keys.
	ConsoleReadOnly ConsoleMode = "read-only"
	// ConsoleFull also has commands, and edits keys.
	ConsoleFull ConsoleMode = "full"
	ConsoleOff  ConsoleMode = "off"
)

// Config is the validated configuration of one node. The zero value is not valid:
// begin with [Default]. A Config is not changed once the node has it.
type Config struct {
	// Name is the node's name in initial-cluster, for people and for bootstrapping.
	// Never empty. Default "default". Two nodes of one name cannot be told apart by
	// the people who run them.
	Name string
	// DataDir is the directory of everything durable but the wal. Empty means
	// NAME.skein in the working directory; [Load] fills it in. A directory of another
	// node or cluster is refused when it is opened.
	DataDir string
	// WALDir is the directory of the wal. Empty means DataDir/wal; [Load] fills it in.
	// On another disk than DataDir, fsyncs do not wait for compactions. It cannot be
	// changed without moving the files.
	WALDir string

	// ListenClientURLs are where clients are served: http, https, unix or unixs; the
	// host is an IP address or localhost; port 0 takes a free port. Never empty.
	// Default http://localhost:2379.
	ListenClientURLs []url.URL
	// ListenClientHTTPURLs are where clients are served that speak HTTP alone. With any of
	// them ListenClientURLs serve gRPC alone. Empty means none.
	ListenClientHTTPURLs []url.URL
	// AdvertiseClientURLs is what clients are told in MemberList. Never empty.
	// Default http://localhost:2379. A client that syncs its endpoints goes away from
	// the cluster if they cannot be reached.
	AdvertiseClientURLs []url.URL
	// ListenPeerURLs are where the bus listens (QUIC and TCP, so UDP and TCP ports): http or https.
	// http is QUIC with self-made certificates and no authentication. Never empty.
	// Default http://localhost:2380.
	ListenPeerURLs []url.URL
	// AdvertisePeerURLs is where the other nodes reach this one; the node's id is
	// derived from them. Never empty. Default http://localhost:2380.
	AdvertisePeerURLs []url.URL
	// ListenMetricsURLs are extra listeners for metrics and health alone. Empty means
	// none.
	ListenMetricsURLs []url.URL
	// PeersByTCP has this node dial its peers by TLS over TCP, and not by QUIC.
	PeersByTCP bool
	// Console is what the console can do. ListenConsoleURLs are where it is served; empty means at the client URLs.
	// Default read-only.
	Console           ConsoleMode
	ListenConsoleURLs []url.URL

	// SocketReusePort lets another process listen at the addresses for clients too, as
	// the one that is to take this one's place. Default false.
	SocketReusePort bool
	// LockMemory keeps the memory of the process from being swapped out. Default false.
	LockMemory bool
	// NoFsync never waits for the disk: after a crash of the machine the node may have forgotten what it has said.
	// Default false. For tests alone.
	NoFsync bool

	// InitialCluster are the peer URLs of each founder by name. Read only where the
	// data directory is empty. Default: this node alone. All founders must be given the
	// same; two that were not do not find each other, since their cluster ids differ.
	InitialCluster types.URLsMap
	// DiscoverySRV is a domain whose SRV records name the founders in the place of InitialCluster, and DiscoverySRVName a
	// suffix of the service's name in them. Empty means none. Records that are not the same for all founders make
	// clusters that do not find each other.
	DiscoverySRV, DiscoverySRVName string
	// InitialClusterState is "new", or "existing" for a node that was added to a running
	// cluster by etcd's MemberAdd: InitialCluster then names the others, which tell it who it
	// is by its peer URLs. Read only where the data directory is empty.
	InitialClusterState string
	// Join are client addresses of nodes of a running cluster, which this node joins: the
	// first that answers admits it. HOST:PORT, http://HOST:PORT or https://HOST:PORT, at most
	// 64. Read only where the data directory is empty; otherwise they are asked whether it is
	// that cluster's. Empty means that the node bootstraps a cluster or has one. If initial-cluster
	// is given too, [Load] keeps one of them: join, unless initial-cluster names this node.
	Join []string
	// InitialClusterToken goes into the ids, so that clusters with the same peer URLs
	// do not mix. Default "etcd-cluster". Must be the same on all founders.
	InitialClusterToken string

	// NodeAttributes are what an operator says of the node, as where it stands: in the order
	// of their keys. Written to its row of the node table at each start. Default none.
	NodeAttributes []fsm.Attribute

	// HeartbeatInterval is raft's tick and the time between heartbeats. Positive.
	// Default 100 ms. Too low costs CPU, above the round trip's jitter is enough.
	HeartbeatInterval time.Duration
	// ElectionTimeout is how long a follower waits for a heartbeat, and the length of
	// the leader lease's promise. At least five heartbeats, at most 50 s. Default 1 s.
	// Too low makes elections of hiccups, too high makes outages long. All nodes must
	// have the same, or the longest one decides how long a restarted node stays quiet.
	ElectionTimeout time.Duration
	// StrictReconfigCheck refuses removals of members for which a quorum is missing.
	// Default true.
	StrictReconfigCheck bool
	// MaxLearners bounds the learners among the members. Positive. Default 1.
	MaxLearners int
	// PreVote has a candidate ask first whether it could win. Default true. Without it
	// a node that was cut off deposes leaders when it comes back.
	PreVote bool

	// MaxRequestBytes bounds a client's request, encoded. Positive, at most 4 MiB. Default
	// 1.5 MiB. Too high lets one request take the memory of thousands.
	MaxRequestBytes int
	// MaxTxnOps bounds the operations of a transaction. Positive. Default 128. Too
	// high lets one transaction hold its latches for long.
	MaxTxnOps int
	// CorruptCheckTime is how often this node's replicas are read from disk and compared with others.
	// 0, the default, or less: never.
	CorruptCheckTime time.Duration
	// QuotaBytes bounds the size of this node's store: above it the node takes no more data, as with a
	// full disk. 0, the default, or less: the disk is the bound.
	QuotaBytes int64
	// MaxConcurrentStreams bounds the calls at a time on one client connection. 0 and
	// the default mean as many as the protocol can count, as in etcd.
	MaxConcurrentStreams uint32
	// Gateway serves the JSON gateway to HTTP clients. Default true.
	Gateway bool
	// KeepAliveMinTime is the least time between pings of a client; one that pings
	// more often is cut off. 0 means gRPC's own, 5 minutes. Default 5 s. Above a
	// client's keepalive time it cuts off healthy clients.
	KeepAliveMinTime time.Duration
	// KeepAliveInterval is the time after which a silent client is pinged. 0 means
	// never. Default 2 h.
	KeepAliveInterval time.Duration
	// KeepAliveTimeout is how long a pinged client may be silent before it is cut off.
	// 0 switches the pings off. Default 20 s.
	KeepAliveTimeout time.Duration
	// WarnUnaryRequest is the duration above which a request is logged. 0 means the
	// default, 300 ms. Too low fills the log under load.
	WarnUnaryRequest time.Duration
	// WarnApply is the duration above which applying entries is logged and counted as slow. 0 means the default, 100 ms.
	WarnApply time.Duration
	// Tracing sends traces of requests to a collector.
	Tracing Tracing
	// WatchProgressInterval is how often watchers that want it are told how far they are
	// while nothing happens. 0 means 10 min, less than 100 ms that. Short ones cost a
	// message per watcher each time.
	WatchProgressInterval time.Duration

	// Compaction says how old versions go.
	Compaction Compaction

	// CertsDir has the files of ClientTLS and PeerTLS, as skein cert makes them; empty where
	// they are named one by one.
	CertsDir string
	// ClientTLS is for the https and unixs URLs among the client and metrics URLs.
	ClientTLS TLS
	// PeerTLS is for the https URLs among the peer URLs.
	PeerTLS TLS
	// CORS are the origins (scheme://host:port) whose pages a browser may let in by the HTTP of the client
	// URLs. Empty or one "*" means all.
	CORS []string
	// HostWhitelist are the names by which HTTP requests without TLS may call this node. Empty, or with a "*", means
	// all.
	HostWhitelist []string
	// CipherSuites restricts TLS 1.2. Empty means Go's choice.
	CipherSuites []uint16
	// TLSMinVersion is the oldest version of TLS. Default TLS 1.2; the bus always uses
	// 1.3.
	TLSMinVersion uint16
	// TLSMaxVersion is the newest version of TLS; 0 means the newest there is.
	TLSMaxVersion uint16
	// SelfSignedCertYears is how long the certificate of auto-tls is valid. Positive.
	// Default 1.
	SelfSignedCertYears uint

	// AuthToken says which tokens users get who log in, as auth.ParseOptions reads it: "simple", "jwt" with
	// its options, or empty for none. Default "simple". All nodes must have the same, or one refuses the tokens
	// of another.
	AuthToken string
	// AuthTokenTTL is how long a simple token is valid without use. 0 means the default, 5 min. Too short and
	// clients log in all the time, too long and a stolen token serves for long.
	AuthTokenTTL time.Duration
	// BcryptCost is the cost of the hashes of new passwords. At most 14; below 4 means the default, 10, as in
	// etcd. Each step doubles the time of a login, and of an attack on a stolen hash.
	BcryptCost int

	// InsecureAdmin lets whoever reaches a client URL command the cluster while users are not checked: drain, join,
	// remove, split, move, settings, debug bundle. Default false: then only loopback, unix sockets and clients with a certificate may.
	InsecureAdmin bool

	// Log says what is logged, how and where.
	Log Log
	// ShutdownDelay is how long the node serves on once it was told to stop. 0 to [MaxShutdownDelay]. Default 0. Too
	// short a delay sends clients of a slow load balancer to a port that is closed.
	ShutdownDelay time.Duration
	// AuditLog is the file of the audit log: logins, denials, and changes of users, members, alarms and the cluster. Empty
	// means none. It is never cut: have it rotated.
	AuditLog string
	// EnablePprof serves Go's profiles to every client, and to root alone once users are checked. Default false. Profiles cost
	// CPU and show what the process holds in memory.
	EnablePprof bool

	// ExtensiveMetrics has the times of each method measured, in histograms. Default false.
	ExtensiveMetrics bool

	// InitialRanges is how many ranges a new cluster begins with, split evenly over
	// printable ASCII. At least 1, at most 10,000. Default 1. Read by the founders, who
	// must have the same. Keys that all begin alike fall into one range: use split keys.
	InitialRanges int
	// InitialSplitKeys are the keys at which a new cluster's ranges begin, ascending,
	// without the first range's. These borders stay until they are merged by command. Empty means InitialRanges decides. Use
	// [Config.SplitKeys] to read both.
	InitialSplitKeys [][]byte
	// MemoryBytes is the node's one memory budget: block cache, memtables, entry
	// caches, queues and overlays are shares of it. 64 MiB to 16 TiB; 0, the default, is
	// [DefaultMemoryBytes] of what the process may have. Too high and the kernel kills the
	// process, too low and requests are refused under load. Go's runtime and stacks come on
	// top, about a quarter more.
	MemoryBytes int64
	// RangeMaxBytes is a range's size on disk, old versions included, above which its leader
	// splits it in the middle of its bytes. 0 is no bound; otherwise at least 1 MiB. Default
	// 256 MiB. If it is too high, copies of ranges take long; if too low, many ranges cost
	// memory.
	RangeMaxBytes int64
	// RangeSplitLoad is how many requests a second a range may have before its leader splits
	// it where they divide. 0 is no bound. Default 10,000. Too low and few requests share an
	// entry of the log, too high and one node has work that others could do.
	RangeSplitLoad int64
	// RangeMergeAfter is how long two neighbours stay small and cold, without a split or a
	// merge, until they are merged. Small and cold is a quarter of RangeMaxBytes and of
	// RangeSplitLoad for both together. 0 merges by command alone; the least other value is
	// 5 minutes. Default an hour. If it is too short, ranges that were split for a load are
	// merged before that load comes back. If it is too long, unneeded ranges cost memory.
	RangeMergeAfter time.Duration
	// CopyBytesPerSecond bounds what copies of ranges bring to this node, all together, and
	// likewise what it sends for them. At least 1 MiB. Default 64 MiB. Too high and clients
	// wait for the disk behind a copy, too low and a lost replica is missed for long.
	CopyBytesPerSecond int64
	// ForceNewCluster makes a cluster of this node alone before it starts.
	ForceNewCluster bool
	// LeaseReads has leaders answer linearizable reads, and the sequencer allocate revisions,
	// under their lease. Default true. Without it each such answer waits for a round trip to a
	// quorum, and nothing rests on how evenly the nodes' clocks run.
	LeaseReads bool
	// NodeDeadAfter is how long a node may be silent before its replicas are rebuilt on
	// others. Default 5 minutes, at least two election timeouts. Too short and a restart
	// copies what is there again a moment later; too long and a second loss finds ranges
	// that have not got over the first.
	NodeDeadAfter time.Duration
	// UpgradeAfter is after how long the cluster version is raised by itself, once all nodes
	// run a build that reads the next one; 0 is by command alone. Default a day. Until then
	// every node can go back to the release before. Too short and nobody has seen yet whether
	// the new release does; too long and what only the new version can is missing.
	UpgradeAfter time.Duration
}

// Default returns etcd's defaults, as they are where nothing is configured.
func Default() *Config {
	client := mustURL("http://localhost:2379")
	peer := mustURL("http://localhost:2380")
	return &Config{
		Name:                 "default",
		ListenClientURLs:     []url.URL{client},
		AdvertiseClientURLs:  []url.URL{client},
		ListenPeerURLs:       []url.URL{peer},
		AdvertisePeerURLs:    []url.URL{peer},
		InitialClusterState:  StateNew,
		InitialClusterToken:  "etcd-cluster",
		HeartbeatInterval:    100 * time.Millisecond,
		ElectionTimeout:      time.Second,
		Gateway:              true,
		Compaction:           Compaction{Mode: CompactPeriodic, Retention: "0"},
		StrictReconfigCheck:  true,
		MaxLearners:          1,
		PreVote:              true,
		MaxRequestBytes:      3 << 19,
		MaxTxnOps:            128,
		MaxConcurrentStreams: 1<<32 - 1,
		KeepAliveMinTime:     5 * time.Second,
		KeepAliveInterval:    2 * time.Hour,
		KeepAliveTimeout:     20 * time.Second,
		WarnUnaryRequest:     300 * time.Millisecond,
		WarnApply:            100 * time.Millisecond,
		Tracing:              Tracing{Address: "localhost:4317", Service: "etcd"},
		TLSMinVersion:        tls.VersionTLS12,
		SelfSignedCertYears:  1,
		CORS:                 []string{"*"},
		HostWhitelist:        []string{"*"},
		Console:              ConsoleReadOnly,
		AuthToken:            "simple",
		AuthTokenTTL:         defaultAuthTokenTTL,
		BcryptCost:           defaultBcryptCost,
		Log:                  Log{Logger: "zap", Level: "info", Format: "json", Outputs: []string{"default"}, Rotation: defaultRotation},
		InitialRanges:        1,
		RangeMaxBytes:        256 << 20,
		RangeSplitLoad:       10_000,
		RangeMergeAfter:      time.Hour,
		CopyBytesPerSecond:   64 << 20,
		LeaseReads:           true,
		NodeDeadAfter:        5 * time.Minute,
		UpgradeAfter:         24 * time.Hour,
	}
}

func mustURL(s string) url.URL {
	u, err := url.Parse(s)
	if err != nil {
		panic(fmt.Sprintf("config: default URL %q: %v", s, err))
	}
	return *u
}

// Complete fills in what depends on other settings and was not given. [Load] does it.
func (c *Config) Complete() {
	if c.DataDir == "" {
		c.DataDir = c.Name + ".skein"
	}
	if c.WALDir == "" {
		c.WALDir = filepath.Join(c.DataDir, "wal")
	}
	// One set of flags serves all nodes of an image that has no shell.
	if len(c.InitialCluster) > 0 && len(c.Join) > 0 {
		if _, founder := c.InitialCluster[c.Name]; founder {
			c.Join = nil
		} else {
			c.InitialCluster = nil
		}
	}
	if len(c.InitialCluster) == 0 && len(c.Join) == 0 && c.DiscoverySRV == "" {
		c.InitialCluster = types.URLsMap{c.Name: slices.Clone(c.AdvertisePeerURLs)}
	}
	if c.MemoryBytes == 0 {
		c.MemoryBytes = DefaultMemoryBytes(limits.Memory())
	}
	if len(c.Log.Outputs) == 0 {
		c.Log.Outputs = []string{"default"}
	}
	if c.Log.Format == "" {
		c.Log.Format = "json"
	}
	if c.AuthTokenTTL == 0 {
		c.AuthTokenTTL = defaultAuthTokenTTL
	}
	if c.WarnApply == 0 {
		c.WarnApply = 100 * time.Millisecond
	}
	if c.WarnUnaryRequest == 0 {
		c.WarnUnaryRequest = 300 * time.Millisecond
	}
}

// DefaultMemoryBytes returns the budget of a process that may have so many bytes of memory: a quarter, between
// 256 MiB and 4 GiB. Where 256 MiB are more than half, it is half, and [MinMemoryBytes] at least. Where nothing is known of the
// memory (0 or less), it is 256 MiB. The rest is for other processes, the kernel's cache of files, and a budget for a
// larger store that somebody sets.
func DefaultMemoryBytes(available int64) int64 {
	if 0 < available && available < 2*leastMemoryBytes {
		return max(available/2, MinMemoryBytes)
	}
	return min(max(available/4, leastMemoryBytes), mostMemoryBytes)
}

// RequestTimeout bounds the whole of one request, as in etcd: 5 s for queues,
// computation and disks, and two election timeouts for an election.
func (c *Config) RequestTimeout() time.Duration {
	return 5*time.Second + 2*c.ElectionTimeout
}

// Validate says what is wrong with the configuration, if anything is. It changes
// nothing.
func (c *Config) Validate() error {
	for _, check := range []func() error{
		c.validateMember, c.validateURLs, c.validateTiming, c.validateLimits,
		c.Compaction.validate, c.validateTLS, c.validateAuth, c.Log.validate, c.validateRanges, c.Tracing.validate,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) validateMember() error {
	switch {
	case c.Name == "":
		return errors.New("--name must not be empty")
	case strings.ContainsAny(c.Name, "=,"):
		return fmt.Errorf("--name %q must not contain '=' or ',', which separate the members of --initial-cluster", c.Name)
	case c.DataDir == "":
		return errors.New("--data-dir must not be empty")
	case c.WALDir == "":
		return errors.New("--wal-dir must not be empty")
	case filepath.Clean(c.WALDir) == filepath.Clean(c.DataDir):
		return fmt.Errorf("--wal-dir %q must not be the data directory itself", c.WALDir)
	case c.InitialClusterState != StateNew && c.InitialClusterState != StateExisting:
		return fmt.Errorf("--initial-cluster-state %q: it is %s or %s", c.InitialClusterState, StateNew, StateExisting)
	}
	if c.MaxLearners < 1 {
		return fmt.Errorf("--max-learners must be at least 1 (set to %d)", c.MaxLearners)
	}
	return c.validateJoin()
}

func (c *Config) validateURLs() error {
	for _, l := range []struct {
		flag  string
		urls  []url.URL
		bind  bool // to listen on: the host is an address of this machine
		peer  bool // the bus is QUIC, which has no unix sockets
		empty bool
	}{
		{flag: "listen-client-urls", urls: c.ListenClientURLs, bind: true},
		{flag: "listen-client-http-urls", urls: c.ListenClientHTTPURLs, bind: true, empty: true},
		{flag: "listen-peer-urls", urls: c.ListenPeerURLs, bind: true, peer: true},
		{flag: "listen-metrics-urls", urls: c.ListenMetricsURLs, bind: true, empty: true},
		{flag: "listen-console-urls", urls: c.ListenConsoleURLs, bind: true, empty: true},
		{flag: "initial-advertise-peer-urls", urls: c.AdvertisePeerURLs, peer: true},
		{flag: "advertise-client-urls", urls: c.AdvertiseClientURLs},
	} {
		if len(l.urls) == 0 && !l.empty {
			if l.flag == "advertise-client-urls" {
				return errors.New("--advertise-client-urls is required when --listen-client-urls is set explicitly")
			}
			return fmt.Errorf("--%s must not be empty", l.flag)
		}
		for i := range l.urls {
			if err := checkURL(&l.urls[i], l.bind, l.peer); err != nil {
				return fmt.Errorf("--%s: %w", l.flag, err)
			}
		}
	}
	for name, urls := range c.InitialCluster {
		for i := range urls {
			if err := checkURL(&urls[i], false, true); err != nil {
				return fmt.Errorf("--initial-cluster: %s: %w", name, err)
			}
		}
	}
	peers := slices.Concat(c.ListenPeerURLs, c.AdvertisePeerURLs)
	for i := range peers {
		if peers[i].Scheme != peers[0].Scheme {
			return fmt.Errorf("%s and %s: the bus between nodes is either https or http, also in what is advertised", &peers[0], &peers[i])
		}
	}
	return c.checkSchemes()
}

// checkSchemes refuses two listeners at one address, but for http and https URLs for the same clients: the first byte
// of a connection tells these apart.
func (c *Config) checkSchemes() error {
	seen := make(map[string]url.URL)
	for i, group := range [][]url.URL{c.ListenClientURLs, c.ListenClientHTTPURLs, c.ListenMetricsURLs, c.ListenConsoleURLs} {
		before := maps.Clone(seen)
		for _, u := range group {
			at := u.Host + u.Path
			o, ok := seen[at]
			_, others := before[at]
			both := i < 2 && !others && o.Scheme != u.Scheme && strings.HasPrefix(o.Scheme, "http") && strings.HasPrefix(u.Scheme, "http")
			if ok && u.Port() != "0" && !both {
				return fmt.Errorf("%s and %s are the same address: give each listener its own", o.String(), u.String())
			}
			seen[at] = u
		}
	}
	return nil
}

func checkURL(u *url.URL, bind, peer bool) error {
	switch u.Scheme {
	case "http", "https":
	case "unix", "unixs":
		if peer {
			return fmt.Errorf("%s: nodes talk over UDP, which has no unix sockets: use http://HOST:PORT or https://HOST:PORT", u)
		}
		if u.Host+u.Path == "" {
			return fmt.Errorf("%s has no path", u)
		}
		return nil
	default:
		return fmt.Errorf("%s: the scheme must be http, https, unix or unixs", u)
	}
	host, _, err := net.SplitHostPort(u.Host)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", u, err)
	case bind && host != "localhost" && net.ParseIP(host) == nil:
		return fmt.Errorf("expected IP in URL for binding (%s)", u)
	case !bind && host == "":
		return fmt.Errorf("unexpected empty host (%s)", u)
	}
	return nil
}

func (c *Config) validateTiming() error {
	switch {
	case c.HeartbeatInterval <= 0:
		return fmt.Errorf("--heartbeat-interval must be >0 (set to %dms)", c.HeartbeatInterval.Milliseconds())
	case c.ElectionTimeout <= 0:
		return fmt.Errorf("--election-timeout must be >0 (set to %dms)", c.ElectionTimeout.Milliseconds())
	case 5*c.HeartbeatInterval > c.ElectionTimeout:
		return fmt.Errorf("--election-timeout[%vms] should be at least as 5 times as --heartbeat-interval[%vms]",
			c.ElectionTimeout.Milliseconds(), c.HeartbeatInterval.Milliseconds())
	case c.ElectionTimeout > MaxElectionTimeout:
		return fmt.Errorf("--election-timeout[%vms] is too long, and should be set less than %vms",
			c.ElectionTimeout.Milliseconds(), MaxElectionTimeout.Milliseconds())
	case c.NodeDeadAfter < 2*c.ElectionTimeout:
		return fmt.Errorf("--node-dead-after must be at least two election timeouts, %v (set to %v)", 2*c.ElectionTimeout, c.NodeDeadAfter)
	}
	if c.ShutdownDelay > MaxShutdownDelay {
		return fmt.Errorf("--shutdown-delay must be at most %v (set to %v)", MaxShutdownDelay, c.ShutdownDelay)
	}
	for flag, d := range map[string]time.Duration{
		"grpc-keepalive-min-time": c.KeepAliveMinTime,
		"grpc-keepalive-interval": c.KeepAliveInterval, "grpc-keepalive-timeout": c.KeepAliveTimeout,
		"warning-unary-request-duration": c.WarnUnaryRequest, "warning-apply-duration": c.WarnApply, "upgrade-after": c.UpgradeAfter, "shutdown-delay": c.ShutdownDelay, "watch-progress-notify-interval": c.WatchProgressInterval,
	} {
		if d < 0 {
			return fmt.Errorf("--%s must not be negative (set to %v)", flag, d)
		}
	}
	return nil
}

func (c *Config) validateLimits() error {
	switch {
	case c.MaxRequestBytes <= 0 || c.MaxRequestBytes > MaxMaxRequestBytes:
		return fmt.Errorf("--max-request-bytes must be between 1 and %d, which is what one entry of the log holds (set to %d)", MaxMaxRequestBytes, c.MaxRequestBytes)
	case c.MaxTxnOps <= 0 || c.MaxTxnOps > MaxMaxTxnOps:
		return fmt.Errorf("--max-txn-ops must be between 1 and %d (set to %d)", MaxMaxTxnOps, c.MaxTxnOps)
	case c.MemoryBytes < MinMemoryBytes || c.MemoryBytes > MaxMemoryBytes:
		return fmt.Errorf("--memory-budget-bytes must be between %d and %d (set to %d)", MinMemoryBytes, int64(MaxMemoryBytes), c.MemoryBytes)
	case c.RangeMaxBytes != 0 && c.RangeMaxBytes < MinRangeMaxBytes:
		return fmt.Errorf("--range-max-bytes must be 0 or at least %d (set to %d)", MinRangeMaxBytes, c.RangeMaxBytes)
	case c.RangeMergeAfter != 0 && c.RangeMergeAfter < MinRangeMergeAfter:
		return fmt.Errorf("--range-merge-after must be 0 or at least %v (set to %v)", MinRangeMergeAfter, c.RangeMergeAfter)
	case c.CopyBytesPerSecond < MinCopyBytes:
		return fmt.Errorf("--copy-bytes-per-second must be at least %d (set to %d)", MinCopyBytes, c.CopyBytesPerSecond)
	}
	return nil
}

func (c *Config) validateAuth() error {
	if _, err := auth.ParseOptions(c.AuthToken); err != nil {
		return fmt.Errorf("--auth-token: %w", err)
	}
	switch {
	case c.AuthTokenTTL < 0:
		return fmt.Errorf("--auth-token-ttl must not be negative (set to %v)", c.AuthTokenTTL)
	case c.BcryptCost > auth.MaxCost:
		return fmt.Errorf("--bcrypt-cost must be at most %d (set to %d): each step doubles what a login computes, which takes about a second with %d",
			auth.MaxCost, c.BcryptCost, auth.MaxCost)
	}
	return nil
}
