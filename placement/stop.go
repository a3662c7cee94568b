package placement

import (
	"github.com/skeindb/skein/keyspace"
)

// stopPhase is how far a stopping node has come.
type stopPhase byte

const (
	// stopClosing: the node got its signal and closes the pipelines of its ranges.
	stopClosing stopPhase = 1
	// stopClosed: they are closed; the node will ask for no more revisions.
	stopClosed stopPhase = 2
)

// verdict is what a stopping node is told.
type verdict byte

const (
	// stopWait: go on voting and storing; ask again.
	stopWait verdict = 0
	// stopGo: the others carry on without you.
	stopGo verdict = 1
	// stopSealed: the ceiling is committed at the counter, all is done.
	stopSealed verdict = 2
)

// stops is what the sequencer knows of stopping nodes.
type stops struct {
	nodes map[keyspace.NodeID]stopping
}

type stopping struct {
	boot  keyspace.BootID
	phase stopPhase
}

func newStops() *stops { return &stops{nodes: map[keyspace.NodeID]stopping{}} }

// note takes over what a node says of itself. A phase never goes back within one
// process.
func (s *stops) note(from process, p stopPhase) {
	if old := s.nodes[from.Node]; old.boot != from.Boot || old.phase < p {
		s.nodes[from.Node] = stopping{boot: from.Boot, phase: p}
	}
}

// started forgets what an earlier process of the node said.
func (s *stops) started(from process) {
	if s.nodes[from.Node].boot != from.Boot {
		delete(s.nodes, from.Node)
	}
}

// decide says what the stopping nodes may do. live are all nodes that live, voters
// the placement group's.
//
// A node may go at once where the nodes that live and are not stopping hold a
// quorum of the placement group: the cluster carries on. Otherwise it stays until
// all that live have closed their pipelines, since the ceiling can be lowered only
// then, and only with a quorum. Dead nodes are waited for by nobody.
func (s *stops) decide(live, voters []keyspace.NodeID) verdict {
	serving := map[keyspace.NodeID]bool{}
	closed := true
	for _, n := range live {
		st, stops := s.nodes[n]
		serving[n] = !stops
		closed = closed && st.phase == stopClosed
	}
	staying := 0
	for _, v := range voters {
		if serving[v] {
			staying++
		}
	}
	switch {
	case staying > len(voters)/2:
		return stopGo
	case closed:
		return stopSealed
	}
	return stopWait
}

// successor returns a voter that lives and is not stopping, the one with the
// lowest id; 0 if there is none.
func (s *stops) successor(live, voters []keyspace.NodeID) keyspace.NodeID {
	alive := map[keyspace.NodeID]bool{}
	for _, n := range live {
		alive[n] = true
	}
	var best keyspace.NodeID
	for _, v := range voters {
		if _, stops := s.nodes[v]; alive[v] && !stops && (best == 0 || v < best) {
			best = v
		}
	}
	return best
}
