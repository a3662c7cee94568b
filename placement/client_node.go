package placement

import (
	"context"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// Members returns the node table, ascending by id, without the nodes that were removed. If
// linearizable is false, it is this node's copy, which may be old.
func (c *Client) Members(ctx context.Context, linearizable bool) ([]fsm.Node, error) {
	ns, err := c.NodeTable(ctx, linearizable)
	return slices.DeleteFunc(ns, func(n fsm.Node) bool { return n.State == fsm.NodeRemoved }), err
}

// NodeTable is Members with the nodes that were removed.
func (c *Client) NodeTable(ctx context.Context, linearizable bool) ([]fsm.Node, error) {
	if m := c.maps.load(); !linearizable && m != nil {
		return m.NodeTable(), nil
	}
	a, err := c.ask(ctx, &request{Kind: requestMembers, Linearizable: linearizable}, true)
	return a.Nodes, err
}

// Publish writes this node's row of the node table: its name, URLs and attributes as it
// was started with. A node that was unstarted serves from then on; every other one keeps
// its state. It is repeated until the placement leader has it or ctx ends. NodeRemoved
// says that the node is to stop: it is none of the cluster any more, and NodeExists that
// another directory is this node's.
func (c *Client) Publish(ctx context.Context, n fsm.Node) error {
	n.ID = c.o.Self
	if err := c.putNode(ctx, fsm.NodePublishes, n); err != nil {
		return fmt.Errorf("publish node %s: %w", n.ID, err)
	}
	return nil
}

// AddNode makes an unstarted row for a node that is to join: its id and peer URLs, and what
// else is known of it. NodeExists and PeerURLExists: another node has these. NodeRemoved: the
// id belongs to a node that is gone for good.
func (c *Client) AddNode(ctx context.Context, n fsm.Node) error {
	return c.putNode(ctx, fsm.NodeIsAdded, n)
}

// ClaimNode notes that a node is that of the directory with an instance. It may be repeated.
// NodeExists says that it is another one's.
func (c *Client) ClaimNode(ctx context.Context, node keyspace.NodeID, instance uint64) error {
	return c.putNode(ctx, fsm.NodeIsClaimed, fsm.Node{ID: node, Instance: instance})
}

// SetPeerURLs changes where a node's bus is. NodeNotFound and PeerURLExists refuse it.
func (c *Client) SetPeerURLs(ctx context.Context, node keyspace.NodeID, urls []string) error {
	return c.putNode(ctx, fsm.NodeHasMoved, fsm.Node{ID: node, PeerURLs: urls})
}

func (c *Client) putNode(ctx context.Context, change fsm.NodeChange, n fsm.Node) error {
	if err := n.Validate(); err != nil {
		return kverror.New(kverror.BadRequest, "%v", err)
	}
	_, err := c.ask(ctx, &request{Kind: requestPutNode, Change: change, Node: n}, true)
	return err
}

// SetNodeState has a node go from one state to another: from serving to draining and back,
// from either to decommissioned, and from that back to serving. It may be repeated: a node
// that is there already stays there. Beside are the other leaving nodes that the caller knows
// of, if this one is to leave too. BadRequest: the node is in another state, the transition
// does not exist, or more nodes are leaving by now.
func (c *Client) SetNodeState(ctx context.Context, node keyspace.NodeID, from, to fsm.NodeState, beside ...keyspace.NodeID) error {
	_, err := c.ask(ctx, &request{Kind: requestSetNodeState, To: node, From: from, Becomes: to, Beside: beside}, true)
	return err
}

// LeaveNode has a node be decommissioned, from the state that it is in, and removed once it
// holds nothing: the leader of placement sees to that, whoever asks again or not. It may be
// repeated, and a node that is decommissioned already leaves from then on too. Beside is as for
// SetNodeState.
func (c *Client) LeaveNode(ctx context.Context, node keyspace.NodeID, from fsm.NodeState, beside ...keyspace.NodeID) error {
	_, err := c.ask(ctx, &request{Kind: requestSetNodeState, To: node, From: from, Becomes: fsm.NodeDecommissioned, Leave: true, Beside: beside}, true)
	return err
}

// RemoveNode removes the row of a node that is decommissioned or was never started. The node
// must hold no replica of a range or of the placement group, and none may be on its way there.
// Its id is never admitted again. BadRequest says what it holds.
func (c *Client) RemoveNode(ctx context.Context, node keyspace.NodeID) error {
	_, err := c.ask(ctx, &request{Kind: requestRemoveNode, To: node}, true)
	return err
}

// RaiseVersion raises the cluster version. It may be repeated. BadRequest names the nodes that do
// not read it.
func (c *Client) RaiseVersion(ctx context.Context, to keyspace.Version) error {
	_, err := c.ask(ctx, &request{Kind: requestRaiseVersion, Version: to}, true)
	return err
}
