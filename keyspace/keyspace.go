// Package keyspace holds the vocabulary of all other packages: the ids of clusters,
// nodes, ranges and replicas, keys, spans of keys, and revisions. It has no state, does
// no I/O and imports nothing of Skein.
package keyspace

import (
	"fmt"
	"strconv"
)

// ClusterID identifies a cluster. It is derived from the initial cluster and its token as
// in etcd, so that two clusters never talk to each other by mistake.
type ClusterID uint64

// String returns the id in lower-case hexadecimal, as etcd prints it.
func (id ClusterID) String() string { return strconv.FormatUint(uint64(id), 16) }

// NodeID identifies a node (etcd: a member). It is never 0 and never reused.
type NodeID uint64

// String returns the id in lower-case hexadecimal, as etcd prints it.
func (id NodeID) String() string { return strconv.FormatUint(uint64(id), 16) }

// BootID distinguishes two runs of one node. It is drawn at random at each start.
type BootID uint64

// String returns the id in lower-case hexadecimal.
func (id BootID) String() string { return strconv.FormatUint(uint64(id), 16) }

// GroupID identifies a raft group: that of a range, or a system group.
type GroupID uint64

// systemGroupBit is set in the ids of groups that are not ranges.
const systemGroupBit GroupID = 1 << 63

// PlacementGroup is the group with the range map, the node table and the
// sequencer's ceiling.
const PlacementGroup = systemGroupBit | 1

// IsSystem reports whether the group is a system group, which has its own worker and
// never sleeps.
func (id GroupID) IsSystem() bool { return id&systemGroupBit != 0 }

// Range returns the range whose group this is. It panics for a system group.
func (id GroupID) Range() RangeID {
	if id.IsSystem() {
		panic(fmt.Sprintf("keyspace: group %s is no range", id))
	}
	return RangeID(id)
}

// String returns the id in decimal, and the name of a system group.
func (id GroupID) String() string {
	if id == PlacementGroup {
		return "placement"
	}
	if id.IsSystem() {
		return "system-" + strconv.FormatUint(uint64(id&^systemGroupBit), 10)
	}
	return strconv.FormatUint(uint64(id), 10)
}

// RangeID identifies a range. It is never 0 and never reused.
type RangeID uint64

// Group returns the id of the range's raft group.
func (id RangeID) Group() GroupID { return GroupID(id) }

// String returns the id in decimal.
func (id RangeID) String() string { return strconv.FormatUint(uint64(id), 10) }

// ReplicaID identifies one replica of one group; it is that replica's raft id. A node
// that is removed from a group and added again gets a new one, so messages of the old
// replica are never taken for the new one's. It is never 0.
type ReplicaID uint64

// Generation counts the changes of a range's span. Requests carry it to be checked.
type Generation uint64

// Revision is etcd's revision over all ranges: 1 on the empty store, +1 for each
// transaction that changes something. Revisions stay below 2^53.
type Revision int64

// MaxRevision is the upper bound of all revisions: 2^53, the limit of exact integers in
// JSON consumers with floating-point numbers.
const MaxRevision Revision = 1 << 53

// LeaseID identifies an etcd lease; 0 is no lease.
type LeaseID int64

// LeaseIncarnation distinguishes successive leases with the same LeaseID. It is a counter
// of the placement group, never 0 and never reused.
type LeaseIncarnation uint64

// KeyCheck says as of which revision the keys of a lease were checked for a revoke, 0 for no check.
type KeyCheck struct {
	At Revision
	// Term is that of placement's leader who sends the revoke. A later leader may have taken the revoke back, so a range that
	// has heard of a later term refuses it.
	Term uint64
}

// LeaseRegistration answers the registration of a span with a lease. From then on the
// lease's record lists the span, and whoever revokes the lease visits it.
type LeaseRegistration struct {
	// Incarnation is that of the live lease.
	Incarnation LeaseIncarnation
}

// Role is a replica's role in its group.
type Role uint8

// The roles of a replica. In a joint configuration a voter may be incoming (in the new
// half only), outgoing (in the old half only) or demoting (a voter of the old half that
// becomes a learner).
const (
	RoleVoter Role = iota
	RoleLearner
	RoleVoterIncoming
	RoleVoterOutgoing
	RoleVoterDemoting
)

// Replica is one member of a group: its id, its node and its role.
type Replica struct {
	ID   ReplicaID
	Node NodeID
	Role Role
}

// Descriptor describes a range. The range's own applied copy is authoritative, all others
// are caches. The copy with the higher Generation is newer, and among equal ones the copy
// with the higher ConfIndex.
type Descriptor struct {
	Range      RangeID
	Generation Generation
	Span       Span
	// ConfIndex is the raft index of the entry that set Replicas.
	ConfIndex uint64
	Replicas  []Replica
}

// Newer reports whether d is a newer copy of the same range than o.
func (d *Descriptor) Newer(o *Descriptor) bool {
	if d.Generation != o.Generation {
		return d.Generation > o.Generation
	}
	return d.ConfIndex > o.ConfIndex
}

// HasQuorum reports whether the voters that are up are a majority, in both halves of a joint configuration.
func (d *Descriptor) HasQuorum(up func(Replica) bool) bool {
	old, now := 0, 0 // voters that are up less those that are not
	for _, r := range d.Replicas {
		weight := -1
		if up(r) {
			weight = 1
		}
		switch r.Role {
		case RoleVoter:
			old, now = old+weight, now+weight
		case RoleVoterIncoming:
			now += weight
		case RoleVoterOutgoing, RoleVoterDemoting:
			old += weight
		case RoleLearner:
		}
	}
	return old > 0 && now > 0
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
