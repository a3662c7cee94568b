package etcdapi

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"
	"golang.org/x/net/netutil"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/watch"
)

// A message may exceed max-request-bytes by grpcOverheadBytes before gRPC itself refuses it, as in
// etcd.
const grpcOverheadBytes = 512 << 10

// Options configure a Server. KV, Users, Members, Node and Clock are required.
type Options struct {
	Users   *Users
	KV      KV
	Members Cluster
	Node    Node
	// Without Watches there is no Watch service.
	Watches *watch.Hub
	// Without Leases there is no Lease service.
	Leases Leases
	// Without Downgrades nobody goes back.
	Downgrades Downgrades
	// Without Alarms there are none.
	Alarms Alarms
	Hashes Hashes
	// Loading returns the error of a cluster that is being loaded, nil where it serves. follows says that reads
	// are answered all the same. Nil is a cluster that is never loaded.
	Loading func() (follows bool, err error)
	// LearnLoad asks placement for what Loading says, and returns once the node knows the answer, or soon without
	// one. It comes before each refusal. It may be nil.
	LearnLoad func(context.Context)
	// Without Snapshots there are none.
	Snapshots Snapshots
	// Cluster and Self are the ids in response headers.
	Cluster keyspace.ClusterID
	Self    keyspace.NodeID
	Clock   clock.Clock
	// Logger may be nil.
	Logger *zap.Logger
	// Nil Metrics are unregistered ones.
	Metrics *Metrics
	// Gatherer provides /metrics. Nil means the process's default registry.
	Gatherer prometheus.Gatherer

	// MaxRequestBytes bounds changes. 0 means 1.5 MiB.
	MaxRequestBytes int
	// Answers bounds the answers to reads of many keys, and counts all large ones until clients have
	// taken them. KV takes from it. Nil means one of 64 MiB, and 512 MiB for one answer.
	Answers *budget.Bytes
	// MaxTxnOps bounds transactions. 0 means 128.
	MaxTxnOps int
	// MaxConcurrentStreams bounds the concurrent calls of a connection. 0 means no bound.
	MaxConcurrentStreams uint32
	// RequestTimeout bounds health checks and the calls that KV does not bound. 0 means 7 s. Too
	// low a value turns elections into errors; too high a value lets clients wait for a dead
	// quorum.
	RequestTimeout time.Duration
	// ElectionTimeout paces the search for a leader for streams that demand one. 0 means 1 s.
	ElectionTimeout time.Duration
	// Unary calls that take longer than WarnUnaryRequest are logged. 0 means 300 ms.
	WarnUnaryRequest time.Duration
	// WatchProgressInterval is how often idle watchers that want progress get it. 0 means 10 min;
	// the least is 100 ms.
	WatchProgressInterval time.Duration
	// KeepAliveMinTime, KeepAliveInterval and KeepAliveTimeout are the three grpc-keepalive
	// settings; 0 means gRPC's own.
	KeepAliveMinTime, KeepAliveInterval, KeepAliveTimeout time.Duration
	// MaxConnections bounds the open connections of clients, over all client URLs. 0 means no bound.
	// ConnectionsWhy says in the log what bounds them and what to do.
	MaxConnections int
	ConnectionsWhy string
	// EnablePprof serves Go's profiles under /debug/pprof/.
	EnablePprof bool
	// NoGateway turns the JSON gateway off.
	NoGateway bool
	// TLS is for https and unixs URLs; nil if there are none.
	TLS *tls.Config
	// Verify says why the certificates of a connected client do not hold any more, or nil. Nil means that
	// clients show none.
	Verify func([]*x509.Certificate) error
	// HTTPURLs are client URLs that serve HTTP alone. With any of them the others serve gRPC alone.
	HTTPURLs []url.URL
	// ReusePort lets another process listen at the addresses too.
	ReusePort bool
	// CORS are the origins whose pages a browser may let in. Empty, or with a "*", means all.
	CORS []string
	// HostWhitelist are the names by which HTTP requests without TLS may call this node. Empty, or
	// with a "*", means all.
	HostWhitelist []string
	// Without Audit there is no audit log.
	Audit Auditor
	// Slow, if not nil, gets each request of a client that took longer than stages.Threshold. It must not block.
	Slow func(stages.Slow)
	// Names puts the names of nodes beside their ids in a text. Nil leaves it as it is.
	Names func(string) string
	// Tracing, if not nil, gets traces of unary calls. Stop closes it.
	Tracing *Tracing
	// Register, if not nil, adds other services, such as the admin service.
	Register func(grpc.ServiceRegistrar)
	// Pipe, if not nil, makes the service of pipes, which serves operations by these.
	Pipe func(*Operations) pipepb.PipeServer
	// Start, if not nil, begins a change for a stream of many operations without waiting for its answer, as router's Start does.
	Start func(ctx context.Context, change proto.Message, answered func(ok bool)) (wait func() (proto.Message, error))
	// Place, if not nil, returns the span of the range of a key, the node that leads it, and the client URLs of that node. The node
	// is 0 if this one knows of none. It does not block.
	Place func(key []byte) (span keyspace.Span, leader keyspace.NodeID, clientURLs []string)
	// Console, if not nil, makes what is served under /console/: at the client URLs, or at ConsoleURLs alone if there are any.
	Console     func(*Services) http.Handler
	ConsoleURLs []url.URL
	// ConsoleHosts are names of this node by which its console may be asked for without TLS, beside those of HostWhitelist.
	ConsoleHosts []string
}

// fill sets the defaults.
func (o *Options) fill() {
	setDefault(&o.MaxRequestBytes, 3<<19)
	setDefault(&o.MaxTxnOps, 128)
	setDefault(&o.MaxConcurrentStreams, math.MaxUint32)
	setDefault(&o.RequestTimeout, 7*time.Second)
	setDefault(&o.ElectionTimeout, time.Second)
	setDefault(&o.WarnUnaryRequest, 300*time.Millisecond)
	setDefault(&o.WatchProgressInterval, 10*time.Minute)
	o.WatchProgressInterval = max(o.WatchProgressInterval, minProgressInterval)
	if o.Answers == nil {
		o.Answers = budget.New(64<<20, 512<<20)
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	if o.Names == nil {
		o.Names = func(s string) string { return s }
	}
	if o.Gatherer == nil {
		o.Gatherer = prometheus.DefaultGatherer
	}
}

// minProgressInterval is etcd's bound for WatchProgressInterval.
const minProgressInterval = 100 * time.Millisecond

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// metricsConnections bounds the connections of each metrics URL. They are beside those of clients:
// who looks why clients are refused must be let in.
const metricsConnections = 32

// consoleConnections bounds the connections of each of the console's own URLs: browsers open six each.
const consoleConnections = 128

// Server serves etcd's clients. Its life is New, Bind, Start, Stop.
type Server struct {
	opts    Options
	log     *zap.Logger
	metrics *Metrics
	grpc    *grpc.Server
	health  *health.Server
	// methods are the counters of each method by its full name. New fills it, and nothing changes
	// it.
	methods    map[string]*methodMetrics
	leaderless leaderWatch
	confirm    confirmer
	verdicts   leaseVerdicts
	watchers   watchStreams
	// slowLines are the lines about slow calls, slowCalls those on the list.
	slowLines, slowCalls stages.Limit
	// told is the highest revision of any header.
	told atomic.Int64
	// stopping says that the server ends soon.
	stopping atomic.Bool

	connections          *connLimit
	certified            certifiedConns
	grpcConns, httpConns *connQueue
	http, metricsHTTP    *http.Server
	consoleHTTP          *http.Server // nil without ConsoleURLs

	// services are those that the console calls, and codec encodes their answers as gRPC does.
	services *Services
	codec    countingCodec

	// clients, pages, extra and consoles are the bound listeners of the client URLs, of those for HTTP alone, of the metrics
	// URLs and of the console's. Bind fills them before Start.
	clients, pages, extra, consoles []boundListener

	gateway *gateway // nil without a gateway
	inside  insideListener
	locks   *Locks // nil without leases or watches

	// life ends with the server, by end. timers are for requests.
	life   context.Context
	end    context.CancelFunc
	timers clock.Timers
	// ending is closed when the server stops, which ends streams without an end of their own.
	ending chan struct{}
	// wg counts the goroutines of Start, and those of streams that wait for their client.
	wg       sync.WaitGroup
	stopOnce sync.Once
}

type boundListener struct {
	net.Listener
	secure bool
	// twin is set for the second URL of an address that has TLS and not. The first one's listener serves both.
	twin bool
	both bool
}

// New makes a server. It opens nothing. What it starts ends in Stop, or in a Bind that failed.
func New(o Options) *Server {
	o.fill()
	s := &Server{opts: o, log: o.Logger, metrics: o.Metrics, health: health.NewServer(), connections: &connLimit{most: int64(o.MaxConnections), why: o.ConnectionsWhy}, grpcConns: newConnQueue(), httpConns: newConnQueue(), inside: newInsideListener(), ending: make(chan struct{})}
	s.life, s.end = context.WithCancel(context.Background())
	s.codec = newCountingCodec(o.Metrics, o.Answers)
	s.grpc = grpc.NewServer(s.grpcOptions()...)
	s.services = &Services{s: s, methods: map[string]within{}}
	s.confirm.ask = s.reachPlacement
	pb.RegisterKVServer(s.services, &kvServer{s: s})
	pb.RegisterAuthServer(s.services, newAuthServer(s))
	pb.RegisterClusterServer(s.services, &clusterServer{s: s})
	pb.RegisterMaintenanceServer(s.services, &maintenanceServer{s: s})
	if o.Watches != nil {
		pb.RegisterWatchServer(s.services, &watchServer{s: s})
	}
	if o.Leases != nil {
		pb.RegisterLeaseServer(s.services, &leaseServer{s: s})
	}
	grpc_health_v1.RegisterHealthServer(s.grpc, s.health)
	s.health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	if o.Leases != nil && o.Watches != nil {
		s.locks = NewLocks(&lockKV{kvServer{s: s}}, &leaseServer{s: s}, &watchServer{s: s, local: true}, s.log)
		s.locks.Register(s.grpc)
	}
	if o.Register != nil {
		o.Register(s.services)
	}
	if o.Pipe != nil {
		pipepb.RegisterPipeServer(s.grpc, o.Pipe(newOperations(s)))
	}
	reflection.Register(s.grpc)
	s.metrics.ServerID.WithLabelValues(o.Self.String()).Set(1)
	known := s.known
	s.metrics.known.Store(&known)
	s.methods = methodTable(s.metrics, s.grpc.GetServiceInfo())
	for name, m := range s.methods {
		m.audited = audited(name, m.rule)
	}
	if !o.NoGateway {
		var err error
		if s.gateway, err = newGateway(&s.opts); err != nil {
			panic(err) // it depends on nothing outside
		}
	}
	s.http = newHTTPServer(s.toNewConnection(s.clientMux()))
	s.metricsHTTP = newHTTPServer(s.metricsMux())
	s.metricsHTTP.ConnState = s.certified.follow
	if o.Console != nil && len(o.ConsoleURLs) > 0 {
		s.consoleHTTP = newHTTPServer(s.consoleMux())
		s.consoleHTTP.ConnState = s.certified.follow
	}
	return s
}

// streamWorkers are goroutines that are kept for calls, with stacks that have grown as far as a
// call needs. Growing a new goroutine's stack costs more than the handler. Further calls get
// goroutines of their own. The workers hold about 8 MiB.
const streamWorkers = 512

// windowBytes is how much a client may send ahead, per stream and per connection. A fixed window
// holds any request within the default bound and is known in advance. gRPC would otherwise find one
// by pings beside the calls, of up to 16 MiB per connection.
const windowBytes = 2 << 20

// ConnectionBytes is what a connection of a client takes at rest: loadtest idle has 17 kB of heap and 11 kB
// of stacks for each of 9,000.
const ConnectionBytes = 28 << 10

// readBufferBytes is what each connection holds to read into, beside the frame that it reads. It takes
// some thirty small requests at a time. gRPC's own 32 KiB are most of what a connection takes at rest.
const readBufferBytes = 8 << 10

func (s *Server) grpcOptions() []grpc.ServerOption {
	o := &s.opts
	opts := []grpc.ServerOption{
		grpc.Creds(sniffedCreds{}),
		grpc.ForceServerCodecV2(s.codec),
		grpc.MaxRecvMsgSize(o.MaxRequestBytes + grpcOverheadBytes),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(o.MaxConcurrentStreams),
		grpc.ConnectionTimeout(sniffTimeout),
		grpc.UnaryInterceptor(s.unary),
		grpc.StreamInterceptor(s.stream),
		grpc.NumStreamWorkers(streamWorkers),
		grpc.StaticStreamWindowSize(windowBytes),
		grpc.StaticConnWindowSize(windowBytes),
		grpc.ReadBufferSize(readBufferBytes),
	}
	if o.Tracing != nil {
		opts = append(opts, o.Tracing.option())
	}
	if o.KeepAliveMinTime > 0 {
		opts = append(opts, grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: o.KeepAliveMinTime}))
	}
	if o.KeepAliveInterval > 0 && o.KeepAliveTimeout > 0 {
		opts = append(opts, grpc.KeepaliveParams(keepalive.ServerParameters{Time: o.KeepAliveInterval, Timeout: o.KeepAliveTimeout}))
	}
	return opts
}

// requestReadTime is how long an HTTP client may take to send its request.
const requestReadTime = 5 * time.Minute

// newHTTPServer makes a server for HTTP/1.1, and for HTTP/2 where a client begins with that. The bound of a whole request is wide, because a
// profile takes long, and its request counts as being read until it is answered.
func newHTTPServer(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true) // the sniffer has done the handshake, if there was one
	return &http.Server{
		Handler:           h,
		Protocols:         &p,
		ReadHeaderTimeout: sniffTimeout,
		ReadTimeout:       requestReadTime,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ConnContext:       noteTLS,
		ErrorLog:          zap.NewStdLog(zap.NewNop()), // errors of clients
	}
}

// Bind opens the listeners of all URLs. If one cannot be opened, all are closed, and the server has
// ended as by Stop. From now on the kernel queues connections; none is served before Start.
func (s *Server) Bind(clientURLs, metricsURLs []url.URL) error {
	err := s.bind(clientURLs, metricsURLs)
	if err != nil {
		s.Stop(context.Background()) // nothing runs that it could wait for
	}
	return err
}

func (s *Server) bind(clientURLs, metricsURLs []url.URL) error {
	var err error
	if s.clients, err = s.listenAll(clientURLs, clientsFlag); err != nil {
		return err
	}
	if s.pages, err = s.listenAll(s.opts.HTTPURLs, pagesFlag); err != nil {
		return err
	}
	for _, u := range metricsURLs {
		l, err := s.listen(&u)
		if err != nil {
			return listenError(metrics, metricsFlag, &u, err)
		}
		l.Listener = netutil.LimitListener(l.Listener, metricsConnections)
		s.extra = append(s.extra, l)
	}
	if s.consoleHTTP == nil {
		return nil
	}
	for _, u := range s.opts.ConsoleURLs {
		l, err := s.listen(&u)
		if err != nil {
			return listenError(console, consoleFlag, &u, err)
		}
		l.Listener = netutil.LimitListener(l.Listener, consoleConnections)
		s.consoles = append(s.consoles, l)
	}
	return nil
}

// listenAll listens at the URLs for clients. Two that differ in TLS alone have one listener.
func (s *Server) listenAll(urls []url.URL, flag string) (all []boundListener, err error) {
	for i, u := range urls {
		twin := slices.IndexFunc(urls[:i], func(o url.URL) bool { return sharesAddress(&o, &u) })
		if twin >= 0 {
			if s.opts.TLS == nil {
				return all, listenError(clients, flag, &u, errNoCertificate)
			}
			all[twin].both = true
			all = append(all, boundListener{Listener: all[twin].Listener, secure: secureScheme(&u), twin: true})
			continue
		}
		l, err := s.listen(&u)
		if err != nil {
			return all, listenError(clients, flag, &u, err)
		}
		all = append(all, l)
	}
	return all, nil
}

// sharesAddress says whether two URLs are one address, with TLS and without.
func sharesAddress(a, b *url.URL) bool {
	return a.Host == b.Host && tcpAddress(a) && tcpAddress(b) && a.Port() != "0"
}

func tcpAddress(u *url.URL) bool { return u.Scheme == "http" || u.Scheme == "https" }

func secureScheme(u *url.URL) bool { return u.Scheme == "https" || u.Scheme == "unixs" }

var errNoCertificate = errors.New("no certificate was configured")

// Whom listeners are for, and the flags that name their addresses.
const (
	clients, clientsFlag = "clients", "--listen-client-urls"
	pagesFlag            = "--listen-client-http-urls"
	metrics, metricsFlag = "metrics", "--listen-metrics-urls"
	console, consoleFlag = "the console", "--listen-console-urls"
)

func listenError(whom, flag string, u *url.URL, err error) error {
	if u.Scheme != "unix" && u.Scheme != "unixs" && errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("listen for %s at %s: %w: stop what listens there, or give another address (%s)", whom, u.String(), err, flag)
	}
	return fmt.Errorf("listen for %s at %s: %w", whom, u.String(), err)
}

// CheckPorts says what would keep Bind from the TCP ports of the URLs now, and leaves them unbound: a
// client that connects before the server starts is to go on to another node, and not to wait.
func CheckPorts(clientURLs, httpURLs, metricsURLs, consoleURLs []url.URL, reusePort bool) error {
	var bound []net.Listener
	defer func() {
		for _, l := range bound {
			_ = l.Close() // nobody has connected, or is answered by it
		}
	}()
	check := func(whom, flag string, urls []url.URL) error {
		for i, u := range urls {
			if !tcpAddress(&u) || slices.ContainsFunc(urls[:i], func(o url.URL) bool { return sharesAddress(&o, &u) }) {
				continue // who has the data directory may have a unix socket still
			}
			l, err := listenAt("tcp", u.Host, reusePort)
			if err != nil {
				return listenError(whom, flag, &u, err)
			}
			bound = append(bound, l)
		}
		return nil
	}
	return cmp.Or(check(clients, clientsFlag, clientURLs), check(clients, pagesFlag, httpURLs), check(metrics, metricsFlag, metricsURLs), check(console, consoleFlag, consoleURLs))
}

func (s *Server) listen(u *url.URL) (boundListener, error) {
	secure := secureScheme(u)
	if secure && s.opts.TLS == nil {
		return boundListener{}, errNoCertificate
	}
	network, addr := "tcp", u.Host
	if u.Scheme == "unix" || u.Scheme == "unixs" {
		network, addr = "unix", u.Host+u.Path
		if err := removeStaleSocket(addr); err != nil {
			return boundListener{}, err
		}
	}
	l, err := listenAt(network, addr, s.opts.ReusePort)
	if err != nil {
		return boundListener{}, err
	}
	return boundListener{Listener: l, secure: secure}, nil
}

// listenAt listens at an address, which another process may have too if that agrees.
func listenAt(network, addr string, reusePort bool) (net.Listener, error) {
	var c net.ListenConfig
	if reusePort && network == "tcp" {
		c.Control = func(_, _ string, raw syscall.RawConn) error {
			var err error
			cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
			return cmp.Or(cerr, err)
		}
	}
	return c.Listen(context.Background(), network, addr)
}

// removeStaleSocket removes a socket that a crash has left behind. It belongs to nobody, because no
// other living process shares the data directory. If it is no socket, it stays, and the listener
// says that it is in the way.
func removeStaleSocket(path string) error {
	fi, err := os.Lstat(path)
	if err != nil || fi.Mode()&os.ModeSocket == 0 {
		return nil
	}
	return os.Remove(path)
}

func (s *Server) closeListeners() {
	for _, l := range slices.Concat(s.clients, s.pages, s.extra, s.consoles) {
		l.Close()
	}
}

// ClientAddrs returns the addresses of the client listeners in the order of the URLs. A URL with
// port 0 has the port that the kernel chose.
func (s *Server) ClientAddrs() []net.Addr { return addrs(s.clients) }

// HTTPAddrs returns the addresses of the listeners for HTTP alone, as ClientAddrs.
func (s *Server) HTTPAddrs() []net.Addr { return addrs(s.pages) }

// MetricsAddrs returns the addresses of the metrics listeners in the order of the URLs.
func (s *Server) MetricsAddrs() []net.Addr { return addrs(s.extra) }

// ConsoleAddrs returns the addresses of the console's own listeners in the order of the URLs.
func (s *Server) ConsoleAddrs() []net.Addr { return addrs(s.consoles) }

func addrs(ls []boundListener) []net.Addr {
	a := make([]net.Addr, len(ls))
	for i := range ls {
		a[i] = ls[i].Addr()
	}
	return a
}

// Start begins to serve what Bind has opened. All goroutines end in Stop.
func (s *Server) Start() {
	ctx := s.life
	s.health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	s.wg.Go(func() { s.watchLeader(ctx) })
	s.wg.Go(func() { s.ended("gRPC", s.grpc.Serve(s.grpcConns)) })
	s.wg.Go(func() { s.ended("HTTP", s.http.Serve(s.httpConns)) })
	s.wg.Go(func() { s.ended("this process", s.grpc.Serve(s.inside)) })
	if s.gateway != nil {
		s.wg.Go(func() { s.ended("gateway", s.grpc.Serve(s.gateway.listener)) })
	}
	if s.opts.Verify != nil {
		s.wg.Go(func() { s.certified.checkEveryMinute(ctx, &s.opts) })
	}
	grpcConns, httpConns := s.grpcConns, s.httpConns
	if len(s.pages) > 0 {
		httpConns = nil
		s.sniff(ctx, s.pages, nil, s.httpConns)
	}
	s.sniff(ctx, s.clients, grpcConns, httpConns)
	s.serveHTTP("metrics", s.metricsHTTP, s.extra)
	s.serveHTTP("console", s.consoleHTTP, s.consoles)
	s.log.Info("ready to serve client requests")
}

// serveHTTP serves what only speaks HTTP.
func (s *Server) serveHTTP(what string, h *http.Server, listeners []boundListener) {
	for _, l := range listeners {
		serve := net.Listener(l)
		if l.secure {
			serve = tls.NewListener(l, speaking(s.opts.TLS, "http/1.1"))
		}
		s.wg.Go(func() { s.ended(what, h.Serve(serve)) })
		s.log.Info("serving "+what, zap.Bool("secure", l.secure), zap.Stringer("address", l.Addr()))
	}
}

// sniff serves clients at listeners. Without grpc or http the other one alone is served.
func (s *Server) sniff(ctx context.Context, listeners []boundListener, grpc, http *connQueue) {
	for _, l := range listeners {
		s.log.Info("serving client traffic", zap.Bool("secure", l.secure), zap.Bool("grpc", grpc != nil), zap.Bool("http", http != nil), zap.Stringer("address", l.Addr()))
		if l.twin {
			continue
		}
		sn := &sniffer{inner: l, limit: s.connections, certified: &s.certified, grpc: grpc, http: http, clock: s.opts.Clock, log: s.log, metrics: s.metrics, plainToo: l.both}
		if l.secure || l.both {
			sn.tls = speaking(s.opts.TLS, clientProtos...)
		}
		s.wg.Go(func() { sn.run(ctx) })
	}
}

// ended logs a server that ended for another reason than Stop.
func (s *Server) ended(what string, err error) {
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) && !errors.Is(err, net.ErrClosed) {
		s.log.Error("client server ended", zap.String("server", what), zap.Error(err))
	}
}

// Stopping has /readyz and gRPC's health service say that the server ends soon, so that clients go elsewhere. It
// serves on until Stop.
func (s *Server) Stopping() {
	s.stopping.Store(true)
	s.health.Shutdown()
}

// Stop accepts nothing more, lets running calls end until ctx is done, cuts the others off, and
// returns when all goroutines are gone. It may be called without Start, and more than once.
func (s *Server) Stop(ctx context.Context) {
	s.stopOnce.Do(func() { s.stop(ctx) })
}

func (s *Server) stop(ctx context.Context) {
	s.Stopping()
	s.closeListeners()
	if s.locks != nil {
		s.locks.Close(ctx) // while the services that it uses run
	}
	close(s.ending)
	s.end()
	var wg sync.WaitGroup
	for _, h := range []*http.Server{s.http, s.metricsHTTP, s.consoleHTTP} {
		if h == nil {
			continue
		}
		wg.Go(func() {
			if h.Shutdown(ctx) != nil {
				h.Close()
			}
		})
	}
	if s.gateway != nil {
		wg.Go(func() { s.gateway.sockets.close(ctx) })
	}
	wg.Go(func() {
		cut := context.AfterFunc(ctx, s.grpc.Stop)
		s.grpc.GracefulStop()
		cut()
	})
	wg.Wait()
	s.services.close()
	if s.gateway != nil {
		s.gateway.close(s.log)
	}
	s.inside.Close()
	s.grpcConns.Close()
	s.httpConns.Close()
	s.wg.Wait()
	s.closeTracing(ctx)
}
