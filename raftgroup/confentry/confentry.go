// Package confentry has the entries of a group's log that change its members: their bytes, and what
// they make of a list of replicas. It is pure. Package raftgroup proposes and applies them; package
// raftgroup/offline reads and writes those of a node that does not run.
package confentry

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

// Version leads the context of a change (docs/format/raftgroup.md). The context carries what raft's own fields
// cannot: a number by which the proposer recognizes its change, the nodes of added replicas, and the caller's
// payload.
const Version = 1

// Type says what a Change does to one replica.
type Type uint8

// The kinds of changes. A replica is added as a learner first.
const (
	// AddLearner adds a replica that does not vote.
	AddLearner Type = iota + 1
	// Promote makes a learner a voter.
	Promote
	// Demote makes a voter a learner.
	Demote
	// RemoveReplica removes a replica of any role.
	RemoveReplica
)

// Change is one step of a change of the group's members.
type Change struct {
	Type    Type
	Replica keyspace.ReplicaID
	// Node is where the replica is; needed for AddLearner only.
	Node keyspace.NodeID
}

// addedBytesMin is the minimum size of an added replica in that context.
const addedBytesMin = 2

// ErrMalformed says that an entry is no change of the members.
var ErrMalformed = errors.New("raftgroup: malformed configuration change")

// Entry is one configuration change as the log has it.
type Entry struct {
	// CC is raft's form of the change. Number is the proposer's.
	CC     *pb.ConfChangeV2
	Number uint64
	// Payload is the caller's.
	Payload []byte
	nodes   map[keyspace.ReplicaID]keyspace.NodeID
}

// Encode builds raft's change from a validated list of changes.
func Encode(number uint64, changes []Change, payload []byte) *pb.ConfChangeV2 {
	cc := &pb.ConfChangeV2{}
	ctx := append([]byte(nil), Version)
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

// Decode decodes an entry that changes the configuration. An entry without data
// leaves a joint configuration.
func Decode(e *pb.Entry) (Entry, error) {
	c := Entry{CC: &pb.ConfChangeV2{}}
	if e.GetType() != pb.EntryConfChangeV2 {
		return c, fmt.Errorf("%w: type %s", ErrMalformed, e.GetType())
	}
	if err := proto.Unmarshal(e.GetData(), c.CC); err != nil {
		return c, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if t := c.CC.GetTransition(); pb.ConfChangeTransition_name[int32(t)] == "" {
		return c, fmt.Errorf("%w: transition %d", ErrMalformed, t) // raft would panic
	}
	if len(c.CC.GetContext()) == 0 {
		if !c.CC.LeaveJoint() {
			return c, fmt.Errorf("%w: no context", ErrMalformed)
		}
		return c, nil
	}
	r := wire.NewReader(c.CC.GetContext())
	if err := keyspace.CheckVersion("configuration change", uint64(r.Byte()), Version); err != nil {
		return c, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	c.Number = r.Uint64LE()
	n := r.Count(addedBytesMin)
	c.nodes = make(map[keyspace.ReplicaID]keyspace.NodeID, n)
	for range n {
		id := keyspace.ReplicaID(r.Uvarint())
		c.nodes[id] = keyspace.NodeID(r.Uvarint())
	}
	if err := r.Err(); err != nil {
		return c, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if r.Len() > 0 {
		c.Payload = r.Rest()
	}
	explicitly(c.CC) // builds of an older version proposed without it
	return c, nil
}

// Apply returns the replicas behind the change. It depends on its inputs alone, so every
// replica computes the same. Raft computes its own view from the same change; applyConf
// compares the two.
func (c *Entry) Apply(before []keyspace.Replica) []keyspace.Replica {
	after := make([]keyspace.Replica, 0, len(before)+len(c.CC.GetChanges()))
	if c.CC.LeaveJoint() {
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
	_, joint := c.CC.EnterJoint()
	after = append(after, before...)
	for _, s := range c.CC.GetChanges() {
		after = c.applyOne(after, s, joint)
	}
	return after
}

func (c *Entry) applyOne(rs []keyspace.Replica, s *pb.ConfChangeSingle, joint bool) []keyspace.Replica {
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
