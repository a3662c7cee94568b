package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// A node that etcd's MemberAdd has added (--initial-cluster-state existing) knows the peer
// URLs of the others, and its own, and asks those by transport.Ask which node it is.

// toldOf is what a node says to one that asks.
type toldOf struct {
	cluster keyspace.ClusterID
	// version is that of the map of which nodes are the node table: a higher one is newer.
	version uint64
	nodes   []placement.Node
}

// told is what this node says, as it knows it (docs/format/placement.md). It says nothing
// before it knows any.
func (c *Core) told() []byte {
	m, _ := c.client.WatchMap()
	if m == nil || !c.letIn.Load() {
		return nil
	}
	return encodeTold(&toldOf{cluster: c.o.Cluster, version: m.Version, nodes: m.NodeTable()})
}

func encodeTold(t *toldOf) []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(t.cluster))
	return append(binary.BigEndian.AppendUint64(b, t.version), placement.EncodeNodeTable(t.nodes)...)
}

func decodeTold(b []byte) (t toldOf, err error) {
	if len(b) < 16 {
		return t, fmt.Errorf("%d bytes about the cluster's nodes", len(b))
	}
	t.cluster, t.version = keyspace.ClusterID(binary.BigEndian.Uint64(b)), binary.BigEndian.Uint64(b[8:])
	t.nodes, err = placement.DecodeNodeTable(b[16:])
	return t, err
}

// addedRounds is how often all others are asked before the node believes that it was not
// added, or that its place is taken: what they say is as they know it.
const addedRounds = 5

// added asks the others of --initial-cluster until they know which node this is. Who does
// not answer is asked again until ctx ends.
func (p *placer) added(ctx context.Context, who engine.Identity) (*joined, error) {
	own := texts(p.cfg.AdvertisePeerURLs)
	if have, ok := p.cfg.InitialCluster[p.cfg.Name]; !ok || !sameURLs(texts(have), own) {
		return nil, fmt.Errorf("--initial-cluster has to name this node with its own peer URLs: %s=%s", p.cfg.Name, strings.Join(own, ","))
	}
	for refused := 0; ; {
		newest, err := p.askOthers(ctx)
		if err == nil && newest == nil {
			err = errors.New("none of --initial-cluster answers")
		} else if err == nil {
			var j *joined
			if j, err = newest.find(p.cfg.Name, own, who.Instance); err == nil {
				return j, nil
			}
			if refused++; refused == addedRounds {
				return nil, err
			}
		}
		p.log.Warn("asking the others of --initial-cluster again which member this is", zap.Error(err))
		if clock.Sleep(ctx, p.clock, joinPause) != nil {
			return nil, err
		}
	}
}

// find looks a node up by its peer URLs, which no two members share.
func (t *toldOf) find(name string, own []string, instance uint64) (*joined, error) {
	urls := strings.Join(own, ",")
	for i := range t.nodes {
		n := &t.nodes[i]
		switch {
		case n.State == placement.NodeRemoved || !sameURLs(n.PeerURLs, own):
		case n.State.Started():
			return nil, fmt.Errorf("member %s (%s) has the peer URLs %s, and has run before: start it with its own data directory, or remove it and add it anew", n.ID, n.Name, urls)
		case n.Instance != 0 && n.Instance != instance:
			return nil, otherDirectory(n)
		default:
			return &joined{cluster: t.cluster, self: n.ID, nodes: t.nodes}, nil
		}
	}
	return nil, fmt.Errorf("the cluster knows no member with the peer URLs %s: add it first (etcdctl member add %s --peer-urls=%s), or start it with --join", urls, name, urls)
}

// askOthers asks each of the others once, and returns what the one says that knows the newest
// node table: of a member that was just added, or removed, not all have heard yet. Where
// nobody answers there is nothing, or an error that says more.
func (p *placer) askOthers(ctx context.Context) (newest *toldOf, err error) {
	var mu sync.Mutex // guards what is returned
	var mixed error
	var wg sync.WaitGroup
	for name, urls := range p.cfg.InitialCluster {
		if name == p.cfg.Name {
			continue
		}
		for _, addr := range hosts(urls) {
			wg.Go(func() {
				b, terr := p.tell(ctx, addr)
				var t toldOf
				if terr == nil {
					t, terr = decodeTold(b)
				}
				mu.Lock()
				defer mu.Unlock()
				switch {
				case terr == nil && newest != nil && newest.cluster != t.cluster:
					mixed = fmt.Errorf("--initial-cluster names nodes of the clusters %s and %s", newest.cluster, t.cluster)
				case terr != nil:
					err = errors.Join(err, fmt.Errorf("%s: %w", name, terr))
				case newest == nil || newest.version < t.version:
					newest = &t
				}
			})
		}
	}
	wg.Wait()
	switch {
	case mixed != nil:
		return nil, mixed
	case newest != nil:
		return newest, nil
	}
	return nil, err
}
