package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/sim/simclock"
	"github.com/skeindb/skein/transport"
)

// machine is one simulated computer. It outlives the node on it, and the node's
// membership.
type machine struct {
	c *cluster
	// name is the name of each node on it and the host of their peer and client URLs.
	name  string
	clock *simclock.Clock
	rate  float64
	// zone is its zone, "" without zones.
	zone string
	// shortLog says that this machine's nodes keep the shortest possible log.
	shortLog bool

	// self is the id of its present or last node, 0 if it never had one.
	self atomic.Uint64
	// leaves says that its node is to leave the cluster for good.
	leaves atomic.Bool
	// wiped says that it has lost its disk since it began to join. It belongs to
	// joinLoop.
	wiped bool

	mu sync.Mutex
	// Guarded by mu. run is nil while the machine is down. starting is nil unless it
	// starts.
	disk     *disk
	run      *run
	starting *start
	state    state
	// founder says that it is one of the first nodes. Later nodes join, and an operator
	// may have added them before.
	founder, added bool
	// lost says that the machine never returns. disks is how many of its disks are gone.
	lost  bool
	disks int
	// rng chooses the nodes that it asks to admit it.
	rng *rand.Rand
}

// state says what a machine is to the cluster.
type state int

const (
	// stateOut is no member: it does not run.
	stateOut state = iota
	// stateJoining is to be admitted: joinLoop starts it, and faults may hit it.
	stateJoining
	// stateMember is a member: whoever has stopped it starts it again.
	stateMember
)

// start is a node that starts.
type start struct {
	ctx context.Context
	// cut ends ctx: the power is off. over is closed when nothing of the start is left.
	cut  context.CancelFunc
	over chan struct{}
}

// id is the node's id.
func (m *machine) id() keyspace.NodeID { return keyspace.NodeID(m.self.Load()) }

// host is the host of the machine's peer port. The simulated bus does not use it.
func (m *machine) host() string { return m.name + ":2380" }

func (m *machine) peerURL() url.URL { return url.URL{Scheme: "http", Host: m.host()} }

// row is the node's row of the node table before it serves.
func (m *machine) row() fsm.Node {
	u := m.peerURL()
	return fsm.Node{ID: m.id(), Name: m.name, PeerURLs: []string{u.String()}}
}

func (m *machine) emptyDisk() *disk {
	d := newDisk(simdisk.New(), m.clock, rand.New(rand.NewPCG(m.c.cfg.Seed, 1000+m.rng.Uint64())))
	d.lies = m.c.cfg.mutation.noSync
	return d
}

func (m *machine) current() *run {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.run
}

func (m *machine) is(s state) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state == s
}

func (m *machine) become(s state) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
}

// boot starts the node of a member that is down. Nodes of a new cluster must be started
// at the same time.
func (m *machine) boot() error {
	if !m.is(stateMember) {
		return nil
	}
	leaves := m.leaves.Load()
	err := m.start()
	switch {
	case errors.Is(err, errCut): // whoever cut its power starts it again
		return nil
	case err != nil && (leaves || m.leaves.Load()): // it may have been removed already
		m.c.logf("node %s does not start: %v", m.id(), err)
		return nil
	}
	return err
}

// errCut says that the power was cut while a node started.
var errCut = errors.New("sim: the power was cut")

// start starts the node and returns when it serves. It does nothing if the node runs or
// starts already.
func (m *machine) start() error {
	m.mu.Lock()
	if m.run != nil || m.starting != nil || m.lost {
		m.mu.Unlock()
		return nil
	}
	s := &start{over: make(chan struct{})}
	s.ctx, s.cut = context.WithCancel(context.Background())
	m.starting = s
	o := m.options(s)
	m.mu.Unlock()
	defer close(s.over)
	defer s.cut()

	r, err := m.open(s.ctx, o)
	m.mu.Lock()
	m.starting = nil
	cut := s.ctx.Err() != nil
	if err == nil && !cut {
		m.run = r
		m.c.noteServing(m)
	}
	m.mu.Unlock()
	switch {
	case cut && r != nil:
		r.kill()
		r.crash(m.c)
		return errCut
	case cut:
		return errCut
	case err != nil:
		return fmt.Errorf("sim: start node %s: %w", m.id(), err)
	}
	m.c.logf("node %s serves", m.id())
	return nil
}

// open finds the node's membership, if it is no founder, and opens its directories.
func (m *machine) open(ctx context.Context, o *node.Options) (*run, error) {
	reg := prometheus.NewRegistry()
	o.Registry = reg
	if len(o.Founders) == 0 {
		membership, err := m.joiner(o).Find(ctx)
		if err != nil {
			return nil, err
		}
		o.SetMembership(membership)
		m.self.Store(uint64(o.Self))
	}
	core, err := node.Open(ctx, *o)
	if err != nil {
		return nil, err
	}
	r := &run{core: core, idle: make(chan struct{}), metrics: reg}
	r.ctx, r.kill = context.WithCancel(context.Background())
	if cfg := &m.c.cfg; cfg.Users > 0 || cfg.Cuts > 0 || cfg.Load > 0 {
		if r.api, err = serveAPI(core, o); err != nil {
			return nil, errors.Join(err, core.Stop(ctx))
		}
	}
	row := m.row()
	row.ClientURLs = []string{"http://" + m.name + ":2379"}
	row.Attributes = m.attributes()
	announce, stop := context.WithCancel(r.ctx)
	r.announced = stop
	r.announcing.Go(func() { core.Announce(announce, row) })
	return r, nil
}

// options are the options of the machine's node. The caller holds mu.
func (m *machine) options(s *start) *node.Options {
	cfg := &m.c.cfg
	o := &node.Options{
		SplitKeys: cfg.splitKeys(),
		FS:        m.disk, DataDir: dataDir, WALDir: walDir, Clock: m.clock,
		NewBus: func(c transport.Config) (node.Bus, error) {
			b, err := m.c.net.NewBus(c)
			if err != nil {
				return nil, err // not a typed nil
			}
			var bus node.Bus = &startedBus{b, m.c, s}
			if wrap := cfg.mutation.bus; wrap != nil {
				bus = wrap(bus)
			}
			return bus, nil
		},
		Heartbeat: election / 10, Election: election, RequestTimeout: requestTimeout,
		MaxRequestBytes: 256 << 10, MaxTxnOps: 128, MemoryBytes: 96 << 20, WALSegmentBytes: 1 << 20,
		RangeMaxBytes: cfg.RangeMaxBytes, RangeSplitLoad: cfg.RangeSplitLoad, RangeMergeAfter: cfg.MergeAfter,
		MergeHold: cfg.mergeHold(), NoLeaseReads: cfg.NoLeaseReads,
		// The processors have nothing to do: the leads of ranges in use gather at the sequencer.
		Processors: func() (time.Duration, float64) { return 0, 1 },
		AuthToken:  "simple", AuthTokenTTL: 5 * time.Minute, BcryptCost: auth.MinCost, Logger: m.logger(),
	}
	if m.founder {
		o.Cluster, o.Self, o.Founders = 0xc1, m.id(), m.c.founders
	}
	if cfg.Crowded {
		o.AwakeFree = -1
	}
	if cfg.Lose > 0 || cfg.Joins > 0 || slices.Contains(cfg.Faults, BootLoop) {
		o.NodeDeadAfter = deadAfter
	}
	if m.shortLog {
		o.WALSegmentBytes, o.MaxWALBytes, o.MaxRequestBytes = 16<<10, 16<<10, 3<<10
	}
	return o
}

// startedBus is a bus that sends nothing after the power cut, even if the interrupted
// start has not come that far.
type startedBus struct {
	node.Bus
	c *cluster
	s *start
}

// Start implements node.Bus.
func (b *startedBus) Start() error {
	if b.s.ctx.Err() != nil {
		return errCut
	}
	if err := b.Bus.Start(); err != nil {
		return err
	}
	if b.s.ctx.Err() != nil {
		return errCut
	}
	return nil
}

func (m *machine) logger() *zap.Logger { return m.c.trace.logger(m.c.elapsed, m.c.cfg.LogLevel) }

// joiner is how a node that is no founder enters the cluster: by --join, or by
// --initial-cluster-state existing after an operator has added it as in etcd.
func (m *machine) joiner(o *node.Options) *join.Joiner {
	cfg := config.Default()
	cfg.Name, cfg.DataDir, cfg.WALDir = m.name, dataDir, walDir
	cfg.AdvertisePeerURLs = []url.URL{m.peerURL()}
	if m.wasAdded() {
		cfg.InitialClusterState, cfg.InitialCluster = config.StateExisting, map[string]types.URLs{}
		for _, o := range m.c.machines {
			if o == m || o.is(stateMember) {
				cfg.InitialCluster[o.name] = types.URLs{o.peerURL()}
			}
		}
	} else {
		cfg.Join = []string{"any"}
	}
	return &join.Joiner{Config: cfg, FS: o.FS, Clock: o.Clock, Logger: o.Logger, Ask: join.AskAgain(m.askIn), PeerTable: m.c.tell}
}

func (m *machine) wasAdded() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.added
}

// askIn asks the admin service of any running node to admit this one.
func (m *machine) askIn(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	m.mu.Lock()
	order := m.rng.Perm(len(m.c.machines))
	m.mu.Unlock()
	r := enterAny(m.c.machines, order)
	if r == nil {
		return nil, errors.New("no node is up")
	}
	defer r.leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	end := context.AfterFunc(r.ctx, cancel)
	defer end()
	return r.core.Admin().JoinNode(ctx, q)
}

// enterAny begins a call at the first of the machines, in an order, whose node takes
// calls; nil if there is none. The caller must leave it.
func enterAny(ms []*machine, order []int) *run {
	for _, i := range order {
		if r := ms[i].current(); r != nil && r.enter() {
			return r
		}
	}
	return nil
}

// tell asks the node at a peer address who the cluster's nodes are.
func (c *cluster) tell(_ context.Context, addr string) ([]byte, error) {
	for _, m := range c.machines {
		if r := m.current(); m.host() == addr && r != nil {
			if b := r.core.PeerTable(); b != nil {
				return b, nil
			}
		}
	}
	return nil, errors.New("it does not answer")
}

// stop stops a machine's node in order. It does nothing if none runs.
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
	m.c.logf("node %s is stopped", m.id())
	leaves := m.leaves.Load()
	switch err := r.stop(m.c); {
	case err != nil && (leaves || m.leaves.Load()) && errors.Is(err, join.ErrRemoved):
		m.c.logf("node %s was removed before it was stopped", m.id())
	case err != nil:
		return fmt.Errorf("sim: stop node %s: %w", m.id(), err)
	}
	return nil
}

// run is one run of a node, from its start to its end.
type run struct {
	core *node.Core
	// ctx ends at the moment of the crash: a client of this gateway receives nothing
	// after it.
	ctx  context.Context
	kill context.CancelFunc
	// announcing publishes the node's row; announced ends it.
	announcing sync.WaitGroup
	announced  context.CancelFunc
	// metrics are the node's.
	metrics *prometheus.Registry
	// api has the services that clients call by gRPC, nil if the run has no such clients.
	api *etcdapi.Server

	mu sync.Mutex
	// Guarded by mu: how many client calls are under way, and whether a clean stop has
	// begun. idle is closed when the last call ends.
	calls    int
	stopping bool
	// suspended says that the machine does not run: no call can begin.
	suspended bool
	idle      chan struct{}
}

// count returns the value of one of the node's counters or gauges.
func (r *run) count(name string) (n int) { return r.countOf(name, "") }

// countOf returns the counter's value for a label, or, without labels, the only one.
func (r *run) countOf(name, value string) (n int) {
	families, err := r.metrics.Gather()
	if err != nil {
		panic(fmt.Sprintf("sim: metrics: %v", err))
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if value == "" || m.GetLabel()[0].GetValue() == value {
				n += int(m.GetCounter().GetValue() + m.GetGauge().GetValue())
			}
		}
	}
	return n
}

// enter begins a client's call. It returns false if the gateway takes no more calls.
func (r *run) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping || r.suspended {
		return false
	}
	r.calls++
	return true
}

// suspend says whether the machine is suspended.
func (r *run) suspend(now bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.suspended = now
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

// stop ends a node in order: it takes no more calls and gives those under way their
// time.
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
	r.endAPI()
	r.announced()
	r.announcing.Wait()
	err := r.core.Stop(context.Background())
	r.kill()
	c.over(r)
	return err
}

// endAPI ends etcd's services. Nobody waits for their answers any more.
func (r *run) endAPI() {
	if r.api != nil {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		r.api.Stop(now)
	}
}

// crash ends a node that was killed.
func (r *run) crash(c *cluster) {
	r.endAPI()
	r.core.Crash()
	r.announcing.Wait()
	c.over(r)
}
