package shard

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/idalloc"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
	"github.com/skeindb/skein/shard/rangefeed"
	"github.com/skeindb/skein/shard/removal"
	"github.com/skeindb/skein/shard/replicas"
)

// Sequencer hands out revisions; placement's client is one.
type Sequencer interface {
	// Sequence asks for req.Count consecutive revisions, or with Count 0 for the
	// current one. done is called exactly once, from any goroutine or within the call.
	// With an error nothing that may have been handed out is ever used.
	Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer))
}

// Reporter takes the descriptors of ranges that this node leads to placement. It
// must not block.
type Reporter interface {
	ReportDescriptors(ds ...keyspace.Descriptor)
}

// Disk says how the node's log and store fare.
type Disk interface {
	// Full says that writes must be refused while deletes and reads go on.
	Full() bool
	// Overloaded says that the log has more to write than its bound.
	Overloaded() bool
}

// Groups opens raft groups; HostGroups makes one of a raftgroup.Host.
type Groups interface {
	replicas.Groups
	open(g keyspace.GroupID, self keyspace.ReplicaID, at raftgroup.Position, sm raftgroup.StateMachine) (group, error)
}

// HostGroups opens the replicas' groups on a host.
func HostGroups(h *raftgroup.Host) Groups { return hostGroups{h} }

type hostGroups struct{ *raftgroup.Host }

func (h hostGroups) open(id keyspace.GroupID, self keyspace.ReplicaID, at raftgroup.Position, sm raftgroup.StateMachine) (group, error) {
	g, err := h.Open(id, self, at, sm)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// Config is what a Node is made of. All fields but Limits, Workers, Disk, Txns,
// Leases, Placed, Logger and Metrics are required.
type Config struct {
	Self      keyspace.NodeID
	Clock     clock.Clock
	Engine    *engine.Engine
	Groups    Groups
	Sequencer Sequencer
	IDs       idalloc.Source
	Reporter  Reporter
	// Txns pushes transactions over several ranges; nil where there are none.
	Txns TxnPusher
	// Leases registers ranges with leases; nil where there is no lease.
	Leases Leases
	// Placed knows the range map. Where it is nil, a replica that was removed while it did
	// not listen stays.
	Placed replicas.Placed
	// Bus reaches other nodes.
	Bus rangeapi.Caller
	// Disk is nil where the disk is never full.
	Disk   Disk
	Limits Limits
	// Workers is how many goroutines evaluate. Default GOMAXPROCS.
	Workers int
	Logger  *zap.Logger
	Metrics *Metrics
}

// Node holds the replicas of one node.
type Node struct {
	cfg         Config
	log         *zap.Logger
	metrics     *Metrics
	maintenance *maintenance
	pushes      *pushes
	unpins      *unpins
	lifecycle   *replicas.Manager
	meter       *load.Meter
	feeds       *rangefeed.Server
	readers     eval.ReadShared
	cache       *eval.VersionCache
	ids         *idalloc.Allocator
	client      *rangeapi.Client
	admins      *AdminClient

	// floor is the highest revision that the node has heard of, compacted the highest
	// compacted revision of the cluster.
	floor, compacted atomic.Int64
	// removal waits for the removal of old versions on all nodes.
	removal removal.Waiter
	// pipes is what the pipelines of all replicas share.
	pipes pipeline.Shared
	// locks is what the lock tables of all replicas share.
	locks locktable.Shared
	// reads bounds what requests hold of what they have read.
	reads eval.ReadLimit

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu sync.RWMutex
	// Guarded by mu.
	replicas map[keyspace.RangeID]*Replica
	timers   map[*alarm]struct{}
	draining bool
	stopped  bool
}

// alarm is a call that was put off.
type alarm struct{ t clock.Timer }

// NewNode returns a node without replicas. Open brings in those of the engine.
func NewNode(cfg Config) *Node {
	cfg.Limits.fill()
	if cfg.Workers == 0 {
		cfg.Workers = runtime.GOMAXPROCS(0)
	}
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(nil)
	}
	n := &Node{
		cfg: cfg, log: cfg.Logger, metrics: cfg.Metrics,
		replicas: make(map[keyspace.RangeID]*Replica),
		timers:   make(map[*alarm]struct{}), cache: eval.NewVersionCache(cfg.Limits.VersionCacheBytes),
	}
	n.reads.Node, n.reads.OneBytes, n.reads.AllBytes = cfg.Self, cfg.Limits.ScanBytes, cfg.Limits.ReadBytes
	n.compacted.Store(-1)
	n.metrics.compacted.Set(-1)
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.pipes = n.newPipes()
	n.readers = eval.ReadShared{
		Cache: n.cache, Pages: eval.NewPageCounts(cfg.Limits.Pages), AnswerBytes: cfg.Limits.AnswerBytes, Compacted: n.Compacted,
		Metrics: n.metrics.reads,
	}
	n.pushes = newPushes(n)
	n.unpins = &unpins{n: n, held: map[*Replica]struct{}{}}
	n.meter = load.NewMeter(load.Config{
		Clock: cfg.Clock, Store: loadStore{cfg.Engine}, MaxBytes: cfg.Limits.RangeMaxBytes, MaxLoad: cfg.Limits.RangeSplitLoad,
		Some: n.someLoads, Metrics: cfg.Metrics.load,
	})
	n.feeds = newFeeds(n)
	n.maintenance, n.ids = newMaintenance(n), idalloc.New(cfg.IDs, cfg.Clock)
	n.client = rangeapi.NewClient(cfg.Self, n, cfg.Bus)
	n.admins = &AdminClient{self: cfg.Self, local: n, bus: cfg.Bus}
	n.removal.Clock, n.removal.Nodes = cfg.Clock, removalNodes{n.admins}
	n.lifecycle = newLifecycle(n)
	n.pipes.Pool.Start(cfg.Workers)
	n.wg.Go(func() { n.maintenance.run(n.ctx) })
	n.wg.Go(func() { n.ids.Run(n.ctx) })
	n.wg.Go(n.runMeter)
	n.lifecycle.Start(n.ctx, n.wg.Go)
	return n
}

// newPipes returns what the pipelines of all replicas share.
func (n *Node) newPipes() pipeline.Shared {
	l := &n.cfg.Limits
	var overloaded func() bool
	if n.cfg.Disk != nil {
		overloaded = n.cfg.Disk.Overloaded
	}
	return pipeline.Shared{
		Limits: pipeline.Limits{
			PendingBytes: l.PendingBytes, RangePendingBytes: l.RangePendingBytes, BatchRequests: l.BatchRequests, MaxEntryBytes: l.MaxEntryBytes,
			InflightBatches: l.InflightBatches, EvaluateTurn: l.EvaluateTurn, FateTimeout: l.FateTimeout,
		},
		Pool: pipeline.NewPool(), Budget: pipeline.NewBudget(n.cfg.Self, l.PendingBytes, overloaded, n.metrics.pipeline),
		Reads: &n.reads, Cache: n.cache, Metrics: n.metrics.pipeline, After: n.after,
	}
}

// Open opens every replica that the engine holds. It is called once, before
// requests come.
func (n *Node) Open() error { return n.lifecycle.Open(n.ctx) }

// Replica returns the replica of the range on this node, nil where there is none.
func (n *Node) Replica(id keyspace.RangeID) *Replica {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.replicas[id]
}

// Replicas returns all replicas of this node, in no order.
func (n *Node) Replicas() []*Replica {
	n.mu.RLock()
	defer n.mu.RUnlock()
	all := make([]*Replica, 0, len(n.replicas))
	for _, r := range n.replicas {
		all = append(all, r)
	}
	return all
}

// Client returns the client that reaches this node by a function call and others
// over the bus.
func (n *Node) Client() *rangeapi.Client { return n.client }

// Admin returns the client for what changes, moves or describes replicas, here and on
// other nodes.
func (n *Node) Admin() *AdminClient { return n.admins }

// Do serves one request to a replica of this node. It returns when the request is
// answered or ctx has ended; a write that is under way then is still carried out.
func (n *Node) Do(ctx context.Context, req *rangeapi.Request) (*rangeapi.Response, error) {
	r := n.Replica(req.Range)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", req.Range, n.cfg.Self)
	}
	if err := rangeapi.CheckRequest(req.Op, n.cfg.Limits.MaxRequestBytes, n.cfg.Limits.MaxTxnOps); err != nil {
		return nil, err
	}
	watch := clock.StartStopwatch()
	if !rangeapi.CanWrite(req.Op) {
		resp, err := r.read(ctx, req)
		n.metrics.readSeconds.Observe(watch.Elapsed().Seconds())
		return resp, err
	}
	resp, err := r.pipe.Do(ctx, req, int64(rangeapi.SizeBound(req.Op))+pipeline.CallOverheadBytes)
	n.metrics.writeSeconds.Observe(watch.Elapsed().Seconds())
	if err != nil {
		n.metrics.failed.Inc()
	} else {
		n.metrics.committed.Inc()
	}
	return resp, err
}

// noSpace says why puts are refused, nil if they are not.
func (n *Node) noSpace() error {
	if n.cfg.Disk == nil || !n.cfg.Disk.Full() {
		return nil
	}
	return kverror.New(kverror.NoSpace, "the disk of node %s is full", n.cfg.Self)
}

// Floor returns the highest revision that the node has heard of.
func (n *Node) Floor() keyspace.Revision { return keyspace.Revision(n.floor.Load()) }

// Compacted returns the highest compacted revision of the cluster that the node has
// heard of, -1 if none.
func (n *Node) Compacted() keyspace.Revision { return keyspace.Revision(n.compacted.Load()) }

// heard notes that a revision was handed out.
func (n *Node) heard(rev keyspace.Revision) { raise(&n.floor, int64(rev)) }

// observe takes what every answer of the sequencer tells.
func (n *Node) observe(a keyspace.SequenceAnswer) {
	if a.Err != nil {
		return
	}
	n.heard(a.Current)
	n.heardCompacted(a.Compacted)
}

// heardCompacted notes the cluster's compacted revision and has all replicas looked
// after if it is news.
func (n *Node) heardCompacted(c keyspace.Revision) {
	if raise(&n.compacted, int64(c)) {
		n.metrics.compacted.Set(float64(n.Compacted()))
		n.maintenance.note(n.Replicas()...)
	}
}

// raise makes v at least to and says whether that changed it.
func raise(v *atomic.Int64, to int64) bool {
	for {
		old := v.Load()
		if to <= old {
			return false
		}
		if v.CompareAndSwap(old, to) {
			return true
		}
	}
}

// after calls f in a goroutine of its own once d has passed, unless the node stops
// before.
func (n *Node) after(d time.Duration, f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopped {
		return
	}
	a := &alarm{}
	n.timers[a] = struct{}{}
	n.wg.Add(1)
	a.t = n.cfg.Clock.AfterFunc(d, func() {
		defer n.wg.Done()
		n.mu.Lock()
		delete(n.timers, a)
		n.mu.Unlock()
		f()
	})
}

// begin calls f in a goroutine of its own, unless the node stops. f ends with the node's ctx.
func (n *Node) begin(f func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopped {
		return false
	}
	n.wg.Go(f)
	return true
}

func (n *Node) isDraining() bool {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.draining
}

// Stop ends the node's goroutines and answers every request that is under way.
// Replicas go on applying what their host gives them. It is called before the host
// stops.
func (n *Node) Stop() {
	n.mu.Lock()
	if n.stopped {
		n.mu.Unlock()
		return
	}
	n.stopped = true
	for a := range n.timers {
		if a.t.Stop() {
			n.wg.Done()
			delete(n.timers, a)
		}
	}
	n.mu.Unlock()
	n.cancel()
	n.pipes.Pool.Stop()
	for _, r := range n.Replicas() {
		r.stop()
	}
	n.wg.Wait()
}
