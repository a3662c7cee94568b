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

// Decline is why a node is given no replicas.
type Decline uint8

// What keeps replicas from a node.
const (
	Accepts Decline = iota
	DeclinesSilent
	DeclinesIsolated
	DeclinesDraining
	DeclinesDecommissioning
	// DeclinesDisk is a disk that is used above Settings.FullAt, DeclinesMemory is Node.Full.
	DeclinesDisk
	DeclinesMemory
)

var declineWords = [...]string{
	"takes replicas", "is silent", "hears hardly any other node", "is drained", "is decommissioned", "has too full a disk", "has no memory for more replicas",
}

// String returns the words behind the name of the node.
func (d Decline) String() string { return declineWords[d] }

// Declines says why the node is given no replicas, whatever their size. One that accepts may still lack the room for a large one.
func (n *Node) Declines(s *Settings) Decline {
	switch {
	case n.State == Decommissioning:
		return DeclinesDecommissioning
	case n.State == Draining:
		return DeclinesDraining
	case n.Silent:
		return DeclinesSilent
	case n.Isolated:
		return DeclinesIsolated
	case n.Capacity > 0 && float64(n.Used) > s.FullAt*float64(n.Capacity):
		return DeclinesDisk
	case n.Full:
		return DeclinesMemory
	}
	return Accepts
}
