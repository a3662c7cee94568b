package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// place says as which node of which cluster a directory is to be opened.
type place struct {
	cluster keyspace.ClusterID
	self    keyspace.NodeID
	// founders are those of a new cluster, this node among them; none where it joins.
	founders []placement.Node
	// peers asks a running node for the node table, where the directory does not have it.
	peers func(ctx context.Context) ([]placement.Node, error)
}

// joined is what a running node tells one that joins.
type joined struct {
	cluster keyspace.ClusterID
	self    keyspace.NodeID
	nodes   []placement.Node
}

// placer finds the place of the node that a configuration describes.
type placer struct {
	cfg   *config.Config
	fs    vfs.FS
	clock clock.Clock
	log   *zap.Logger
	// ask asks the nodes of --join once to let this node in, of which nothing is known but
	// the instance of its directory, or, where it has an identity, what has become of it. An
	// errLater may pass by itself.
	ask func(ctx context.Context, who engine.Identity) (*joined, error)
	// tell asks the node at a peer address, HOST:PORT, who its cluster's nodes are.
	tell func(ctx context.Context, addr string) ([]byte, error)
}

// errLater is wrapped by what --join is told that may pass by itself.
var errLater = errors.New("nobody could tell")

const (
	// joinTimeout bounds one attempt to join, joinPause lies between two.
	joinTimeout = 10 * time.Second
	joinPause   = time.Second
	// sameClusterTimeout bounds the question whether the nodes of --join are of the
	// cluster that the directory belongs to. Where they do not answer it is left open.
	sameClusterTimeout = time.Second
)

// find returns the node's place. A directory that somebody has used says it itself, as in
// etcd; else the node joins, or is a founder. Between the moment when the cluster has let a
// node in and that when its directory says so a crash may come: who asks again with the same
// name, peer URLs and directory, and has not started yet, is the same node.
func (p *placer) find(ctx context.Context) (*place, error) {
	id, err := engine.ReadIdentity(p.fs, p.cfg.DataDir)
	switch {
	case err != nil:
		return nil, err
	case id != nil:
		return p.again(ctx, id)
	case len(p.cfg.Join) == 0 && p.cfg.InitialClusterState != config.StateExisting:
		boot, err := p.cfg.Bootstrap()
		if err != nil {
			return nil, err
		}
		return &place{cluster: boot.Cluster, self: boot.Self, founders: founders(boot)}, nil
	}
	instance, err := engine.EnsureInstance(p.fs, p.cfg.DataDir)
	if err != nil {
		return nil, err
	}
	which := p.join
	if len(p.cfg.Join) == 0 {
		which = p.added
	}
	j, err := which(ctx, engine.Identity{Instance: instance})
	if err != nil {
		return nil, err
	}
	return p.letIn(j), nil
}

func (p *placer) letIn(j *joined) *place {
	p.log.Info("let in", zap.Stringer("cluster", j.cluster), zap.Stringer("node", j.self), zap.Int("nodes", len(j.nodes)))
	return &place{
		cluster: j.cluster, self: j.self,
		peers: func(context.Context) ([]placement.Node, error) { return j.nodes, nil },
	}
}

func founders(b *config.Bootstrap) []placement.Node {
	var all []placement.Node
	for _, f := range b.Founders {
		all = append(all, placement.Node{ID: f.ID, Name: f.Name, PeerURLs: f.PeerURLs})
	}
	return all
}

// again returns the place of a node that has started before, or has tried to.
func (p *placer) again(ctx context.Context, id *engine.Identity) (*place, error) {
	l := &place{cluster: id.Cluster, self: id.Node}
	if len(p.cfg.Join) > 0 {
		l.peers = func(ctx context.Context) ([]placement.Node, error) {
			j, err := p.join(ctx, *id)
			if err != nil {
				return nil, err
			}
			return j.nodes, nil
		}
		return l, p.sameCluster(ctx, id)
	}
	if p.cfg.InitialClusterState == config.StateExisting {
		l.peers = func(ctx context.Context) ([]placement.Node, error) {
			j, err := p.added(ctx, *id)
			if err == nil && (j.cluster != id.Cluster || j.self != id.Node) {
				err = fmt.Errorf("the directory is that of node %s of cluster %s, and --initial-cluster leads to node %s of cluster %s", id.Node, id.Cluster, j.self, j.cluster)
			}
			if err != nil {
				return nil, err
			}
			return j.nodes, nil
		}
		return l, nil
	}
	boot, err := p.cfg.Bootstrap()
	if err == nil && boot.Cluster == id.Cluster && boot.Self == id.Node {
		l.founders = founders(boot)
		return l, nil
	}
	if _, self := p.cfg.InitialCluster[p.cfg.Name]; self && len(p.cfg.InitialCluster) == 1 {
		return l, nil // most likely nobody has said anything: this is its default
	}
	p.log.Warn("--initial-cluster says otherwise than the data directory, which counts",
		zap.Stringer("cluster", id.Cluster), zap.Stringer("node", id.Node), zap.Error(err))
	return l, nil
}

// sameCluster refuses the directory of a node of another cluster than that of --join, or of
// a node that is none of it any more. Where nobody answers the directory is believed.
func (p *placer) sameCluster(ctx context.Context, id *engine.Identity) error {
	asked, cancel := clock.WithTimeout(ctx, p.clock, sameClusterTimeout)
	defer cancel()
	_, err := p.ask(asked, *id)
	if err != nil && !errors.Is(err, errLater) {
		return err
	}
	p.log.Info("--join is ignored: the data directory says which node this is",
		zap.Stringer("cluster", id.Cluster), zap.Stringer("node", id.Node), zap.Error(err))
	return nil
}

// join asks until somebody answers or ctx ends.
func (p *placer) join(ctx context.Context, who engine.Identity) (*joined, error) {
	for {
		asked, cancel := clock.WithTimeout(ctx, p.clock, joinTimeout)
		j, err := p.ask(asked, who)
		cancel()
		switch {
		case err == nil && (j.cluster == 0 || j.self == 0 || len(j.nodes) == 0 || who.Node != 0 && (j.cluster != who.Cluster || j.self != who.Node)):
			return nil, fmt.Errorf("join: the answer is node %s of cluster %s, with %d nodes", j.self, j.cluster, len(j.nodes))
		case err == nil || !errors.Is(err, errLater):
			return j, err
		}
		p.log.Warn("join: asking again", zap.Strings("nodes", p.cfg.Join), zap.Error(err))
		if clock.Sleep(ctx, p.clock, joinPause) != nil {
			return nil, err
		}
	}
}
