package shard

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/sim/simclock"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// rig is three nodes in virtual time: real raft groups, wals and engines on
// crashable memory disks over a simulated network. Only the sequencer is
// the test's own, with a delay.
type rig struct {
	t     *testing.T
	rng   *rand.Rand
	net   *simbus.Network
	nodes []*rigNode
	boots uint64
	seq   rigSequencer
	// noLease turns leader leases off.
	noLease bool
	limits  Limits
	// leases are those of all nodes, nil where there are none.
	leases *rigLeases
	// maxLag is raftgroup's MaxLagBytes, 0 its default.
	maxLag int64
	// maxInflight is raftgroup's MaxGroupInflightBytes, 0 its default.
	maxInflight int64
	desc        keyspace.Descriptor
}

// rigSequencer allocates revisions to everybody, each answer after a delay.
type rigSequencer struct {
	mu sync.Mutex
	// Guarded by mu.
	last, compacted keyspace.Revision
	ids             keyspace.RangeID
	// failures is the share of requests that fail. Half of them fail behind an allocation, which
	// nobody will use. slow is the share that waits for a second.
	failures, slow float64
	rng            *rand.Rand
	wg             sync.WaitGroup
	// reported are the newest descriptors that were reported.
	reported map[keyspace.RangeID]keyspace.Descriptor
}

func (s *rigSequencer) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	s.mu.Lock()
	there := time.Duration(s.rng.Int64N(int64(2 * time.Millisecond)))
	back := time.Duration(s.rng.Int64N(int64(2 * time.Millisecond)))
	fails, lost := s.rng.Float64() < s.failures, s.rng.IntN(2) == 0
	if s.rng.Float64() < s.slow {
		back += time.Second
	}
	s.mu.Unlock()
	s.wg.Go(func() {
		time.Sleep(there)
		s.mu.Lock()
		a := keyspace.SequenceAnswer{Compacted: s.compacted}
		if req.Count > 0 && (!fails || lost) {
			a.First = s.last + 1
			s.last += keyspace.Revision(req.Count)
		}
		a.Current = s.last
		if fails {
			a = keyspace.SequenceAnswer{Err: kverror.New(kverror.Timeout, "the sequencer is away")}
		}
		s.mu.Unlock()
		time.Sleep(back)
		done(a)
	})
}

func (s *rigSequencer) RangeIDs(_ context.Context, n int) ([]keyspace.RangeID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]keyspace.RangeID, n)
	for i := range ids {
		s.ids++
		ids[i] = s.ids
	}
	return ids, nil
}

func (s *rigSequencer) ReportDescriptors(ds ...keyspace.Descriptor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reported == nil {
		s.reported = map[keyspace.RangeID]keyspace.Descriptor{}
	}
	for _, d := range ds {
		if old := s.reported[d.Range]; d.Newer(&old) {
			s.reported[d.Range] = d
		}
	}
}

// Descriptor implements replicas.Placed.
func (s *rigSequencer) Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, ok := s.reported[id]
	return d, ok
}

// Ranges implements replicas.Placed.
func (s *rigSequencer) Ranges() int { return 0 }

// At implements replicas.Placed.
func (s *rigSequencer) At(key []byte) (best keyspace.Descriptor, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.reported {
		if d.Span.Contains(key) && d.Generation > best.Generation {
			best, ok = d, true
		}
	}
	return best, ok
}

// rigNode is one node; what is below fs is nil while it is down.
type rigNode struct {
	r     *rig
	id    keyspace.NodeID
	fs    *simdisk.Disk
	clock *simclock.Clock

	// killer, if not nil, sees all that the node does to its disk and says to others.
	killer *killer

	// bootstrapped says that the node has had its first range created.
	bootstrapped bool

	bus    *simbus.Bus
	log    *wal.Log
	engine *engine.Engine
	host   *raftgroup.Host
	// registry has raftgroup's metrics of this run.
	registry *prometheus.Registry
	node     atomic.Pointer[Store]
}

func newShardRig(t *testing.T, seed uint64, faults simbus.Faults) *rig {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 3))
	r := &rig{t: t, rng: rng, net: simbus.New(seed, faults)}
	r.seq.last, r.seq.ids = 1, 1
	r.seq.rng = rand.New(rand.NewPCG(seed, 4))
	r.desc = keyspace.Descriptor{Range: 1, Generation: 1}
	for i := range 3 {
		id := keyspace.NodeID(i + 1)
		r.desc.Replicas = append(r.desc.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(id), Node: id})
		r.nodes = append(r.nodes, &rigNode{
			r: r, id: id, fs: simdisk.New(),
			clock: simclock.New(time.Duration(i)*time.Hour, 1+float64(i)*0.002),
		})
	}
	return r
}

func (n *rigNode) must(err error) {
	n.r.t.Helper()
	if err != nil {
		n.r.t.Fatalf("node %s: %v", n.id, err)
	}
}

func (n *rigNode) start() {
	r := n.r
	r.boots++
	boot := keyspace.BootID(r.boots)
	var err error
	fs := n.killer.disk(n)
	n.log, err = wal.Open(wal.Options{FS: fs, Dir: "wal", Clock: n.clock, SegmentBytes: 1 << 20})
	n.must(err)
	n.engine, err = engine.Open(engine.Options{FS: fs, Dir: "data", Clock: n.clock, BallastBytes: -1, LowSpaceBytes: -1})
	n.must(err)
	n.bus, err = r.net.NewBus(transport.Config{Cluster: 0xc1, Node: n.id, Boot: boot, Clock: n.clock})
	n.must(err)
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(r.rng.Uint32())
	}
	logger := zap.NewNop()
	if os.Getenv("SKEIN_TEST_LOG") != "" {
		logger = zaptest.NewLogger(r.t).With(zap.Stringer("node", n.id))
	}
	n.registry = prometheus.NewRegistry()
	n.host, err = raftgroup.NewHost(raftgroup.Config{
		Logger: logger, Metrics: raftgroup.NewMetrics(n.registry), Node: n.id, Boot: boot, Clock: n.clock, WAL: n.log, Engine: n.engine, Bus: n.killer.mouth(n),
		Workers: 1, Appliers: 1, NoLeaseReads: r.noLease, MaxLagBytes: r.maxLag, MaxGroupInflightBytes: r.maxInflight, Rand: rand.NewChaCha8(seed),
		Unknown: func(from keyspace.NodeID, g keyspace.GroupID, to keyspace.ReplicaID) {
			if s := n.node.Load(); s != nil {
				s.Unknown(from, g, to)
			}
		},
		Removed: func(g keyspace.GroupID, self keyspace.ReplicaID) {
			if s := n.node.Load(); s != nil {
				s.Removed(g, self)
			}
		},
	})
	n.must(err)
	cfg := Config{
		Self: n.id, Clock: n.clock, Engine: n.engine, Groups: HostGroups(n.host), Sequencer: &r.seq, IDs: &r.seq,
		Reporter: &r.seq, Placed: &r.seq, Bus: n.bus, Limits: r.limits, Workers: 2, Logger: logger,
	}
	if r.leases != nil {
		cfg.Leases = r.leases
	}
	store := NewStore(cfg)
	for _, p := range r.nodes {
		if p != n {
			n.bus.SetPeer(p.id, nil)
		}
	}
	n.host.RegisterHandlers(n.bus)
	store.RegisterHandlers(n.bus)
	n.must(n.bus.Start())
	n.host.Start()
	n.must(store.Open())
	n.engine.OnCorruption(store.BadTable)
	if n.bootstrapped = n.bootstrapped || store.Replica(1) != nil; !n.bootstrapped {
		n.must(store.Create(context.Background(), []keyspace.Descriptor{r.desc}))
		n.bootstrapped = true
	}
	n.node.Store(store)
}

// stop ends the node in order.
func (n *rigNode) stop() {
	store := n.node.Swap(nil)
	// Calls that clients sent through this node come back.
	time.Sleep(100 * time.Millisecond)
	store.Stop()
	n.must(n.bus.Close())
	n.must(n.host.Stop(context.Background()))
	n.must(n.engine.Flush(context.Background()))
	n.must(n.log.Close())
	n.must(n.engine.Close())
}

// crash ends the node as a power cut does: of what was not synced, nothing is left.
func (n *rigNode) crash() {
	store := n.node.Swap(nil)
	// First of all, or the node tells the others what only becomes durable behind the copy.
	n.r.net.Crash(n.id)
	disk := n.fs.Crash(0, nil)
	store.Stop()
	_ = n.bus.Close()
	_ = n.host.Stop(context.Background())
	_ = n.log.Close()
	_ = n.engine.Abort()
	n.fs = disk
}

func (r *rig) startAll() {
	for _, n := range r.nodes {
		n.start()
	}
}

func (r *rig) stopAll() {
	for _, n := range r.nodes {
		if n.node.Load() != nil {
			n.stop()
		}
	}
	r.seq.wg.Wait()
}

// route returns the range of a key and the nodes that take themselves for its
// leader, or all of them.
func (r *rig) route(key []byte) (keyspace.Descriptor, []*rigNode) {
	var best keyspace.Descriptor
	for _, n := range r.nodes {
		s := n.node.Load()
		if s == nil {
			continue
		}
		for _, p := range s.Replicas() {
			d := p.Descriptor()
			if d.Generation != 0 && d.Span.Contains(key) && d.Generation > best.Generation {
				best = d
			}
		}
	}
	var leaders []*rigNode
	for _, n := range r.nodes {
		if s := n.node.Load(); s != nil {
			if p := s.Replica(best.Range); p != nil && p.Leader().IsLeader {
				leaders = append(leaders, n)
			}
		}
	}
	// Two nodes may both believe that they lead. Ask sometimes the one first, sometimes the
	// other.
	if time.Now().UnixNano()/int64(time.Microsecond)%2 == 0 {
		slices.Reverse(leaders)
	}
	return best, leaders
}

// do sends a request as the gateway does: again where it was certainly not applied.
func (r *rig) do(ctx context.Context, key string, req *rangeapi.Request) (*rangeapi.Response, error) {
	var last error = kverror.NoLeader
	for attempt := 0; ctx.Err() == nil; attempt++ {
		d, leaders := r.route([]byte(key))
		for _, n := range leaders {
			s := n.node.Load()
			if s == nil {
				continue
			}
			q := *req
			q.Range, q.Generation = d.Range, d.Generation
			// Mostly from another node, so that the codec and the bus take part; sometimes on
			// the node itself, which may be cut off from all others.
			turn := int(time.Now().UnixNano() / int64(time.Millisecond))
			from := r.nodes[(int(n.id)+attempt+turn)%len(r.nodes)].node.Load()
			if from == nil {
				from = s
			}
			p, err := from.Client().Do(ctx, n.id, &q)
			if err == nil {
				return p, nil
			}
			last = err
			if kverror.Of(err).Retry() != kverror.RetryRouter {
				return nil, err
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, last
}

// leader waits until the range has a replica that serves, and returns its node.
func (r *rig) leader(id keyspace.RangeID) *rigNode {
	r.t.Helper()
	for range 1200 {
		for _, n := range r.nodes {
			if s := n.node.Load(); s != nil {
				if p := s.Replica(id); p != nil && p.Show().Serving {
					return n
				}
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	for _, n := range r.nodes {
		if s := n.node.Load(); s != nil {
			for _, p := range s.Replicas() {
				r.t.Logf("node %s: %+v", n.id, p.Show())
			}
		}
	}
	r.t.Fatalf("range %s has no leader within a minute", id)
	return nil
}

// agree waits until all replicas of all ranges have applied the same, and compares
// what they count and what they store.
func (r *rig) agree() {
	r.t.Helper()
	for _, s := range r.nodes[0].node.Load().List() {
		id := s.Descriptor.Range
		var states []*Status
		for range 600 {
			states = states[:0]
			same := true
			for _, n := range r.nodes {
				p := n.node.Load().Replica(id)
				if p == nil {
					same = false
					break
				}
				st := p.Show()
				states = append(states, st)
				same = same && st.Applied.Index == states[0].Applied.Index
			}
			if same {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		var sums []string
		for i, st := range states {
			h, err := r.nodes[i].node.Load().Replica(id).HashAt(st.LastRevision, st.Compacted)
			if err != nil {
				r.t.Fatal(err)
			}
			sums = append(sums, fmt.Sprintf("%s gen %d index %d revision %d hash %s keys %d counted %t stored %x",
				st.Descriptor.Span, st.Descriptor.Generation, st.Applied.Index, st.LastRevision, st.Hash, st.Keys, st.Counted, h))
		}
		for _, s := range sums {
			if len(sums) != len(r.nodes) || s != sums[0] {
				r.t.Fatalf("range %s: replicas disagree:\n%q", id, sums)
			}
		}
	}
}

func virtually(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}
