package shard

import (
	"context"
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
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/idalloc"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/load/heat"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
	"github.com/skeindb/skein/shard/rangefeed"
	"github.com/skeindb/skein/shard/removal"
	"github.com/skeindb/skein/shard/replicas"
)

// Sequencer allocates revisions; placement's client is one.
type Sequencer interface {
	// Sequence asks for req.Count consecutive revisions, or with Count 0 for the
	// current one. done is called exactly once, from any goroutine or within the call.
	// With an error nothing that may have been allocated is ever used.
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
	// Quarantine is as raftgroup.Host.Quarantine.
	Quarantine(g keyspace.GroupID, reason string)
	// KeepClosed is as raftgroup.Host.KeepClosed.
	KeepClosed(g keyspace.GroupID, self keyspace.ReplicaID, reason string)
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

// Config is what a Store is made of. All fields but Limits, Workers, Disk, Txns,
// Leases, Placed, Slow, Logger and Metrics are required.
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
	// Written is the version in which this node writes; nil for the newest.
	Written func() keyspace.Version
	// Placed knows the range map. Nil leaves replicas that were removed while they did not
	// listen.
	Placed replicas.Placed
	// Holds says that SetHeld is called. Until then no range is compacted.
	Holds bool
	// Bus reaches other nodes.
	Bus rangeapi.Caller
	// Disk is nil where the disk is never full.
	Disk   Disk
	Limits Limits
	// Workers is how many evaluations use the processor at a time. Default GOMAXPROCS. Others
	// may wait for the disk.
	Workers int
	// Slow gets the requests of other nodes that took long and were given up there. It must not block. Nil drops them.
	Slow    func(stages.Slow)
	Logger  *zap.Logger
	Metrics *Metrics
}

// Store holds the replicas of one node.
type Store struct {
	cfg         Config
	log         *zap.Logger
	metrics     *Metrics
	maintenance *maintenance
	pushes      *pushes
	unpins      *unpins
	lifecycle   *replicas.Manager
	meter       *load.Meter
	heat        *heat.Store
	recorder    *heat.Recorder
	feeds       *rangefeed.Server
	readers     eval.ReadShared
	cache       *eval.VersionCache
	ids         *idalloc.Allocator
	client      *rangeapi.Client
	admins      *AdminClient

	// floor is the highest revision that the node has heard of, compacted the highest
	// compacted revision of the cluster.
	floor, compacted atomic.Int64
	moves            moves
	// held is the lowest revision that somebody's hold keeps, keyspace.MaxRevision if nobody's does.
	held atomic.Int64
	// sequencerTerm is the highest term of a sequencer that the node has heard of.
	sequencerTerm atomic.Int64
	// removal waits for the removal of old versions on all nodes.
	removal removal.Waiter
	// pipes is what the pipelines of all replicas share.
	pipes pipeline.Shared
	// recorded are the records of requests that took long.
	recorded stages.Limit
	// locks is what the lock tables of all replicas share.
	locks locktable.Shared
	// reads bounds what requests hold of what they have read.
	reads *eval.ReadLimit

	// hashing holds a token while a part is hashed: many nodes may ask at once.
	hashing chan struct{}
	// cutting holds a token for each page of versions that is being read.
	cutting chan struct{}

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

// Replica returns the replica of the range on this node, nil where there is none.
func (s *Store) Replica(id keyspace.RangeID) *Replica {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.replicas[id]
}

// Replicas returns all replicas of this node, in no order.
func (s *Store) Replicas() []*Replica {
	s.mu.RLock()
	defer s.mu.RUnlock()
	all := make([]*Replica, 0, len(s.replicas))
	for _, r := range s.replicas {
		all = append(all, r)
	}
	return all
}

// Client returns the client that reaches this node by a function call and others
// over the bus.
func (s *Store) Client() *rangeapi.Client { return s.client }

// Admin returns the client for what changes, moves or describes replicas, here and on
// other nodes.
func (s *Store) Admin() *AdminClient { return s.admins }

// noSpace says why puts are refused, nil if they are not.
func (s *Store) noSpace() error {
	if s.cfg.Disk == nil || !s.cfg.Disk.Full() {
		return nil
	}
	return kverror.New(kverror.NoSpace, "the disk of node %s is full, or its store is above --quota-backend-bytes", s.cfg.Self)
}

// Floor returns the highest revision that the node has heard of.
func (s *Store) Floor() keyspace.Revision { return keyspace.Revision(s.floor.Load()) }

// Compacted returns the highest compacted revision of the cluster that the node has
// heard of, -1 if none.
func (s *Store) Compacted() keyspace.Revision { return keyspace.Revision(s.compacted.Load()) }

// heard notes that a revision was allocated.
func (s *Store) heard(rev keyspace.Revision) { raise(&s.floor, int64(rev)) }

// observe takes what every answer of the sequencer tells.
func (s *Store) observe(a keyspace.SequenceAnswer) {
	if a.Err != nil {
		return
	}
	s.heard(a.Current)
	raise(&s.sequencerTerm, int64(a.Term))
	s.heardCompacted(a.Compacted)
}

// heardTerm notes the term of a sequencer that another node has named. One that is far above what
// this node knows cannot be real, and no read would be answered any more.
func (s *Store) heardTerm(term uint64) {
	if term <= uint64(s.sequencerTerm.Load())+maxAhead {
		raise(&s.sequencerTerm, int64(term))
	}
}

// heardCompacted notes the cluster's compacted revision and has all replicas looked
// after if it is news.
func (s *Store) heardCompacted(c keyspace.Revision) {
	if raise(&s.compacted, int64(c)) {
		s.metrics.compacted.Set(float64(s.Compacted()))
		s.maintenance.note(s.Replicas()...)
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
func (s *Store) after(d time.Duration, f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	a := &alarm{}
	s.timers[a] = struct{}{}
	s.wg.Add(1)
	a.t = s.cfg.Clock.AfterFunc(d, func() {
		defer s.wg.Done()
		s.mu.Lock()
		delete(s.timers, a)
		s.mu.Unlock()
		f()
	})
}

// begin calls f in a goroutine of its own, unless the node stops. f ends with the node's ctx.
func (s *Store) begin(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	s.wg.Go(f)
	return true
}

func (s *Store) isDraining() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.draining
}
