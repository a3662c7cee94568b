// Package keyspace holds the words that every other package speaks: the ids of
// clusters, nodes, ranges and replicas, keys, spans of keys, and revisions.
//
// It has no state, does no I/O and imports nothing of Skein.
package keyspace

import (
	"fmt"
	"strconv"
)

// ClusterID names a cluster. It is derived from the initial cluster and its
// token as etcd derives it, so that two clusters never talk to each other by
// mistake.
type ClusterID uint64

// String returns the id in lower-case hexadecimal, as etcd prints it.
func (id ClusterID) String() string { return strconv.FormatUint(uint64(id), 16) }

// NodeID names a node (etcd: a member). It is never 0 and never reused.
type NodeID uint64

// String returns the id in lower-case hexadecimal, as etcd prints it.
func (id NodeID) String() string { return strconv.FormatUint(uint64(id), 16) }

// BootID distinguishes two runs of one node. It is drawn at random at each start.
type BootID uint64

// String returns the id in lower-case hexadecimal.
func (id BootID) String() string { return strconv.FormatUint(uint64(id), 16) }

// GroupID names a raft group: the group of a range, or a system group.
type GroupID uint64

// systemGroupBit is set in the ids of the groups that are not ranges.
const systemGroupBit GroupID = 1 << 63

// PlacementGroup is the group with the range map, the node table and the
// sequencer's ceiling.
const PlacementGroup = systemGroupBit | 1

// IsSystem says whether the group is a system group, which has a worker of its
// own and never sleeps.
func (id GroupID) IsSystem() bool { return id&systemGroupBit != 0 }

// Range returns the range whose group this is. It panics for a system group.
func (id GroupID) Range() RangeID {
	if id.IsSystem() {
		panic(fmt.Sprintf("keyspace: group %s is no range", id))
	}
	return RangeID(id)
}

// String returns the id in decimal, and system groups by name.
func (id GroupID) String() string {
	if id == PlacementGroup {
		return "placement"
	}
	if id.IsSystem() {
		return "system-" + strconv.FormatUint(uint64(id&^systemGroupBit), 10)
	}
	return strconv.FormatUint(uint64(id), 10)
}

// RangeID names a range. It is never 0 and never reused.
type RangeID uint64

// Group returns the id of the range's raft group.
func (id RangeID) Group() GroupID { return GroupID(id) }

// String returns the id in decimal.
func (id RangeID) String() string { return strconv.FormatUint(uint64(id), 10) }

// ReplicaID names one replica of one group; it is the raft id of that replica.
// A node that is removed from a group and added again gets a new one, so that
// nothing which the old replica said can be taken for a word of the new one.
// It is never 0.
type ReplicaID uint64

// Generation counts the changes of a range's span. Requests are checked by it.
type Generation uint64

// Revision is etcd's revision: 1 on the empty store, +1 for each transaction
// that changes something, over all ranges. Revisions stay below 2^53.
type Revision int64

// MaxRevision is the upper bound of all revisions: the largest integer that
// JSON consumers with floating-point numbers hold exactly, plus one.
const MaxRevision Revision = 1 << 53

// LeaseID names an etcd lease; 0 is no lease.
type LeaseID int64

// LeaseIncarnation tells apart the leases that have had one LeaseID one after the
// other: a counter of the placement group, never 0 and never used twice.
type LeaseIncarnation uint64

// LeaseRegistration is the answer to registering a span with a lease: from now on the
// lease's record lists the span, and whoever revokes the lease visits it.
type LeaseRegistration struct {
	// Incarnation is that of the living lease.
	Incarnation LeaseIncarnation
}

// Role says what a replica may do in its group.
type Role uint8

// The roles of a replica. In a joint configuration a voter may be incoming (only
// in the new half), outgoing (only in the old one) or demoting (a voter in the
// old half that will be a learner).
const (
	RoleVoter Role = iota
	RoleLearner
	RoleVoterIncoming
	RoleVoterOutgoing
	RoleVoterDemoting
)

// Replica is one member of a group: which replica, on which node, in which role.
type Replica struct {
	ID   ReplicaID
	Node NodeID
	Role Role
}

// Descriptor describes a range. The range's own applied copy is the truth, all
// others are caches; of two copies the one with the higher Generation is newer,
// and of two with one Generation the one with the higher ConfIndex.
type Descriptor struct {
	Range      RangeID
	Generation Generation
	Span       Span
	// ConfIndex is the raft index of the entry that made Replicas what they are.
	ConfIndex uint64
	Replicas  []Replica
}

// Newer says whether d is a newer copy than o of the same range.
func (d *Descriptor) Newer(o *Descriptor) bool {
	if d.Generation != o.Generation {
		return d.Generation > o.Generation
	}
	return d.ConfIndex > o.ConfIndex
}

// ReplicaOn returns the replica on the node, if there is one.
func (d *Descriptor) ReplicaOn(n NodeID) (Replica, bool) {
	for _, r := range d.Replicas {
		if r.Node == n {
			return r, true
		}
	}
	return Replica{}, false
}
