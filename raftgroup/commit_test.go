package raftgroup

import (
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// A learner has entries and makes no quorum: what it acknowledges last is not the quorum's last.
func TestALearnerIsNotTheQuorumsLast(t *testing.T) {
	g := &Group{isLeader: true, commit: 4}
	g.conf = configurationOf([]keyspace.Replica{
		{ID: 11, Node: 1, Role: keyspace.RoleVoter}, {ID: 12, Node: 2, Role: keyspace.RoleVoter}, {ID: 13, Node: 3, Role: keyspace.RoleLearner},
	}, 1)
	g.acknowledged(12, 2, 5)
	g.acknowledged(13, 3, 5)
	if g.commits.acked != 2 {
		t.Errorf("node %s acknowledged last", g.commits.acked)
	}
}
