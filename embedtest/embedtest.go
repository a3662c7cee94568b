// Package embedtest gives a test a Skein of its own, in the place of an etcd: in the test's process, on a temporary directory and
// on free ports of loopback.
//
//	func TestGreeting(t *testing.T) {
//		s := embedtest.New(t)
//		app := NewApp(s.Endpoints())
//		app.Greet("hello")
//		got, err := s.Client().Get(t.Context(), "greeting")
//		...
//	}
//
// It is there when New returns, and gone at the end of the test. Several at a time do not disturb each other, so parallel tests
// may have one each. A node may be killed and started again on its directory:
//
//	s := embedtest.New(t, embedtest.Nodes(3))
//	s.Node(0).Kill()
//	...
//	s.Node(0).Start()
//
// Methods that start and end nodes are called from the test's own goroutine, since failures end the test.
package embedtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/internal/ports"
)

// Option is a choice about a Server.
type Option func(*options)

type options struct {
	nodes  int
	change func(*config.Config)
	logger *zap.Logger
}

// Nodes has the Server consist of n nodes. Without it there is one.
func Nodes(n int) Option { return func(o *options) { o.nodes = n } }

// WithConfig has f change the configuration of each node before its first start. Names, directories, URLs and members are set
// already, and stay.
func WithConfig(f func(*config.Config)) Option { return func(o *options) { o.change = f } }

// WithLogger has the nodes log there. Without it nothing is logged.
func WithLogger(logger *zap.Logger) Option { return func(o *options) { o.logger = logger } }

// memoryBytes is what each node may use.
const memoryBytes = 256 << 20

// portAttempts is how often New looks for ports, as another process may take one first.
const portAttempts = 3

// Server is a cluster of a test.
type Server struct {
	t      testing.TB
	nodes  []*Node
	client *clientv3.Client
}

// New starts a Server and returns when it serves. It is stopped at the end of the test. What goes wrong ends the test.
func New(t testing.TB, opts ...Option) *Server {
	t.Helper()
	o := options{nodes: 1, logger: zap.NewNop()}
	for _, opt := range opts {
		opt(&o)
	}
	if o.nodes < 1 {
		t.Fatalf("embedtest: a Server of %d nodes", o.nodes)
	}
	s := &Server{t: t}
	var err error
	for attempt := 0; attempt == 0 || attempt < portAttempts && errors.Is(err, syscall.EADDRINUSE); attempt++ {
		if s.nodes, err = plan(t, &o); err == nil {
			err = s.start(s.nodes)
		}
	}
	if err != nil {
		t.Fatalf("embedtest: %v", err)
	}
	t.Cleanup(func() {
		if err := s.stop(s.nodes); err != nil {
			t.Errorf("embedtest: %v", err)
		}
	})
	// While a node is down the client knocks often: by gRPC's pauses puts would fail for a second after it is back.
	often := grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 100 * time.Millisecond}, MinConnectTimeout: 20 * time.Second,
	})
	if s.client, err = clientv3.New(clientv3.Config{Endpoints: s.Endpoints(), Logger: zap.NewNop(), DialOptions: []grpc.DialOption{often}}); err != nil {
		t.Fatalf("embedtest: %v", err)
	}
	t.Cleanup(func() { _ = s.client.Close() }) // before the nodes
	for _, n := range s.nodes {
		n.client = s.client
	}
	return s
}

// plan configures the nodes. Nobody can know their cluster: its token is made here.
func plan(t testing.TB, o *options) ([]*Node, error) {
	t.Helper()
	free, err := ports.Unused(2 * o.nodes)
	if err != nil {
		return nil, err
	}
	dir, token, members := t.TempDir(), rand.Text(), types.URLsMap{}
	var nodes []*Node
	for i := range o.nodes {
		cfg := config.Default()
		cfg.MemoryBytes = memoryBytes
		if o.change != nil {
			o.change(cfg)
		}
		cfg.Name = fmt.Sprintf("n%d", i+1)
		cfg.DataDir, cfg.WALDir = filepath.Join(dir, cfg.Name), ""
		client, peer := loopback(free[i]), loopback(free[o.nodes+i])
		cfg.ListenClientURLs, cfg.AdvertiseClientURLs = client, client
		cfg.ListenPeerURLs, cfg.AdvertisePeerURLs = peer, peer
		cfg.InitialCluster, cfg.InitialClusterToken = members, token
		members[cfg.Name] = types.URLs(peer)
		nodes = append(nodes, &Node{t: t, cfg: cfg, logger: o.logger})
	}
	return nodes, nil
}

func loopback(port int) []url.URL {
	return []url.URL{{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", port)}}
}

// start starts nodes at the same time, and returns when all are ready. If one fails, the others do not wait for it and are gone.
func (s *Server) start(nodes []*Node) error {
	starting, cancel := context.WithCancel(context.Background())
	defer cancel()
	err := together(nodes, func(n *Node) error {
		err := n.start(starting)
		if err != nil {
			cancel()
		}
		return err
	})
	if err != nil {
		err = errors.Join(err, s.stop(nodes))
	}
	return err
}

// stop stops those of the nodes that run, at the same time: one that stops after another would hand over to the next.
func (s *Server) stop(nodes []*Node) error {
	return together(nodes, func(n *Node) error {
		if n.server == nil {
			return nil
		}
		err := n.server.Stop(context.Background())
		n.server = nil
		return err
	})
}

// together calls f for each of the nodes at the same time.
func together(nodes []*Node, f func(*Node) error) error {
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			if err := f(n); err != nil {
				errs[i] = fmt.Errorf("%s: %w", n.cfg.Name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Client returns a client of all nodes. It goes on where a node is killed, and is closed at the end of the test.
func (s *Server) Client() *clientv3.Client { return s.client }

// Endpoints returns where clients reach the nodes, a HOST:PORT for each.
func (s *Server) Endpoints() []string {
	var all []string
	for _, n := range s.nodes {
		all = append(all, n.Endpoint())
	}
	return all
}

// Node returns the i-th node, from 0.
func (s *Server) Node(i int) *Node { return s.nodes[i] }

// Node is one node of a Server.
type Node struct {
	t      testing.TB
	cfg    *config.Config
	logger *zap.Logger
	client *clientv3.Client // the Server's
	// server is nil while the node does not run.
	server *embed.Server
}

func (n *Node) start(ctx context.Context) error {
	server, err := embed.Start(ctx, n.cfg, embed.WithLogger(n.logger), embed.SurelyNew())
	if err != nil {
		return err
	}
	n.server = server
	select {
	case <-server.Ready():
		return nil
	case <-server.Done():
		return server.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Endpoint returns where clients reach the node, HOST:PORT. It is the same after a restart.
func (n *Node) Endpoint() string { return n.cfg.ListenClientURLs[0].Host }

// Server returns the running node, nil while it does not run.
func (n *Node) Server() *embed.Server { return n.server }

// Kill ends the node at once, as kill -9 would. Nothing acknowledged is lost by it.
func (n *Node) Kill() {
	n.t.Helper()
	if n.server == nil {
		n.t.Fatalf("embedtest: kill %s, which does not run", n.cfg.Name)
	}
	n.server.Kill()
	n.server = nil
}

// Stop ends the node in order.
func (n *Node) Stop() {
	n.t.Helper()
	if n.server == nil {
		n.t.Fatalf("embedtest: stop %s, which does not run", n.cfg.Name)
	}
	server := n.server
	n.server = nil
	if err := server.Stop(context.Background()); err != nil {
		n.t.Fatalf("embedtest: stop %s: %v", n.cfg.Name, err)
	}
}

// Start starts the node again on its directory, and returns when it serves and the Server's client reaches a node. That needs a
// quorum: with two of three nodes down it waits for ever.
func (n *Node) Start() {
	n.t.Helper()
	if n.server != nil {
		n.t.Fatalf("embedtest: start %s, which runs", n.cfg.Name)
	}
	if err := n.start(context.Background()); err != nil {
		n.t.Fatalf("embedtest: start %s: %v", n.cfg.Name, err)
	}
	n.connect()
}

// connect waits until the client has a connection. Until then its puts fail.
func (n *Node) connect() {
	conn := n.client.ActiveConnection()
	for state := conn.GetState(); state != connectivity.Ready && state != connectivity.Shutdown; state = conn.GetState() {
		conn.Connect()
		conn.WaitForStateChange(context.Background(), state)
	}
}
