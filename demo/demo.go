// Package demo runs a whole cluster on this machine, with real QUIC on loopback and
// real disks, for people who want to see Skein work: skein demo calls it. The nodes are in this
// process, or processes of their own where one is to be killed.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	demo.go       Run: a cluster in this process, a load test
//	kill.go       a node is killed under load
//	processes.go  nodes as processes
//	traffic.go    writes and watchers beside a fault
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/loadtest"
)

// Options are the flags of skein demo.
type Options struct {
	// Nodes is how many nodes there are, 1 to 9.
	Nodes int
	// Ranges is how many ranges the keyspace begins with.
	Ranges int
	// DataDir holds the nodes' directories. Empty means a temporary one that is removed
	// at the end.
	DataDir string
	// Port is the first node's client port; node i has the i-th after it, and the peer
	// ports follow.
	Port int
	// Load is how long to run the load test; 0 means none: the cluster runs until ctx
	// ends.
	Load time.Duration
	// Kill has each node run as a process, and kills one under load.
	Kill bool
	// Command starts a node as a process: a program and its arguments, behind which the node's flags come. It is for Kill.
	Command []string
}

// Validate says what is wrong with the options.
func (o *Options) Validate() error {
	switch {
	case o.Nodes < 1 || o.Nodes > 9:
		return fmt.Errorf("--nodes must be between 1 and 9 (set to %d)", o.Nodes)
	case o.Ranges < 1 || o.Ranges > config.MaxInitialRanges:
		return fmt.Errorf("--ranges must be between 1 and %d (set to %d)", config.MaxInitialRanges, o.Ranges)
	case o.Port < 1 || o.Port+2*o.Nodes-1 > 65535:
		return fmt.Errorf("--port must leave room for %d ports up to 65535 (set to %d)", 2*o.Nodes, o.Port)
	case o.Load < 0:
		return fmt.Errorf("--load must not be negative (set to %v)", o.Load)
	case o.Kill && o.Load != 0:
		return errors.New("--kill has a load of its own: leave --load out")
	case o.Kill && o.Nodes < 3:
		return fmt.Errorf("--kill needs --nodes 3 at least, of which two go on (set to %d)", o.Nodes)
	}
	return nil
}

// demoMemoryBytes is what each node of the demo may use.
const demoMemoryBytes = 256 << 20

// Run starts the cluster, says how to reach it, and runs the load test or waits for
// ctx. It returns after a clean stop; any error, of a node or of the load test, is
// returned.
func Run(ctx context.Context, o Options, out io.Writer, logger *zap.Logger) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	if o.DataDir == "" {
		if o.DataDir, err = os.MkdirTemp("", "skein-demo-"); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		defer func() {
			if o.Kill && err != nil && ctx.Err() == nil {
				return // the error may name a log in it
			}
			if rerr := os.RemoveAll(o.DataDir); rerr != nil && err == nil {
				err = fmt.Errorf("demo: %w", rerr)
			}
		}()
	}
	if o.Kill {
		return kill(ctx, &o, usualPhases, out)
	}
	began := clock.System().Now()
	nodes, endpoints, err := start(ctx, &o, logger)
	defer func() { err = errors.Join(err, stop(nodes)) }()
	if err != nil {
		return err
	}
	if err := awaitReady(ctx, endpoints); err != nil {
		return err
	}
	fmt.Fprintf(out, "%d nodes with %d ranges serve etcd clients after %v:\n  etcdctl --endpoints %s put greeting hello\n  skein range list --endpoints %s\ndata in %s\n",
		o.Nodes, o.Ranges, clock.System().Now().Sub(began).Round(time.Millisecond), strings.Join(endpoints, ","), endpoints[0], o.DataDir)
	if o.Load > 0 {
		return load(ctx, &o, endpoints, out)
	}
	fmt.Fprintln(out, "Ctrl-C stops it.")
	<-anyFatal(ctx, nodes)
	if ctx.Err() == nil {
		return errors.New("demo: a node cannot go on; its log says why")
	}
	return nil
}

// configure returns the configuration of each node, and where clients reach it.
func configure(o *Options) (cfgs []*config.Config, endpoints []string) {
	cluster := types.URLsMap{}
	for i := range o.Nodes {
		cfg := config.Default()
		cfg.Name = fmt.Sprintf("n%d", i+1)
		cfg.DataDir = filepath.Join(o.DataDir, cfg.Name)
		client, peer := loopback(o.Port+i), loopback(o.Port+o.Nodes+i)
		cfg.ListenClientURLs, cfg.AdvertiseClientURLs = client, client
		cfg.ListenPeerURLs, cfg.AdvertisePeerURLs = peer, peer
		cfg.InitialCluster, cfg.InitialClusterToken = cluster, "skein-demo"
		cfg.InitialRanges, cfg.MemoryBytes = o.Ranges, demoMemoryBytes
		cluster[cfg.Name] = types.URLs(peer)
		cfgs = append(cfgs, cfg)
		endpoints = append(endpoints, client[0].Host)
	}
	return cfgs, endpoints
}

// start starts all nodes at the same time and returns those that run. If one fails, the others
// do not wait for it.
func start(ctx context.Context, o *Options, logger *zap.Logger) (nodes []*embed.Server, endpoints []string, err error) {
	cfgs, endpoints := configure(o)
	starting, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, cfg := range cfgs {
		wg.Go(func() {
			n, nerr := embed.Start(starting, cfg, embed.WithLogger(logger))
			mu.Lock()
			defer mu.Unlock()
			if errors.Is(nerr, unix.EADDRINUSE) {
				nerr = fmt.Errorf("%w: give other ports with --port", nerr)
			}
			if nerr != nil {
				if err == nil || !errors.Is(nerr, context.Canceled) { // else it ended with another one's start
					err = errors.Join(err, fmt.Errorf("%s: %w", cfg.Name, nerr))
				}
				cancel()
				return
			}
			nodes = append(nodes, n)
		})
	}
	wg.Wait()
	return nodes, endpoints, err
}

func loopback(port int) []url.URL {
	return []url.URL{{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", fmt.Sprint(port))}}
}

// stop stops all nodes at the same time, as one that stops after another would hand
// its leaderships to the next.
func stop(nodes []*embed.Server) error {
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { errs[i] = n.Stop(context.Background()) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// anyFatal is closed when one of the nodes cannot go on, or ctx ends.
func anyFatal(ctx context.Context, nodes []*embed.Server) <-chan struct{} {
	failed := make(chan struct{})
	var once sync.Once
	for _, n := range nodes {
		go func() {
			select {
			case <-n.Done():
			case <-ctx.Done():
			}
			once.Do(func() { close(failed) })
		}()
	}
	return failed
}

// readyTimeout is how long the cluster may take to have all its leaders.
// readyPause lies between two attempts to find out.
const (
	readyTimeout = 30 * time.Second
	readyPause   = 20 * time.Millisecond
)

// awaitReady returns when every range can be read through every node.
func awaitReady(ctx context.Context, endpoints []string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for _, e := range endpoints {
		cl, err := clientv3.New(clientv3.Config{Endpoints: []string{e}, Logger: zap.NewNop()})
		if err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		for err = errNotAsked; err != nil && ctx.Err() == nil; {
			if _, err = cl.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil {
				_ = clock.Sleep(ctx, clock.System(), readyPause)
			}
		}
		cl.Close()
		if err != nil {
			return fmt.Errorf("demo: %s did not serve within %v: %w", e, readyTimeout, err)
		}
	}
	return nil
}

var errNotAsked = errors.New("not asked yet")

// load runs the load test, prints its report, and checks what was acknowledged.
// Any error in it is an error of the demo.
func load(ctx context.Context, o *Options, endpoints []string, out io.Writer) error {
	cfg := loadtest.DefaultConfig()
	cfg.Endpoints, cfg.Duration = endpoints, o.Load
	cfg.Workload, cfg.ReadPercent = loadtest.Mixed, 50
	cfg.Conns, cfg.Clients, cfg.Keys = 4*o.Nodes, 64*o.Nodes, 10_000
	cfg.Verify, cfg.Live, cfg.DataPath = true, true, o.DataDir
	report, err := loadtest.Run(ctx, cfg, out)
	if err != nil {
		return fmt.Errorf("load test: %w", err)
	}
	return report.Err()
}
