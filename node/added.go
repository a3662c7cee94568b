package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// A node that etcd's MemberAdd has added (--initial-cluster-state existing) knows the peer
// URLs of the others, and its own, and asks those by transport.Ask which node it is.

// told is what a node says to one that asks: the cluster's id (8 bytes) and the node table
// as it knows it. It says nothing before it knows any.
func (c *Core) told() []byte {
	m, _ := c.client.WatchMap()
	if m == nil || !c.letIn.Load() {
		return nil
	}
	return append(binary.BigEndian.AppendUint64(nil, uint64(c.o.Cluster)), placement.EncodeNodeTable(m.NodeTable())...)
}

func decodeTold(b []byte) (keyspace.ClusterID, []placement.Node, error) {
	if len(b) < 8 {
		return 0, nil, fmt.Errorf("%d bytes about the cluster's nodes", len(b))
	}
	nodes, err := placement.DecodeNodeTable(b[8:])
	return keyspace.ClusterID(binary.BigEndian.Uint64(b)), nodes, err
}

// addedRounds is how often all others are asked before the node believes that it was not
// added: what they say is as they know it.
const addedRounds = 5

// added asks the others of --initial-cluster until one of them knows which node this is.
// Who does not answer is asked again until ctx ends.
func (p *placer) added(ctx context.Context) (*joined, error) {
	own := texts(p.cfg.AdvertisePeerURLs)
	if have, ok := p.cfg.InitialCluster[p.cfg.Name]; !ok || !sameURLs(texts(have), own) {
		return nil, fmt.Errorf("--initial-cluster has to name this node with its own peer URLs: %s=%s", p.cfg.Name, strings.Join(own, ","))
	}
	unknown := 0
	for {
		j, answered, err := p.askOthers(ctx, own)
		if err == nil || !errors.Is(err, errLater) {
			return j, err
		}
		if answered {
			unknown++
		}
		if unknown == addedRounds {
			return nil, fmt.Errorf("the cluster knows no member with the peer URLs %s: add it first (etcdctl member add %s --peer-urls=%s), or start it with --join",
				strings.Join(own, ","), p.cfg.Name, strings.Join(own, ","))
		}
		p.log.Warn("asking the others of --initial-cluster again which member this is", zap.Error(err))
		if clock.Sleep(ctx, p.clock, joinPause) != nil {
			return nil, err
		}
	}
}

// askOthers asks each of the others once. answered says that one of them has told who the
// members are.
func (p *placer) askOthers(ctx context.Context, own []string) (j *joined, answered bool, err error) {
	err = fmt.Errorf("%w: --initial-cluster names no other node", errLater)
	for _, name := range slices.Sorted(maps.Keys(p.cfg.InitialCluster)) {
		if name == p.cfg.Name {
			continue
		}
		for _, addr := range hosts(p.cfg.InitialCluster[name]) {
			b, terr := p.tell(ctx, addr)
			if terr != nil {
				err = fmt.Errorf("%w: %s: %w", errLater, name, terr)
				continue
			}
			cluster, nodes, terr := decodeTold(b)
			if terr != nil {
				return nil, false, fmt.Errorf("what %s says: %w", name, terr)
			}
			answered = true
			for i := range nodes {
				n := &nodes[i]
				switch {
				case n.State == placement.NodeRemoved || !sameURLs(n.PeerURLs, own):
				case n.State.Started():
					return nil, true, fmt.Errorf("member %s (%s) has the peer URLs %s, and has run before: start it with its own data directory, or remove it and add it anew",
						n.ID, n.Name, strings.Join(own, ","))
				default:
					return &joined{cluster: cluster, self: n.ID, nodes: nodes}, true, nil
				}
			}
			err = fmt.Errorf("%w: %s knows no such member", errLater, name)
		}
	}
	return nil, answered, err
}
