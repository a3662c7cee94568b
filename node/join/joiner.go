package join

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// Membership says as which node of which cluster a directory is to be opened.
type Membership struct {
	Cluster keyspace.ClusterID
	Self    keyspace.NodeID
	// Founders are those of a new cluster, this node among them. A node that joins has none.
	Founders []fsm.Node
	// Peers asks a running node for the node table, where the directory does not have it.
	Peers func(ctx context.Context) ([]fsm.Node, error)
	// Anew finds Founders or Peers after all, for a directory that does not have the node table: it waits for the resolver
	// that has not answered so far. nil where they are known.
	Anew func(ctx context.Context) (*Membership, error)
}

// answer is what a running node tells one that joins.
type answer struct {
	cluster keyspace.ClusterID
	self    keyspace.NodeID
	nodes   []fsm.Node
}

// Joiner finds the membership of the node that a configuration describes. All its fields are
// required.
type Joiner struct {
	// Config says name, peer URLs and directories, and how the node comes into a cluster: by
	// --join, by --initial-cluster-state existing, or as a founder. Where --discovery-srv says who the others
	// are, Resolver looks them up.
	Config   *config.Config
	Resolver *net.Resolver
	FS       vfs.FS
	Clock    clock.Clock
	Logger   *zap.Logger
	// Ask asks a node of --join once to admit this one. An error that wraps ErrLater may pass by
	// itself; any other is final.
	Ask func(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error)
	// PeerTable asks the node at a peer address, HOST:PORT, for its peer table (EncodePeerTable).
	PeerTable func(ctx context.Context, addr string) ([]byte, error)
}

const (
	// joinTimeout bounds one attempt to join, joinPause lies between two.
	joinTimeout = 10 * time.Second
	joinPause   = time.Second
	// sameClusterTimeout bounds the question whether the nodes of --join are of the
	// cluster that the directory belongs to. Without an answer the directory counts.
	sameClusterTimeout = time.Second
)

// Find returns the node's membership. It waits until somebody has answered or ctx ends; a
// refusal is final. A directory that was used before says it itself, as in etcd. With an empty
// one the node joins, or is a founder. The node may crash after the cluster has admitted it and
// before its directory says so. If it asks again with the same name, peer URLs and directory,
// and has not started yet, it is the same node.
func (j *Joiner) Find(ctx context.Context) (*Membership, error) {
	id, err := engine.ReadIdentity(j.FS, j.Config.DataDir)
	switch {
	case err != nil:
		return nil, err
	case id != nil:
		return j.again(ctx, id)
	}
	if j, err = j.discovered(ctx); err != nil {
		return nil, err
	}
	if len(j.Config.Join) == 0 && j.Config.InitialClusterState != config.StateExisting {
		boot, err := j.Config.Bootstrap()
		if err != nil {
			return nil, err
		}
		return &Membership{Cluster: boot.Cluster, Self: boot.Self, Founders: j.founders(boot)}, nil
	}
	instance, err := engine.EnsureInstance(j.FS, j.Config.DataDir)
	if err != nil {
		return nil, err
	}
	ask := j.join
	if len(j.Config.Join) == 0 {
		ask = j.askExisting
	}
	a, err := ask(ctx, engine.Identity{Instance: instance})
	if err != nil {
		return nil, err
	}
	j.Logger.Info("admitted", zap.Stringer("cluster", a.cluster), zap.Stringer("node", a.self), zap.Int("nodes", len(a.nodes)))
	return &Membership{
		Cluster: a.cluster, Self: a.self,
		Peers: func(context.Context) ([]fsm.Node, error) { return a.nodes, nil },
	}, nil
}

// founders are the rows of a new cluster, the same on all founders. SRV records have no names of nodes: then each tells its own
// once it has started.
func (j *Joiner) founders(b *config.Bootstrap) []fsm.Node {
	var all []fsm.Node
	for _, f := range b.Founders {
		n := fsm.Node{ID: f.ID, Name: f.Name, PeerURLs: f.PeerURLs}
		if j.Config.DiscoverySRV != "" {
			n.Name = ""
		}
		all = append(all, n)
	}
	return all
}

// again returns the membership of a node that has started before, or has tried to. Most such nodes know the others from
// their directory, so resolvers are waited for only where it turns out not to have them.
func (j *Joiner) again(ctx context.Context, id *engine.Identity) (*Membership, error) {
	if j.Config.DiscoverySRV == "" {
		return j.configured(ctx, id)
	}
	if found, err := j.discoveredAgain(ctx); err == nil {
		return found.configured(ctx, id)
	}
	return &Membership{Cluster: id.Cluster, Self: id.Node, Anew: func(ctx context.Context) (*Membership, error) {
		found, err := j.discovered(ctx)
		if err != nil {
			return nil, fmt.Errorf("the directory is that of node %s of cluster %s, which was not admitted yet: %w", id.Node, id.Cluster, err)
		}
		return found.configured(ctx, id)
	}}, nil
}

// configured is again for a node whose founders are known, if it is to have any.
func (j *Joiner) configured(ctx context.Context, id *engine.Identity) (*Membership, error) {
	m := &Membership{Cluster: id.Cluster, Self: id.Node}
	if len(j.Config.Join) > 0 {
		m.Peers = func(ctx context.Context) ([]fsm.Node, error) {
			a, err := j.join(ctx, *id)
			if err != nil {
				return nil, err
			}
			return a.nodes, nil
		}
		return m, j.sameCluster(ctx, id)
	}
	if j.Config.InitialClusterState == config.StateExisting {
		m.Peers = func(ctx context.Context) ([]fsm.Node, error) {
			a, err := j.askExisting(ctx, *id)
			if err == nil && (a.cluster != id.Cluster || a.self != id.Node) {
				err = fmt.Errorf("the directory is that of node %s of cluster %s, and --initial-cluster leads to node %s of cluster %s", id.Node, id.Cluster, a.self, a.cluster)
			}
			if err != nil {
				return nil, err
			}
			return a.nodes, nil
		}
		return m, nil
	}
	boot, err := j.Config.Bootstrap()
	if err == nil && boot.Cluster == id.Cluster && boot.Self == id.Node {
		m.Founders = j.founders(boot)
		return m, nil
	}
	if j.Config.DiscoverySRV != "" {
		// The records are those of today's nodes, which matters only to one that needs them still.
		m.Peers = func(context.Context) ([]fsm.Node, error) { return nil, otherRecords(id, boot, err) }
		return m, nil
	}
	if _, self := j.Config.InitialCluster[j.Config.Name]; self && len(j.Config.InitialCluster) == 1 {
		return m, nil // most likely the default: nobody has set --initial-cluster
	}
	j.Logger.Warn("--initial-cluster contradicts the data directory; the directory counts",
		zap.Stringer("cluster", id.Cluster), zap.Stringer("node", id.Node), zap.Error(err))
	return m, nil
}

// otherRecords is why a founder that was not admitted yet cannot be one of those that the SRV records name now: boot, or
// nobody as err says.
func otherRecords(id *engine.Identity, boot *config.Bootstrap, err error) error {
	const advice = "give the records back that the founders were first started with, or start this node with --join of a running one"
	if err != nil {
		return fmt.Errorf("--discovery-srv contradicts the data directory of node %s of cluster %s, which was not admitted yet: %w: %s", id.Node, id.Cluster, err, advice)
	}
	return fmt.Errorf("--discovery-srv contradicts the data directory of node %s of cluster %s, which was not admitted yet: the SRV records now make it node %s of cluster %s: %s",
		id.Node, id.Cluster, boot.Self, boot.Cluster, advice)
}

// sameCluster refuses the directory of a node of another cluster than that of --join, or of
// a node that was removed. Without an answer the directory counts.
func (j *Joiner) sameCluster(ctx context.Context, id *engine.Identity) error {
	asked, cancel := clock.WithTimeout(ctx, j.Clock, sameClusterTimeout)
	defer cancel()
	_, err := j.ask(asked, *id)
	if err != nil && !errors.Is(err, ErrLater) {
		return err
	}
	j.Logger.Info("--join is ignored: the data directory says which node this is",
		zap.Stringer("cluster", id.Cluster), zap.Stringer("node", id.Node), zap.Error(err))
	return nil
}

// join asks until somebody answers or ctx ends.
func (j *Joiner) join(ctx context.Context, who engine.Identity) (*answer, error) {
	for {
		asked, cancel := clock.WithTimeout(ctx, j.Clock, joinTimeout)
		a, err := j.ask(asked, who)
		cancel()
		switch {
		case err == nil && (a.cluster == 0 || a.self == 0 || len(a.nodes) == 0 || who.Node != 0 && (a.cluster != who.Cluster || a.self != who.Node)):
			return nil, fmt.Errorf("join: the answer is node %s of cluster %s, with %d nodes", a.self, a.cluster, len(a.nodes))
		case err == nil || !errors.Is(err, ErrLater):
			return a, err
		}
		j.Logger.Warn("join: asking again", zap.Strings("nodes", j.Config.Join), zap.Error(err))
		if clock.Sleep(ctx, j.Clock, joinPause) != nil {
			return nil, err
		}
	}
}

// ask asks once to admit this node, of which only the instance of its directory is known. For
// a node with an identity it asks what has become of it.
func (j *Joiner) ask(ctx context.Context, who engine.Identity) (*answer, error) {
	a, err := j.Ask(ctx, request(j.Config.Name, types.URLs(j.Config.AdvertisePeerURLs).StringSlice(), who))
	if r := (*adminapi.Refusal)(nil); errors.As(err, &r) && r.Removed {
		return nil, fmt.Errorf("%w: %w", ErrRemoved, err)
	}
	if err != nil {
		return nil, err
	}
	return answerOf(a)
}
