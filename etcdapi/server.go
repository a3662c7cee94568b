package etcdapi

import (
	"context"
	"crypto/tls"
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

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// grpcOverheadBytes is what a message may be larger than max-request-bytes before
// gRPC itself refuses it, as in etcd.
const grpcOverheadBytes = 512 << 10

// Options are what a Server is made of. KV, Members, Node and Clock are required.
type Options struct {
	KV      KV
	Members Cluster
	Node    Node
	// Watches may be nil: then the Watch service is not there.
	Watches *watch.Hub
	// Leases may be nil: then the Lease service is not there.
	Leases Leases
	// Cluster and Self are the ids in response headers.
	Cluster keyspace.ClusterID
	Self    keyspace.NodeID
	Clock   clock.Clock
	// Logger may be nil for none.
	Logger *zap.Logger
	// Metrics may be nil for unregistered ones.
	Metrics *Metrics
	// Gatherer is what /metrics shows. Nil means the process's default registry.
	Gatherer prometheus.Gatherer

	// MaxRequestBytes bounds changes. 0 means 1.5 MiB.
	MaxRequestBytes int
	// UnsentBytes bounds the large answers that wait for slow clients: beyond it reads of
	// many keys are refused. 0 means 64 MiB.
	UnsentBytes int64
	// MaxTxnOps bounds transactions. 0 means 128.
	MaxTxnOps int
	// MaxConcurrentStreams bounds the calls at a time on a connection. 0 means no bound.
	MaxConcurrentStreams uint32
	// RequestTimeout bounds health checks and the calls that KV does not bound. 0 means 7 s. Too low turns
	// elections into errors, too high lets clients wait on a dead quorum.
	RequestTimeout time.Duration
	// ElectionTimeout paces the search for a leader on behalf of streams that demand
	// one. 0 means 1 s.
	ElectionTimeout time.Duration
	// WarnUnaryRequest is the duration above which a unary call is logged. 0 means
	// 300 ms.
	WarnUnaryRequest time.Duration
	// WatchProgressInterval is how often watchers that want it are told how far they are
	// while they are told nothing else. 0 means 10 min, less than 100 ms that.
	WatchProgressInterval time.Duration
	// KeepAliveMinTime, KeepAliveInterval and KeepAliveTimeout are the three
	// grpc-keepalive settings; where one is 0, gRPC's own hold.
	KeepAliveMinTime, KeepAliveInterval, KeepAliveTimeout time.Duration
	// MaxConnections bounds the open connections of each listener. 0 means half of the
	// files that the process may open; the other half is the data's.
	MaxConnections int
	// EnablePprof serves Go's profiles under /debug/pprof/.
	EnablePprof bool
	// NoGateway leaves the JSON gateway out.
	NoGateway bool
	// TLS is for https and unixs URLs. Nil where there are none.
	TLS *tls.Config
	// Register adds services of others, the admin service for one. May be nil.
	Register func(grpc.ServiceRegistrar)
}

// fill puts defaults where nothing is said.
func (o *Options) fill() {
	setDefault(&o.MaxRequestBytes, 3<<19)
	setDefault(&o.UnsentBytes, 64<<20)
	setDefault(&o.MaxTxnOps, 128)
	setDefault(&o.MaxConcurrentStreams, math.MaxUint32)
	setDefault(&o.RequestTimeout, 7*time.Second)
	setDefault(&o.ElectionTimeout, time.Second)
	setDefault(&o.WarnUnaryRequest, 300*time.Millisecond)
	setDefault(&o.WatchProgressInterval, 10*time.Minute)
	o.WatchProgressInterval = max(o.WatchProgressInterval, minProgressInterval)
	if o.MaxConnections == 0 {
		o.MaxConnections = maxConnections()
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
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

// maxConnections is half of the process's limit of open files.
func maxConnections() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 512
	}
	return int(min(max(limit.Cur/2, 1), 1<<20))
}

// Server serves etcd's clients. Its life is New, Bind, Start, Stop.
type Server struct {
	opts    Options
	log     *zap.Logger
	metrics *Metrics
	grpc    *grpc.Server
	health  *health.Server
	// methods are the counters of each method by its full name; not changed once New
	// has returned.
	methods    map[string]*methodMetrics
	leaderless leaderWatch
	// unsent are the bytes of large answers that gRPC has not sent yet, and of those that
	// the gateway is writing.
	unsent atomic.Int64
	// told is the highest revision that a header has told of.
	told atomic.Int64

	grpcConns, httpConns *connQueue
	http, metricsHTTP    *http.Server

	// clients and extra are the bound listeners of the client and the metrics URLs. Bind
	// fills them, before Start.
	clients, extra []boundListener

	gateway *gateway // nil where there is none
	locks   *Locks   // nil where there are no leases or no watches

	stopping context.CancelFunc
	// ending is closed when the server stops: streams that have no end of their own end.
	ending chan struct{}
	// wg counts the goroutines of Start, and those of streams that wait for their client.
	wg       sync.WaitGroup
	stopOnce sync.Once
}

type boundListener struct {
	net.Listener
	secure bool
}

// New makes a server. It opens nothing, but what it starts ends in Stop or in a Bind
// that failed.
func New(o Options) *Server {
	o.fill()
	s := &Server{opts: o, log: o.Logger, metrics: o.Metrics, health: health.NewServer(), grpcConns: newConnQueue(), httpConns: newConnQueue(), ending: make(chan struct{})}
	s.grpc = grpc.NewServer(s.grpcOptions()...)
	pb.RegisterKVServer(s.grpc, &kvServer{s: s})
	pb.RegisterClusterServer(s.grpc, &clusterServer{s: s})
	pb.RegisterMaintenanceServer(s.grpc, &maintenanceServer{s: s})
	if o.Watches != nil {
		pb.RegisterWatchServer(s.grpc, &watchServer{s: s})
	}
	if o.Leases != nil {
		pb.RegisterLeaseServer(s.grpc, &leaseServer{s: s})
	}
	grpc_health_v1.RegisterHealthServer(s.grpc, s.health)
	s.health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	if o.Leases != nil && o.Watches != nil {
		s.locks = NewLocks(&kvServer{s: s}, &leaseServer{s: s}, &watchServer{s: s}, s.log)
		s.locks.Register(s.grpc)
	}
	if o.Register != nil {
		o.Register(s.grpc)
	}
	reflection.Register(s.grpc)
	s.metrics.ServerID.WithLabelValues(o.Self.String()).Set(1)
	s.methods = methodTable(s.metrics, s.grpc.GetServiceInfo())
	if !o.NoGateway {
		var err error
		if s.gateway, err = newGateway(&s.opts, &s.unsent); err != nil {
			panic(err) // nothing that depends on anything outside
		}
	}
	s.http = newHTTPServer(s.clientMux())
	s.metricsHTTP = newHTTPServer(s.metricsMux())
	return s
}

// streamWorkers are goroutines kept for calls, whose stacks have grown to what a call
// needs: to grow the stack of a new goroutine costs more than the handler. Calls
// beyond them get goroutines of their own. They hold about 8 MiB.
const streamWorkers = 512

// windowBytes is what a client may send ahead, per stream and per connection. A fixed
// window holds any request within the default bound, and is known in advance; the
// one that gRPC would find by pings beside the calls grows to 16 MiB a connection.
const windowBytes = 2 << 20

func (s *Server) grpcOptions() []grpc.ServerOption {
	o := &s.opts
	opts := []grpc.ServerOption{
		grpc.Creds(sniffedCreds{}),
		grpc.ForceServerCodecV2(newCountingCodec(o.Metrics, &s.unsent)),
		grpc.MaxRecvMsgSize(o.MaxRequestBytes + grpcOverheadBytes),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(o.MaxConcurrentStreams),
		grpc.ConnectionTimeout(sniffTimeout),
		grpc.UnaryInterceptor(s.unary),
		grpc.StreamInterceptor(s.stream),
		grpc.NumStreamWorkers(streamWorkers),
		grpc.StaticStreamWindowSize(windowBytes),
		grpc.StaticConnWindowSize(windowBytes),
	}
	if o.KeepAliveMinTime > 0 {
		opts = append(opts, grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: o.KeepAliveMinTime}))
	}
	if o.KeepAliveInterval > 0 && o.KeepAliveTimeout > 0 {
		opts = append(opts, grpc.KeepaliveParams(keepalive.ServerParameters{Time: o.KeepAliveInterval, Timeout: o.KeepAliveTimeout}))
	}
	return opts
}

// requestReadTime is how long a client of HTTP may take to say what it wants.
const requestReadTime = 5 * time.Minute

// newHTTPServer makes a server for HTTP/1.1. The bound of a whole request is wide: a
// profile takes its time, and its request counts as being read until it is answered.
func newHTTPServer(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	return &http.Server{
		Handler:           h,
		Protocols:         &p,
		ReadHeaderTimeout: sniffTimeout,
		ReadTimeout:       requestReadTime,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ConnContext:       noteCertificate,
		ErrorLog:          zap.NewStdLog(zap.NewNop()), // what clients do wrong
	}
}

// Bind opens the listeners of all URLs. Where one cannot be opened none stays open, and
// the server has ended as by Stop. The kernel queues connections from here on; none is
// served before Start.
func (s *Server) Bind(clientURLs, metricsURLs []url.URL) error {
	err := s.bind(clientURLs, metricsURLs)
	if err != nil {
		s.Stop(context.Background()) // nothing runs that it could wait for
	}
	return err
}

func (s *Server) bind(clientURLs, metricsURLs []url.URL) error {
	for _, u := range clientURLs {
		l, err := s.listen(&u)
		if err != nil {
			return fmt.Errorf("listen for clients at %s: %w", u.String(), err)
		}
		s.clients = append(s.clients, l)
	}
	for _, u := range metricsURLs {
		l, err := s.listen(&u)
		if err != nil {
			return fmt.Errorf("listen for metrics at %s: %w", u.String(), err)
		}
		s.extra = append(s.extra, l)
	}
	return nil
}

func (s *Server) listen(u *url.URL) (boundListener, error) {
	secure := u.Scheme == "https" || u.Scheme == "unixs"
	if secure && s.opts.TLS == nil {
		return boundListener{}, errors.New("no certificate was configured")
	}
	network, addr := "tcp", u.Host
	if u.Scheme == "unix" || u.Scheme == "unixs" {
		network, addr = "unix", u.Host+u.Path
		if err := removeStaleSocket(addr); err != nil {
			return boundListener{}, err
		}
	}
	l, err := net.Listen(network, addr)
	if err != nil {
		return boundListener{}, err
	}
	return boundListener{netutil.LimitListener(l, s.opts.MaxConnections), secure}, nil
}

// removeStaleSocket removes a socket that a crash has left behind. It is nobody's: a
// living process would not share the data directory with this one. What is no socket
// stays, and the listener says that it is in the way.
func removeStaleSocket(path string) error {
	fi, err := os.Lstat(path)
	if err != nil || fi.Mode()&os.ModeSocket == 0 {
		return nil
	}
	return os.Remove(path)
}

func (s *Server) closeListeners() {
	for _, l := range slices.Concat(s.clients, s.extra) {
		l.Close()
	}
}

// ClientAddrs returns the addresses of the client listeners in the order of the URLs:
// with the ports that the kernel chose, where a URL said 0.
func (s *Server) ClientAddrs() []net.Addr { return addrs(s.clients) }

// MetricsAddrs returns the addresses of the metrics listeners in the order of the URLs.
func (s *Server) MetricsAddrs() []net.Addr { return addrs(s.extra) }

func addrs(ls []boundListener) []net.Addr {
	a := make([]net.Addr, len(ls))
	for i := range ls {
		a[i] = ls[i].Addr()
	}
	return a
}

// Start begins to serve what Bind has opened. All goroutines end in Stop.
func (s *Server) Start() {
	ctx, cancel := context.WithCancel(context.Background())
	s.stopping = cancel
	s.health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	s.wg.Go(func() { s.watchLeader(ctx) })
	s.wg.Go(func() { s.ended("gRPC", s.grpc.Serve(s.grpcConns)) })
	s.wg.Go(func() { s.ended("HTTP", s.http.Serve(s.httpConns)) })
	if s.gateway != nil {
		s.wg.Go(func() { s.ended("gateway", s.grpc.Serve(s.gateway.listener)) })
	}
	for _, l := range s.clients {
		sn := &sniffer{inner: l, grpc: s.grpcConns, http: s.httpConns, clock: s.opts.Clock, log: s.log, metrics: s.metrics}
		if l.secure {
			sn.tls = serverTLS(s.opts.TLS)
		}
		s.wg.Go(func() { sn.run(ctx) })
		s.log.Info("serving client traffic", zap.Bool("secure", l.secure), zap.Stringer("address", l.Addr()))
	}
	for _, l := range s.extra {
		serve := net.Listener(l)
		if l.secure {
			t := s.opts.TLS.Clone()
			t.NextProtos = []string{"http/1.1"}
			serve = tls.NewListener(l, t)
		}
		s.wg.Go(func() { s.ended("metrics", s.metricsHTTP.Serve(serve)) })
		s.log.Info("serving metrics", zap.Bool("secure", l.secure), zap.Stringer("address", l.Addr()))
	}
	s.log.Info("ready to serve client requests")
}

// ended logs a server that ended for another reason than Stop.
func (s *Server) ended(what string, err error) {
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) && !errors.Is(err, net.ErrClosed) {
		s.log.Error("client server ended", zap.String("server", what), zap.Error(err))
	}
}

// Stop accepts nothing more, lets the calls that run end until ctx is done, cuts off
// the rest, and returns when all goroutines are gone. It may be called without Start,
// and more than once.
func (s *Server) Stop(ctx context.Context) {
	s.stopOnce.Do(func() { s.stop(ctx) })
}

func (s *Server) stop(ctx context.Context) {
	s.health.Shutdown()
	s.closeListeners()
	if s.locks != nil {
		s.locks.Close(ctx) // while there is what locks are made of
	}
	close(s.ending)
	if s.stopping != nil {
		s.stopping()
	}
	var wg sync.WaitGroup
	for _, h := range []*http.Server{s.http, s.metricsHTTP} {
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
	if s.gateway != nil {
		s.gateway.close(s.log)
	}
	s.grpcConns.Close()
	s.httpConns.Close()
	s.wg.Wait()
}
