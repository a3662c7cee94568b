package driver

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// Options are what a Driver is made of. All fields are required but those that say what
// their absence means.
type Options struct {
	Self    keyspace.NodeID
	Clock   clock.Clock
	Logger  *zap.Logger
	Metrics *Metrics
	// Group is the placement group, on this node.
	Group Group
	// Mover moves replicas and leaders of ranges. Without one nothing is decided, and
	// operations on ranges wait.
	Mover Mover
	// OwnMover moves those of the placement group, in a term.
	OwnMover func(term uint64) Mover
	// Merger takes the steps of merges. Without one none begins.
	Merger Merger
	// Alive says whether a node lives, as far as this one knows, Central whether a node that
	// lives hears half of the others or more.
	Alive, Central func(keyspace.NodeID) bool
	// Asked returns how many revisions each node has got of this node in a term in which it is the
	// sequencer. The caller keeps the map. Without it the sequencer stays where it is.
	Asked func(term uint64) map[keyspace.NodeID]uint64
	// Processors returns how much of its processors' time the process has used, and how many processors' time
	// it may use. Without it leads are not gathered at the sequencer.
	Processors func() (used time.Duration, processors float64)
	// BootOf returns in which boot a node was last heard, 0 if that is not known.
	BootOf func(keyspace.NodeID) keyspace.BootID
	// NodeDeadAfter is how long a node may be silent before its replicas are rebuilt
	// elsewhere. Default 5 minutes.
	NodeDeadAfter time.Duration
	// RangeMaxBytes and RangeSplitLoad are above what leaders split their ranges. Defaults
	// 256 MiB and 10,000 requests a second, also where they are 0 or less.
	RangeMaxBytes, RangeSplitLoad int64
	// RangeMergeAfter is how old two neighbours are, and for how long they have been small
	// and cold, before they are merged. Default an hour; below 0 nothing is merged but by
	// command.
	RangeMergeAfter time.Duration
	// OperationPatience is after how long without a step an operation is given up, beside
	// the time of a copy. Default 10 minutes.
	OperationPatience time.Duration
	// CopyBytesPerSecond bounds what copies bring to a node. Default 64 MiB.
	CopyBytesPerSecond int64
	// UpgradeAfter is after how long the cluster version is raised by itself, once all nodes
	// read the next. Default a day; below 0 it is raised by command alone.
	UpgradeAfter time.Duration
}

// Group is what a Driver needs of the placement group.
type Group interface {
	// View returns the newest state.
	View() *fsm.View
	// Propose proposes an effect in the term and waits for its result.
	Propose(ctx context.Context, term uint64, op fsm.Effect) fsm.Result
	// CanTransfer says why a replica cannot take the group's leadership over now.
	CanTransfer(ctx context.Context, to keyspace.ReplicaID) error
	// TransferLeader gives the leadership to a node.
	TransferLeader(ctx context.Context, to keyspace.NodeID) error
	// Wall is the time that goes into rows of nodes.
	Wall() fsm.UnixMillis
}

// Driver decides what is to be changed in the cluster and executes it, on the node that
// leads the placement group.
type Driver struct {
	o Options
	// kick says that an operation has begun.
	kick wake.Signal
	// tracker is that of the last leadership.
	tracker atomic.Pointer[Tracker]
}

// New returns the node's Driver. It does nothing before Lead.
func New(o Options) *Driver {
	o.OperationPatience = cmp.Or(o.OperationPatience, operationPatience)
	o.CopyBytesPerSecond = cmp.Or(o.CopyBytesPerSecond, copyBytesPerSecond)
	o.UpgradeAfter = cmp.Or(o.UpgradeAfter, upgradeAfter)
	o.NodeDeadAfter = cmp.Or(o.NodeDeadAfter, nodeDeadAfter)
	if o.RangeMaxBytes <= 0 {
		o.RangeMaxBytes = rangeMaxBytes
	}
	if o.RangeSplitLoad <= 0 {
		o.RangeSplitLoad = rangeSplitLoad
	}
	o.RangeMergeAfter = cmp.Or(o.RangeMergeAfter, rangeMergeAfter)
	s := &Driver{o: o, kick: wake.New()}
	s.tracker.Store(newTracker())
	return s
}

// Lead starts a leadership: operations are executed and decisions made until ctx ends with
// the term. run starts a goroutine that the caller waits for. The reports of nodes go to
// the tracker that Lead returns.
func (s *Driver) Lead(ctx context.Context, term uint64, run func(func())) *Tracker {
	t := newTracker()
	s.tracker.Store(t)
	d := newPair(s, term, t)
	run(func() { d.operator.run(ctx) })
	if s.o.Mover != nil {
		run(func() { d.run(ctx) })
	}
	return t
}

// newPair returns the decider of a leadership with its operator, which tells it how operations
// have ended.
func newPair(s *Driver, term uint64, t *Tracker) *decider {
	o := newOperator(s, term, t)
	d := newDecider(s, term, t, o)
	o.over = d.over
	return d
}
