package shard

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
	"github.com/skeindb/skein/shard/rangefeed"
)

// Sequencer hands out revisions; placement's client is one.
type Sequencer interface {
	// Sequence asks for req.Count consecutive revisions, or with Count 0 for the
	// current one. done is called exactly once, from any goroutine or within the call.
	// With an error nothing that may have been handed out is ever used.
	Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer))
}

// IDs hands out range ids that were never used; placement's client does.
type IDs interface {
	RangeIDs(ctx context.Context, n int) ([]keyspace.RangeID, error)
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
	bootstrap(b *engine.Batch, g keyspace.GroupID, replicas []keyspace.Replica, payload []byte) error
	// finishRemovals is raftgroup.Host's.
	finishRemovals(ctx context.Context, del func(b *engine.Batch, g keyspace.GroupID, a *engine.Applied) error) error
	open(g keyspace.GroupID, self keyspace.ReplicaID, at raftgroup.Position, sm raftgroup.StateMachine) (group, error)
	// remove is raftgroup.Host's.
	remove(ctx context.Context, g keyspace.GroupID, del func(b *engine.Batch) error) error
}

// HostGroups opens the replicas' groups on a host.
func HostGroups(h *raftgroup.Host) Groups { return hostGroups{h} }

type hostGroups struct{ h *raftgroup.Host }

func (g hostGroups) bootstrap(b *engine.Batch, id keyspace.GroupID, replicas []keyspace.Replica, payload []byte) error {
	return g.h.Bootstrap(b, id, replicas, payload)
}

func (g hostGroups) remove(ctx context.Context, id keyspace.GroupID, del func(b *engine.Batch) error) error {
	return g.h.Remove(ctx, id, del)
}

func (g hostGroups) finishRemovals(ctx context.Context, del func(b *engine.Batch, g keyspace.GroupID, a *engine.Applied) error) error {
	return g.h.FinishRemovals(ctx, del)
}

func (g hostGroups) open(id keyspace.GroupID, self keyspace.ReplicaID, at raftgroup.Position, sm raftgroup.StateMachine) (group, error) {
	rg, err := g.h.Open(id, self, at, sm)
	if err != nil {
		return nil, err
	}
	return rg, nil
}

// Config is what a Node is made of. All fields but Limits, Workers, Disk, Txns,
// Leases, Placed, Logger and Metrics are required.
type Config struct {
	Self      keyspace.NodeID
	Clock     clock.Clock
	Engine    *engine.Engine
	Groups    Groups
	Sequencer Sequencer
	IDs       IDs
	Reporter  Reporter
	// Txns pushes transactions over several ranges; nil where there are none.
	Txns TxnPusher
	// Leases registers ranges with leases; nil where there is no lease.
	Leases Leases
	// Placed knows the range map. Where it is nil, a replica that was removed while it did
	// not listen stays.
	Placed Placed
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
	cfg     Config
	log     *zap.Logger
	metrics *Metrics
	keeper  *keeper
	pushes  *pushes
	unpins  *unpins
	opener  *opener
	leaver  *leaver
	meter   *load.Meter
	feeds   *rangefeed.Server
	pages   *eval.PageCounts
	cache   *eval.VersionCache
	ids     *idStock
	client  *rangeapi.Client
	admins  *AdminClient

	// floor is the highest revision that the node has heard of, compacted the highest
	// compacted revision of the cluster.
	floor, compacted atomic.Int64
	// removalTurn is nil where nobody waits for removal.
	removalTurn atomic.Pointer[removalTurn]
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
	claims   map[keyspace.RangeID]keyspace.Span
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
		cfg: cfg, log: cfg.Logger, metrics: cfg.Metrics, pages: eval.NewPageCounts(cfg.Limits.Pages),
		replicas: make(map[keyspace.RangeID]*Replica), claims: make(map[keyspace.RangeID]keyspace.Span),
		timers: make(map[*alarm]struct{}), cache: eval.NewVersionCache(cfg.Limits.VersionCacheBytes),
	}
	n.reads.Node, n.reads.OneBytes, n.reads.AllBytes = cfg.Self, cfg.Limits.ScanBytes, cfg.Limits.ReadBytes
	n.compacted.Store(-1)
	n.metrics.compacted.Set(-1)
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.pipes = n.newPipes()
	n.pushes = newPushes(n)
	n.unpins = &unpins{n: n, held: map[*Replica]struct{}{}}
	n.leaver = newLeaver(n)
	n.meter = load.NewMeter(load.Config{
		Clock: cfg.Clock, Store: loadStore{cfg.Engine}, MaxBytes: cfg.Limits.RangeMaxBytes, MaxLoad: cfg.Limits.RangeSplitLoad,
		Some: n.someLoads, Metrics: cfg.Metrics.load,
	})
	n.feeds = newFeeds(n)
	n.keeper, n.opener, n.ids = newKeeper(n), newOpener(n), newIDStock(cfg.IDs, cfg.Clock)
	n.client = rangeapi.NewClient(cfg.Self, n, cfg.Bus)
	n.admins = &AdminClient{self: cfg.Self, local: n, bus: cfg.Bus}
	n.pipes.Pool.Start(cfg.Workers)
	n.wg.Go(func() { n.keeper.run(n.ctx) })
	n.wg.Go(func() { n.ids.run(n.ctx) })
	n.wg.Go(n.runMeter)
	n.wg.Go(func() { n.leaver.run(n.ctx) })
	n.wg.Go(func() { n.opener.openChildren(n.ctx) })
	n.wg.Go(func() { n.opener.openOthers(n.ctx) })
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
func (n *Node) Open() error {
	if err := n.cfg.Groups.finishRemovals(n.ctx, n.deleteData); err != nil {
		return fmt.Errorf("shard: open the replicas: %w", err)
	}
	type stored struct {
		g keyspace.GroupID
		a engine.Applied
	}
	var all []stored
	err := n.cfg.Engine.VisitApplied(func(g keyspace.GroupID, a engine.Applied) error {
		if !g.IsSystem() {
			all = append(all, stored{g, a})
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("shard: open the replicas: %w", err)
	}
	txns, err := command.LoadAllTxns(n.cfg.Engine)
	if err != nil {
		return fmt.Errorf("shard: open the replicas: %w", err)
	}
	for i := range all {
		id := all[i].g.Range()
		if err := n.openStored(id, &all[i].a, txns[id]); err != nil {
			return err
		}
	}
	return nil
}

// openStored opens the replica of an applied record.
func (n *Node) openStored(id keyspace.RangeID, a *engine.Applied, txns command.TxnState) error {
	rec, err := command.DecodeRecord(a.Payload)
	if err != nil {
		return fmt.Errorf("shard: range %s: applied record at index %d: %w", id, a.Index, err)
	}
	var self keyspace.ReplicaID
	for _, m := range a.Replicas {
		if m.Node == n.cfg.Self {
			self = m.ID
		}
	}
	gone, err := n.goneStored(&rec, self)
	if err != nil {
		return err
	}
	if gone {
		// The replica has applied that it is no member any more, or another one has taken its
		// place, and the node went down before it was removed. Its span is nobody else's until
		// it is.
		n.claimChild(id, rec.Span)
		n.leaver.note(id)
		return nil
	}
	r := n.newReplica(id)
	r.applying = applyState{rec: rec, confIndex: a.ConfIndex, replicas: a.Replicas, term: a.Term, txns: txns}
	r.rec, r.confIndex, r.replicas = rec, a.ConfIndex, a.Replicas
	r.applying.advance(true)
	r.resolved = r.applying.resolved
	r.position = raftgroup.Position{Index: a.Index, Term: a.Term}
	r.live.Reset(rec.LastRevision)
	r.loadTableLocked(&txns)
	if r.removedTo, err = n.loadRemoval(&rec); err != nil {
		return err
	}
	n.heard(rec.LastRevision)
	return n.open(r, self)
}

// goneStored says whether a replica that the engine holds is to be removed, and not opened:
// no member of its group is here, it is noted to have left, or the target of the merge for
// which it is frozen has absorbed it by a snapshot.
func (n *Node) goneStored(rec *command.Record, self keyspace.ReplicaID) (bool, error) {
	left, err := n.left(rec.RangeID)
	if err != nil || self <= left {
		return self <= left, err
	}
	if !rec.Merge.Frozen() {
		return false, nil
	}
	target, here, err := n.record(rec.Merge.Other)
	if err != nil || !here || target.Generation <= rec.Generation || !target.Span.Contains(rec.Span.Start) {
		return false, err
	}
	return true, n.note(func(b *engine.Batch) error { return setLeft(b, rec.RangeID, self) })
}

// note commits what write writes.
func (n *Node) note(write func(b *engine.Batch) error) error {
	b := n.cfg.Engine.NewBatch()
	if err := write(b); err != nil {
		return errors.Join(err, b.Close())
	}
	return b.Commit()
}

// loadRemoval returns up to where old versions of the range are gone. What is known from
// before it absorbed another range says nothing of that one's keys.
func (n *Node) loadRemoval(rec *command.Record) (keyspace.Revision, error) {
	v, ok, err := n.cfg.Engine.Get(removalKey(rec.RangeID))
	if err != nil || !ok {
		return 0, err
	}
	rev, g, err := decodeRemoval(v)
	if err != nil {
		return 0, fmt.Errorf("shard: range %s: the removed revision: %w", rec.RangeID, err)
	}
	if g < rec.Absorbed {
		return 0, nil
	}
	return rev, nil
}

// forgetRemoval drops the note of how far old versions are gone, for good: other data
// takes their place, and an ingest of it may become durable before what is committed
// here.
func (n *Node) forgetRemoval(id keyspace.RangeID) error {
	b := n.cfg.Engine.NewBatch()
	err := b.Delete(removalKey(id))
	if err == nil {
		err = b.Commit()
	}
	if err == nil && !mutation.Is(mutation.SnapshotNotDurable) {
		err = n.cfg.Engine.Flush(n.ctx)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("shard: range %s: forget how far old versions are removed: %w", id, err), b.Close())
	}
	return nil
}

// deleteData writes the deletion of what the node has of a removed replica. Its user
// keys stay where another replica holds a part of its span by now: a snapshot for the
// rest clears it.
func (n *Node) deleteData(b *engine.Batch, g keyspace.GroupID, a *engine.Applied) error {
	local := engine.GroupLocalSpan(g)
	if err := b.DeleteRange(local.Lower, local.Upper); err != nil || g.IsSystem() {
		return err
	}
	if err := b.Delete(removalKey(g.Range())); err != nil || a == nil {
		return err
	}
	for _, m := range a.Replicas {
		if m.Node != n.cfg.Self {
			continue
		}
		if err := setLeft(b, g.Range(), m.ID); err != nil {
			return err
		}
	}
	rec, err := command.DecodeRecord(a.Payload)
	if err != nil {
		return fmt.Errorf("shard: range %s: applied record at index %d: %w", g.Range(), a.Index, err)
	}
	held, err := n.heldByOthers(g, rec.Span)
	if err != nil || held {
		return err
	}
	txns, err := command.LoadTxns(n.cfg.Engine, g.Range())
	if err != nil {
		return err
	}
	return deleteSpan(b, rec.Span, &txns)
}

// heldByOthers says whether a part of the span is that of another group's replica here, by the
// engine's records.
func (n *Node) heldByOthers(g keyspace.GroupID, span keyspace.Span) (held bool, err error) {
	err = n.cfg.Engine.VisitApplied(func(o keyspace.GroupID, a engine.Applied) error {
		if o == g || o.IsSystem() {
			return nil
		}
		other, err := command.DecodeRecord(a.Payload)
		if err == nil && other.Span.Overlaps(span) {
			err = n.holds(&other, &a, &held)
		}
		return err
	})
	return held, err
}

// holds sets held unless the replica of an applied record has left this node.
func (n *Node) holds(rec *command.Record, a *engine.Applied, held *bool) error {
	left, err := n.left(rec.RangeID)
	for _, m := range a.Replicas {
		*held = *held || m.Node == n.cfg.Self && m.ID > left
	}
	return err
}

// deleteSpan writes the deletion of the keys of a span and of their places in the index
// of leases.
func deleteSpan(b *engine.Batch, span keyspace.Span, txns *command.TxnState) error {
	data := engine.VersionedSpan(span)
	err := b.DeleteRange(data.Lower, data.Upper)
	for lease := range txns.Attachments {
		if s := engine.LeaseSpan(lease, span); err == nil {
			err = b.DeleteRange(s.Lower, s.Upper)
		}
	}
	return err
}

func (n *Node) newReplica(id keyspace.RangeID) *Replica {
	r := &Replica{
		node: n, id: id, store: eval.NewEngineStore(n.cfg.Engine), locks: locktable.New(&n.locks),
		log: n.log.WithLazy(zap.Stringer("range", id)), epochs: eval.NewKeyEpochs(n.cache),
	}
	r.pipe.Init(pipeline.Config{
		Shared: &n.pipes, Range: id, Log: r.log, Env: (*pipelineEnv)(r), Mu: &r.mu, Record: &r.rec, Locks: &r.locks, Epochs: &r.epochs,
	})
	if n.isDraining() {
		r.pipe.Drain()
	}
	r.feeds.Init(n.feeds, id, &r.mu, feedSource{r})
	r.load = n.meter.Range(id, &r.mu, loadOwner{r}, r.log)
	return r
}

// open opens the replica's group and lets requests find it.
func (n *Node) open(r *Replica, self keyspace.ReplicaID) error {
	g, err := n.cfg.Groups.open(r.id.Group(), self, r.position, r)
	if err != nil {
		return fmt.Errorf("shard: open range %s as replica %d: %w", r.id, self, err)
	}
	r.opened(g)
	n.mu.Lock()
	n.replicas[r.id] = r
	stopped, draining := n.stopped, n.draining
	n.metrics.replicas.Set(float64(len(n.replicas)))
	n.mu.Unlock()
	if draining {
		r.mu.Lock()
		r.pipe.Drain()
		r.mu.Unlock()
	}
	if stopped {
		r.stop()
	}
	n.keeper.note(r)
	r.mu.Lock()
	r.load.Measure()
	r.mu.Unlock()
	n.ids.want()
	return nil
}

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
		n.keeper.note(n.Replicas()...)
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
