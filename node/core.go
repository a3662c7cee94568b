package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/lease"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/node/series"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	slow "github.com/skeindb/skein/rangeapi/stages"
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
	Founders  []fsm.Node
	SplitKeys [][]byte
	// Peers asks a running node for the node table. It is called where there are no
	// Founders and the directory does not hold the table yet; nil means that nobody can
	// be asked.
	Peers func(ctx context.Context) ([]fsm.Node, error)
	// Anew finds Founders or Peers where the directory does not hold the table; nil if they are known.
	Anew func(ctx context.Context) (*join.Membership, error)

	// SurelyNew says that nobody can have joined the cluster before: the only founder need not listen for such nodes.
	SurelyNew bool
	// NoKnocks says that datagrams do not reach this node: the only founder listens longer.
	NoKnocks bool

	// Name is the name that the node is started with. A directory that knows its node by another one
	// is refused; "" fits every directory.
	Name string

	// Certificates are the files of the node's own, whose ends are told.
	Certificates []string

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
	// AwakeFree is raftgroup's: how many raft groups may be awake before idle ones sleep sooner; 0 is its default.
	AwakeFree int
	// NodeDeadAfter is --node-dead-after; 0 is its default.
	NodeDeadAfter time.Duration
	// RequestTimeout bounds a request.
	RequestTimeout time.Duration
	// MaxRequestBytes and MaxTxnOps are etcd's limits. MaxRequestBytes is at most
	// rangeapi.MaxRequestBytes, and what an entry of the wal holds.
	MaxRequestBytes, MaxTxnOps int
	// AuthToken, AuthTokenTTL and BcryptCost are --auth-token, --auth-token-ttl and --bcrypt-cost. Nothing
	// uses the cost yet, and no token is made.
	AuthToken    string
	AuthTokenTTL time.Duration
	BcryptCost   int
	// RemoveBatch and RemovePause pace the removal of old versions; 0 are the defaults.
	RemoveBatch int64
	RemovePause time.Duration
	// KeepPeriod or KeepRevisions are what automatic compaction keeps; where both are 0
	// there is none.
	KeepPeriod    time.Duration
	KeepRevisions int64
	// MemoryBytes is the node's memory budget.
	MemoryBytes int64
	// MaxOpenTables is how many tables the engine keeps open; 0 is its default.
	MaxOpenTables int
	// RangeMaxBytes and RangeSplitLoad are what a range may have before its leader splits it;
	// 0 are the defaults, below 0 is no bound.
	RangeMaxBytes, RangeSplitLoad int64
	// Processors is placement's; nil gathers no leads at the sequencer.
	Processors func() (used time.Duration, processors float64)
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
	// followers that lag are cut off from it; 0 is the default. The wal's own target is two
	// thirds of it, but at least four segments.
	MaxWALBytes int64

	// ScrubEvery is --corrupt-check-time: how often replicas are read from disk and compared; 0 is
	// never.
	ScrubEvery time.Duration
	// Snapshots says that etcd's Snapshot is served, by files in DataDir. FS is the system's then.
	Snapshots bool
	// QuotaBytes bounds the size of the store; 0 or less is no bound but the disk.
	QuotaBytes int64

	// Versions are those that the node reads and writes. The zero value is the build's own.
	Versions keyspace.Versions
	// UpgradeAfter is after how long the cluster version is raised by itself, once all nodes read
	// the next; 0 is the default, below 0 it is raised by command alone.
	UpgradeAfter time.Duration

	// WarnApply is how long applying entries may take before the log has a line; 0 is etcd's 100 ms.
	WarnApply time.Duration
	// Traces says that some requests are traced.
	Traces bool

	// Stage, if set, is called with each stage that the node enters in its start and stop. It is one of few words, for people.
	Stage func(name string)

	Logger *zap.Logger
	// Registry takes the metrics; nil leaves them unregistered.
	Registry prometheus.Registerer
	// Gatherer has them all, and those of who opens the Core, for the charts of the last hour. Without it there are none.
	Gatherer prometheus.Gatherer
}

// enter tells who wants to know that a stage begins.
func (o *Options) enter(stage string) {
	if o.Stage != nil {
		o.Stage(stage)
	}
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
	// answers has what router and etcdapi hold of answers.
	answers *budget.Bytes

	dirs    *engine.DirLock
	version *writtenVersion
	// recovered is what the node knows of a recovery of its directory.
	recovered *recovered
	wal       *wal.Log
	engine    *engine.Engine
	bus       Bus
	host      *raftgroup.Host
	service   *placement.Service
	client    *placement.Client
	shards    *shard.Store
	router    *router.Router
	cuts      *dataapi.Cutter
	watches   *watch.Hub
	// leases counts the time of leases while this node leads placement; grants answers
	// etcd's questions about leases.
	leases *lease.Timer
	grants *lease.Gateway

	// access has the gate go by the rights that placement has.
	access *access
	// loadQuestion is what requests ask that a load would have refused.
	loadQuestion loadQuestion

	// slow has the last slow requests.
	slow slow.Ring

	// ctx ends when Stop or Crash begins; wait holds the goroutines of Core itself.
	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup

	// nodes is the node table as the node knew it when it was opened, names those of the newest.
	nodes []fsm.Node
	names nodeNames

	// admission has the peers admit this node, and answers theirs. Operators' commands and
	// questions go to admin.
	admission *join.Admission
	admin     *operate.Admin
	// watchers lists the node's watchers, nil without ports.
	watchers atomic.Pointer[func(most int) *adminpb.WatcherListResponse]
	// listing has a value while a list of the watchers of all nodes is made.
	listing chan struct{}
	// troubles knows since when something troubles this node.
	troubles *troubles
	// series is what this node has measured of itself, nil without a Gatherer.
	series *series.Ring

	fatalOnce sync.Once
	fatal     chan struct{}
	fatalErr  error
}

// full says that nobody may write more by this node.
func (c *Core) full() bool { return c.noRoom() || c.engine.OverQuota() }

// noRoom says that a disk of this node is full.
func (c *Core) noRoom() bool {
	return c.wal.Space() == wal.SpaceFull || c.engine.Space() == engine.SpaceFull
}

// alive reports whether a node lives as far as this one knows, perhaps from others.
func (c *Core) alive(n keyspace.NodeID) bool { return n == c.o.Self || c.host.Heard(n) }

// reached reports whether placement counts on a node.
func (c *Core) reached(n keyspace.NodeID) bool { return n == c.o.Self || c.host.Reached(n) }

// KV is the node's gateway, for requests of the process itself.
func (c *Core) KV() router.Own { return router.Own{Router: c.router} }

// Watches are the watchers of the node's gateway.
func (c *Core) Watches() *watch.Hub { return c.watches }

// Leases answers etcd's questions about leases.
func (c *Core) Leases() *lease.Gateway { return c.grants }

// Cuts makes cuts through the whole store, and reads them.
func (c *Core) Cuts() *dataapi.Cutter { return c.cuts }

// RegisterData adds the services of cuts and loads to a gRPC server.
func (c *Core) RegisterData(r grpc.ServiceRegistrar) {
	dataapi.RegisterData(r, c.cuts)
	dataapi.RegisterLoad(r, c.client, c.router, c.admin)
}

// Gate says who sends a request to this node.
func (c *Core) Gate() *auth.Gate { return c.access.gate }

// MayServe says whether the node may serve by the rights that it knows what asks no sequencer. It is asked
// after the data have been read.
func (c *Core) MayServe() bool { return c.access.lease.Valid() }

// OnRevoked has f called with each view that takes rights from somebody, once the gate knows it. When f
// returns, no watcher receives what the view does not cover.
func (c *Core) OnRevoked(f func(*auth.View)) { c.access.revoked.Store(&f) }

// OnLoad has f called when the node hears that the cluster is loaded, with what clients are told meanwhile.
func (c *Core) OnLoad(f func(error)) { c.access.loads.Store(&f) }

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
		if !errors.Is(err, join.ErrRemoved) { // that was planned
			c.log.Error("the node cannot go on", zap.Error(err))
		}
		close(c.fatal)
	})
}

// joinAnew is what an operator does with a node that has lost a part of its state.
const joinAnew = "remove this node from the cluster (etcdctl member remove), empty both directories, and let it join anew (--join, or etcdctl member add)"

// adviseOnDamage says what to do where the node's log or its own records are damaged. No part of them
// can be left out: the node would vote without knowing what it has promised and stored.
func (c *Core) adviseOnDamage(err error) error {
	if damage := (*wal.CorruptionError)(nil); !errors.As(err, &damage) && !engine.IsCorruption(err) {
		return err
	}
	return fmt.Errorf("%w: its disk has changed what was stored in %s or %s; %s", err, c.o.WALDir, c.o.DataDir, joinAnew)
}

// watchFatal ends the node with the first part that cannot go on.
func (c *Core) watchFatal() {
	select {
	case <-c.wal.Fatal():
		c.fail(c.adviseOnDamage(fmt.Errorf("wal: %w", c.wal.Err())))
	case <-c.engine.Fatal():
		c.fail(c.adviseOnDamage(c.engine.Err()))
	case <-c.host.Fatal():
		c.fail(fmt.Errorf("raft groups: %w", c.host.Err()))
	case <-c.ctx.Done():
	}
}

// watchRestores drops leases when this virtual machine runs on from a snapshot.
func (c *Core) watchRestores() {
	err := clock.Restored(c.ctx, func() { c.host.DropLeases("this virtual machine runs on from a snapshot") })
	if c.ctx.Err() == nil {
		c.log.Info("the kernel does not tell whether this machine is restored from a snapshot", zap.Error(err))
	}
}

// recordSlackBytes is what an entry with nothing but a commit record, or versions of a load, holds beside them, at most.
const recordSlackBytes = 256

// Bounds of a clean stop.
const (
	drainTimeout = 5 * time.Second
	hostTimeout  = 5 * time.Second
	// unheardTimeout is in the place of each of the longer ones where a node hears too few others: what needs
	// a quorum does not end.
	unheardTimeout = 250 * time.Millisecond
)

// patience is how long a stop waits for something that usually takes up to the given time.
func (c *Core) patience(usually time.Duration) time.Duration {
	if c.host.Connected(c.o.Self) {
		return usually
	}
	return min(usually, unheardTimeout)
}

// Stop ends the node in order, so that nothing has to be replayed and the next sequencer skips
// no revision. It takes at most about 20 s; ctx cuts the waiting short, not the order.
func (c *Core) Stop(ctx context.Context) error {
	var errs []error
	enter := c.o.enter
	if c.Err() == nil {
		enter("end transactions over several ranges")
		drain, cancel := context.WithTimeout(ctx, c.patience(drainTimeout))
		c.router.Drain(drain)
		cancel()
		enter("hand over what the node leads")
		drain, cancel = context.WithTimeout(ctx, c.patience(drainTimeout))
		if err := c.shards.Drain(drain); err != nil {
			// No reason to call the stop a failure: the others elect leaders, and where all
			// stop at once there is nobody to hand over to.
			c.log.Warn("not all leaderships were handed over: others elect leaders of these ranges", zap.Error(err))
		}
		cancel()
		enter("hand placement over")
		handover, cancel := context.WithTimeout(ctx, c.patience(placement.ShutdownTimeout))
		if err := c.service.Shutdown(handover); err != nil {
			c.log.Warn("placement was not handed over: some revisions may be skipped", zap.Error(err))
		}
		cancel()
	}
	c.stopServing()
	// The bus waits for its handlers, which read the engine on behalf of other nodes.
	for _, part := range []struct {
		name  string
		close func() error
	}{{"close the bus", c.bus.Close}, {"close the store", c.engine.Close}, {"close the wal", c.wal.Close}, {"unlock the directories", c.closeDirs}} {
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
	enter := c.o.enter
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
	_ = c.closeDirs()
}
