package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// loadTable finds out whom the node speaks to at first: as the directory has it, or else
// as the configuration or a running node says. A node that has joined has its peers in the directory
// alone, and each learns there which of them have moved since.
func (c *Core) loadTable(ctx context.Context) error {
	nodes, ok, err := placement.StoredNodeTable(c.engine)
	switch {
	case err != nil:
		return err
	case ok:
	case len(c.o.Founders) > 0:
		nodes = slices.Clone(c.o.Founders)
		for i := range nodes {
			nodes[i].State = fsm.NodeServing // as the bootstrap has it
		}
	case c.o.Anew != nil:
		m, err := c.o.Anew(ctx)
		if err != nil {
			return err
		}
		c.o.Founders, c.o.Peers, c.o.Anew = m.Founders, m.Peers, nil
		return c.loadTable(ctx)
	case c.o.Peers == nil:
		return fmt.Errorf("node %s is no founder of cluster %s, and %s does not say who its other nodes are: start it with --join of a running one",
			c.o.Self, c.o.Cluster, c.o.DataDir)
	default:
		if nodes, err = c.o.Peers(ctx); err != nil {
			return err
		}
	}
	c.nodes = nodes
	return c.refuseName()
}

// knowsOfRemoval reports whether the node has learnt, at its last run, that it was removed.
func (c *Core) knowsOfRemoval() bool {
	return slices.ContainsFunc(c.nodes, func(n fsm.Node) bool { return n.ID == c.o.Self && n.State == fsm.NodeRemoved })
}

// refuseName refuses the directory of a node that has another name. Whoever mistook the directory would
// have two nodes of one name, and commands that name either would be refused.
func (c *Core) refuseName() error {
	i := slices.IndexFunc(c.nodes, func(n fsm.Node) bool { return n.ID == c.o.Self })
	if c.o.Name == "" || i < 0 || c.nodes[i].Name == "" || c.nodes[i].Name == c.o.Name {
		return nil
	}
	own := c.nodes[i].Name
	return fmt.Errorf("%s is the data directory of node %s, and this node is named %s: start it with --name %s and the other flags of %s, or give the data directory of %s",
		c.o.DataDir, own, c.o.Name, own, own, c.o.Name)
}

// keepTable stores the node table, and has it known to the bus. It is durable with what is
// flushed next: an old one does as long as one of its nodes is where it was.
func (c *Core) keepTable(nodes []fsm.Node) error {
	b := c.engine.NewBatch()
	err := placement.StoreNodeTable(b, nodes)
	if err == nil {
		err = b.Commit()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("keep the node table: %w", err), b.Close())
	}
	return nil
}

// setPeer tells the bus where a node is. One that was removed is nowhere: it may come
// itself and be told so.
func (c *Core) setPeer(n *fsm.Node) {
	var addrs []string
	for _, text := range n.PeerURLs {
		if u, err := url.Parse(text); err == nil {
			addrs = append(addrs, u.Host)
		}
	}
	c.bus.SetPeer(n.ID, addrs)
}

// nodeNames has the names of the node table, for the log, and for the bus, which compares them with the
// roles of peers' certificates. It is set before the bus hears of the nodes.
type nodeNames struct {
	mu    sync.Mutex
	nodes map[keyspace.NodeID]nodeName // guarded by mu
	// texts puts names into texts; guarded by mu, nil before set.
	texts *strings.Replacer
}

type nodeName struct {
	name    string
	removed bool
}

func (n *nodeNames) set(nodes []fsm.Node) {
	m := make(map[keyspace.NodeID]nodeName, len(nodes))
	for i := range nodes {
		m[nodes[i].ID] = nodeName{nodes[i].Name, nodes[i].State == fsm.NodeRemoved}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.nodes, n.texts = m, replacer(m)
}

// fit says whether the node bears the name. A member that was added without a name gets it when it
// announces itself; until then it may have any that no other node has. A removed node may still come,
// to be told so, and does not keep its name from others.
func (n *nodeNames) fit(id keyspace.NodeID, name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	own, ok := n.nodes[id]
	if !ok || own.name != "" {
		return ok && own.name == name
	}
	for _, other := range n.nodes {
		if other.name == name && !other.removed {
			return false
		}
	}
	return true
}

// of returns name and id of a node, or the id alone where nobody knows a name.
func (n *nodeNames) of(id keyspace.NodeID) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if name := n.nodes[id].name; name != "" {
		return name + " (" + id.String() + ")"
	}
	return id.String()
}

// longID is how many digits an id has at least that is looked for in texts. A shorter one may be any number; those that nodes
// choose have sixteen, or hardly fewer.
const longID = 8

// inText puts names before the ids in a text.
func (n *nodeNames) inText(text string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.texts == nil {
		return text
	}
	return n.texts.Replace(text)
}

// replacer puts names before long ids.
func replacer(nodes map[keyspace.NodeID]nodeName) *strings.Replacer {
	ids := make([]keyspace.NodeID, 0, len(nodes))
	for id, node := range nodes {
		if node.name != "" && len(id.String()) >= longID {
			ids = append(ids, id)
		}
	}
	// The first pair that fits counts: longer ids come first.
	slices.SortFunc(ids, func(a, b keyspace.NodeID) int {
		return cmp.Or(len(b.String())-len(a.String()), cmp.Compare(a, b))
	})
	var pairs []string
	for _, id := range ids {
		pairs = append(pairs, id.String(), nodes[id].name+" ("+id.String()+")")
	}
	return strings.NewReplacer(pairs...)
}

// setMembers tells the raft groups which nodes are the cluster's.
func (c *Core) setMembers(nodes []fsm.Node) {
	var ids []keyspace.NodeID
	for i := range nodes {
		if nodes[i].State.Started() {
			ids = append(ids, nodes[i].ID)
		}
	}
	c.host.SetMembers(ids)
}

// others are the nodes that this one knew at its start, without itself and those that were
// removed.
func (c *Core) others() []keyspace.NodeID { return c.othersOf(c.nodes) }

func (c *Core) othersOf(nodes []fsm.Node) []keyspace.NodeID {
	var ids []keyspace.NodeID
	for i := range nodes {
		if n := &nodes[i]; n.ID != c.o.Self && n.State != fsm.NodeRemoved {
			ids = append(ids, n.ID)
		}
	}
	return ids
}

// nodesOf are the nodes by the map. Without one, which is until the node has heard of the cluster, these are those that it knew at its
// start, and itself.
func (c *Core) nodesOf(known *fsm.Map) []fsm.Node {
	if known != nil {
		return known.NodeTable()
	}
	nodes := slices.Clone(c.nodes)
	own := func(n fsm.Node) bool { return n.ID == c.o.Self }
	if i := slices.IndexFunc(nodes, own); i < 0 || !nodes[i].State.Started() {
		nodes = append(slices.DeleteFunc(nodes, own), fsm.Node{ID: c.o.Self, Name: c.o.Name, State: fsm.NodeServing})
	}
	return nodes
}
