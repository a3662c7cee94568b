package replicas

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/shard/command"
)

// Groups makes and removes raft groups; *raftgroup.Host does.
type Groups interface {
	// Bootstrap is raftgroup.Host's.
	Bootstrap(b *engine.Batch, g keyspace.GroupID, replicas []keyspace.Replica, payload []byte) error
	// FinishRemovals is raftgroup.Host's.
	FinishRemovals(ctx context.Context, del raftgroup.Deleter) error
	// Remove is raftgroup.Host's.
	Remove(ctx context.Context, gs []keyspace.GroupID, del raftgroup.Deleter) (failed map[keyspace.GroupID]error)
	// Removed is raftgroup.Host's.
	Removed() []keyspace.GroupID
}

// Placed knows the range map; placement's client does.
type Placed interface {
	// Descriptor returns the range's newest descriptor in this node's copy of the map.
	Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool)
	// Ranges returns how many ranges that copy has.
	Ranges() int
	// At returns the newest descriptor of the range that holds the key, by the same copy.
	At(key []byte) (keyspace.Descriptor, bool)
}

// State is the state of an open replica at one moment.
type State struct {
	// Replica is 0 until the group is open.
	Replica keyspace.ReplicaID
	// Descriptor is the applied one. Its Generation is 0 while the replica is empty.
	Descriptor keyspace.Descriptor
	// Introduced is the descriptor by which an empty replica was opened.
	Introduced keyspace.Descriptor
	Merge      command.MergeState
	// Absorbed says that another range has taken this one's place by a merge.
	Absorbed bool
	// Ended says that the replica serves and applies nothing any more.
	Ended bool
	// KnowsLeader says that the replica knows a leader of its group.
	KnowsLeader bool
}

// Holds says whether the replica holds its span: it has data, and no other range of this node has
// taken its place.
func (s *State) Holds() bool { return s.Descriptor.Generation != 0 && !s.Absorbed }

// Yields says whether the replica has to make way for the claim: a snapshot of the target of the
// merge for which it is frozen, in which it is absorbed.
func (s *State) Yields(c *Claim) bool {
	return s.Merge.Frozen() && s.Merge.Other == c.Range && c.Generation > s.Descriptor.Generation
}

// Replica is an open replica of a range.
type Replica interface {
	Range() keyspace.RangeID
	State() State
	// CaughtUp says whether all that the replica knows to be committed is applied.
	CaughtUp() bool
	// Campaign has the replica stand for election.
	Campaign()
	// Expel ends the replica: whoever asks for the range here is sent elsewhere, and the replica
	// writes nothing any more. It may be repeated.
	Expel()
}

// Start says how a replica is to be opened.
type Start struct {
	Range   keyspace.RangeID
	Replica keyspace.ReplicaID
	// Applied, Record and Txns are the stored state. Applied is nil for an empty replica.
	Applied *engine.Applied
	Record  command.Record
	Txns    command.TxnState
	// Unreadable says why Txns could not be read: the replica is opened into quarantine.
	Unreadable error
	// Introduced is the descriptor by which an empty replica is opened.
	Introduced keyspace.Descriptor
}

// Owner has the open replicas of the node.
type Owner interface {
	// Replica returns the replica of the range, nil if there is none.
	Replica(id keyspace.RangeID) Replica
	// Replicas returns all replicas, in no order.
	Replicas() []Replica
	// Open opens a replica. The error is raftgroup.ErrExists if its group is open.
	Open(s *Start) error
	// Drop forgets a replica that is removed.
	Drop(id keyspace.RangeID)
	// DeleteNotes writes the deletion of the owner's own notes of a range.
	DeleteNotes(b *engine.Batch, id keyspace.RangeID) error
}

// Config is what a Manager is made of. All fields but Placed and Room are required.
type Config struct {
	Self   keyspace.NodeID
	Clock  clock.Clock
	Engine *engine.Engine
	Groups Groups
	Owner  Owner
	// Placed is nil if nothing is known of the map. A replica that was removed while its node
	// was down then stays.
	Placed Placed
	// Look asks a node for a range's descriptor.
	Look func(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, error)
	// Room says why there is no memory for so many more replicas. Nil means that there is.
	Room func(more int) error
	// After calls a function once a time has passed, unless the owner stops before.
	After  func(d time.Duration, f func())
	Logger *zap.Logger
}

// Manager makes, opens and removes the replicas of a node.
type Manager struct {
	// Tombstones has the newest replica of each range that has left the node.
	Tombstones lifecycle.Tombstones

	cfg       Config
	log       *zap.Logger
	lifecycle *lifecycle.Lifecycle

	// making is held while a replica is opened from its record, so that the campaign of a child
	// does not miss the replica that somebody else is about to open.
	making sync.Mutex
	// unheld is held by ifUnheld: nobody has one claim.
	unheld sync.Mutex
	// ending are the open replicas among those whose removal is under way. Only the calls of
	// lifecycle.Remover touch it, which come one at a time.
	ending map[keyspace.GroupID]Replica

	// untaken paces the log of replicas for which there is no room. Only OpenEmpty uses it, which is
	// called by one goroutine.
	untaken clock.Time

	kickChildren wake.Signal
	mu           sync.Mutex
	// Guarded by mu: claims are spans by the range that is about to hold them, children the
	// children of splits that wait to be opened. deleting are the open replicas whose data is being
	// deleted; each map is written once, before it is set here. bad are the bad tables since the start.
	claims   map[keyspace.RangeID]keyspace.Span
	children []child
	deleting map[keyspace.GroupID]bool
	bad      []*badTable
}

// Check has a goroutine look whether the range's replica here still is a member. It does not
// block.
func (m *Manager) Check(id keyspace.RangeID) { m.lifecycle.Check(id.Group()) }

// DurableRecord returns the record of a range as it would be after a crash now. ok says that there
// is one.
func (m *Manager) DurableRecord(id keyspace.RangeID) (rec command.Record, ok bool, err error) {
	a, ok, err := m.cfg.Engine.DurableApplied(id.Group())
	if err != nil || !ok {
		return rec, false, err
	}
	rec, err = command.DecodeRecord(a.Payload)
	return rec, true, err
}

// Record returns the applied record of the node's replica of a range; here says that there is
// one that is a member.
func (m *Manager) Record(id keyspace.RangeID) (rec command.Record, here bool, err error) {
	a, ok, err := m.cfg.Engine.Applied(id.Group())
	if err != nil || !ok {
		return rec, false, err
	}
	_, here = on(a.Replicas, m.cfg.Self)
	rec, err = command.DecodeRecord(a.Payload)
	return rec, here, err
}

// on returns the node's replica among the members.
func on(members []keyspace.Replica, node keyspace.NodeID) (keyspace.ReplicaID, bool) {
	for _, m := range members {
		if m.Node == node {
			return m.ID, true
		}
	}
	return 0, false
}

// commit makes visible what write writes.
func (m *Manager) commit(write func(b *engine.Batch) error) error {
	b := m.cfg.Engine.NewBatch()
	if err := write(b); err != nil {
		return errors.Join(err, b.Close())
	}
	return b.Commit()
}
