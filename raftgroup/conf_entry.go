package raftgroup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// The change's context carries what raft's own fields cannot: a version, a number by
// which the proposer recognizes its change, the nodes of added replicas, and the caller's
// payload.
const confContextVersion = 1

// addedBytesMin is the minimum size of an added replica in that context.
const addedBytesMin = 2

var errConfEntry = errors.New("raftgroup: malformed configuration change")

// appliedConf is one applied configuration change.
type appliedConf struct {
	cc      *pb.ConfChangeV2
	number  uint64
	nodes   map[keyspace.ReplicaID]keyspace.NodeID
	payload []byte
	// after is the configuration behind the change, index the index of its entry.
	after []keyspace.Replica
	index uint64
}

// encodeConf builds raft's change from a validated list of changes.
func encodeConf(number uint64, changes []ConfChange, payload []byte) *pb.ConfChangeV2 {
	cc := &pb.ConfChangeV2{}
	ctx := append([]byte(nil), confContextVersion)
	ctx = binary.LittleEndian.AppendUint64(ctx, number)
	var nodes []byte
	added := 0
	for _, c := range changes {
		var t pb.ConfChangeType
		switch c.Type {
		case AddLearner, Demote:
			t = pb.ConfChangeAddLearnerNode
		case Promote:
			t = pb.ConfChangeAddNode
		case RemoveReplica:
			t = pb.ConfChangeRemoveNode
		}
		id := uint64(c.Replica)
		cc.Changes = append(cc.Changes, &pb.ConfChangeSingle{Type: t.Enum(), NodeId: &id})
		if c.Type == AddLearner {
			nodes = binary.AppendUvarint(nodes, id)
			nodes = binary.AppendUvarint(nodes, uint64(c.Node))
			added++
		}
	}
	explicitly(cc)
	ctx = binary.AppendUvarint(ctx, uint64(added))
	cc.Context = append(append(ctx, nodes...), payload...)
	return cc
}

// explicitly keeps raft from leaving a joint configuration by itself: raft would do so
// even under a leader that the change removes or demotes. See leaveJoint.
func explicitly(cc *pb.ConfChangeV2) {
	if len(cc.GetChanges()) > 1 {
		cc.Transition = pb.ConfChangeTransition_ConfChangeTransitionJointExplicit.Enum()
	}
}

// decodeConfEntry decodes an entry that changes the configuration. An entry without data
// leaves a joint configuration.
func decodeConfEntry(e *pb.Entry) (appliedConf, error) {
	c := appliedConf{cc: &pb.ConfChangeV2{}}
	if e.GetType() != pb.EntryConfChangeV2 {
		return c, fmt.Errorf("%w: type %s", errConfEntry, e.GetType())
	}
	if err := proto.Unmarshal(e.GetData(), c.cc); err != nil {
		return c, fmt.Errorf("%w: %w", errConfEntry, err)
	}
	if t := c.cc.GetTransition(); pb.ConfChangeTransition_name[int32(t)] == "" {
		return c, fmt.Errorf("%w: transition %d", errConfEntry, t) // raft would panic
	}
	if len(c.cc.GetContext()) == 0 {
		if !c.cc.LeaveJoint() {
			return c, fmt.Errorf("%w: no context", errConfEntry)
		}
		return c, nil
	}
	r := wire.NewReader(c.cc.GetContext())
	if err := keyspace.CheckVersion("configuration change", uint64(r.Byte()), confContextVersion); err != nil {
		return c, fmt.Errorf("%w: %w", errConfEntry, err)
	}
	c.number = r.Uint64LE()
	n := r.Count(addedBytesMin)
	c.nodes = make(map[keyspace.ReplicaID]keyspace.NodeID, n)
	for range n {
		id := keyspace.ReplicaID(r.Uvarint())
		c.nodes[id] = keyspace.NodeID(r.Uvarint())
	}
	if err := r.Err(); err != nil {
		return c, fmt.Errorf("%w: %w", errConfEntry, err)
	}
	if r.Len() > 0 {
		c.payload = r.Rest()
	}
	explicitly(c.cc) // builds of an older version proposed without it
	return c, nil
}

// apply returns the replicas behind the change. It depends on its inputs alone, so every
// replica computes the same. Raft computes its own view from the same change; applyConf
// compares the two.
func (c *appliedConf) apply(before []keyspace.Replica) []keyspace.Replica {
	after := make([]keyspace.Replica, 0, len(before)+len(c.cc.GetChanges()))
	if c.cc.LeaveJoint() {
		for _, r := range before {
			switch r.Role {
			case keyspace.RoleVoterOutgoing:
				continue
			case keyspace.RoleVoterIncoming:
				r.Role = keyspace.RoleVoter
			case keyspace.RoleVoterDemoting:
				r.Role = keyspace.RoleLearner
			default: // as it was
			}
			after = append(after, r)
		}
		return after
	}
	_, joint := c.cc.EnterJoint()
	after = append(after, before...)
	for _, s := range c.cc.GetChanges() {
		after = c.applyOne(after, s, joint)
	}
	return after
}

func (c *appliedConf) applyOne(rs []keyspace.Replica, s *pb.ConfChangeSingle, joint bool) []keyspace.Replica {
	id := keyspace.ReplicaID(s.GetNodeId())
	i := slices.IndexFunc(rs, func(r keyspace.Replica) bool { return r.ID == id })
	role := func(simple, inJoint keyspace.Role) {
		if rs[i].Role = simple; joint {
			rs[i].Role = inJoint
		}
	}
	switch s.GetType() {
	case pb.ConfChangeAddLearnerNode:
		if i < 0 {
			return append(rs, keyspace.Replica{ID: id, Node: c.nodes[id], Role: keyspace.RoleLearner})
		}
		if rs[i].Role == keyspace.RoleVoter {
			role(keyspace.RoleLearner, keyspace.RoleVoterDemoting)
		}
	case pb.ConfChangeAddNode:
		if i >= 0 && rs[i].Role == keyspace.RoleLearner {
			role(keyspace.RoleVoter, keyspace.RoleVoterIncoming)
		}
	case pb.ConfChangeRemoveNode:
		if i < 0 {
			return rs
		}
		if rs[i].Role == keyspace.RoleVoter && joint {
			rs[i].Role = keyspace.RoleVoterOutgoing
			return rs
		}
		return slices.Delete(rs, i, i+1)
	default: // nothing else is ever proposed
	}
	return rs
}
