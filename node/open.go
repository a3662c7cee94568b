package node

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"go.uber.org/zap"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/lease"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/node/series"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/offline"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
	"github.com/skeindb/skein/watch"
)

// Open opens the directories and everything in them, and starts what serves other
// nodes. It returns when the node takes part in the cluster, which may not have a
// quorum yet. ctx bounds only the opening.
func Open(ctx context.Context, o Options) (_ *Core, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	c := &Core{o: o, budget: NewBudget(o.MemoryBytes), fatal: make(chan struct{}), listing: make(chan struct{}, 1)}
	c.answers = budget.New(c.budget.Reads, answer(o.MemoryBytes))
	if o.Name != "" {
		c.names.set([]fsm.Node{{ID: o.Self, Name: o.Name}}) // the others follow with the node table
	}
	c.o.Logger = withNames(o.Logger, &c.names)
	c.log = c.o.Logger.With(zap.Stringer("node", o.Self))
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if c.boot, err = newBoot(); err != nil {
		return nil, err
	}
	// undo holds what is to be undone if the opening fails, and is run backwards.
	var undo []func()
	defer func() {
		if err != nil {
			err = c.adviseOnDamage(err)
			c.cancel()
			for i := len(undo) - 1; i >= 0; i-- {
				undo[i]()
			}
		}
	}()
	o.enter("open the storage")
	if err := c.openStorage(ctx, &undo); err != nil {
		return nil, err
	}
	o.enter("open the raft groups")
	if err := c.openGroups(ctx, &undo); err != nil {
		return nil, err
	}
	if admitted, err := c.storedAdmission(); err != nil {
		return nil, err
	} else if admitted {
		c.admission.SetAdmitted() // peers that are new may ask before this node has joined
		if c.knowsOfRemoval() {
			return nil, c.admission.RemovedError()
		}
	}
	// Before the bus speaks: it brings orders to create ranges.
	if err := c.shards.Open(); err != nil {
		return nil, err
	}
	// From here on bad tables are a matter of their replicas, which are open now.
	c.engine.OnCorruption(c.shards.BadTable)
	if err := c.bus.Start(); err != nil {
		return nil, fmt.Errorf("start the bus: %w", err)
	}
	o.enter("take part in the cluster")
	if err := c.takePart(ctx); err != nil {
		return nil, err
	}
	c.compact()
	c.observe()
	if c.series != nil {
		c.wait.Go(func() { c.series.Run(c.ctx) })
	}
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
	if c.dirs, err = engine.OpenDir(o.FS, o.DataDir, o.WALDir, engine.Identity{Cluster: o.Cluster, Node: o.Self}, o.versions()); err != nil {
		return err
	}
	c.version = newWrittenVersion(c.dirs, o.versions(), func() bool { return c.admission.Admitted() }, c.log)
	*undo = append(*undo, func() { _ = c.closeDirs() })
	store := engine.Options{
		FS: o.FS, Dir: filepath.Join(o.DataDir, "engine"), Clock: o.Clock, QuotaBytes: o.QuotaBytes,
		CacheBytes: c.budget.BlockCache, MemTableBytes: c.budget.memTable(), MaxOpenFiles: o.MaxOpenTables,
		Logger: c.log, Metrics: engine.NewMetrics(o.Registry),
	}
	var target int64
	if o.MaxWALBytes > 0 {
		target = max(o.MaxWALBytes*2/3, 4*o.WALSegmentBytes)
	}
	if c.wal, err = wal.Open(wal.Options{
		FS: o.FS, Dir: o.WALDir, Clock: o.Clock, SegmentBytes: o.WALSegmentBytes, TargetBytes: target,
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
	if err := offline.Refuse(c.engine); err != nil {
		return err
	}
	if c.recovered, err = openRecovered(c.engine, o.Self, c.log); err != nil {
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
	const advice = "restore it if you can; otherwise " + joinAnew
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
		Cluster: o.Cluster, Node: o.Self, Boot: c.boot, Clock: o.Clock, Logger: c.log, Tell: c.PeerTable, Unknown: func(id keyspace.NodeID) { c.admission.UnknownCame(id) }, Knocked: c.knocked(),
		Named:   c.names.fit,
		Metrics: transport.NewMetrics(o.Registry), QueueBytes: c.budget.busBytes(o.MaxRequestBytes),
		// A request to a node that died is given up soon after that node's leaderships
		// have moved on.
		PingInterval: o.Election / 4, MaxMissedPings: 6,
		Version: c.version, Recovery: c.recovered, Relays: func(to keyspace.NodeID) []keyspace.NodeID { return c.host.Relays(to) },
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
		Self: o.Self, Boot: c.boot, Clock: o.Clock, Engine: c.engine, Control: control{c}, Mover: control{c}, Merger: control{c}, Alive: c.reached, Central: c.host.Connected, BootOf: c.host.BootOf, Processors: o.Processors, Bus: c.bus,
		LeaseObserver: leaseTimer{c}, LeaseTimes: leaseTimer{c}, MinLeaseTTL: minLeaseTTL(o.Heartbeat, o.Election), Full: c.full,
		NodeDeadAfter: o.NodeDeadAfter, UpgradeAfter: o.UpgradeAfter, Logger: c.log, Metrics: metrics,
		CopyBytesPerSecond: o.CopyBytesPerSecond, RangeMaxBytes: o.RangeMaxBytes, RangeSplitLoad: cmp.Or(o.RangeSplitLoad, shard.DefaultSplitLoad), RangeMergeAfter: o.RangeMergeAfter,
	}); err != nil {
		return err
	}
	*undo = append(*undo, c.service.Stop)
	c.client = placement.NewClient(placement.ClientOptions{
		Self: o.Self, Boot: c.boot, Service: c.service, Clock: o.Clock, Bus: c.bus, Peers: c.others(),
		Measurer: measurer{c}, Written: c.version.written, AttemptTimeout: o.Election, Logger: c.log, Metrics: metrics,
	})
	*undo = append(*undo, c.client.Stop)
	if err := c.openAccess(); err != nil {
		return err
	}
	c.shards = shard.NewStore(shard.Config{
		Self: o.Self, Clock: o.Clock, Engine: c.engine, Groups: shard.HostGroups(c.host),
		Sequencer: c.client, IDs: c.client, Reporter: c.client, Txns: pusher{c}, Leases: c.client, Written: c.version.written, Placed: c.client, Bus: c.bus, Disk: disk{c}, Holds: true, Slow: c.keepSlow,
		Limits: shard.Limits{
			MaxRequestBytes: o.MaxRequestBytes, MaxTxnOps: o.MaxTxnOps, PendingBytes: atLeast(c.budget.Requests, o.MaxRequestBytes), VersionCacheBytes: c.budget.VersionCache, LockBytes: atLeast(c.budget.Locks, o.MaxRequestBytes), MaxRecordBytes: int(c.host.MaxEntryBytes() - recordSlackBytes), RemoveBatch: o.RemoveBatch, RemovePause: o.RemovePause, ScanBytes: scan(o.MemoryBytes), ReadBytes: c.budget.Scans,
			RangeMaxBytes: o.RangeMaxBytes, RangeSplitLoad: o.RangeSplitLoad, MergeHold: o.MergeHold, StandingBytes: NewStanding(o.MemoryBytes).Replicas,
		},
		Logger: c.log, Metrics: shard.NewMetrics(o.Registry),
	})
	*undo = append(*undo, c.shards.Stop)
	c.router = c.newRouter()
	c.cuts = dataapi.NewCutter(dataapi.Options{Cluster: o.Cluster, Holds: c.client, Records: c.client, Keys: c.router, Clock: o.Clock, Logger: c.log})
	*undo = append(*undo, c.router.Stop)
	c.watches = c.newHub()
	c.troubles = newTroubles(c)
	*undo = append(*undo, c.watches.Stop)
	c.leases = lease.New(lease.Options{
		Clock: o.Clock, Records: c.service, Revoker: c.router, Extend: o.Election, Logger: c.log, Metrics: lease.NewMetrics(o.Registry),
	})
	*undo = append(*undo, c.leases.Stop)
	c.grants = lease.NewGateway(c.client, c.router, o.Clock)
	c.openAdmin()
	c.registerHandlers()
	return nil
}

// openAccess makes what has the node go by the rights that placement has.
func (c *Core) openAccess() error {
	options, err := auth.ParseOptions(c.o.AuthToken)
	if err != nil {
		return fmt.Errorf("--auth-token: %w", err)
	}
	tokens, err := options.Open(c.o.Clock, rand.Reader, c.o.AuthTokenTTL)
	if err != nil {
		return fmt.Errorf("--auth-token: %w", err)
	}
	noted, err := c.storedAccess()
	if err != nil {
		return err
	}
	c.access = &access{
		clk: c.o.Clock, election: c.o.Election, log: c.log, source: c.client, note: c.storeAccess, noted: noted,
		tokens: tokens, gate: auth.NewGate(c.o.Clock, tokens), lease: newViewLease(c.o.Clock), told: wake.New(),
	}
	return nil
}

func (c *Core) newRouter() *router.Router {
	o := &c.o
	return router.New(router.Config{
		Self: o.Self, Boot: c.boot, Clock: o.Clock, Ranges: c.shards.Client(), Sequencer: c.client, Placement: c.client, Local: c.shards, Starter: c.shards,
		Loads: c.shards.Client(), Txns: c.shards.Client(), Bus: c.bus, Removal: removal{c}, Hashes: struct {
			*shard.AdminClient
			*rangeapi.Client
		}{c.shards.Admin(), c.shards.Client()},
		Cuts:    c.shards.Client(),
		Timeout: o.RequestTimeout, AttemptTimeout: o.Election, Alive: c.alive, Answers: c.answers, TxnBytes: atLeast(c.budget.Txns, o.MaxRequestBytes), Traces: o.Traces, Logger: c.log, Metrics: router.NewMetrics(o.Registry),
	})
}

func (c *Core) newHub() *watch.Hub {
	watches := watch.Config{
		Self: c.o.Self, Clock: c.o.Clock, Log: c.client, Ranges: c.router, Feeds: watch.ClientFeeds(c.shards.Client()),
		IdleBytes: NewStanding(c.o.MemoryBytes).Watchers, Logger: c.log, Metrics: watch.NewMetrics(c.o.Registry),
	}
	c.budget.watchConfig(&watches)
	return watch.New(watches)
}

// openAdmin makes what joins nodes and what operators use.
func (c *Core) openAdmin() {
	o := &c.o
	c.admission = join.New(join.Options{
		Cluster: o.Cluster, Self: o.Self, Instance: c.dirs.Identity.Instance, DataDir: o.DataDir, WALDir: o.WALDir,
		Founders: len(o.Founders), SurelyNew: o.SurelyNew, NoKnocks: o.NoKnocks, Nodes: c.nodes, Others: c.others(), Clock: o.Clock, Logger: c.log,
		Ask: c.askCheck, GiveUp: c.giveUp, Placement: c.client, View: c.service.View, LogsEmpty: c.logsEmpty,
		UndoBootstrap: func(ctx context.Context, holds keyspace.ReplicaID) error {
			return c.service.UndoBootstrap(ctx, c.host, holds)
		},
	})
	if o.Gatherer != nil {
		c.series = series.New(o.Gatherer, o.Clock)
	}
	c.admin = operate.New(operate.Options{
		Self: o.Self, Clock: o.Clock, Election: o.Election, Heartbeat: o.Heartbeat, Logger: c.log,
		Placement: c.client, Replicas: c.shards.Admin(), Routes: c.router, Peers: peers{c}, Served: peers{c},
	})
}

// registerHandlers connects the bus to its receivers, and names the peers and members.
func (c *Core) registerHandlers() {
	c.host.RegisterHandlers(c.bus)
	c.router.RegisterHandlers(c.bus)
	c.service.RegisterHandlers(c.bus)
	c.shards.RegisterHandlers(c.bus)
	c.bus.HandleCall(transport.MethodNodeAdmin, transport.ClassRequest, c.handleQuestion)
	c.names.set(c.nodes)
	for i := range c.nodes {
		c.setPeer(&c.nodes[i])
	}
	c.setMembers(c.nodes)
}

// groupConfig is what the raft groups are made of.
func (c *Core) groupConfig() raftgroup.Config {
	o := &c.o
	return raftgroup.Config{
		Node: o.Self, Boot: c.boot, Clock: o.Clock, WAL: c.wal, Engine: c.engine, Bus: c.bus,
		TickInterval: o.Heartbeat, ElectionTimeout: o.Election, NoPreVote: o.NoPreVote, NoLeaseReads: o.NoLeaseReads, AwakeFree: o.AwakeFree,
		MaxProposalBytes: c.budget.Proposals, MaxInboundBytes: c.budget.Inbound, MaxWALBytes: o.MaxWALBytes, SnapshotBytesPerSecond: o.CopyBytesPerSecond,
		SlowApply:     o.WarnApply,
		Needed:        func() keyspace.NodeID { return c.client.Leader() },
		LeasesDropped: func() { c.access.lease.drop() },
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
