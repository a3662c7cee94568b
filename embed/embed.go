package embed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node"
)

// Option is a choice about a Server that its configuration does not have.
type Option func(*options)

type options struct {
	logger *zap.Logger
	start  node.StartOptions
}

// WithLogger has the Server log there. Without it nothing is logged: Config.Log is for the command, which builds its logger by
// [config.Log.Build].
func WithLogger(logger *zap.Logger) Option { return func(o *options) { o.logger = logger } }

// OnStage has f called with each stage that the Server enters in its start and its stop, a few words for people. f returns at
// once.
func OnStage(f func(stage string)) Option { return func(o *options) { o.start.Stage = f } }

// SurelyNew says that no node can have joined this cluster before, as its token or its ports were made for it. A single node
// with an empty directory otherwise listens a moment for nodes that know it, since it may have lost its disk.
func SurelyNew() Option { return func(o *options) { o.start.SurelyNew = true } }

// Server is a node that runs. Its methods may be called from any goroutine.
type Server struct {
	node   *node.Node
	logger *zap.Logger
	client *clientv3.Client
	// done is closed when the node cannot go on, or was stopped.
	done chan struct{}
	// stop ends the wait for a node that cannot go on.
	stop     context.CancelFunc
	watching sync.WaitGroup
	ended    sync.Once
	stopErr  error
}

// Start starts a node. It returns once the node serves clients at its client URLs; Ready says when a quorum answers them.
// ctx bounds the start alone. cfg comes from [config.Default] or [config.Load] and is not changed; what is empty and depends on
// other settings is filled in. An error says what is wrong with the configuration, the directory or the ports, and nothing is
// left of the start.
func Start(ctx context.Context, cfg *config.Config, opts ...Option) (*Server, error) {
	o := options{logger: zap.NewNop()}
	for _, opt := range opts {
		opt(&o)
	}
	own := *cfg
	own.Complete()
	if err := own.Validate(); err != nil {
		return nil, err
	}
	if own.ForceNewCluster {
		return nil, errors.New("--force-new-cluster is done by the command, before a node is started: see skein recover")
	}
	n, err := node.StartWith(ctx, &own, o.logger, o.start)
	if err != nil {
		return nil, err
	}
	s := &Server{node: n, logger: o.logger, done: make(chan struct{})}
	if s.client, err = s.NewClient(clientv3.Config{}); err != nil {
		return nil, errors.Join(err, n.Stop(ctx))
	}
	watch, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.watching.Go(func() {
		defer close(s.done)
		select {
		case <-n.Fatal():
		case <-watch.Done():
		}
	})
	return s, nil
}

// Ready is closed once a quorum knows the node: then requests succeed. It stays open where the node ends before.
func (s *Server) Ready() <-chan struct{} { return s.node.Announced() }

// Client returns a client of this node within the process, without a socket. It may do what loopback may. It is closed by Stop.
func (s *Server) Client() *clientv3.Client { return s.client }

// NewClient makes another client of this node within the process, as a user: Username and Password of c. The endpoints of c
// count for nothing. The caller closes it.
func (s *Server) NewClient(c clientv3.Config) (*clientv3.Client, error) {
	c.Endpoints = []string{"inside"} // no name that is looked up: the dialler goes nowhere else
	c.TLS = nil
	c.DialOptions = append(append([]grpc.DialOption(nil), c.DialOptions...),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return s.node.DialInside(ctx) }))
	if c.Logger == nil {
		c.Logger = s.logger.Named("client")
	}
	cl, err := clientv3.New(c)
	if err != nil {
		return nil, fmt.Errorf("a client within the process: %w", err)
	}
	return cl, nil
}

// ClientAddrs returns the addresses at which clients are served, in the order of Config.ListenClientURLs. A URL with port 0 has
// the port that the kernel chose.
func (s *Server) ClientAddrs() []net.Addr { return s.node.ClientAddrs() }

// Logger returns the Server's log: each of its lines names the node.
func (s *Server) Logger() *zap.Logger { return s.node.Logger() }

// Done is closed when the node cannot go on, which Err explains, or was stopped.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err returns why the node cannot go on, nil while it can. That of a node that was removed from its cluster is ErrRemoved.
func (s *Server) Err() error { return s.node.Err() }

// ErrRemoved says that the node was removed from its cluster. It never comes back by its directory.
var ErrRemoved = node.ErrRemoved

// Stopping has load balancers and clients go elsewhere, by /readyz and gRPC's health service. The node serves on until Stop.
func (s *Server) Stopping() { s.node.Stopping() }

// DiskStalled says that the node waits for a disk that does not move.
func (s *Server) DiskStalled() bool { return s.node.DiskStalled() }

// Stop ends the node in order and returns when nothing of it runs any more: requests under way end, what it leads is handed over,
// and what it has in memory is written. Those waits have bounds of seconds, and none without a quorum; ctx cuts them short. An
// error says what went wrong with that; nothing acknowledged is lost by it. Later calls return the same.
func (s *Server) Stop(ctx context.Context) error {
	s.end(func() error { return s.node.Stop(ctx) })
	return s.stopErr
}

// Kill ends the node at once, as kill -9 would, for tests: nothing is handed over or written, and requests fail. Nothing
// acknowledged is lost: Start on the same directory goes on with it.
func (s *Server) Kill() {
	s.end(func() error {
		s.node.Crash()
		return nil
	})
}

func (s *Server) end(how func() error) {
	s.ended.Do(func() {
		_ = s.client.Close() // else its watches would come back until the node is gone
		s.stopErr = how()
		s.stop()
		s.watching.Wait()
	})
}
