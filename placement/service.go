package placement

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/transport"
)

// RangeControl opens ranges on nodes. It is package shard's, reached over the bus.
type RangeControl interface {
	// CreateRanges makes the node's replicas of the ranges durable and opens them. It
	// may be repeated: replicas that exist already are left as they are. The node
	// that holds the first replica of a descriptor is where its leader is preferred.
	CreateRanges(ctx context.Context, node keyspace.NodeID, ds []keyspace.Descriptor) error
}

// Group is what a Service needs of the placement group; *raftgroup.Group is one.
type Group interface {
	sequencer.Raft
	// CanTransfer says why Transfer would fail at once. It changes nothing.
	CanTransfer(ctx context.Context, to keyspace.ReplicaID) error
	// Transfer hands leadership to a replica, with 0 to the one that is best off, and
	// returns when it has taken it.
	Transfer(ctx context.Context, to keyspace.ReplicaID) error
	// ChangeConf changes the members, if this replica leads in the term.
	ChangeConf(ctx context.Context, term uint64, changes []raftgroup.ConfChange, payload []byte) error
	Status() raftgroup.Status
}

// Bus is what the package needs of the bus.
type Bus interface {
	Call(ctx context.Context, to keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error)
	OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error)
}

// Registrar takes the handlers of the package's bus methods.
type Registrar interface {
	HandleCall(m transport.Method, class transport.Class, h transport.CallHandler)
	HandleStream(m transport.Method, class transport.Class, h transport.StreamHandler)
}

// ServiceOptions are what a Service is made of. All fields are required but
// Metrics and Logger, and those that say what their absence means.
type ServiceOptions struct {
	Self  keyspace.NodeID
	Boot  keyspace.BootID
	Clock clock.Clock
	// Engine holds the state, if this node has a replica of the placement group.
	Engine  *engine.Engine
	Control RangeControl
	// Mover executes operations on ranges. Without one they wait.
	Mover driver.Mover
	// Merger takes the steps of merges. Without one none begins.
	Merger driver.Merger
	// NodeDeadAfter is how long a node may be silent before its replicas are rebuilt
	// elsewhere. Default 5 minutes.
	NodeDeadAfter time.Duration
	// RangeMaxBytes and RangeSplitLoad are the bounds above which leaders split their ranges.
	// Merged ranges have a quarter of them at most. Defaults 256 MiB and 10,000 requests a
	// second, which count for this too where a range is split for neither (below 0).
	RangeMaxBytes, RangeSplitLoad int64
	// RangeMergeAfter is how old two neighbours are, and for how long they have been small
	// and cold, before they are merged. Default an hour; below 0 nothing is merged but by
	// command.
	RangeMergeAfter time.Duration
	// OperationPatience is after how long without a step an operation is given up: its
	// target is dead, or cannot be filled. Default 10 minutes. For a copy comes the time that
	// it takes, and more.
	OperationPatience time.Duration
	// CopyBytesPerSecond bounds what copies bring to a node. Default 64 MiB.
	CopyBytesPerSecond int64
	// UpgradeAfter is after how long the cluster version is raised by itself, once all nodes
	// read the next. Default a day; below 0 it is raised by command alone.
	UpgradeAfter time.Duration
	// Alive says whether a node lives, as far as this one knows.
	Alive func(keyspace.NodeID) bool
	// Central says whether a node that lives hears half of the others or more.
	Central func(keyspace.NodeID) bool
	// BootOf returns in which boot a node was last heard, 0 if that is not known.
	BootOf func(keyspace.NodeID) keyspace.BootID
	// Processors returns how much of its processors' time the process has used, and how many it may
	// use. Without it leads are not gathered at the sequencer.
	Processors func() (used time.Duration, processors float64)
	// Bus reaches the other nodes.
	Bus Bus
	// LeaseObserver and LeaseTimes are what counts the time of leases where this node
	// leads. Without them requests about leases are refused.
	LeaseObserver LeaseObserver
	LeaseTimes    LeaseTimes
	// MinLeaseTTL is the shortest TTL that a lease is granted, in seconds. Too short ones
	// end while their holders wait for an election.
	MinLeaseTTL int64
	// Full says that there is no room for new leases on this node's disk; nil is never.
	Full    func() bool
	Logger  *zap.Logger
	Metrics *Metrics
}

// Service is a node's side of the placement group. On a node with a replica it has the state
// machine, on the leader the sequencer and the leader's duties. It answers other nodes'
// Clients.
type Service struct {
	o         ServiceOptions
	machine   *machine
	sequencer *sequencer.Sequencer
	driver    *driver.Driver

	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup
	// lifecycle opens and removes the replica, which is own.
	lifecycle *lifecycle.Lifecycle
	own       *ownReplica
	// taken is which rights nodes have said that they go by.
	taken takenViews
	// usual is where leases were registered last in the term in which this node leads, or led last.
	usual usualSpan
	// client is what this node's Client knows, nil until there is one.
	client atomic.Pointer[clientView]

	mu sync.Mutex
	// Guarded by mu. group is nil on a node without a replica; leader is what this
	// node last heard about the leader, from raft or from a Client.
	group Group
	// detached is closed when the replica goes, changed when it comes, goes, gets other
	// members, or its leader changes; both are made anew.
	detached, changed chan struct{}
	// listener is told of each change of the leader that raft tells this node.
	listener func(raftgroup.LeaderState)
	// leadCtx ends with the term in which this node leads; leadCancel is nil while it
	// does not.
	leadTerm   uint64
	leadCtx    context.Context
	leadCancel context.CancelFunc
	// tracker is what nodes say of themselves to the leadership; nil while there is none.
	tracker *driver.Tracker
	// held are reported descriptors that did not fit into the map, by range.
	held map[keyspace.RangeID]keyspace.Descriptor
}

// clientView is the knowledge that a node's Client has from other nodes: the leader, and the
// newest map, which may be nil.
type clientView struct {
	leader func() keyspace.NodeID
	newest func() *fsm.Map
}

// maxHeld bounds the reported descriptors that wait for others.
const maxHeld = 4096

// NewService returns the node's Service and loads the placement group's state if
// the engine has one. RegisterHandlers, Open and Start follow.
func NewService(o ServiceOptions) (*Service, error) {
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	o.Logger = o.Logger.With(zap.Stringer("group", keyspace.PlacementGroup))
	m, err := newMachine(o.Engine, o.Boot, o.Logger)
	if err != nil {
		return nil, err
	}
	s := &Service{
		o: o, machine: m,
		sequencer: sequencer.New(o.Clock, m, o.Metrics.Sequencer, o.Logger),
		held:      map[keyspace.RangeID]keyspace.Descriptor{},

		detached: make(chan struct{}),
		changed:  make(chan struct{}),
	}
	s.own = &ownReplica{s: s}
	s.taken.init()
	s.lifecycle = newLifecycle(s.own)
	s.driver = driver.New(s.driverOptions())
	m.self = o.Self
	m.onMembers = s.membersApplied
	s.ctx, s.cancel = context.WithCancel(context.Background())
	m.onApplied = s.sequencer.Applied
	m.onLeader = s.leaderChanged
	m.onLeases = s.leasesChanged
	s.sequencer.Applied(m.View())
	return s, nil
}

// Open opens this node's replica of the placement group, if the engine holds one.
// It comes after NewService and before the Client starts.
func (s *Service) Open(h *raftgroup.Host) error {
	if err := s.openStored(h); err != nil {
		return fmt.Errorf("open placement group: %w", err)
	}
	return nil
}

// RegisterHandlers registers the package's bus methods, before the bus starts.
func (s *Service) RegisterHandlers(r Registrar) {
	r.HandleCall(transport.MethodPlacementSequence, transport.ClassRequest, s.handleSequence)
	r.HandleCall(transport.MethodPlacementRequest, transport.ClassRequest, s.handleRequest)
	r.HandleStream(transport.MethodPlacementFeed, transport.ClassRequest, s.handleFeed)
	r.HandleStream(transport.MethodPlacementLog, transport.ClassRequest, s.handleLog)
	r.HandleCall(transport.MethodPlacementReport, transport.ClassRequest, s.handleReport)
}

// Start starts the Service's goroutines. Stop ends them.
func (s *Service) Start() {
	s.wait.Go(func() { s.sequencer.Run(s.ctx.Done()) })
	s.wait.Go(func() { s.lifecycle.RunOpener(s.ctx) })
	s.wait.Go(func() { s.lifecycle.RunGC(s.ctx) })
}

// Stop ends the Service and waits for its goroutines. A leader hands over before, with
// Shutdown.
func (s *Service) Stop() {
	s.cancel()
	s.mu.Lock()
	s.endDutiesLocked()
	s.mu.Unlock()
	s.wait.Wait()
}

// serveClient makes c this node's Client, which is told of the leader, as known now and
// with each change.
func (s *Service) serveClient(c *Client) {
	s.client.Store(&clientView{leader: c.Leader, newest: c.maps.load})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listener = c.raftLeader
	s.listener(s.machine.leaderState())
}

// leaderChanged is called by the machine, in order with its Views.
func (s *Service) leaderChanged(ls raftgroup.LeaderState) {
	s.sequencer.LeaderChanged(ls)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changedLocked()
	switch {
	case !ls.IsLeader || ls.Term != s.leadTerm:
		s.endDutiesLocked()
		fallthrough
	default:
		if ls.Ready && s.leadCancel == nil && s.ctx.Err() == nil {
			s.beginDutiesLocked(ls.Term)
		}
	}
	s.o.Metrics.IsLeader.Set(boolGauge(ls.Ready))
	if s.listener != nil {
		s.listener(ls)
	}
}

func boolGauge(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// beginDutiesLocked starts what only the leader does.
func (s *Service) beginDutiesLocked(term uint64) {
	ctx, cancel := context.WithCancel(s.ctx)
	s.leadTerm, s.leadCtx, s.leadCancel = term, ctx, cancel
	clear(s.held)
	s.usual.forget()
	s.taken.lead(term, s.o.Clock.Now())
	if s.o.LeaseObserver != nil {
		records := s.View().Records
		if s.View().Loading.Active() {
			records = func(func(*fsm.Lease) bool) {} // their clocks start when the load finishes
		}
		s.o.LeaseObserver.Lead(ctx, term, records)
	}
	s.wait.Go(func() { s.createRanges(ctx, term) })
	s.tracker = s.driver.Lead(ctx, term, s.wait.Go)
}

func (s *Service) endDutiesLocked() {
	if s.leadCancel != nil {
		s.leadCancel()
		s.leadCancel, s.tracker = nil, nil
	}
}
