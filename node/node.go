package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/audit"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/node/bundle"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/pipeapi"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/transport"
)

// ErrRemoved says that the node was removed from its cluster.
var ErrRemoved = join.ErrRemoved

// Node is a Core with ports.
type Node struct {
	core *Core
	api  *etcdapi.Server
	log  *zap.Logger
	// metrics has all metrics of the node.
	metrics *prometheus.Registry
	// audit is nil without an audit log.
	audit *audit.Log
	// cancel ends the background work of announcing the node; done is closed at its end.
	cancel context.CancelFunc
	done   chan struct{}
	// announced is closed once a quorum has the node's row of the node table.
	announced chan struct{}
}

// stopServingTimeout bounds how long requests under way may take to end at a stop.
const stopServingTimeout = 5 * time.Second

// StartOptions are what a start may have beside its configuration. The zero value is an ordinary start.
type StartOptions struct {
	// Stage is Options.Stage.
	Stage func(name string)
	// SurelyNew is Options.SurelyNew.
	SurelyNew bool
	// Clock is the node's; nil is the machine's. What serves clients goes by the machine's.
	Clock clock.Clock
	// Resolver looks up the SRV records of --discovery-srv; nil is the system's.
	Resolver *net.Resolver
}

// Start starts a node from its configuration. It returns when the node serves
// clients; whether their requests succeed depends on a quorum being there.
func Start(ctx context.Context, cfg *config.Config, logger *zap.Logger) (*Node, error) {
	return StartWith(ctx, cfg, logger, StartOptions{})
}

// StartWith is Start with options.
func StartWith(ctx context.Context, cfg *config.Config, logger *zap.Logger, s StartOptions) (*Node, error) {
	n, err := start(ctx, cfg, logger, s)
	return n, adviseOnPermission(err)
}

func start(ctx context.Context, cfg *config.Config, logger *zap.Logger, s StartOptions) (_ *Node, err error) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	unusable := unusableFiles(reg)
	last := &bundle.Ring{}
	logger = last.Attach(logger)
	o := options(cfg, logger, unusable.WithLabelValues("peer"))
	o.Registry, o.Gatherer, o.Stage, o.SurelyNew, o.Clock = reg, reg, s.Stage, s.SurelyNew, cmp.Or(s.Clock, o.Clock)
	limit, err := filesLimit()
	if err != nil {
		return nil, err
	}
	reg.MustRegister(fileGauges(limit)...)
	files, err := NewFileBudget(limit)
	if err != nil {
		return nil, err
	}
	o.MaxOpenTables = files.Tables
	if o.KeepPeriod, o.KeepRevisions, err = cfg.Compaction.Keep(); err != nil {
		return nil, err
	}
	if err := refuseEtcd(o.FS, cfg.DataDir, types.URLs(cfg.AdvertiseClientURLs).StringSlice()); err != nil {
		return nil, err
	}
	// Before anything is decided that stays: a founder that then cannot serve has founded its cluster.
	if err := etcdapi.CheckPorts(cfg.ListenClientURLs, cfg.ListenClientHTTPURLs, cfg.ListenMetricsURLs, cfg.ListenConsoleURLs, cfg.SocketReusePort); err != nil {
		return nil, err
	}
	o.enter("find the node's place in the cluster")
	membership, err := joiner(cfg, &o, s.Resolver).Find(ctx)
	if err != nil {
		return nil, err
	}
	o.SetMembership(membership)
	core, err := Open(ctx, o)
	if err != nil {
		return nil, err
	}
	files.tell(core.log, limit)
	tellInsecure(cfg, core.log, reg)
	// After the directory is known to be this node's: auto-tls writes certificates there.
	secure, err := cfg.ClientSide(o.Clock.Wall, logger, unusable.WithLabelValues("client"))
	if err != nil {
		return nil, errors.Join(err, core.Stop(ctx))
	}
	n := &Node{core: core, log: core.log, metrics: reg, done: make(chan struct{}), announced: make(chan struct{})}
	face := faceOptions(cfg, membership)
	if err := n.guard(ctx, cfg, &face, reg); err != nil {
		return nil, errors.Join(err, core.Stop(ctx))
	}
	face.Members = core.Members(cfg.MaxLearners, cfg.StrictReconfigCheck)
	face.MaxConnections, face.ConnectionsWhy = NewStanding(o.MemoryBytes).connections(files)
	face.Metrics, face.Gatherer, face.TLS, face.Verify = faceMetrics(cfg, reg), reg, secure.TLS, secure.Verify
	face.Register = func(r grpc.ServiceRegistrar) {
		adminapi.Register(r, withBundles{core.Admin(), &bundle.Source{Node: cfg.Name, Config: cfg, Log: last, SlowCalls: core.slowCalls, Metrics: reg, Clock: o.Clock}})
		core.RegisterData(r)
	}
	servePipes(&o, &face, reg)
	showConsole(cfg, &face)
	n.api = etcdapi.New(face)
	core.OnRevoked(func(*auth.View) { n.api.RightsTaken() })
	core.OnLoad(func(why error) { n.api.LoadBegun(why) })
	core.OnWatchers(n.api.Watchers)
	if err := n.api.Bind(cfg.ListenClientURLs, cfg.ListenMetricsURLs); err != nil {
		return nil, errors.Join(err, n.audit.Close(ctx), core.Stop(ctx))
	}
	n.api.Start()
	announce, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	row := fsm.Node{ID: membership.Self, Name: cfg.Name, PeerURLs: types.URLs(cfg.AdvertisePeerURLs).StringSlice(), ClientURLs: types.URLs(cfg.AdvertiseClientURLs).StringSlice(), Attributes: cfg.NodeAttributes}
	go n.announce(announce, row)
	core.wait.Go(core.watchRestores)
	return n, nil
}

func servePipes(o *Options, face *etcdapi.Options, reg prometheus.Registerer) {
	most, parts, wait := NewStanding(o.MemoryBytes).pipes(), atLeast(NewBudget(o.MemoryBytes).Pipes, o.MaxRequestBytes), o.RequestTimeout
	face.Pipe = func(o *etcdapi.Operations) pipepb.PipeServer {
		return pipeapi.New(pipeapi.Options{
			Operations: o, Clock: clock.System(), Node: face.Self, Metrics: pipeapi.NewMetrics(reg), MaxPipes: most, PartBytes: parts, PartWait: wait,
		})
	}
}

// announce publishes the node's row, and says so once a quorum has it.
func (n *Node) announce(ctx context.Context, row fsm.Node) {
	defer close(n.done)
	n.core.Announce(ctx, row)
	if ctx.Err() == nil && n.core.Err() == nil {
		close(n.announced)
	}
}

// newTracing has requests traced, if they are to be.
func newTracing(ctx context.Context, cfg *config.Config, log *zap.Logger) (*etcdapi.Tracing, error) {
	t := &cfg.Tracing
	if !t.Enabled {
		return nil, nil
	}
	return etcdapi.NewTracing(ctx, etcdapi.TracingOptions{
		Address: t.Address, Service: t.Service, Instance: t.Instance, SamplingRate: t.SamplingRate, Clock: clock.System(), Logger: log,
	})
}

// faceMetrics are those of the services that clients call.
func faceMetrics(cfg *config.Config, reg prometheus.Registerer) *etcdapi.Metrics {
	m := etcdapi.NewMetrics(reg)
	if cfg.ExtensiveMetrics {
		m.TimeMethods(reg)
	}
	return m
}

// unusableFiles counts the certificate files that could not be taken.
func unusableFiles(reg prometheus.Registerer) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "skein_certificate_files_unusable_total", Help: "Changes of certificate files that could not be taken, so that the last good content stays in use, by side.",
	}, []string{"side"})
	reg.MustRegister(c)
	return c
}

// guard sets who may do what, and opens the audit log and the way to the collector of traces if there are to be any.
func (n *Node) guard(ctx context.Context, cfg *config.Config, face *etcdapi.Options, reg prometheus.Registerer) (err error) {
	if err = n.core.Face(face); err != nil {
		return err
	}
	face.Users.ClientCertAuth, face.Users.InsecureAdmin = cfg.ClientTLS.ClientCertAuth, cfg.InsecureAdmin
	if cfg.AuditLog != "" {
		if n.audit, err = audit.Open(audit.Options{Path: cfg.AuditLog, Node: cfg.Name, Clock: n.core.o.Clock, Logger: n.log, Registry: reg}); err != nil {
			return fmt.Errorf("--audit-log: %w", err)
		}
		face.Audit = n.audit
	}
	if face.Tracing, err = newTracing(ctx, cfg, n.log); err != nil {
		return errors.Join(err, n.audit.Close(ctx))
	}
	return nil
}

// tellInsecure says which URLs others reach without TLS.
func tellInsecure(cfg *config.Config, log *zap.Logger, reg prometheus.Registerer) {
	insecure := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "skein_insecure", Help: "1 if a client or peer URL beyond loopback is without TLS, else 0.",
	})
	reg.MustRegister(insecure)
	urls := cfg.Insecure()
	if len(urls) == 0 {
		return
	}
	insecure.Set(1)
	log.Warn("THIS NODE IS OPEN TO THE NETWORK WITHOUT TLS: whoever reaches these URLs reads all keys and writes them, or takes the part of a node; "+
		"make certificates with skein cert, and use https:// URLs and --certs-dir", zap.Strings("urls", urls))
}

// Stop ends the node in order. Requests under way get a few seconds to end.
func (n *Node) Stop(ctx context.Context) error {
	n.core.o.enter("end the requests of clients")
	serving, cancel := context.WithTimeout(ctx, n.core.patience(stopServingTimeout))
	n.api.Stop(serving)
	cancel()
	auditing, cancel := context.WithTimeout(ctx, stopServingTimeout)
	if err := n.audit.Close(auditing); err != nil {
		n.log.Error("the audit log lacks its last entries", zap.Error(err))
	}
	cancel()
	n.core.o.enter("end the announcing of the node")
	n.cancel()
	<-n.done
	return n.core.Stop(ctx)
}

// Crash ends the node at once, as kill -9 would: nothing is flushed or handed over, and requests under way fail. Only the
// peers hear that it is gone.
func (n *Node) Crash() {
	now, cancel := context.WithCancel(context.Background())
	cancel()
	n.api.Stop(now)
	_ = n.audit.Close(now) // a crash has nobody to tell
	n.cancel()
	<-n.done
	n.core.Crash()
}

// Stopping has /readyz and gRPC's health service say that the node stops soon, so that clients go elsewhere. It serves on
// until Stop.
func (n *Node) Stopping() { n.api.Stopping() }

// Announced is closed once a quorum has the node's row of the node table: then requests succeed.
func (n *Node) Announced() <-chan struct{} { return n.announced }

// DialInside opens a connection to the services of clients within this process.
func (n *Node) DialInside(ctx context.Context) (net.Conn, error) { return n.api.DialInside(ctx) }

// DiskStalled says that the log or the store waits for its disk.
func (n *Node) DiskStalled() bool { return n.core.host.DiskStalled() }

// Logger returns the node's log: each of its lines names the node.
func (n *Node) Logger() *zap.Logger { return n.log }

// Core returns the node without its ports.
func (n *Node) Core() *Core { return n.core }

// ClientAddrs returns the addresses at which clients are served.
func (n *Node) ClientAddrs() []net.Addr { return n.api.ClientAddrs() }

// ConsoleAddrs returns the addresses of --listen-console-urls.
func (n *Node) ConsoleAddrs() []net.Addr { return n.api.ConsoleAddrs() }

// Fatal is closed when the node cannot go on, and Err says why. The node is to be stopped then.
func (n *Node) Fatal() <-chan struct{} { return n.core.Fatal() }

// Err returns why the node cannot go on, nil before Fatal is closed: ErrRemoved for one that was removed from its cluster.
func (n *Node) Err() error { return n.core.Err() }

// joiner returns what finds the node's membership: it asks the admin services of --join, and the
// nodes at the peer addresses of --initial-cluster.
func joiner(cfg *config.Config, o *Options, resolver *net.Resolver) *join.Joiner {
	return &join.Joiner{
		Config: cfg, Resolver: cmp.Or(resolver, net.DefaultResolver), FS: o.FS, Clock: o.Clock, Logger: o.Logger, Ask: join.ByAdminService(cfg),
		PeerTable: func(ctx context.Context, addr string) ([]byte, error) {
			return transport.Ask(ctx, transport.AskOptions{Clock: o.Clock, Security: security(cfg), Carrier: carrier(cfg)}, addr)
		},
	}
}

// SetMembership has a Core open as that node of that cluster.
func (o *Options) SetMembership(m *join.Membership) {
	o.Cluster, o.Self, o.Founders, o.Peers, o.Anew = m.Cluster, m.Self, m.Founders, m.Peers, m.Anew
}

// options translates the configuration. unusable counts changed files of the peers' certificates that cannot be taken.
func options(cfg *config.Config, logger *zap.Logger, unusable prometheus.Counter) Options {
	o := Options{
		SplitKeys: cfg.SplitKeys(), Name: cfg.Name,
		FS: vfs.Default, Snapshots: true, DataDir: filepath.Clean(cfg.DataDir), WALDir: filepath.Clean(cfg.WALDir),
		Clock: clock.System(), Heartbeat: cfg.HeartbeatInterval, Election: cfg.ElectionTimeout, NoPreVote: !cfg.PreVote,
		NoLeaseReads:  !cfg.LeaseReads,
		NodeDeadAfter: cfg.NodeDeadAfter,
		WarnApply:     cfg.WarnApply, Traces: cfg.Tracing.Enabled, Processors: processors,
		NoKnocks:       cfg.PeersByTCP,
		Certificates:   cfg.CertificateFiles(),
		UpgradeAfter:   cmp.Or(cfg.UpgradeAfter, -1), // 0 is never, as --upgrade-after has it
		RequestTimeout: cfg.RequestTimeout(), MaxRequestBytes: cfg.MaxRequestBytes, MaxTxnOps: cfg.MaxTxnOps,
		MemoryBytes: cfg.MemoryBytes, QuotaBytes: cfg.QuotaBytes, ScrubEvery: cfg.CorruptCheckTime, Logger: logger,
		RangeMaxBytes: unbounded(cfg.RangeMaxBytes), RangeSplitLoad: unbounded(cfg.RangeSplitLoad), RangeMergeAfter: unbounded(cfg.RangeMergeAfter),
		CopyBytesPerSecond: cfg.CopyBytesPerSecond,
		AuthToken:          cfg.AuthToken, AuthTokenTTL: cfg.AuthTokenTTL, BcryptCost: cfg.BcryptCost,
		RemoveBatch: int64(cfg.Compaction.BatchLimit), RemovePause: cfg.Compaction.SleepInterval,
	}
	if cfg.NoFsync {
		logger.Warn("THIS NODE NEVER WAITS FOR THE DISK (--unsafe-no-fsync): a crash of the machine loses or corrupts what it has acknowledged, and its votes")
		o.FS = noSync{o.FS}
	}
	o.NewBus = func(c transport.Config) (Bus, error) {
		sec := security(cfg)
		sec.Unusable = unusable
		return transport.NewQUIC(transport.Options{Config: c, Listen: hosts(cfg.ListenPeerURLs), Security: sec, Carrier: carrier(cfg)})
	}
	return o
}

// carrier is what the nodes are dialled by.
func carrier(cfg *config.Config) transport.Carrier {
	if cfg.PeersByTCP {
		return transport.CarrierTLS
	}
	return transport.CarrierQUIC
}

// unbounded returns a bound of which the configuration has 0 for none.
func unbounded[T ~int64](v T) T {
	if v == 0 {
		return -1
	}
	return v
}

// faceOptions translates what the configuration says of the clients' side.
func faceOptions(cfg *config.Config, m *join.Membership) etcdapi.Options {
	return etcdapi.Options{
		Cluster: m.Cluster, Self: m.Self,
		MaxRequestBytes: cfg.MaxRequestBytes, MaxTxnOps: cfg.MaxTxnOps, MaxConcurrentStreams: cfg.MaxConcurrentStreams,
		RequestTimeout: cfg.RequestTimeout(), ElectionTimeout: cfg.ElectionTimeout, WarnUnaryRequest: cfg.WarnUnaryRequest,
		WatchProgressInterval: cfg.WatchProgressInterval,
		KeepAliveMinTime:      cfg.KeepAliveMinTime, KeepAliveInterval: cfg.KeepAliveInterval, KeepAliveTimeout: cfg.KeepAliveTimeout,
		EnablePprof: cfg.EnablePprof, NoGateway: !cfg.Gateway, CORS: cfg.CORS, HostWhitelist: cfg.HostWhitelist,
		HTTPURLs: cfg.ListenClientHTTPURLs, ReusePort: cfg.SocketReusePort,
	}
}

// security says how nodes know each other: by the given certificates where the
// peer URLs are https, and not at all where they are http.
func security(cfg *config.Config) transport.Security {
	t := cfg.PeerTLS
	for _, u := range cfg.ListenPeerURLs {
		if u.Scheme != "https" {
			return transport.Security{SelfMade: true, Why: "the peer URL " + u.String() + " is http"}
		}
	}
	if t.Auto && t.CertFile == "" {
		return transport.Security{SelfMade: true, Why: "--peer-auto-tls makes certificates that no peer checks"}
	}
	return transport.Security{
		Name: cfg.Name, CertFile: t.CertFile, KeyFile: t.KeyFile, ClientCertFile: t.ClientCertFile, ClientKeyFile: t.ClientKeyFile,
		TrustedCAFile: t.TrustedCAFile,
		AllowedCNs:    t.AllowedCNs, AllowedHostnames: t.AllowedHostnames, CRLFile: t.CRLFile,
	}
}

func hosts(urls []url.URL) []string {
	h := make([]string, len(urls))
	for i := range urls {
		h[i] = urls[i].Host
	}
	return h
}
