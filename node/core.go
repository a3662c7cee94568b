package node

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/lease"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
	"github.com/skeindb/skein/watch"
)

// Bus is the bus as node uses it: *transport.QUIC, or the simulator's.
type Bus interface {
	raftgroup.Bus
	placement.Bus
	HandleSend(m transport.Method, class transport.Class, h transport.SendHandler)
	HandleCall(m transport.Method, class transport.Class, h transport.CallHandler)
	HandleStream(m transport.Method, class transport.Class, h transport.StreamHandler)
	SetPeer(id keyspace.NodeID, addrs []string)
	SetQueueBytes(q [4]int64)
	Peer(id keyspace.NodeID) transport.PeerState
	OnPeer(fn func(keyspace.NodeID, transport.PeerState))
	Start() error
	Close() error
}

// Options are what a Core is made of.
type Options struct {
	// Cluster and Self say as which node of which cluster the directories are opened.
	Cluster keyspace.ClusterID
	Self    keyspace.NodeID
	// Founders are those of a new cluster, this node's row among them, and SplitKeys the
	// borders of its first ranges. A node that joins, and one whose directory knows better
	// than its configuration, has none.
	Founders  []placement.Node
	SplitKeys [][]byte
	// Peers asks a running node for the node table. It is called where there are no
	// Founders and the directory does not hold the table yet; nil means that nobody can
	// be asked.
	Peers func(ctx context.Context) ([]placement.Node, error)
	// PlacementReplicas is how many replicas the placement group has at first; 0 is the
	// default, see placement.Bootstrap.
	PlacementReplicas int

	// FS holds DataDir and WALDir.
	FS              vfs.FS
	DataDir, WALDir string

	Clock clock.Clock
	// NewBus makes the bus, bound and silent.
	NewBus func(transport.Config) (Bus, error)

	// Heartbeat and Election are raft's tick and election timeout.
	Heartbeat, Election time.Duration
	// NoPreVote is --pre-vote=false.
	NoPreVote bool
	// NoLeaseReads is --lease-reads=false.
	NoLeaseReads bool
	// NodeDeadAfter is --node-dead-after; 0 is its default.
	NodeDeadAfter time.Duration
	// RequestTimeout bounds a request.
	RequestTimeout time.Duration
	// MaxRequestBytes and MaxTxnOps are etcd's limits. MaxRequestBytes is at most
	// shard.MaxRequestBytes, and what an entry of the wal holds.
	MaxRequestBytes, MaxTxnOps int
	// RemoveBatch and RemovePause pace the removal of old versions; 0 are the defaults.
	RemoveBatch int64
	RemovePause time.Duration
	// KeepPeriod or KeepRevisions are what automatic compaction keeps; where both are 0
	// there is none.
	KeepPeriod    time.Duration
	KeepRevisions int64
	// MemoryBytes is the node's memory budget.
	MemoryBytes int64
	// RangeMaxBytes and RangeSplitLoad are what a range may have before its leader splits it;
	// 0 are the defaults, below 0 is no bound.
	RangeMaxBytes, RangeSplitLoad int64
	// RangeMergeAfter is --range-merge-after; 0 is its default, below 0 ranges are merged by
	// command alone.
	RangeMergeAfter time.Duration
	// MergeHold is shard.Limits'; 0 is its default.
	MergeHold time.Duration
	// CopyBytesPerSecond bounds what copies of ranges bring here, and what is sent for them;
	// 0 is the default.
	CopyBytesPerSecond int64
	// WALSegmentBytes is the size of a wal segment; 0 is the default. An entry takes a third
	// of one at most.
	WALSegmentBytes int64
	// MaxWALBytes is how long the wal may become before the store is flushed and
	// followers that lag are cut off from it; 0 is the default.
	MaxWALBytes int64

	// stages, if set, is told how far the node is in its start and stop.
	stages *stages

	Logger *zap.Logger
	// Registry takes the metrics; nil leaves them unregistered.
	Registry prometheus.Registerer
}

// check refuses limits that contradict one another: a request could be accepted though no log
// entry can hold it.
func (o *Options) check() error {
	if o.MaxRequestBytes < 1 || o.MaxRequestBytes > rangeapi.MaxRequestBytes {
		return fmt.Errorf("requests of up to %d bytes (MaxRequestBytes): an entry of the log holds those of 1 to %d", o.MaxRequestBytes, rangeapi.MaxRequestBytes)
	}
	entry := int64(o.MaxRequestBytes)*17/16 + 512 // with what the log adds to keys and values
	if holds := wal.MaxEntryBytes(o.WALSegmentBytes); entry > holds {
		return fmt.Errorf("a wal segment of %d bytes (WALSegmentBytes) holds entries of at most %d, and a request of %d bytes (MaxRequestBytes) makes one of %d: give segments of at least %d",
			o.WALSegmentBytes, holds, o.MaxRequestBytes, entry, 3*entry+8192)
	}
	return nil
}

// Core is a node without ports.
type Core struct {
	o      Options
	boot   keyspace.BootID
	log    *zap.Logger
	budget Budget

	dirs    *engine.DirLock
	wal     *wal.Log
	engine  *engine.Engine
	bus     Bus
	host    *raftgroup.Host
	service *placement.Service
	client  *placement.Client
	shards  *shard.Node
	router  *router.Router
	watches *watch.Hub
	// leases counts the time of leases while this node leads placement; grants answers
	// etcd's questions about leases.
	leases *lease.Timer
	grants *lease.Gateway

	// ctx ends when Stop or Crash begins; wait holds the goroutines of Core itself.
	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup

	// nodes is the node table as the node knew it when it was opened.
	nodes []placement.Node

	// admission has the peers admit this node, and answers theirs. Operators' commands and
	// questions go to admin.
	admission *join.Admission
	admin     *operate.Admin

	fatalOnce sync.Once
	fatal     chan struct{}
	fatalErr  error
}

// Open opens the directories and everything in them, and starts what serves other
// nodes. It returns when the node takes part in the cluster, which may not have a
// quorum yet. ctx bounds only the opening.
func Open(ctx context.Context, o Options) (_ *Core, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	c := &Core{o: o, budget: NewBudget(o.MemoryBytes), fatal: make(chan struct{})}
	c.log = o.Logger.With(zap.Stringer("node", o.Self))
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if c.boot, err = newBoot(); err != nil {
		return nil, err
	}
	// undo holds what is to be undone if the opening fails, and is run backwards.
	var undo []func()
	defer func() {
		if err != nil {
			c.cancel()
			for i := len(undo) - 1; i >= 0; i-- {
				undo[i]()
			}
		}
	}()
	o.stages.enter("open the storage")
	if err := c.openStorage(ctx, &undo); err != nil {
		return nil, err
	}
	o.stages.enter("open the raft groups")
	if err := c.openGroups(ctx, &undo); err != nil {
		return nil, err
	}
	if admitted, err := c.storedAdmission(); err != nil {
		return nil, err
	} else if admitted {
		c.admission.SetAdmitted() // peers that are new may ask before this node has joined
	}
	// Before the bus speaks: it brings orders to create ranges.
	if err := c.shards.Open(); err != nil {
		return nil, err
	}
	if err := c.bus.Start(); err != nil {
		return nil, fmt.Errorf("start the bus: %w", err)
	}
	o.stages.enter("take part in the cluster")
	if err := c.takePart(ctx); err != nil {
		return nil, err
	}
	c.compact()
	return c, nil
}

func newBoot() (keyspace.BootID, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, fmt.Errorf("boot id: %w", err)
	}
	// 0 means that no boot is known.
	return keyspace.BootID(binary.LittleEndian.Uint64(b[:]) | 1), nil
}

// openStorage opens directories, wal and engine.
func (c *Core) openStorage(ctx context.Context, undo *[]func()) (err error) {
	o := &c.o
	if c.dirs, err = engine.OpenDir(o.FS, o.DataDir, o.WALDir, engine.Identity{Cluster: o.Cluster, Node: o.Self}); err != nil {
		return err
	}
	*undo = append(*undo, func() { c.dirs.Close() })
	store := engine.Options{
		FS: o.FS, Dir: filepath.Join(o.DataDir, "engine"), Clock: o.Clock,
		CacheBytes: c.budget.BlockCache, MemTableBytes: c.budget.memTable(),
		Logger: c.log, Metrics: engine.NewMetrics(o.Registry),
	}
	if c.wal, err = wal.Open(wal.Options{
		FS: o.FS, Dir: o.WALDir, Clock: o.Clock, SegmentBytes: o.WALSegmentBytes,
		QueueBytes: atLeast(c.budget.WALQueue, o.MaxRequestBytes), EntryCacheBytes: c.budget.WALCache,
		MayAllocate: func(bytes int64) bool { return store.LeavesRoom(o.WALDir, bytes) },
		Logger:      c.log, Metrics: wal.NewMetrics(o.Registry),
	}); err != nil {
		return err
	}
	*undo = append(*undo, func() { c.wal.Close() })
	if c.engine, err = engine.Open(store); err != nil {
		return err
	}
	*undo = append(*undo, func() { _ = c.engine.Abort() })
	if err := c.refuseLoss(store.Dir); err != nil {
		return err
	}
	if !c.wal.BeganEmpty() {
		return nil
	}
	// The log is never the younger one: only then does an empty log beside a store
	// that is not mean a loss.
	if err := c.wal.Sync(ctx); err != nil {
		return fmt.Errorf("begin the log in %s: %w", o.WALDir, err)
	}
	return nil
}

// errLost says that a part of what the node has on its disks is gone.
var errLost = errors.New("the node's state is not complete")

// refuseLoss refuses to open where one of log and store is there without the other. A
// log begins before the store holds anything, and the store holds what the host keeps
// of its promises before the log holds anything of a group. A replica without its
// log has forgotten its votes and what it acknowledged; one without its store cannot
// know whose log it has.
func (c *Core) refuseLoss(storeDir string) error {
	empty, err := c.engine.Empty()
	if err != nil {
		return err
	}
	const advice = "restore it if you can; otherwise remove this node from the cluster, empty both directories, and let it join anew (--join, or etcdctl member add)"
	if c.wal.BeganEmpty() && !empty {
		return fmt.Errorf("%w: the wal directory %s holds no log, but %s holds the store that was made with it: %s",
			errLost, c.o.WALDir, storeDir, advice)
	}
	if groups := len(c.wal.Groups()); groups > 0 && empty {
		return fmt.Errorf("%w: the store in %s is empty, but the wal directory %s holds the logs of %d raft groups: %s",
			errLost, storeDir, c.o.WALDir, groups, advice)
	}
	return nil
}

// openGroups makes the bus and what is driven by it, and wires it all. Nothing is
// received before the bus starts.
func (c *Core) openGroups(ctx context.Context, undo *[]func()) (err error) {
	o := &c.o
	if err := c.loadTable(ctx); err != nil {
		return err
	}
	if c.bus, err = o.NewBus(transport.Config{
		Cluster: o.Cluster, Node: o.Self, Boot: c.boot, Clock: o.Clock, Logger: c.log, Tell: c.PeerTable, Unknown: func(id keyspace.NodeID) { c.admission.UnknownCame(id) },
		Metrics: transport.NewMetrics(o.Registry), QueueBytes: c.queueBytes(c.nodes),
		// A request to a node that died is given up soon after that node's leaderships
		// have moved on.
		PingInterval: o.Election / 4, MaxMissedPings: 6,
	}); err != nil {
		return err
	}
	*undo = append(*undo, func() { c.bus.Close() })
	if c.host, err = raftgroup.NewHost(c.groupConfig()); err != nil {
		return err
	}
	*undo = append(*undo, func() { _ = c.host.Stop(context.Background()) })
	if err := c.bootstrap(ctx); err != nil {
		return err
	}
	metrics := placement.NewMetrics(o.Registry)
	if c.service, err = placement.NewService(placement.ServiceOptions{
		Self: o.Self, Boot: c.boot, Clock: o.Clock, Engine: c.engine, Control: control{c}, Mover: control{c}, Merger: control{c}, Alive: c.alive, Central: c.host.Connected, Bus: c.bus,
		LeaseObserver: leaseTimer{c}, LeaseTimes: leaseTimer{c}, MinLeaseTTL: minLeaseTTL(o.Heartbeat, o.Election), Full: c.full,
		NodeDeadAfter: o.NodeDeadAfter, Logger: c.log, Metrics: metrics,
		CopyBytesPerSecond: o.CopyBytesPerSecond,
		RangeMaxBytes:      o.RangeMaxBytes, RangeSplitLoad: cmp.Or(o.RangeSplitLoad, shard.DefaultSplitLoad), RangeMergeAfter: o.RangeMergeAfter,
	}); err != nil {
		return err
	}
	*undo = append(*undo, c.service.Stop)
	c.client = placement.NewClient(placement.ClientOptions{
		Self: o.Self, Boot: c.boot, Service: c.service, Clock: o.Clock, Bus: c.bus, Peers: c.others(),
		Measurer: measurer{c}, AttemptTimeout: o.Election, Logger: c.log, Metrics: metrics,
	})
	*undo = append(*undo, c.client.Stop)
	c.shards = shard.NewNode(shard.Config{
		Self: o.Self, Clock: o.Clock, Engine: c.engine, Groups: shard.HostGroups(c.host),
		Sequencer: c.client, IDs: c.client, Reporter: c.client, Txns: pusher{c}, Leases: c.client, Placed: c.client, Bus: c.bus, Disk: disk{c},
		Limits: shard.Limits{
			MaxRequestBytes: o.MaxRequestBytes, MaxTxnOps: o.MaxTxnOps, PendingBytes: atLeast(c.budget.Requests, o.MaxRequestBytes), VersionCacheBytes: c.budget.VersionCache, LockBytes: atLeast(c.budget.Locks, o.MaxRequestBytes), RemoveBatch: o.RemoveBatch, RemovePause: o.RemovePause, ScanBytes: scan(o.MemoryBytes), ReadBytes: c.budget.Scans,
			RangeMaxBytes: o.RangeMaxBytes, RangeSplitLoad: o.RangeSplitLoad, MergeHold: o.MergeHold,
		},
		Logger: c.log, Metrics: shard.NewMetrics(o.Registry),
	})
	*undo = append(*undo, c.shards.Stop)
	c.router = router.New(router.Config{
		Self: o.Self, Boot: c.boot, Clock: o.Clock, Ranges: c.shards.Client(), Sequencer: c.client, Placement: c.client, Local: c.shards,
		Txns: c.shards.Client(), Bus: c.bus, Removal: removal{c},
		Timeout: o.RequestTimeout, AttemptTimeout: o.Election, Alive: c.alive, ReadBytes: c.budget.Reads, AnswerBytes: answer(o.MemoryBytes), TxnBytes: atLeast(c.budget.Txns, o.MaxRequestBytes), Logger: c.log, Metrics: router.NewMetrics(o.Registry),
	})
	*undo = append(*undo, c.router.Stop)
	watches := watch.Config{
		Self: o.Self, Clock: o.Clock, Log: c.client, Ranges: c.router, Feeds: watch.ClientFeeds(c.shards.Client()),
		Logger: c.log, Metrics: watch.NewMetrics(o.Registry),
	}
	c.budget.watchConfig(&watches)
	c.watches = watch.New(watches)
	*undo = append(*undo, c.watches.Stop)
	c.leases = lease.New(lease.Options{
		Clock: o.Clock, Records: c.service, Revoker: c.router, Extend: o.Election, Logger: c.log, Metrics: lease.NewMetrics(o.Registry),
	})
	*undo = append(*undo, c.leases.Stop)
	c.grants = lease.NewGateway(c.client, c.router)
	c.openAdmin()
	c.registerHandlers()
	return nil
}

// openAdmin makes what joins nodes and what operators use.
func (c *Core) openAdmin() {
	o := &c.o
	c.admission = join.New(join.Options{
		Cluster: o.Cluster, Self: o.Self, Instance: c.dirs.Identity.Instance, DataDir: o.DataDir, WALDir: o.WALDir,
		Founders: len(o.Founders), Nodes: c.nodes, Others: c.others(), Clock: o.Clock, Logger: c.log,
		Ask: c.askCheck, Placement: c.client, View: c.service.View, LogsEmpty: c.logsEmpty,
		UndoBootstrap: func(ctx context.Context, holds keyspace.ReplicaID) error {
			return c.service.UndoBootstrap(ctx, c.host, holds)
		},
	})
	c.admin = operate.New(operate.Options{
		Clock: o.Clock, Election: o.Election, Heartbeat: o.Heartbeat, Logger: c.log,
		Placement: c.client, Replicas: c.shards.Admin(), Routes: c.router, Peers: peers{c},
	})
}

// registerHandlers connects the bus to its receivers, and names the peers.
func (c *Core) registerHandlers() {
	c.host.RegisterHandlers(c.bus)
	c.router.RegisterHandlers(c.bus)
	c.service.RegisterHandlers(c.bus)
	c.shards.RegisterHandlers(c.bus)
	c.bus.HandleCall(transport.MethodNodeAdmin, transport.ClassRequest, c.handleQuestion)
	for i := range c.nodes {
		c.setPeer(&c.nodes[i])
	}
}

// groupConfig is what the raft groups are made of.
func (c *Core) groupConfig() raftgroup.Config {
	o := &c.o
	return raftgroup.Config{
		Node: o.Self, Boot: c.boot, Clock: o.Clock, WAL: c.wal, Engine: c.engine, Bus: c.bus,
		TickInterval: o.Heartbeat, ElectionTimeout: o.Election, NoPreVote: o.NoPreVote, NoLeaseReads: o.NoLeaseReads,
		MaxProposalBytes: c.budget.Proposals, MaxInboundBytes: c.budget.Inbound, MaxWALBytes: o.MaxWALBytes, SnapshotBytesPerSecond: o.CopyBytesPerSecond,
		Unknown: func(from keyspace.NodeID, g keyspace.GroupID, to keyspace.ReplicaID) {
			if g == keyspace.PlacementGroup {
				c.service.Unknown(from, to)
				return
			}
			c.shards.Unknown(from, g, to)
		},
		Removed: func(g keyspace.GroupID, self keyspace.ReplicaID) {
			if g == keyspace.PlacementGroup {
				c.service.Removed()
				return
			}
			c.shards.Removed(g, self)
		},
		Logger: o.Logger, Metrics: raftgroup.NewMetrics(o.Registry),
	}
}

// control opens ranges for placement; the replicas are made after it.
type control struct{ c *Core }

// CreateRanges implements placement.RangeControl.
func (r control) CreateRanges(ctx context.Context, node keyspace.NodeID, ds []keyspace.Descriptor) error {
	return r.c.shards.Admin().CreateRanges(ctx, node, ds)
}

// Look implements placement.Mover.
func (r control) Look(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	return r.c.shards.Admin().Look(ctx, node, id)
}

// ChangeMembers implements placement.Mover.
func (r control) ChangeMembers(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	_, err := r.c.shards.Admin().ChangeMembers(ctx, node, id, confIndex, changes)
	return err
}

// TransferTo implements placement.Mover.
func (r control) TransferTo(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error {
	return r.c.shards.Admin().TransferTo(ctx, node, id, to)
}

// Merge implements placement.Merger.
func (r control) Merge(ctx context.Context, node keyspace.NodeID, order keyspace.MergeOrder) error {
	return r.c.shards.Admin().Merge(ctx, node, order)
}

// pusher finds out for the replicas what became of transactions; the router is made
// after them.
type pusher struct{ c *Core }

// Push implements shard.TxnPusher.
func (p pusher) Push(ctx context.Context, name rangeapi.TxnName, anchor []byte) (live bool, d *rangeapi.Decided, err error) {
	return p.c.router.Push(ctx, name, anchor)
}

// Finish implements shard.TxnPusher.
func (p pusher) Finish(ctx context.Context, name rangeapi.TxnName, d *rangeapi.Decided) (live bool, err error) {
	return p.c.router.Finish(ctx, name, d)
}

// Reads implements shard.TxnPusher.
func (p pusher) Reads(ctx context.Context, below keyspace.Revision) (bool, error) {
	nodes, err := removal(p).Nodes(ctx)
	if err != nil {
		return false, err
	}
	return p.c.router.Reads(ctx, nodes, below)
}

// disk says how the node's disks fare.
type disk struct{ c *Core }

// Full implements shard.Disk.
func (d disk) Full() bool { return d.c.full() }

// Overloaded implements shard.Disk.
func (d disk) Overloaded() bool { return d.c.wal.Overloaded() }

func (c *Core) full() bool {
	return c.wal.Space() == wal.SpaceFull || c.engine.Space() == engine.SpaceFull
}

// alive reports whether a node lives as far as this one knows.
func (c *Core) alive(n keyspace.NodeID) bool { return n == c.o.Self || c.host.Liveness(n) }

// KV is the node's gateway.
func (c *Core) KV() *router.Router { return c.router }

// Watches are the watchers of the node's gateway.
func (c *Core) Watches() *watch.Hub { return c.watches }

// Leases answers etcd's questions about leases.
func (c *Core) Leases() *lease.Gateway { return c.grants }

// Store is what the node has applied, for who checks it.
func (c *Core) Store() engine.Reader { return c.engine }

// Ranges is the node's access to the replicas of all nodes.
func (c *Core) Ranges() *shard.AdminClient { return c.shards.Admin() }

// Placement is the node's access to the placement group.
func (c *Core) Placement() *placement.Client { return c.client }

// Fatal is closed when the node cannot go on; Err then says why. Crash or Stop it.
func (c *Core) Fatal() <-chan struct{} { return c.fatal }

// Err returns why the node cannot go on, after Fatal is closed.
func (c *Core) Err() error {
	select {
	case <-c.fatal:
		return c.fatalErr
	default:
		return nil
	}
}

func (c *Core) fail(err error) {
	c.fatalOnce.Do(func() {
		c.fatalErr = err
		c.log.Error("the node cannot go on", zap.Error(err))
		close(c.fatal)
	})
}

// watchFatal ends the node with the first part that cannot go on.
func (c *Core) watchFatal() {
	select {
	case <-c.wal.Fatal():
		c.fail(fmt.Errorf("wal: %w", c.wal.Err()))
	case <-c.engine.Fatal():
		c.fail(fmt.Errorf("engine: %w", c.engine.Err()))
	case <-c.host.Fatal():
		c.fail(fmt.Errorf("raft groups: %w", c.host.Err()))
	case <-c.ctx.Done():
	}
}

// Bounds of a clean stop.
const (
	drainTimeout = 5 * time.Second
	hostTimeout  = 5 * time.Second
)

// Stop ends the node in order, so that nothing has to be replayed and the next sequencer skips
// no revision. It takes at most about 20 s; ctx cuts the waiting short, not the order.
func (c *Core) Stop(ctx context.Context) error {
	var errs []error
	enter := c.o.stages.enter
	if c.Err() == nil {
		enter("end transactions over several ranges")
		c.router.Drain(ctx)
		enter("hand over what the node leads")
		drain, cancel := context.WithTimeout(ctx, drainTimeout)
		if err := c.shards.Drain(drain); err != nil {
			// No reason to call the stop a failure: the others elect leaders, and where all
			// stop at once there is nobody to hand over to.
			c.log.Warn("drain", zap.Error(err))
		}
		cancel()
		enter("lower the ceiling of revisions and hand placement over")
		if err := c.service.Shutdown(ctx); err != nil {
			c.log.Warn("stop with unused revisions below the ceiling", zap.Error(err))
		}
	}
	c.stopServing()
	// The bus waits for its handlers, which read the engine on behalf of other nodes.
	for _, part := range []struct {
		name  string
		close func() error
	}{{"close the bus", c.bus.Close}, {"close the store", c.engine.Close}, {"close the wal", c.wal.Close}, {"unlock the directories", c.dirs.Close}} {
		enter(part.name)
		errs = append(errs, part.close())
	}
	enter("end the process")
	if err := c.Err(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// stopServing ends everything between the bus and the storage.
func (c *Core) stopServing() {
	enter := c.o.stages.enter
	c.cancel()
	for _, part := range []struct {
		name string
		stop func()
	}{
		{"end watches", c.watches.Stop},
		{"stop the clocks of leases", c.leases.Stop},
		{"stop asking placement", c.client.Stop},
		{"stop the router", c.router.Stop},
		{"stop the replicas", c.shards.Stop},
		{"stop placement", c.service.Stop},
	} {
		enter(part.name)
		part.stop()
	}
	enter("stop the raft groups")
	ctx, cancel := context.WithTimeout(context.Background(), hostTimeout)
	defer cancel()
	if err := c.host.Stop(ctx); err != nil {
		c.log.Warn("stop the raft groups", zap.Error(err))
	}
	enter("end what keeps the node table")
	c.wait.Wait()
}

// Crash ends the node without flushing or telling anybody anything: the
// simulator's kill -9. What the disk keeps is the file system's matter.
func (c *Core) Crash() {
	c.bus.Close()
	c.stopServing()
	_ = c.engine.Abort() // a crash has nobody to tell
	c.wal.Close()
	c.dirs.Close()
}
