package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/sim/judge"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/sim/simclock"
)

// calm is the network without faults.
var calm = simbus.Faults{Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 400 * time.Microsecond}}

// cluster is the simulated machines and their nodes.
type cluster struct {
	cfg      Config
	time     clock.Clock // the bubble's
	start    clock.Time
	net      *simbus.Network
	founders []fsm.Node
	machines []*machine
	trace    *Trace
	leases   leasePool

	// stores is held for reading by readers of a running node's store, and for writing
	// by whoever takes a node from its machine.
	stores storeLock

	mu sync.Mutex
	// Guarded by mu: counts of nodes that are gone. How many snapshots they installed,
	// how often they cut followers off, how many ranges they split by size and by load,
	// and how many of their replicas absorbed others.
	snapshots, cutOffs, bySize, byLoad, absorbed int
	// served, guarded by mu, are the disks whose nodes have served. twice are the nodes
	// that have served from two disks.
	served map[keyspace.NodeID]diskID
	twice  []string
}

// diskID names a disk: its machine, and how many disks the machine had before.
type diskID struct {
	machine string
	before  int
}

// noteServing records that the machine's node serves. The caller holds the machine's
// mu.
func (c *cluster) noteServing(m *machine) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := diskID{m.name, m.disks}
	if first, ok := c.served[m.id()]; ok && first != now {
		c.twice = append(c.twice, fmt.Sprintf("membership: node %s is admitted twice, with disk %d of %s and disk %d of %s",
			m.id(), first.before, first.machine, now.before, now.machine))
	}
	c.served[m.id()] = now
}

// doubles returns the nodes that have served from two disks.
func (c *cluster) doubles() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.twice
}

// over adds the counts of a node that has ended.
func (c *cluster) over(r *run) {
	snapshots, cutOffs := r.count(snapshotsReceived), r.count(followersCutOff)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snapshots += snapshots
	c.cutOffs += cutOffs
	c.absorbed += r.count(absorbed)
	c.bySize, c.byLoad = c.bySize+r.countOf(splitsItself, "size"), c.byLoad+r.countOf(splitsItself, "load")
}

// countSplits returns how many ranges the nodes have split by size and by load.
func (c *cluster) countSplits() (size, load int) {
	c.mu.Lock()
	size, load = c.bySize, c.byLoad
	c.mu.Unlock()
	for _, r := range c.runs() {
		size, load = size+r.countOf(splitsItself, "size"), load+r.countOf(splitsItself, "load")
	}
	return size, load
}

// countMerges returns how many replicas of the nodes have absorbed others.
func (c *cluster) countMerges() int {
	c.mu.Lock()
	n := c.absorbed
	c.mu.Unlock()
	for _, r := range c.runs() {
		n += r.count(absorbed)
	}
	return n
}

// The counters of the nodes.
const (
	snapshotsReceived = "skein_raftgroup_snapshots_received_total"
	followersCutOff   = "skein_raftgroup_cut_offs_total"
	quarantined       = "skein_raftgroup_quarantined_replicas"
	splitsItself      = "skein_shard_automatic_splits_total"
	absorbed          = "skein_shard_merges_total"
)

func newCluster(cfg Config, rng *rand.Rand, trace *Trace) *cluster {
	c := &cluster{cfg: cfg, time: clock.Virtual(), trace: trace, served: map[keyspace.NodeID]diskID{}, net: simbus.New(cfg.Seed, calm), stores: newStoreLock()}
	c.start = c.time.Now()
	long := rng.IntN(cfg.Nodes)
	for i := range cfg.Nodes + cfg.Spares {
		m := &machine{c: c, name: fmt.Sprintf("n%d", i+1), rate: 1 + (rng.Float64()-0.5)*2*judge.MaxDrift}
		m.clock = simclock.New(time.Duration(rng.Int64N(int64(time.Hour))), m.rate)
		m.rng = rand.New(rand.NewPCG(cfg.Seed, 2000+uint64(i)))
		m.disk = m.emptyDisk()
		m.shortLog = cfg.ShortLogs && i != long
		if cfg.Zones > 0 {
			m.zone = fmt.Sprintf("z%d", i%cfg.Zones+1)
		}
		if i < cfg.Nodes {
			m.founder, m.state = true, stateMember
			m.self.Store(uint64(i + 1))
			c.founders = append(c.founders, m.row())
		}
		c.machines = append(c.machines, m)
	}
	return c
}

// elapsed is the virtual time since the start of the cluster.
func (c *cluster) elapsed() time.Duration { return c.time.Now().Sub(c.start) }

// sleep waits in virtual time. Nothing can end it early: a bubble ends when every
// goroutine in it has ended.
func (c *cluster) sleep(d time.Duration) { _ = clock.Sleep(context.Background(), c.time, d) }

func (c *cluster) logf(format string, args ...any) {
	c.trace.Add(c.elapsed(), fmt.Sprintf(format, args...))
}

// members returns the machines that belong to the cluster or are to belong to it.
// Faults hit only these.
func (c *cluster) members() (ms []*machine) {
	for _, m := range c.machines {
		if !m.is(stateOut) {
			ms = append(ms, m)
		}
	}
	return ms
}

// machine returns the machine of a node, nil if there is none.
func (c *cluster) machine(id keyspace.NodeID) *machine {
	for _, m := range c.machines {
		if m.id() == id {
			return m
		}
	}
	return nil
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

// election is the nodes' election timeout, and so the length of promises and leases.
const election = time.Second

// requestTimeout is etcd's.
const requestTimeout = 7 * time.Second

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

// crash cuts the power of some machines at one moment and returns when their nodes are
// gone. Each unsynced block of a disk survives with a probability of keep percent.
//
// The order makes it one moment: nothing is heard of a node after it was killed, and
// nothing that it said before depends on later writes of its disk.
func (c *cluster) crash(keepPercent int, ms ...*machine) {
	c.cut(ms, func(m *machine) {
		m.disk = m.disk.crash(keepPercent)
		c.logf("node %s lost its power, keeps %d %% of its unsynced data", m.id(), keepPercent)
	})
}

// wipe cuts the power of a machine, drops its disk, and sets the machine's state.
func (c *cluster) wipe(m *machine, to state) {
	c.cut([]*machine{m}, func(m *machine) {
		_ = m.disk.crash(0) // whoever waits for it must go on
		m.disk, m.state = m.emptyDisk(), to
		m.disks++
		c.logf("node %s lost its power and its disk", m.id())
	})
}

// storeLock is a lock for reading and for writing. Who waits for it waits in virtual time. With a mutex
// time would stand still meanwhile, and a reader may sleep: the store does so after it has met a bad table.
type storeLock struct{ *semaphore.Weighted }

// storeReaders is more than there are readers at a time.
const storeReaders = 1 << 20

func newStoreLock() storeLock { return storeLock{semaphore.NewWeighted(storeReaders)} }

func (l storeLock) take(n int64) {
	if err := l.Acquire(context.Background(), n); err != nil {
		panic(err) // the context does not end
	}
}

func (l storeLock) Lock()    { l.take(storeReaders) }
func (l storeLock) Unlock()  { l.Release(storeReaders) }
func (l storeLock) RLock()   { l.take(1) }
func (l storeLock) RUnlock() { l.Release(1) }

// cut cuts the power of machines. lose, called under the lock of each, says what is
// left of its disk.
func (c *cluster) cut(ms []*machine, lose func(*machine)) {
	var dying []*run
	var starting []*start
	c.stores.Lock()
	for _, m := range ms {
		m.mu.Lock()
		if m.run != nil {
			m.run.kill()
			dying = append(dying, m.run)
			m.run = nil
		}
		if m.starting != nil {
			m.starting.cut()
			starting = append(starting, m.starting)
		}
		m.mu.Unlock()
	}
	c.stores.Unlock()
	for _, m := range ms {
		c.net.Crash(m.id())
	}
	for _, m := range ms {
		m.mu.Lock()
		lose(m)
		m.mu.Unlock()
		m.clock.Resume()
		c.net.Resume(m.id())
	}
	var wg sync.WaitGroup
	for _, r := range dying {
		wg.Go(func() { r.crash(c) })
	}
	wg.Wait()
	for _, s := range starting {
		<-s.over
	}
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
