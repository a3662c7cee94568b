package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/sim/simclock"
	"github.com/skeindb/skein/transport"
)

// calm is the network when nothing is wrong.
var calm = simbus.Faults{Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 400 * time.Microsecond}}

// cluster is the simulated machines and what runs on them.
type cluster struct {
	cfg      Config
	time     clock.Clock // the bubble's
	start    clock.Time
	net      *simbus.Network
	founders []placement.Node
	machines []*machine
	trace    *Trace
	leases   leasePool

	// stores is held for reading by who reads the store of a node that runs, and for
	// writing by who takes a node from its machine.
	stores sync.RWMutex

	mu sync.Mutex
	// Guarded by mu: how many snapshots the nodes that are gone had installed, and how
	// often they had cut followers off.
	snapshots, cutOffs int
}

// over notes what a node has done that is no more.
func (c *cluster) over(r *run) {
	snapshots, cutOffs := r.count(snapshotsReceived), r.count(followersCutOff)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snapshots += snapshots
	c.cutOffs += cutOffs
}

// What the nodes count.
const (
	snapshotsReceived = "skein_raftgroup_snapshots_received_total"
	followersCutOff   = "skein_raftgroup_cut_offs_total"
)

// machine is one simulated computer: it outlives the node that runs on it.
type machine struct {
	c     *cluster
	id    keyspace.NodeID
	clock *simclock.Clock
	rate  float64
	// shortLog says that this machine's nodes keep as little log as they can.
	shortLog bool

	mu sync.Mutex
	// Guarded by mu. run is nil while the machine is down.
	disk *disk
	run  *run
	// lost says that the machine never comes back.
	lost bool
}

// run is one run of a node, from its start to its end.
type run struct {
	core *node.Core
	// ctx ends in the moment of the crash: what a client of this gateway hears later
	// it has not heard.
	ctx  context.Context
	kill context.CancelFunc
	// metrics are the node's.
	metrics *prometheus.Registry

	mu sync.Mutex
	// Guarded by mu: how many client calls are under way, and whether a clean stop has
	// begun, which is told at idle when the last one ends.
	calls    int
	stopping bool
	idle     chan struct{}
}

// count returns the value of one of the node's counters.
func (r *run) count(name string) (n int) {
	families, err := r.metrics.Gather()
	if err != nil {
		panic(fmt.Sprintf("sim: metrics: %v", err))
	}
	for _, f := range families {
		if f.GetName() == name {
			n = int(f.GetMetric()[0].GetCounter().GetValue())
		}
	}
	return n
}

// enter begins a client's call; false says that the gateway takes none any more.
func (r *run) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		return false
	}
	r.calls++
	return true
}

// leave ends it.
func (r *run) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls--; r.stopping && r.calls == 0 {
		close(r.idle)
	}
}

// serveTimeout is how long a clean stop waits for the clients' calls, as a Node's.
const serveTimeout = 5 * time.Second

// stop ends a node in order: no calls any more, those under way get their time.
func (r *run) stop(c *cluster) error {
	r.mu.Lock()
	r.stopping = true
	if r.calls == 0 {
		close(r.idle)
	}
	r.mu.Unlock()
	t := c.time.AfterFunc(serveTimeout, r.kill)
	defer t.Stop()
	<-r.idle
	err := r.core.Stop(context.Background())
	r.kill()
	c.over(r)
	return err
}

func newCluster(cfg Config, rng *rand.Rand, trace *Trace) *cluster {
	c := &cluster{cfg: cfg, time: clock.Virtual(), trace: trace, net: simbus.New(cfg.Seed, calm)}
	c.start = c.time.Now()
	long := rng.IntN(cfg.Nodes)
	for i := range cfg.Nodes {
		id := keyspace.NodeID(i + 1)
		c.founders = append(c.founders, placement.Node{
			ID: id, Name: fmt.Sprintf("n%d", id), PeerURLs: []string{fmt.Sprintf("http://n%d:2380", id)},
		})
		rate := 1 + (rng.Float64()-0.5)*2*maxDrift
		m := &machine{c: c, id: id, rate: rate, clock: simclock.New(time.Duration(rng.Int64N(int64(time.Hour))), rate)}
		m.disk = newDisk(vfs.NewCrashableMem(), m.clock, rand.New(rand.NewPCG(cfg.Seed, 1000+uint64(id))))
		m.disk.lies = cfg.plant.noSync
		m.shortLog = cfg.ShortLogs && i != long
		c.machines = append(c.machines, m)
	}
	return c
}

// maxDrift is how far the rate of a clock may be from that of the world: two
// clocks then differ by less than raftgroup's default of 1 %.
const maxDrift = 0.004

// elapsed is the virtual time since the cluster began.
func (c *cluster) elapsed() time.Duration { return c.time.Now().Sub(c.start) }

// sleep waits in virtual time. There is nothing that could end it early: bubbles
// end when everything in them has.
func (c *cluster) sleep(d time.Duration) { _ = clock.Sleep(context.Background(), c.time, d) }

func (c *cluster) logf(format string, args ...any) {
	c.trace.Add(c.elapsed(), fmt.Sprintf(format, args...))
}

// runs returns the runs of all machines that are up.
func (c *cluster) runs() map[*machine]*run {
	up := map[*machine]*run{}
	for _, m := range c.machines {
		if r := m.current(); r != nil {
			up[m] = r
		}
	}
	return up
}

func (m *machine) current() *run {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.run
}

// boot starts the node. Cores of a cluster that is new are to be started at the
// same time.
func (m *machine) boot() error {
	m.mu.Lock()
	d, done := m.disk, m.run != nil || m.lost
	m.mu.Unlock()
	if done {
		return nil
	}
	reg := prometheus.NewRegistry()
	o := node.Options{
		Cluster: 0xc1, Self: m.id, Founders: m.c.founders, SplitKeys: m.c.cfg.splitKeys(), PlacementReplicas: m.c.cfg.PlacementReplicas,
		FS: d, DataDir: dataDir, WALDir: walDir, Clock: m.clock,
		NewBus: func(c transport.Config) (node.Bus, error) {
			b, err := m.c.net.NewBus(c)
			if err != nil {
				return nil, err // not a typed nil
			}
			if wrap := m.c.cfg.plant.bus; wrap != nil {
				return wrap(b), nil
			}
			return b, nil
		},
		Heartbeat: election / 10, Election: election, RequestTimeout: requestTimeout,
		MaxRequestBytes: 1 << 20, MaxTxnOps: 128, MemoryBytes: 96 << 20, WALSegmentBytes: 1 << 20,
		Logger: m.logger(), Registry: reg,
	}
	if m.c.cfg.Lose > 0 {
		o.NodeDeadAfter = deadAfter
	}
	if m.shortLog {
		o.WALSegmentBytes, o.MaxWALBytes = 16<<10, 16<<10
	}
	core, err := node.Open(context.Background(), o)
	if err != nil {
		return fmt.Errorf("sim: start node %s: %w", m.id, err)
	}
	r := &run{core: core, idle: make(chan struct{}), metrics: reg}
	r.ctx, r.kill = context.WithCancel(context.Background())
	m.mu.Lock()
	m.run = r
	m.mu.Unlock()
	m.c.logf("node %s serves", m.id)
	if m.isLost() { // since it began to start
		m.c.crash(0, m)
	}
	return nil
}

// election is the nodes' election timeout, and so the length of promises and leases.
const election = time.Second

// requestTimeout is etcd's for that.
const requestTimeout = 7 * time.Second

func (m *machine) logger() *zap.Logger { return m.c.trace.logger(m.c.elapsed, m.c.cfg.LogLevel) }

// bootAll starts all machines that are down.
func (c *cluster) bootAll() error {
	errs := make([]error, len(c.machines))
	var wg sync.WaitGroup
	for i, m := range c.machines {
		if m.current() == nil {
			wg.Go(func() { errs[i] = m.boot() })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// crash cuts the power of some machines in one moment and returns when their nodes
// are gone. Of what the disks have not synced each block is left with a
// probability of so many percent.
//
// The order is what makes it a moment: nothing is heard from a node after it was
// killed, and nothing that it said before depends on what its disk did later.
func (c *cluster) crash(keepPercent int, ms ...*machine) {
	var dying []*run
	c.stores.Lock()
	for _, m := range ms {
		m.mu.Lock()
		if m.run != nil {
			m.run.kill()
			dying = append(dying, m.run)
			m.run = nil
		}
		m.mu.Unlock()
	}
	c.stores.Unlock()
	for _, m := range ms {
		c.net.Crash(m.id)
	}
	for _, m := range ms {
		m.mu.Lock()
		m.disk = m.disk.crash(keepPercent)
		m.mu.Unlock()
		m.clock.Resume()
		c.net.Resume(m.id)
		c.logf("node %s lost its power, keeps %d %% of what it did not sync", m.id, keepPercent)
	}
	var wg sync.WaitGroup
	for _, r := range dying {
		wg.Go(func() {
			r.core.Crash()
			c.over(r)
		})
	}
	wg.Wait()
}

// stop stops a machine's node in order; it does nothing where none runs.
func (m *machine) stop() error {
	m.c.stores.Lock()
	m.mu.Lock()
	r := m.run
	m.run = nil
	m.mu.Unlock()
	m.c.stores.Unlock()
	if r == nil {
		return nil
	}
	m.c.logf("node %s is stopped", m.id)
	if err := r.stop(m.c); err != nil {
		return fmt.Errorf("sim: stop node %s: %w", m.id, err)
	}
	return nil
}

// stopAll stops all nodes at the same time.
func (c *cluster) stopAll() error {
	errs := make([]error, len(c.machines))
	var wg sync.WaitGroup
	for i, m := range c.machines {
		wg.Go(func() { errs[i] = m.stop() })
	}
	wg.Wait()
	return errors.Join(errs...)
}
