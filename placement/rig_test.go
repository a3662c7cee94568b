package placement

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/sim/simclock"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// rig is a cluster of whole placement nodes in virtual time: real raft groups, wals
// and engines on crashable memory disks, over a simulated network.
type rig struct {
	t         *testing.T
	rng       *rand.Rand
	net       *simbus.Network
	bootstrap fsm.Bootstrap
	nodes     []*rigNode
	boots     uint64
	// noLease turns leader leases off.
	noLease bool
	// maxLag is the host's MaxLagBytes, 0 its default.
	maxLag int64
	// mover returns who executes operations; nil is nobody.
	mover func() driver.Mover
	// deadAfter is the services' NodeDeadAfter, 0 its default.
	deadAfter time.Duration
	// patience is the services' OperationPatience.
	patience time.Duration
	// mergeAfter is the services' RangeMergeAfter, 0 its default.
	mergeAfter time.Duration
	// killer, if not nil, may end a node at one of its steps.
	killer *killer
	// rangeMaxBytes and rangeSplitLoad are the services', 0 their defaults.
	rangeMaxBytes, rangeSplitLoad int64
	// processors are the services' Processors.
	processors func() (time.Duration, float64)
	// measurer returns what a node measures; where it is nil, gauges have it.
	measurer func(keyspace.NodeID) driver.Measurer
	gauges   map[keyspace.NodeID]*gauge
	// tick is the hosts' TickInterval, 0 its default. Sessions are pinged every four ticks.
	tick time.Duration
	// written is the version in which the nodes write, at least OldestVersion.
	written atomic.Uint32
}

// rigNode is one node; what is below fs is nil while it is down.
type rigNode struct {
	r     *rig
	id    keyspace.NodeID
	fs    *simdisk.Disk
	clock *simclock.Clock

	bus     *simbus.Bus
	log     *wal.Log
	engine  *engine.Engine
	host    *raftgroup.Host
	service *Service
	client  *Client
	// current is client for those who run beside the nemesis.
	current atomic.Pointer[Client]
	// views is what it knows of rights, nil unless takeViews was called.
	views *nodeView
	// leases are those of this node's service; full is what it hears of the disk.
	leases *clocklessLeases
	ending sync.WaitGroup
	full   atomic.Bool
	// deaf are the nodes, by bit, that are pretended to hear hardly any other, by what this one
	// is told.
	deaf atomic.Uint64
	// closed says that no replica of the placement group is opened here, whoever speaks to it.
	closed atomic.Bool
	// bootstrapped says that it has written the bootstrap state once.
	bootstrapped bool
	// undoBootstrap has it delete that state, since the cluster says that the group has moved.
	undoBootstrap bool

	mu sync.Mutex
	// created, guarded by mu, are the ranges that were created here.
	created map[keyspace.RangeID]int
	// refuse makes CreateRanges fail that many times.
	refuse int
}

// central is the node's ServiceOptions.Central.
func (n *rigNode) central(id keyspace.NodeID) bool {
	return n.deaf.Load()>>id&1 == 0 && n.host.Connected(id)
}

// deafen has these nodes pretended to hear hardly any other, and no others.
func (r *rig) deafen(ids ...keyspace.NodeID) {
	bits := uint64(0)
	for _, id := range ids {
		bits |= 1 << id
	}
	for _, n := range r.nodes {
		n.deaf.Store(bits)
	}
}

func newRig(t *testing.T, seed uint64, nodes int, faults simbus.Faults, splits ...string) *rig {
	t.Helper()
	r := &rig{t: t, rng: rand.New(rand.NewPCG(seed, 7)), net: simbus.New(seed, faults), patience: 30 * time.Second}
	r.bootstrap.Cluster = 0xc1
	for _, k := range splits {
		r.bootstrap.SplitKeys = append(r.bootstrap.SplitKeys, []byte(k))
	}
	for i := range nodes {
		id := keyspace.NodeID(i + 1)
		r.bootstrap.Nodes = append(r.bootstrap.Nodes, fsm.Node{ID: id, Name: fmt.Sprintf("n%d", id), PeerURLs: []string{"http://n"}})
		r.nodes = append(r.nodes, &rigNode{
			r: r, id: id, fs: simdisk.New(), created: map[keyspace.RangeID]int{},
			clock: simclock.New(time.Duration(i)*time.Hour, 1+float64(i)*0.002),
		})
	}
	t.Cleanup(func() {
		for _, n := range r.nodes {
			if n.up() {
				n.crash()
			}
		}
	})
	return r
}

func (r *rig) startAll() {
	for _, n := range r.nodes {
		n.start()
	}
}

// CreateRanges implements RangeControl for all nodes.
func (r *rig) CreateRanges(_ context.Context, node keyspace.NodeID, ds []keyspace.Descriptor) error {
	n := r.nodes[node-1]
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refuse > 0 {
		n.refuse--
		return fmt.Errorf("node %s does not want to", node)
	}
	for i := range ds {
		n.created[ds[i].Range]++
	}
	return nil
}

func (n *rigNode) up() bool { return n.client != nil }

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
	files := r.killer.files(n)
	var err error
	n.log, err = wal.Open(wal.Options{FS: files, Dir: "wal", Clock: n.clock, SegmentBytes: 256 << 10})
	n.must(err)
	n.engine, err = engine.Open(engine.Options{FS: files, Dir: "data", Clock: n.clock, BallastBytes: -1, LowSpaceBytes: -1})
	n.must(err)
	bus := transport.Config{Cluster: r.bootstrap.Cluster, Node: n.id, Boot: boot, Clock: n.clock}
	if r.tick > 0 {
		bus.PingInterval, bus.MaxMissedPings = 4*r.tick, 2
	}
	n.bus, err = r.net.NewBus(bus)
	n.must(err)
	var service *Service // before the bus brings anything
	n.host, err = raftgroup.NewHost(raftgroup.Config{
		Node: n.id, Boot: boot, Clock: n.clock, WAL: n.log, Engine: n.engine, Bus: r.killer.mouth(n),
		Workers: 1, Appliers: 1, TickInterval: r.tick, NoLeaseReads: r.noLease, MaxLagBytes: r.maxLag, Rand: newSeedReader(r.rng),
		Unknown: func(from keyspace.NodeID, _ keyspace.GroupID, to keyspace.ReplicaID) {
			if !n.closed.Load() {
				service.Unknown(from, to)
			}
		},
		Removed: func(keyspace.GroupID, keyspace.ReplicaID) { service.Removed() },
	})
	n.must(err)
	if !n.bootstrapped {
		n.must(WriteBootstrap(r.t.Context(), n.engine, n.host, &r.bootstrap, n.id))
		n.bootstrapped = true
	}
	linger := time.Duration(0)
	if n.leases != nil {
		linger = n.leases.linger
	}
	n.leases = &clocklessLeases{linger: linger, wait: &n.ending}
	var mover driver.Mover
	if r.mover != nil {
		mover = r.killer.hands(n, r.mover())
	}
	merger, _ := mover.(driver.Merger)
	n.service, err = NewService(ServiceOptions{
		Mover: mover, Merger: merger, OperationPatience: r.patience, NodeDeadAfter: r.deadAfter, RangeMergeAfter: r.mergeAfter,
		RangeMaxBytes: r.rangeMaxBytes, RangeSplitLoad: r.rangeSplitLoad, Processors: r.processors,
		Self: n.id, Boot: boot, Clock: n.clock, Engine: n.engine, Control: r, Alive: n.host.Liveness, Central: n.central, BootOf: n.host.BootOf, Bus: n.bus,
		LeaseObserver: n.leases, LeaseTimes: n.leases, MinLeaseTTL: 2, Full: n.full.Load,
	})
	n.must(err)
	service = n.service
	n.leases.service = func() *Service { return service }
	var peers []keyspace.NodeID
	for _, p := range r.nodes {
		peers = append(peers, p.id)
		n.bus.SetPeer(p.id, nil)
	}
	n.host.RegisterHandlers(n.bus)
	n.service.RegisterHandlers(r.killer.ears(n))
	if n.undoBootstrap {
		n.undoBootstrap = false
		n.must(n.service.UndoBootstrap(r.t.Context(), n.host, 0))
	}
	n.must(n.host.FinishRemovals(r.t.Context(), func(b *engine.Batch, g keyspace.GroupID) error {
		span := engine.GroupLocalSpan(g)
		return b.DeleteRange(span.Lower, span.Upper)
	}))
	n.must(n.bus.Start())
	n.host.Start()
	n.must(n.service.Open(n.host))
	n.service.Start()
	var measurer driver.Measurer = r.gaugeOf(n.id)
	if r.measurer != nil {
		measurer = r.measurer(n.id)
	}
	n.client = NewClient(ClientOptions{
		Self: n.id, Boot: boot, Service: n.service, Clock: n.clock, Bus: n.bus, Peers: peers, Measurer: measurer,
		Written: func() keyspace.Version {
			return keyspace.Version(max(r.written.Load(), uint32(keyspace.OldestVersion)))
		},
	})
	n.client.Start()
	n.current.Store(n.client)
}

// newSeedReader gives the host's random numbers a seed of their own.
func newSeedReader(rng *rand.Rand) *rand.ChaCha8 {
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(rng.Uint32())
	}
	return rand.NewChaCha8(seed)
}

// stop ends the node in order, except for Shutdown.
func (n *rigNode) stop() {
	n.current.Store(nil)
	n.client.Stop()
	n.service.Stop()
	n.ending.Wait()
	n.must(n.bus.Close())
	n.must(n.host.Stop(context.Background()))
	n.must(n.engine.Flush(context.Background()))
	n.must(n.log.Close())
	n.must(n.engine.Close())
	n.down()
}

func (n *rigNode) down() {
	n.client, n.service, n.host, n.bus, n.log, n.engine = nil, nil, nil, nil, nil, nil
}

// crash ends the node as a power cut does: of what was not synced, nothing is left.
func (n *rigNode) crash() {
	n.current.Store(nil)
	// First of all, or the node tells the others what only becomes durable behind the copy.
	n.r.net.Crash(n.id)
	disk := n.fs.Crash(0, nil)
	n.client.Stop()
	n.service.Stop()
	n.ending.Wait()
	_ = n.bus.Close()
	_ = n.host.Stop(context.Background())
	_ = n.log.Close()
	_ = n.engine.Abort()
	n.fs = disk
	n.down()
}

// stopAllAtOnce is SIGTERM for every node at the same moment.
func (r *rig) stopAllAtOnce() {
	var wg sync.WaitGroup
	for _, n := range r.nodes {
		if !n.up() {
			continue
		}
		wg.Go(func() {
			time.Sleep(time.Duration(n.id) * 30 * time.Millisecond) // the pipelines close
			if err := n.service.Shutdown(context.Background()); err != nil {
				r.t.Logf("node %s: %v", n.id, err)
			}
			n.stop()
		})
	}
	wg.Wait()
}

// leader waits for a leader that serves and returns its node.
func (r *rig) leader() *rigNode {
	for range 600 {
		for _, n := range r.nodes {
			if n.up() && n.service.machine.leaderState().Ready {
				return n
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	r.t.Fatal("no leader within 30 s")
	return nil
}

// sequence asks at one node and waits.
func (n *rigNode) sequence(count int) keyspace.SequenceAnswer {
	ch := make(chan keyspace.SequenceAnswer, 1)
	n.client.Sequence(keyspace.SequenceRequest{Range: 1, Generation: 1, Count: count}, func(a keyspace.SequenceAnswer) { ch <- a })
	return <-ch
}

// virtually runs a test in virtual time.
func virtually(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// memoryEngine returns an engine on a memory disk.
func memoryEngine(t testing.TB) *engine.Engine {
	t.Helper()
	e, err := engine.Open(engine.Options{FS: simdisk.New(), Dir: "data", Clock: clock.System(), BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}
