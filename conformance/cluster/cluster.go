// Package cluster starts a Skein of three nodes in this process, with real disks and
// real ports on loopback, for the suites. A race or a broken invariant in any node ends
// the suite's own process.
//
// It stops all nodes at the same time, because nodes that stop one after another hand
// their leaderships on. After a failed Start nothing is left behind.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/node"
)

// Nodes is how many nodes a cluster has.
const Nodes = 3

const (
	// ElectionTimeout is that of the nodes. A pause of the machine for a second must not
	// change leaders: a lost leader may leave revisions unused, and etcd's would then be
	// lower.
	ElectionTimeout = 5 * time.Second
	nodeMemoryBytes = 256 << 20
)

// Options are the settings of a cluster.
type Options struct {
	// Dir holds the nodes' directories. It is not removed.
	Dir string
	// Logger gets the nodes' logs. Not nil.
	Logger *zap.Logger
	// Configure changes the configuration of each node before it is checked. Nil changes
	// nothing.
	Configure func(*config.Config)
}

// Cluster is three running nodes.
type Cluster struct {
	nodes [Nodes]*node.Node
	https bool
}

// Start starts the nodes. It returns when they serve; requests succeed once they have
// elected leaders. ctx bounds only the start.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	cfgs, err := configs(&o)
	if err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	c := &Cluster{https: cfgs[0].ListenClientURLs[0].Scheme == "https"}
	err = each(func(i int) (err error) {
		if err = cfgs[i].Validate(); err == nil {
			c.nodes[i], err = node.Start(ctx, cfgs[i], o.Logger)
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cluster: %w", err), c.Stop())
	}
	return c, nil
}

// Addrs returns HOST:PORT of each node's client port.
func (c *Cluster) Addrs() []string {
	var addrs []string
	for _, n := range c.nodes {
		addrs = append(addrs, n.ClientAddrs()[0].String())
	}
	return addrs
}

// Endpoints returns the URL of each node's client port.
func (c *Cluster) Endpoints() []string {
	scheme := "http://"
	if c.https {
		scheme = "https://"
	}
	urls := c.Addrs()
	for i := range urls {
		urls[i] = scheme + urls[i]
	}
	return urls
}

// Stop stops all nodes, in order and at the same time.
func (c *Cluster) Stop() error {
	return each(func(i int) error {
		if c.nodes[i] == nil {
			return nil
		}
		return c.nodes[i].Stop(context.Background())
	})
}

// configs are the configurations of the nodes.
func configs(o *Options) ([]*config.Config, error) {
	peers, err := ports.Unused(Nodes)
	if err != nil {
		return nil, err
	}
	founders := types.URLsMap{}
	cfgs := make([]*config.Config, Nodes)
	for i := range cfgs {
		cfg := config.Default()
		cfg.Name = fmt.Sprintf("n%d", i+1)
		cfg.DataDir = filepath.Join(o.Dir, cfg.Name)
		cfg.WALDir = filepath.Join(cfg.DataDir, "wal")
		client := []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
		cfg.ListenClientURLs, cfg.AdvertiseClientURLs = client, client
		peer := []url.URL{{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", peers[i])}}
		cfg.ListenPeerURLs, cfg.AdvertisePeerURLs = peer, peer
		cfg.InitialCluster, cfg.InitialClusterToken = founders, "conformance"
		cfg.ElectionTimeout, cfg.MemoryBytes = ElectionTimeout, nodeMemoryBytes
		if o.Configure != nil {
			o.Configure(cfg)
		}
		founders[cfg.Name] = types.URLs(peer)
		cfgs[i] = cfg
	}
	return cfgs, nil
}

// each runs f for every node at the same time.
func each(f func(int) error) error {
	var errs [Nodes]error
	var wg sync.WaitGroup
	for i := range Nodes {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}
