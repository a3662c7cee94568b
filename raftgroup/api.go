package raftgroup

import (
	"context"
	"errors"
	"io"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// InitIndex and InitTerm are the raft position at which every bootstrapped
// group begins: its first applied record stands for an entry at this place that
// no log ever holds. Both are above what raft itself starts at, so that a
// replica without state can never be taken for one with this state.
const (
	InitIndex uint64 = 10
	InitTerm  uint64 = 5
)

// Errors that callers tell apart. All but ErrUnknownFate mean that what was
// asked for certainly did not happen and will not.
var (
	// ErrNotLeader says that the group does not lead here, or not in that term, or that a
	// disk of this node stands still, which ends its leaderships.
	ErrNotLeader = errors.New("raftgroup: not the leader in this term")
	// ErrFull says that a byte or count bound is reached; try again later.
	ErrFull = errors.New("raftgroup: bound reached")
	// ErrDropped says that raft took in no proposal now (a transfer is under way).
	ErrDropped = errors.New("raftgroup: proposal dropped")
	// ErrClosed says that the group was closed or removed here.
	ErrClosed = errors.New("raftgroup: group closed")
	// ErrStopped says that the host is stopping.
	ErrStopped = errors.New("raftgroup: host stopped")
	// ErrNoLeader says that no leader answered within three election timeouts.
	ErrNoLeader = errors.New("raftgroup: no leader")
	// ErrExists says that a group of that id is open here, or is being opened, closed or
	// removed.
	ErrExists = errors.New("raftgroup: group is open")
	// ErrConfPending says that another configuration change is not applied yet, or
	// that the group is in a joint configuration.
	ErrConfPending = errors.New("raftgroup: configuration change pending")
	// ErrConfInvalid says that a configuration change makes no sense on top of the
	// present configuration.
	ErrConfInvalid = errors.New("raftgroup: invalid configuration change")
	// ErrRemovesLeader says that the change would remove or demote the leader, which
	// must be transferred away first.
	ErrRemovesLeader = errors.New("raftgroup: change removes or demotes the leader")
	// ErrNotCaughtUp says that the replica which was to become a voter or a leader
	// lags or was not heard from lately.
	ErrNotCaughtUp = errors.New("raftgroup: replica is not caught up")
	// ErrTooLarge says that a proposal is empty or above 16 MiB, or above what the wal takes.
	ErrTooLarge = errors.New("raftgroup: proposal of a forbidden size")
	// ErrTransferFailed says that the transfer of leadership did not happen in time.
	ErrTransferFailed = errors.New("raftgroup: transfer failed")
	// ErrUnknownFate says that leadership or patience ended while the change was
	// under way: it may still happen.
	ErrUnknownFate = errors.New("raftgroup: outcome unknown")
)

// Bus is what the host needs of the bus to reach its peers; *transport.QUIC and
// the simulator's bus are ones.
type Bus interface {
	// Send hands over one one-way message; the payload is the bus's after the call.
	// Messages with one (to, class of m, order) arrive in order or not at all.
	Send(to keyspace.NodeID, m transport.Method, order uint64, payload []byte) error
	// OpenStream opens a stream whose first message is first.
	OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error)
	// Peers are the other nodes of the cluster, as far as they are known.
	Peers() []keyspace.NodeID
}

// Registrar is what RegisterHandlers needs of the bus.
type Registrar interface {
	HandleSend(m transport.Method, class transport.Class, h transport.SendHandler)
	HandleStream(m transport.Method, class transport.Class, h transport.StreamHandler)
}

// Config is what a Host is made of. Zero values of the optional fields mean the
// default in the comment.
type Config struct {
	// Node is this node; Boot its present run. Both are required.
	Node keyspace.NodeID
	Boot keyspace.BootID
	// Clock, WAL, Engine and Bus are required.
	Clock  clock.Clock
	WAL    *wal.Log
	Engine *engine.Engine
	Bus    Bus

	// TickInterval is raft's tick and the heartbeat interval of awake groups.
	// Default 100 ms.
	TickInterval time.Duration
	// ElectionTimeout is after how much silence a follower campaigns, at the
	// earliest, and for how long a voter keeps the promise that it gives with the
	// answer to a heartbeat. At least five ticks. Default 1 s.
	ElectionTimeout time.Duration
	// NoLeaseReads turns leader leases off: Lease never holds and readers are left
	// with ReadIndex.
	NoLeaseReads bool
	// NoPreVote lets a candidate campaign without asking first whether it could win,
	// as etcd's --pre-vote=false does. A node that was cut off then deposes leaders
	// when it comes back, once their promises to each other have run out.
	NoPreVote bool
	// MaxClockDrift bounds how much faster one node's monotonic clock may run than
	// another's, as a fraction. Default 0.01. Leases are only as safe as this.
	MaxClockDrift float64
	// LivenessTimeout is after how much silence a node counts as dead. Default
	// ElectionTimeout.
	LivenessTimeout time.Duration
	// SleepAfter is after how much idleness a leader puts its group to sleep.
	// Default 10 ticks; negative turns sleep off.
	SleepAfter time.Duration
	// WakesPerSecond paces the wake-ups after the death or return of a node and
	// after a start, in groups per second. Default 2000.
	WakesPerSecond int

	// Workers is the number of workers for ranges; system groups have one more.
	// Default GOMAXPROCS. Appliers is the number of goroutines that apply. Default
	// GOMAXPROCS.
	Workers  int
	Appliers int

	// MaxGroupInflightBytes bounds the proposals of one group that are not applied
	// yet. Default 16 MiB. A proposal into an empty pipeline is never refused by it.
	MaxGroupInflightBytes int64
	// MaxProposalBytes bounds the same over all groups of the node. Default 256 MiB.
	MaxProposalBytes int64
	// MaxInboundBytes bounds received entries that no worker has taken in yet;
	// beyond it MsgApp is dropped (never votes or heartbeats). Default 128 MiB.
	MaxInboundBytes int64
	// MaxPeerInflightBytes bounds the entries on the way to one follower of one
	// group. Default 4 MiB.
	MaxPeerInflightBytes uint64
	// MaxLagBytes is how much log a leader keeps for a follower that lags; beyond it
	// the follower is cut off and gets a snapshot. Default 64 MiB per group.
	MaxLagBytes int64
	// MaxWALBytes bounds the live wal: beyond it the engine is flushed, then laggards
	// are cut off. Default 2 GiB. The wal's own TargetBytes, from which on it writes
	// small tails again, should not be above it.
	MaxWALBytes int64
	// MaxReads bounds the ReadIndex waiters of one group. Default 65536.
	MaxReads int
	// passReadBytes is passReadMax but in tests.
	passReadBytes int64
	// snapshotTableBytes is the engine's size of an exported table but in tests.
	snapshotTableBytes int64

	// SnapshotBytesPerSecond bounds what the node sends as snapshots, all together, and
	// likewise what it receives. Default 64 MiB.
	SnapshotBytesPerSecond int64
	// SnapshotSends and SnapshotReceives bound concurrent snapshots. A node
	// gets a send only while more are free than it has: at most half of all. Default 16 each: what a small one takes is mostly waiting, and what
	// they take together SnapshotBytesPerSecond bounds.
	SnapshotSends, SnapshotReceives int

	// Unknown, if set, is told of a message for a replica that is not open here, at
	// most once per group and election timeout. The newest vote and pre-vote of each
	// sender are kept and stepped when the replica opens. It must not block.
	Unknown func(from keyspace.NodeID, group keyspace.GroupID, to keyspace.ReplicaID)
	// Removed, if set, is told that a leader says this replica is not a member of
	// its group. It is a hint, at most once per replica and election timeout: ask
	// placement before the replica is removed. It must not block.
	Removed func(group keyspace.GroupID, self keyspace.ReplicaID)

	// Rand is where request numbers come from. Default crypto/rand.
	Rand    io.Reader
	Logger  *zap.Logger
	Metrics *Metrics
}

// Position is a place in a group's log.
type Position struct {
	Index, Term uint64
}

// Entry is one committed entry as the state machine sees it.
type Entry struct {
	Index, Term uint64
	// Data is what was proposed; empty for raft's own entries, which are delivered
	// all the same. It must not be changed, and copied if it is kept.
	Data []byte
	// Replicas is set for an entry that changed the configuration: the members from
	// this entry on. Data is then the payload given to ChangeConf.
	Replicas []keyspace.Replica
}

// LeaderState is what a state machine is told about its group's leader.
type LeaderState struct {
	Term uint64
	// Leader and LeaderNode are 0 while no leader is known.
	Leader     keyspace.ReplicaID
	LeaderNode keyspace.NodeID
	// IsLeader says that this replica leads in Term.
	IsLeader bool
	// Ready says that IsLeader and an entry of Term is applied here: all that earlier
	// leaders committed is applied too.
	Ready bool
}

// StateMachine is the replica that a group drives. The host calls its methods
// one at a time per group, from a pool: they must not wait for the network, the
// disk or another group.
type StateMachine interface {
	// Apply writes what the entries say into b, which entries of other groups share.
	// It must be a function of state and entries alone. An error is fatal.
	Apply(b *engine.Batch, ents []Entry) error
	// Applied says that the entries up to the position are committed to the engine:
	// visible, not yet durable. It is the place to publish and to answer.
	Applied(upTo Position)
	// LeaderChanged is called for each change, in order with Applied.
	LeaderChanged(LeaderState)
}

// Payloader is an optional interface of a StateMachine whose applied record
// carries a payload (a descriptor).
type Payloader interface {
	// Payload returns the payload as of the last applied entry. It is called after
	// each Apply.
	Payload() []byte
}

// Snapshotter is an optional interface of a StateMachine whose group can be
// sent and received as a snapshot. Without it the group sends and accepts none.
type Snapshotter interface {
	// SnapshotSpans returns the engine's spans that hold the group's state under the
	// applied record, on any node. It is called from any goroutine.
	SnapshotSpans(applied engine.Applied) []engine.KeySpan
	// AcceptSnapshot is asked before a received snapshot is given to raft. It reserves
	// the spans, or refuses if they overlap what another replica here holds.
	AcceptSnapshot(applied engine.Applied) error
	// SnapshotDone ends what AcceptSnapshot began. With err == nil the snapshot is
	// installed and durable and the state machine must load itself anew from it; it
	// is called in order with Applied then. Otherwise nothing has changed.
	SnapshotDone(applied engine.Applied, err error)
}

// LeaseIndexer is an optional interface of a Snapshotter that keeps keys in the engine's
// index of leases.
type LeaseIndexer interface {
	// LeaseSpans returns the spans of the index that belong to the group's state as snap
	// shows it, in order. It is called from any goroutine.
	LeaseSpans(snap engine.Reader, applied engine.Applied) ([]engine.KeySpan, error)
}

// ConfChangeType is what a ConfChange does to one replica.
type ConfChangeType uint8

// The kinds of changes. A replica is added as a learner first.
const (
	// AddLearner adds a replica that does not vote.
	AddLearner ConfChangeType = iota + 1
	// Promote makes a learner a voter.
	Promote
	// Demote makes a voter a learner.
	Demote
	// RemoveReplica removes a replica of any role.
	RemoveReplica
)

// ConfChange is one step of a change of the group's members.
type ConfChange struct {
	Type    ConfChangeType
	Replica keyspace.ReplicaID
	// Node is where the replica is; needed for AddLearner only.
	Node keyspace.NodeID
}

// Status is a group's state as its worker last published it. Its numbers need not
// be of one moment.
type Status struct {
	Group      keyspace.GroupID
	Replica    keyspace.ReplicaID
	Term       uint64
	Leader     keyspace.ReplicaID
	LeaderNode keyspace.NodeID
	IsLeader   bool
	Asleep     bool
	// Commit and Last are the commit index and the last index of the log, Applied
	// the last applied index here, DurableApplied the last one that is known to
	// survive a crash without the wal.
	Commit, Last, Applied, DurableApplied uint64
	Replicas                              []keyspace.Replica
	// InflightBytes are proposals of this replica that are not applied yet.
	InflightBytes int64
	// Receiving says that a snapshot is being received or installed.
	Receiving bool
}

// Progress is what a leader knows about one replica.
type Progress struct {
	Replica keyspace.Replica
	// Match is the highest index known to be durable there.
	Match uint64
	// Active says that it was heard from within the last one or two election timeouts.
	Active bool
	// Replicating says that it follows the log: no probing, no snapshot.
	Replicating bool
	// NodeAlive says that its node is live.
	NodeAlive bool
}
