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
	"github.com/skeindb/skein/raftgroup/confentry"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// InitIndex and InitTerm are the raft position at which every bootstrapped group begins.
// The first applied record stands for an entry at this position that no log ever holds.
// Both lie above the values at which raft itself starts, so a replica without state is
// never mistaken for one with this state.
const (
	InitIndex uint64 = 10
	InitTerm  uint64 = 5
)

// Errors that callers tell apart. For all but ErrUnknownFate, the requested operation
// certainly did not happen and never will.
var (
	// ErrNoRecord says that the wal has a log whose applied record the engine has not.
	ErrNoRecord = errors.New("no applied record")
	// ErrNotLeader says that the group does not lead here, or not in that term, or that a
	// disk of this node is stalled, which ends its leaderships.
	ErrNotLeader = errors.New("raftgroup: not the leader in this term")
	// ErrFull says that a byte or count bound is reached; try again later.
	ErrFull = errors.New("raftgroup: bound reached")
	// ErrDropped says that raft does not accept proposals now because a transfer is under
	// way.
	ErrDropped = errors.New("raftgroup: proposal dropped")
	// ErrClosed says that the group was closed or removed here.
	ErrClosed = errors.New("raftgroup: group closed")
	// ErrStopped says that the host is stopping.
	ErrStopped = errors.New("raftgroup: host stopped")
	// ErrNoLeader says that no leader answered within three election timeouts.
	ErrNoLeader = errors.New("raftgroup: no leader")
	// ErrExists says that a group with that id is open here, or is being opened, closed
	// or removed.
	ErrExists = errors.New("raftgroup: group is open")
	// ErrConfPending says that an earlier configuration change is not applied yet, or
	// that the group is in a joint configuration.
	ErrConfPending = errors.New("raftgroup: configuration change pending")
	// ErrConfInvalid says that a configuration change makes no sense on top of the
	// current configuration.
	ErrConfInvalid = errors.New("raftgroup: invalid configuration change")
	// ErrRemovesLeader says that the change would remove or demote the leader. Transfer
	// the leadership first.
	ErrRemovesLeader = errors.New("raftgroup: change removes or demotes the leader")
	// ErrNotCaughtUp says that the replica to be promoted, or to become the leader, lags
	// or was not heard from lately.
	ErrNotCaughtUp = errors.New("raftgroup: replica is not caught up")
	// ErrTooLarge says that a proposal is empty, or larger than 16 MiB, or larger than
	// the wal accepts.
	ErrTooLarge = errors.New("raftgroup: proposal of a forbidden size")
	// ErrTransferFailed says that the transfer of leadership did not happen in time.
	ErrTransferFailed = errors.New("raftgroup: transfer failed")
	// ErrUnknownFate says that leadership or the context ended while the change was under
	// way: it may still happen.
	ErrUnknownFate = errors.New("raftgroup: outcome unknown")
)

// Bus is what the host needs of the bus to reach its peers. *transport.QUIC and the
// simulator's bus implement it.
type Bus interface {
	// Send hands over one one-way message. The bus owns the payload after the call.
	// Messages with the same (to, class of m, order) arrive in order or not at all.
	Send(to keyspace.NodeID, m transport.Method, order uint64, payload []byte) error
	// OpenStream opens a stream whose first message is first.
	OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error)
	// Peers returns the other nodes of the cluster, as far as they are known.
	Peers() []keyspace.NodeID
}

// Registrar is what RegisterHandlers needs of the bus.
type Registrar interface {
	HandleSend(m transport.Method, class transport.Class, h transport.SendHandler)
	HandleStream(m transport.Method, class transport.Class, h transport.StreamHandler)
}

// Config configures a Host. A zero value of an optional field means the default in its
// comment.
type Config struct {
	// Node is this node, Boot its current run. Both are required.
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
	// ElectionTimeout is the shortest silence after which a follower campaigns. It is
	// also how long a voter keeps the promise that it gives with each heartbeat response.
	// At least five ticks. Default 1 s.
	ElectionTimeout time.Duration
	// NoLeaseReads turns leader leases off: Lease never holds and readers have to use
	// ReadIndex.
	NoLeaseReads bool
	// NoPreVote lets a candidate campaign without first asking whether it could win, as
	// etcd's --pre-vote=false does. A node that was cut off then deposes leaders when it
	// returns, once their promises to each other have expired.
	NoPreVote bool
	// MaxClockDrift bounds how much faster one node's monotonic clock may run than
	// another's, as a fraction. Default DefaultClockDrift. Leases are only as safe as this.
	MaxClockDrift float64
	// Needed returns the node that leaders on this one have to hear in order to serve, 0 if
	// none is known. A host that does not hear it, while other nodes do, counts as isolated.
	// It must not block. It may be nil.
	Needed func() keyspace.NodeID
	// LivenessTimeout is the silence after which a node counts as dead. Default
	// ElectionTimeout.
	LivenessTimeout time.Duration
	// SlowApply is how long applying entries may take before it is counted and logged as slow. Default 100 ms, as
	// etcd's --warning-apply-duration.
	SlowApply time.Duration
	// SleepAfter is the idle time after which a leader puts its group to sleep. Default
	// 10 ticks; a negative value turns sleep off.
	SleepAfter time.Duration
	// AwakeFree is how many awake groups the host may have before idle ones fall asleep sooner. Default 64; a negative
	// value is none.
	AwakeFree int
	// WakesPerSecond paces the wake-ups after a start, and after the death or return of a
	// node, in groups per second. Default 2000.
	WakesPerSecond int

	// Workers is the number of workers for ranges; system groups have one more. Appliers
	// is the number of goroutines that apply. Both default to GOMAXPROCS.
	Workers  int
	Appliers int

	// MaxGroupInflightBytes bounds the proposals of one group that are not applied yet.
	// It never refuses a proposal when no other is in flight. Default 16 MiB.
	MaxGroupInflightBytes int64
	// MaxProposalBytes bounds the same over all groups of the node. Default 256 MiB.
	MaxProposalBytes int64
	// MaxInboundBytes bounds received entries that no worker has processed yet. Beyond it
	// the host drops MsgApp, but never votes or heartbeats. Default 128 MiB.
	MaxInboundBytes int64
	// MaxPeerInflightBytes bounds the entries in flight to one follower of one group.
	// Default 4 MiB.
	MaxPeerInflightBytes uint64
	// MaxLagBytes is how much log a leader keeps for a lagging follower. Beyond it the
	// follower is cut off and gets a snapshot. Default 64 MiB per group.
	MaxLagBytes int64
	// MaxWALBytes is the length of the live wal beyond which the host flushes the engine,
	// then cuts lagging followers off, then lets the wal move what remains. It should lie
	// between the wal's own TargetBytes, at which that starts to rewrite small tails, and
	// twice as much: the steps take seconds, and the log grows meanwhile. Default 1.5 GiB.
	MaxWALBytes int64
	// MaxReads bounds the ReadIndex waiters of one group. Default 65536.
	MaxReads int
	// passReadBytes overrides passReadMax in tests.
	passReadBytes int64
	// snapshotTableBytes overrides the engine's size of an exported table in tests.
	snapshotTableBytes int64

	// SnapshotBytesPerSecond bounds what the node sends as snapshots in total, and
	// separately what it receives. Default 64 MiB.
	SnapshotBytesPerSecond int64
	// SnapshotSends and SnapshotReceives bound concurrent snapshots. One peer gets
	// another send only while more sends are free than it has, so at most half of all.
	// Default 16 each: a small snapshot mostly waits, and SnapshotBytesPerSecond bounds
	// their total rate.
	SnapshotSends, SnapshotReceives int

	// Unknown, if set, is told of a message for a replica that is not open here, at most
	// once per group and election timeout. The host keeps the newest vote and pre-vote of
	// each sender and steps them when the replica opens. It must not block.
	Unknown func(from keyspace.NodeID, group keyspace.GroupID, to keyspace.ReplicaID)
	// Removed, if set, is told that a leader says this replica is not a member of its
	// group. This is only a hint, at most once per replica and election timeout: ask
	// placement before you remove the replica. It must not block.
	Removed func(group keyspace.GroupID, self keyspace.ReplicaID)
	// LeasesDropped is called when the clock may have stood still: whatever else counts time by it must begin anew. It
	// must not wait. It may be nil.
	LeasesDropped func()

	// Rand is the source of request numbers. Default crypto/rand.
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
	// Data is the proposed data. It is empty for raft's own entries, which are delivered
	// too. It must not be changed, and must be copied to be kept.
	Data []byte
	// Replicas is set for an entry that changed the configuration: the members from this
	// entry on. Data is then the payload that was given to ChangeConf.
	Replicas []keyspace.Replica
	// Refused is set by Apply for an entry that breaks a rule, whatever replica looks at it:
	// it does nothing. The host sets it for a change of the configuration that cannot be
	// decoded. Such an entry comes with neither data nor replicas.
	Refused error
}

// LeaderState tells a state machine about its group's leader.
type LeaderState struct {
	Term uint64
	// Leader and LeaderNode are 0 while no leader is known.
	Leader     keyspace.ReplicaID
	LeaderNode keyspace.NodeID
	// IsLeader says that this replica leads in Term.
	IsLeader bool
	// Ready says that IsLeader is set and an entry of Term is applied here, so everything
	// that earlier leaders committed is applied too.
	Ready bool
}

// StateMachine is the replica that a group drives. For each group the host calls one
// method at a time, from a pool of goroutines. The methods must not wait for the network,
// the disk or another group.
type StateMachine interface {
	// Apply writes the effect of the entries into b, which other groups share. It must
	// depend on state and entries alone. An entry that these alone refuse gets Refused and
	// has no effect. An error is one of this node, and fatal.
	Apply(b *engine.Batch, ents []Entry) error
	// Applied says that the entries up to the position are committed to the engine:
	// visible, not yet durable. Publish results and answer clients here.
	Applied(upTo Position)
	// LeaderChanged is called for each change, in order with Applied.
	LeaderChanged(LeaderState)
}

// Payloader is an optional interface of a StateMachine whose applied record carries a
// payload, such as a descriptor.
type Payloader interface {
	// Payload returns the payload as of the last applied entry. The host calls it after
	// each Apply.
	Payload() []byte
}

// Snapshotter is an optional interface of a StateMachine. A group whose state machine
// lacks it neither sends nor accepts snapshots.
type Snapshotter interface {
	// SnapshotSpans returns the engine spans that hold the group's state under the
	// applied record, on any node. It is called from any goroutine.
	SnapshotSpans(applied engine.Applied) []engine.KeySpan
	// AcceptSnapshot is called before a received snapshot is given to raft. It reserves
	// the spans, or refuses if they overlap the spans of another replica here.
	AcceptSnapshot(applied engine.Applied) error
	// SnapshotDone ends what AcceptSnapshot began. If err is nil, the snapshot is
	// installed and durable, and the state machine must reload itself from it; the call
	// is then in order with Applied. Otherwise nothing has changed.
	SnapshotDone(applied engine.Applied, err error)
}

// LeaseIndexer is an optional interface of a Snapshotter that keeps keys in the engine's
// lease index.
type LeaseIndexer interface {
	// LeaseSpans returns, in order, the spans of the index that belong to the group's
	// state as snap shows it. It is called from any goroutine.
	LeaseSpans(snap engine.Reader, applied engine.Applied) ([]engine.KeySpan, error)
}

// ConfChange is one step of a change of the group's members.
type ConfChange struct {
	Type    confentry.Type
	Replica keyspace.ReplicaID
	// Node is where the replica is; needed for AddLearner only.
	Node keyspace.NodeID
}

// The kinds of changes. A replica is added as a learner first.
const (
	// AddLearner adds a replica that does not vote.
	AddLearner = confentry.AddLearner
	// Promote makes a learner a voter.
	Promote = confentry.Promote
	// Demote makes a voter a learner.
	Demote = confentry.Demote
	// RemoveReplica removes a replica of any role.
	RemoveReplica = confentry.RemoveReplica
)

// Status is a group's state as its worker last published it. Its fields need not stem
// from one moment.
type Status struct {
	Group      keyspace.GroupID
	Replica    keyspace.ReplicaID
	Term       uint64
	Leader     keyspace.ReplicaID
	LeaderNode keyspace.NodeID
	IsLeader   bool
	Asleep     bool
	// Commit is the commit index and Last the last index of the log. Applied is the last
	// applied index here, DurableApplied the last one known to survive a crash without
	// the wal.
	Commit, Last, Applied, DurableApplied uint64
	Replicas                              []keyspace.Replica
	// InflightBytes is the size of this replica's proposals that are not applied yet.
	InflightBytes int64
	// Receiving says that a snapshot is being received or installed.
	Receiving bool
}

// Progress is a leader's knowledge of one replica.
type Progress struct {
	Replica keyspace.Replica
	// Match is the highest index known to be durable there.
	Match uint64
	// Active says that the leader heard from it within the last one or two election
	// timeouts.
	Active bool
	// Replicating says that it follows the log: raft neither probes it nor sends it a
	// snapshot.
	Replicating bool
	// NodeAlive says that its node is live.
	NodeAlive bool
}
