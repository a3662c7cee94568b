package sequencer

import (
	"github.com/skeindb/skein/keyspace"
)

// StopPhase is how far a stopping node has come.
type StopPhase byte

const (
	// Staying says that the node was not told to stop.
	Staying StopPhase = 0
	// StopClosing says that the node got its signal and closes the pipelines of its ranges.
	StopClosing StopPhase = 1
	// StopClosed says that they are closed: the node will ask for no more revisions.
	StopClosed StopPhase = 2
	// StopLeaving says that the node has waited as long as it may. It leaves next, whoever
	// stays. To itself and to others it is StopClosed.
	StopLeaving StopPhase = 3
)

// Verdict is what a stopping node is told.
type Verdict byte

const (
	// StopWait tells the node to go on voting and storing, and to ask again.
	StopWait Verdict = 0
	// StopGo tells the node that the others carry on without it.
	StopGo Verdict = 1
	// StopSealed tells the node that the ceiling is committed at the last revision: all is done.
	StopSealed Verdict = 2
)

// stops is what the sequencer knows of stopping nodes. It may know too little: a
// new leader begins with nothing.
type stops struct {
	nodes map[keyspace.NodeID]Standing
}

// Standing is what a node says of itself.
type Standing struct {
	Boot  keyspace.BootID
	Phase StopPhase
}

func newStops() *stops { return &stops{nodes: map[keyspace.NodeID]Standing{}} }

// note takes over what a stopping node says of itself, and says whether that is
// news. A phase never goes back within one process.
func (s *stops) note(node keyspace.NodeID, is Standing) (news bool) {
	is.Phase = min(is.Phase, StopClosed)
	if old := s.nodes[node]; old.Boot == is.Boot && old.Phase >= is.Phase {
		return false
	}
	s.nodes[node] = is
	return true
}

// started forgets what an earlier process of the node said.
func (s *stops) started(from Process) {
	if s.nodes[from.Node].Boot != from.Boot {
		delete(s.nodes, from.Node)
	}
}

// mayStay returns the voters that live and are not known to stop, ascending. Only they
// themselves know whether they do.
func (s *stops) mayStay(live []keyspace.NodeID, voters electorate) []keyspace.NodeID {
	alive := map[keyspace.NodeID]bool{}
	for _, n := range live {
		alive[n] = true
	}
	var may []keyspace.NodeID
	for _, v := range voters.all() {
		if _, stops := s.nodes[v]; alive[v] && !stops {
			may = append(may, v)
		}
	}
	return may
}

// decide says what the stopping nodes may do. live are all nodes that live, voters
// the placement group's; stay are those that were asked, after the node that wants
// to go had begun to stop, and do not stop themselves.
//
// A node may go at once where those that stay hold a quorum of the placement group:
// the cluster carries on. Otherwise it waits until all that live have closed their
// pipelines, since the ceiling can be lowered only then, and only with a quorum.
// Dead nodes are waited for by nobody.
//
// Of all nodes that were ever told to go, by whichever leader, take the one that
// began to stop last: when the others were asked for its sake all the rest were
// stopping already, so that none of them is in the quorum that stayed. So there is
// at any time a quorum of nodes none of which was told to go.
func (s *stops) decide(live []keyspace.NodeID, voters electorate, stay []keyspace.NodeID) Verdict {
	closed := true
	for _, n := range live {
		closed = closed && s.nodes[n].Phase == StopClosed
	}
	switch {
	case voters.agree(s.mayStay(stay, voters)):
		return StopGo
	case closed:
		return StopSealed
	}
	return StopWait
}

// successor returns the voter with the lowest id of those that stay, also in the group;
// 0 if there is none.
func (s *stops) successor(voters electorate, stay []keyspace.NodeID) keyspace.NodeID {
	var best keyspace.NodeID
	for _, v := range s.mayStay(stay, electorate{voters[0]}) {
		if best == 0 || v < best {
			best = v
		}
	}
	return best
}
