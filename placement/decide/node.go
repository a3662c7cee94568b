package decide

import (
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// NodeState is what the operator wants of a node.
type NodeState uint8

// The states of a node.
const (
	// Serving is the ordinary state.
	Serving NodeState = iota
	// Draining gives up its leaders and takes neither leaders nor replicas: it is about
	// to be stopped and to come back. Its replicas stay.
	Draining
	// Decommissioning gives up its replicas too: it is about to go for good.
	Decommissioning
)

var stateNames = [...]string{"serving", "draining", "decommissioning"}

// String returns the state in one word.
func (s NodeState) String() string { return stateNames[s] }

// Node is what is known of a node.
type Node struct {
	ID keyspace.NodeID
	// Zone is the attribute by whose value replicas are kept apart; where no node has
	// one, all are in one zone.
	Zone  string
	State NodeState
	// Leaves says that a decommissioning node is to be gone in any case. If every serving node
	// already has a replica of a range, the range goes on with one less.
	Leaves bool
	// Silent says that nothing was heard of the node since SilentSince.
	Silent      bool
	SilentSince clock.Time
	// Isolated says that the node is heard and hears fewer than half of the others, since
	// IsolatedSince. It gives up by itself what it leads, and keeps its replicas. It gets
	// neither leaders nor replicas, except for a range that has no other way to survive its
	// next loss. What it has stays.
	Isolated      bool
	IsolatedSince clock.Time
	// Capacity and Used are the bytes of its disk; a capacity of 0 is not known and
	// counts as that of an average disk of one TiB.
	Capacity, Used int64
	// Full says that it has no memory for another replica. What it has stays.
	Full bool
}

func (n *Node) describe(known bool) string {
	switch {
	case !known:
		return "not known"
	case n.Silent:
		return "silent and " + n.State.String()
	case n.Isolated:
		return "isolated and " + n.State.String()
	}
	return n.State.String()
}

// Takes says whether the node may be given replicas and leaders.
func (n *Node) Takes() bool { return !n.Silent && !n.Isolated && n.State == Serving }
