package raftgroup

import (
	"go.etcd.io/raft/v3/quorum"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// configuration is the group's membership in all the forms that are needed.
type configuration struct {
	replicas []keyspace.Replica
	index    uint64
	voters   quorum.JointConfig
	joint    bool
}

// configurationOf derives all forms from the list of replicas. The list alone says
// whether the configuration is joint: ChangeConf refuses joint changes that leave the
// voters as they are.
func configurationOf(replicas []keyspace.Replica, index uint64) configuration {
	c := configuration{replicas: replicas, index: index}
	in, out := quorum.MajorityConfig{}, quorum.MajorityConfig{}
	for _, r := range replicas {
		switch r.Role {
		case keyspace.RoleVoter:
			in[uint64(r.ID)], out[uint64(r.ID)] = struct{}{}, struct{}{}
		case keyspace.RoleVoterIncoming:
			in[uint64(r.ID)], c.joint = struct{}{}, true
		case keyspace.RoleVoterOutgoing, keyspace.RoleVoterDemoting:
			out[uint64(r.ID)], c.joint = struct{}{}, true
		default: // a learner decides nothing
		}
	}
	if c.voters[0] = in; c.joint {
		c.voters[1] = out
	}
	return c
}

// soleVoter reports whether the replica is the only voter.
func (c *configuration) soleVoter(id keyspace.ReplicaID) bool {
	_, in := c.voters[0][uint64(id)]
	return in && len(c.voters[0]) == 1 && !c.joint
}

func (c *configuration) votes(id keyspace.ReplicaID) bool {
	_, in := c.voters[0][uint64(id)]
	_, out := c.voters[1][uint64(id)]
	return in || out
}

func (c *configuration) find(id keyspace.ReplicaID) (keyspace.Replica, bool) {
	for _, r := range c.replicas {
		if r.ID == id {
			return r, true
		}
	}
	return keyspace.Replica{}, false
}

// confStateOf returns raft's form of a configuration.
func confStateOf(replicas []keyspace.Replica) *pb.ConfState {
	cs, joint := &pb.ConfState{}, configurationOf(replicas, 0).joint
	for _, r := range replicas {
		id := uint64(r.ID)
		switch r.Role {
		case keyspace.RoleVoter:
			cs.Voters = append(cs.Voters, id)
			if joint {
				cs.VotersOutgoing = append(cs.VotersOutgoing, id)
			}
		case keyspace.RoleVoterIncoming:
			cs.Voters = append(cs.Voters, id)
		case keyspace.RoleVoterOutgoing:
			cs.VotersOutgoing = append(cs.VotersOutgoing, id)
		case keyspace.RoleVoterDemoting:
			cs.VotersOutgoing = append(cs.VotersOutgoing, id)
			cs.LearnersNext = append(cs.LearnersNext, id)
		case keyspace.RoleLearner:
			cs.Learners = append(cs.Learners, id)
		}
	}
	return cs
}

// snapshotAt returns raft's form of a snapshot's position.
func snapshotAt(index, term uint64, replicas []keyspace.Replica) *pb.Snapshot {
	return &pb.Snapshot{Metadata: &pb.SnapshotMetadata{
		Index: &index, Term: &term, ConfState: confStateOf(replicas),
	}}
}

func ptr[T any](v T) *T { return &v }

func boolInt(b bool) int { return int(wire.Flag(b, 1)) }
