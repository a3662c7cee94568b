package conformance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node"
)

const (
	skeinNodes = 3
	// A machine that hiccups for a second must not change leaders: a leader that is
	// lost may leave revisions that no event bears, etcd's would then be lower.
	electionTimeout = 5 * time.Second
	nodeMemoryBytes = 256 << 20
)

// startSkein starts a Skein of three nodes in dir, with one range.
func startSkein(ctx context.Context, dir string, logger *zap.Logger) (*store, error) {
	peers, err := freeUDPPorts(skeinNodes)
	if err != nil {
		return nil, fmt.Errorf("skein: %w", err)
	}
	cluster := types.URLsMap{}
	cfgs := make([]*config.Config, skeinNodes)
	for i := range cfgs {
		cfg := config.Default()
		cfg.Name = fmt.Sprintf("n%d", i+1)
		cfg.DataDir = filepath.Join(dir, cfg.Name)
		cfg.WALDir = filepath.Join(cfg.DataDir, "wal")
		client := []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
		cfg.ListenClientURLs, cfg.AdvertiseClientURLs = client, client
		peer := []url.URL{{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", peers[i])}}
		cfg.ListenPeerURLs, cfg.AdvertisePeerURLs = peer, peer
		cfg.InitialCluster, cfg.InitialClusterToken = cluster, "conformance"
		cfg.ElectionTimeout, cfg.MemoryBytes = electionTimeout, nodeMemoryBytes
		cluster[cfg.Name] = types.URLs(peer)
		cfgs[i] = cfg
	}
	nodes := make([]*node.Node, skeinNodes)
	err = each(skeinNodes, func(i int) (err error) {
		if err = cfgs[i].Validate(); err == nil {
			nodes[i], err = node.Start(ctx, cfgs[i], logger)
		}
		return err
	})
	s := &store{name: "Skein"}
	s.stop = func() error {
		return each(skeinNodes, func(i int) error {
			if nodes[i] == nil {
				return nil
			}
			return nodes[i].Stop(context.Background())
		})
	}
	for _, n := range nodes {
		if err != nil {
			break
		}
		conn, derr := dial(n.ClientAddrs()[0].String())
		if err = derr; err == nil {
			s.conns = append(s.conns, conn)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("skein: %w", err), s.close())
	}
	return s, nil
}

// each runs f for 0 to n−1 at the same time.
func each(n int, f func(int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// freeUDPPorts returns ports that were free a moment ago: the nodes must know each
// other's before they listen.
func freeUDPPorts(n int) ([]int, error) {
	var held []net.PacketConn
	defer func() {
		for _, l := range held {
			l.Close()
		}
	}()
	ports := make([]int, n)
	for i := range ports {
		l, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		held = append(held, l)
		ports[i] = l.LocalAddr().(*net.UDPAddr).Port
	}
	return ports, nil
}
