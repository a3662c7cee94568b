package join

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// Admitter admits nodes to the cluster, on a node that serves already. All its fields are
// required.
type Admitter struct {
	// Cluster and Self are those of this node.
	Cluster keyspace.ClusterID
	Self    keyspace.NodeID
	Clock   clock.Clock
	Table   NodeTable
}

// NodeTable is the node table of the placement group; *placement.Client implements it.
type NodeTable interface {
	// NodeTable returns all nodes, removed ones included. With linearizable a quorum answers.
	NodeTable(ctx context.Context, linearizable bool) ([]fsm.Node, error)
	// AddNode adds a node that has not started. kverror.NodeExists and kverror.PeerURLExists
	// say that its id or one of its peer URLs is taken.
	AddNode(ctx context.Context, n fsm.Node) error
}

// quorumTimeout bounds the wait for a quorum's answer. A joiner without an answer is to ask the
// next node.
const quorumTimeout = 3 * time.Second

// JoinNode implements adminapi.Joiner.
func (a *Admitter) JoinNode(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	urls, err := types.NewURLs(q.GetPeerUrls())
	if err != nil {
		return nil, &adminapi.Refusal{Reason: "peer URLs: " + err.Error(), NextStep: "give --initial-advertise-peer-urls"}
	}
	if q.GetInstance() == 0 {
		return nil, &adminapi.Refusal{Reason: "the node does not say which directory it has", NextStep: "start it with the release that the cluster runs"}
	}
	// Without a quorum the joiner is to ask the next node before its own timeout.
	ctx, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	table, err := a.Table.NodeTable(ctx, true)
	if err != nil {
		return nil, err
	}
	var self keyspace.NodeID
	if q.GetNode() != "" {
		self, err = a.memberAgain(q, table)
	} else {
		self, err = a.admit(ctx, fsm.Node{Name: q.GetName(), PeerURLs: urls.StringSlice(), Instance: q.GetInstance()}, table)
	}
	if err != nil {
		return nil, err
	}
	// The joiner is to find its own row, too.
	if table, err = a.Table.NodeTable(ctx, true); err != nil {
		return nil, err
	}
	return &adminpb.NodeJoinResponse{Cluster: a.Cluster.String(), Node: self.String(), NodeTable: placement.EncodeNodeTable(table)}, nil
}

// memberAgain answers a node that has an identity.
func (a *Admitter) memberAgain(q *adminpb.NodeJoinRequest, table []fsm.Node) (keyspace.NodeID, error) {
	if q.GetCluster() != a.Cluster.String() {
		return 0, &adminapi.Refusal{
			Reason:   fmt.Sprintf("the data directory belongs to cluster %s, and node %s to cluster %s", q.GetCluster(), a.Self, a.Cluster),
			NextStep: "give another --data-dir, or --join of a node of its cluster",
		}
	}
	id, err := parseID(q.GetNode())
	if err != nil {
		return 0, kverror.New(kverror.BadRequest, "%v", err)
	}
	for i := range table {
		n := &table[i]
		switch {
		case n.ID != keyspace.NodeID(id) || n.State == fsm.NodeRemoved:
		case n.OtherThan(q.GetInstance()):
			return 0, otherDirectory(n)
		default:
			return n.ID, nil
		}
	}
	return 0, &adminapi.Refusal{
		Reason:   fmt.Sprintf("the data directory is that of node %s, which was removed from cluster %s and is never admitted again", q.GetNode(), q.GetCluster()),
		NextStep: "empty the directory and let the node join anew",
		Removed:  true,
	}
}

// otherDirectory refuses who comes as a node that another directory is.
func otherDirectory(n *fsm.Node) error {
	return &adminapi.Refusal{
		Reason: fmt.Sprintf("another directory has been admitted as node %s: a machine with the same name and the same peer URLs has joined, or this one has lost its directory", n.ID),
		NextStep: fmt.Sprintf("give this node a --name and --initial-advertise-peer-urls of its own; where there is no other machine, have the node removed (skein node decommission %s once it has started, then etcdctl member remove %s) and let it join anew",
			n.ID, n.ID),
	}
}

// admit returns the id of the unstarted node with a name, peer URLs and a directory. It adds the
// node if there is none, so a node that asks again gets the same id. A row of etcd's MemberAdd
// has neither name nor directory yet. It belongs to the first node that comes.
func (a *Admitter) admit(ctx context.Context, asker fsm.Node, table []fsm.Node) (keyspace.NodeID, error) {
	if asker.Name == "" {
		return 0, &adminapi.Refusal{Reason: "the node has no name", NextStep: "give it one that no other node has (--name)"}
	}
	if id, err := rowFor(&asker, table); id != 0 || err != nil {
		return id, err
	}
	asker.ID = NodeID(asker.PeerURLs, a.Clock.Wall().Unix())
	err := a.Table.AddNode(ctx, asker)
	if !errors.Is(err, kverror.NodeExists) && !errors.Is(err, kverror.PeerURLExists) {
		return asker.ID, err
	}
	// Another one has come since the table was read.
	now, terr := a.Table.NodeTable(ctx, true)
	if terr != nil {
		return 0, terr
	}
	if id, terr := rowFor(&asker, now); id != 0 || terr != nil {
		return id, terr
	}
	return 0, &adminapi.Refusal{Reason: kverror.Of(err).Detail, NextStep: "another node joins just now: look with skein node list, and try again"}
}

// rowFor returns the id of the row that the asker may have, 0 where there is none for it, or
// why it is not admitted.
func rowFor(asker *fsm.Node, table []fsm.Node) (keyspace.NodeID, error) {
	name, urls := asker.Name, asker.PeerURLs
	for i := range table {
		n := &table[i]
		same := sameURLs(n.PeerURLs, urls)
		named := n.Name == name
		switch {
		case n.State == fsm.NodeRemoved:
		case same && !n.State.Started() && (named || n.Name == ""):
			if n.OtherThan(asker.Instance) {
				return 0, otherDirectory(n)
			}
			return n.ID, nil
		case same && named:
			return 0, &adminapi.Refusal{
				Reason: fmt.Sprintf("node %s (%s) has the name and the peer URLs %s, and has run before", name, n.ID, strings.Join(urls, ",")),
				NextStep: fmt.Sprintf("start it with its own data directory; where that is lost, have the node removed (skein node decommission %s, or etcdctl member remove %s) and let it join anew",
					n.ID, n.ID),
			}
		case named:
			return 0, &adminapi.Refusal{Reason: fmt.Sprintf("node %s is named %s already", n.ID, name), NextStep: "give another --name (skein node list shows those that are taken)"}
		case same || slices.ContainsFunc(urls, func(u string) bool { return slices.Contains(n.PeerURLs, u) }):
			return 0, &adminapi.Refusal{
				Reason:   fmt.Sprintf("node %s (%s) has one of the peer URLs %s", n.Name, n.ID, strings.Join(urls, ",")),
				NextStep: "give other --initial-advertise-peer-urls (skein node list shows those that are taken)",
			}
		}
	}
	return 0, nil
}

// NodeID derives the id of a node that is added to a cluster, as etcd does: from its peer URLs and
// the time in seconds. So a removed node comes back as another one.
func NodeID(peerURLs []string, unixSeconds int64) keyspace.NodeID {
	text := strings.Join(slices.Sorted(slices.Values(peerURLs)), "") + strconv.FormatInt(unixSeconds, 10)
	sum := sha1.Sum([]byte(text))
	return keyspace.NodeID(binary.BigEndian.Uint64(sum[:]))
}
