package join

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// etcd's MemberAdd has added a node that starts with --initial-cluster-state existing. Such a
// node knows its own peer URLs and those of the others. It asks the others by transport.Ask
// which node it is.

// peerTable is a node's answer to a node that asks at its peer address.
type peerTable struct {
	cluster keyspace.ClusterID
	// version is that of the map that holds the node table: a higher one is newer.
	version uint64
	nodes   []fsm.Node
}

// EncodePeerTable returns the answer of a node to one that asks at its peer address
// (docs/format/placement.md): its cluster, and the node table with the version of its map.
func EncodePeerTable(cluster keyspace.ClusterID, version uint64, nodes []fsm.Node) []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(cluster))
	return append(binary.BigEndian.AppendUint64(b, version), placement.EncodeNodeTable(nodes)...)
}

func decodePeerTable(b []byte) (t peerTable, err error) {
	if len(b) < 16 {
		return t, fmt.Errorf("%d bytes about the cluster's nodes", len(b))
	}
	t.cluster, t.version = keyspace.ClusterID(binary.BigEndian.Uint64(b)), binary.BigEndian.Uint64(b[8:])
	t.nodes, err = placement.DecodeNodeTable(b[16:])
	return t, err
}

// existingRounds is how often the node asks all others before it believes that it was not added,
// or that its row is taken. Each of them may be behind.
const existingRounds = 5

// askExisting asks the others of --initial-cluster until they know which node this is. It
// asks those without an answer again until ctx ends.
func (j *Joiner) askExisting(ctx context.Context, who engine.Identity) (*answer, error) {
	own := types.URLs(j.Config.AdvertisePeerURLs).StringSlice()
	if have, ok := j.Config.InitialCluster[j.Config.Name]; j.Config.DiscoverySRV == "" && (!ok || !sameURLs(have.StringSlice(), own)) {
		return nil, fmt.Errorf("--initial-cluster has to name this node with its own peer URLs: %s=%s", j.Config.Name, strings.Join(own, ","))
	}
	for refused := 0; ; {
		newest, err := j.askOthers(ctx)
		if err == nil && newest == nil {
			err = errors.New("none of --initial-cluster answers")
		} else if err == nil {
			var a *answer
			if a, err = newest.find(j.Config.Name, own, who.Instance); err == nil {
				return a, nil
			}
			if refused++; refused == existingRounds {
				return nil, err
			}
		}
		j.Logger.Warn("asking the others of --initial-cluster again which member this is", zap.Error(err))
		if clock.Sleep(ctx, j.Clock, joinPause) != nil {
			return nil, err
		}
	}
}

// find looks a node up by its peer URLs, which no two members share.
func (t *peerTable) find(name string, own []string, instance uint64) (*answer, error) {
	urls := strings.Join(own, ",")
	for i := range t.nodes {
		n := &t.nodes[i]
		switch {
		case n.State == fsm.NodeRemoved || !sameURLs(n.PeerURLs, own):
		case n.State.Started():
			return nil, fmt.Errorf("member %s (%s) has the peer URLs %s, and has run before: start it with its own data directory, or remove it and add it anew", n.ID, n.Name, urls)
		case n.Instance != 0 && n.Instance != instance:
			return nil, otherDirectory(n)
		default:
			return &answer{cluster: t.cluster, self: n.ID, nodes: t.nodes}, nil
		}
	}
	return nil, fmt.Errorf("the cluster knows no member with the peer URLs %s: add it first (etcdctl member add %s --peer-urls=%s), or start it with --join", urls, name, urls)
}

// askOthers asks each of the others once, and returns the newest of their node tables: not all
// know yet of a member that was just added or removed. If nobody answers it returns nil, or an
// error that says more.
func (j *Joiner) askOthers(ctx context.Context) (newest *peerTable, err error) {
	var mu sync.Mutex // guards what is returned
	var mixed error
	var wg sync.WaitGroup
	for name, urls := range j.Config.InitialCluster {
		if name == j.Config.Name {
			continue
		}
		for i := range urls {
			addr := urls[i].Host
			wg.Go(func() {
				b, terr := j.PeerTable(ctx, addr)
				var t peerTable
				if terr == nil {
					t, terr = decodePeerTable(b)
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
