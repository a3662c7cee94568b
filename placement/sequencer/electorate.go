package sequencer

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// electorate is who votes in a configuration. Of a joint one the first half is who votes
// afterwards and the second who did before, and each must agree; else there is no second.
type electorate [2][]keyspace.NodeID

func electorateOf(replicas []keyspace.Replica) electorate {
	var e electorate
	both := false
	for _, r := range replicas {
		switch r.Role {
		case keyspace.RoleVoter:
			e[0], e[1] = append(e[0], r.Node), append(e[1], r.Node)
		case keyspace.RoleVoterIncoming:
			e[0], both = append(e[0], r.Node), true
		case keyspace.RoleVoterOutgoing, keyspace.RoleVoterDemoting:
			e[1], both = append(e[1], r.Node), true
		case keyspace.RoleLearner:
		}
	}
	if !both {
		e[1] = nil
	}
	return e
}

// all returns everybody who votes, each once.
func (e electorate) all() []keyspace.NodeID {
	all := slices.Concat(e[0], e[1])
	slices.Sort(all)
	return slices.Compact(all)
}

// agree says whether the nodes are a quorum.
func (e electorate) agree(nodes []keyspace.NodeID) bool {
	for _, half := range e {
		n := 0
		for _, v := range half {
			if slices.Contains(nodes, v) {
				n++
			}
		}
		if len(half) > 0 && n <= len(half)/2 {
			return false
		}
	}
	return len(e[0]) > 0
}
