package raftgroup

import "github.com/skeindb/skein/keyspace"

// route is the node of a replica that the configuration does not name yet.
type route struct {
	id   keyspace.ReplicaID
	node keyspace.NodeID
}

// checkSender checks that the sender is on the node where its replica is known to be. It remembers a sender that the
// configuration does not name yet: a new replica learns the configuration only from the leader that contacts it.
func (g *Group) checkSender(m *message) bool {
	if r, ok := g.conf.find(m.from); ok {
		return r.Node == m.node
	}
	for i := range g.learned {
		if g.learned[i].id == m.from {
			return g.learned[i].node == m.node
		}
	}
	if len(g.learned) == learnedRoutesMax {
		g.learned = append(g.learned[:0], g.learned[1:]...)
	}
	g.learned = append(g.learned, route{m.from, m.node})
	return true
}

// nodeOf returns the node of a replica, 0 if it is unknown.
func (g *Group) nodeOf(id keyspace.ReplicaID) keyspace.NodeID {
	if r, ok := g.conf.find(id); ok {
		return r.Node
	}
	for _, r := range g.learned {
		if r.id == id {
			return r.node
		}
	}
	return 0
}

// sendHost sends a message of the host's own kinds.
func (g *Group) sendHost(m *message) {
	if node := g.nodeOf(m.to); node != 0 && node != g.h.cfg.Node {
		g.w.out.host(node, m)
	}
}
