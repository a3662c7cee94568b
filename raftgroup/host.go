package raftgroup

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/quarantine"
	"github.com/skeindb/skein/transport"
)

// Host runs the groups of one node. All methods may be called from many goroutines.
type Host struct {
	cfg Config
	log *zap.Logger
	m   *Metrics

	// embargo is the time before which no replica here votes or campaigns: a previous run
	// of this node may have promised that long. 0 on the node's first run.
	embargo clock.Time
	// promiseShrinks says that an earlier run may have promised for longer than this one does.
	promiseShrinks bool

	workers  []*worker // 0 serves the system groups
	appliers []*applier
	peers    peers
	pacer    pacer
	trunc    truncator
	snaps    snapshots
	votes    voteBuffer
	// quarantine has the replicas that are kept closed.
	quarantine *quarantine.List

	mu struct {
		sync.RWMutex
		groups map[keyspace.GroupID]*Group
		// reserved holds the ids that an Open or a Remove is working on. closing holds
		// closed groups of which something still runs or is on its way to the disk.
		reserved map[keyspace.GroupID]bool
		closing  map[keyspace.GroupID]*closing
		// promises are those of closed groups: a group that is opened again in this run
		// must keep them.
		promises map[keyspace.GroupID]clock.Time
	}

	// maxEntry bounds the data of one proposal: the smaller of raftgroup's and the wal's
	// bound.
	maxEntry int64

	inbound, proposals atomic.Int64
	// pending counts the proposals whose bytes are in proposals. committed and applied
	// count the entries of this run. Opening a group adds its unapplied entries to
	// committed, so the difference is always what is left to apply.
	pending, committed, applied atomic.Int64
	readNumber                  atomic.Uint64
	readNonce                   uint64 // of this run
	diskStalled                 atomic.Bool
	// sleepTicks is after how many idle ticks a leader's group falls asleep now.
	sleepTicks atomic.Int64
	mutated    mutationState
	stopping   atomic.Bool
	// leasesFrom is when leases were dropped last, see DropLeases; 0 is never.
	leasesFrom atomic.Int64
	// suspects notices that the machine was paused. The ticker owns it.
	suspects suspects
	failed   atomic.Bool
	failMu   sync.Mutex
	failErr  error
	failCh   chan struct{}

	ctx         context.Context // ends when Stop begins
	cancel      context.CancelFunc
	wg          sync.WaitGroup // workers, ticker, snapshots
	applyWG     sync.WaitGroup
	removeOn    func() // unregisters the engine's listener
	lifecycleMu sync.Mutex
	started     bool
}

// promiseKey stores the longest election timeout with which a promise may still stand.
var promiseKey = engine.NodeLocalKey([]byte("raftgroup/promise"))

// NewHost makes a host. It starts no goroutine. It writes to the engine if the election
// timeout is longer than any before, because the next run must know how long this one
// promises.
func NewHost(cfg Config) (*Host, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	h := &Host{cfg: cfg, log: cfg.Logger.With(zap.Stringer("node", cfg.Node)), m: cfg.Metrics}
	h.maxEntry = min(maxEntryBytes, cfg.WAL.MaxEntryBytes())
	h.sleepTicks.Store(cfg.sleepTicks(0))
	h.failCh = make(chan struct{})
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.mu.groups = make(map[keyspace.GroupID]*Group)
	h.mu.reserved = make(map[keyspace.GroupID]bool)
	h.mu.closing = make(map[keyspace.GroupID]*closing)
	h.mu.promises = make(map[keyspace.GroupID]clock.Time)
	var nonce [8]byte
	if _, err := cfg.Rand.Read(nonce[:]); err != nil {
		return nil, fmt.Errorf("raftgroup: random numbers: %w", err)
	}
	h.readNonce = binary.LittleEndian.Uint64(nonce[:])
	if err := h.loadPromise(); err != nil {
		return nil, err
	}
	var err error
	if h.quarantine, err = quarantine.Load(cfg.Engine, h.m.quarantined); err != nil {
		return nil, fmt.Errorf("raftgroup: %w", err)
	}
	for i := range cfg.Workers + 1 {
		h.workers = append(h.workers, newWorker(h, i))
	}
	for range cfg.Appliers + 1 {
		h.appliers = append(h.appliers, newApplier(h))
	}
	h.peers.init(h)
	h.pacer.init(h)
	h.trunc.init(h)
	h.votes.init()
	h.snaps.init(h)
	return h, nil
}

// loadPromise reads the longest promise that may stand, begins the embargo that follows from
// it, and stores the current one if it is longer.
func (h *Host) loadPromise() error {
	v, ok, err := h.cfg.Engine.Get(promiseKey)
	if err != nil {
		return fmt.Errorf("raftgroup: stored promise: %w", err)
	}
	var longest time.Duration
	if ok {
		if len(v) != 8 {
			return fmt.Errorf("raftgroup: stored promise of %d bytes, want 8", len(v))
		}
		longest = time.Duration(binary.BigEndian.Uint64(v))
		h.embargo = h.cfg.Clock.Now().Add(longest)
	}
	h.promiseShrinks = h.cfg.ElectionTimeout < longest && !mutation.Is(mutation.EmbargoKept)
	if h.cfg.ElectionTimeout <= longest {
		return nil
	}
	return h.storePromise()
}

// storePromise makes this run's promise durable as the longest one.
func (h *Host) storePromise() error {
	b := h.cfg.Engine.NewBatch()
	defer b.Close()
	v := binary.BigEndian.AppendUint64(nil, uint64(h.cfg.ElectionTimeout))
	if err := b.Set(promiseKey, v); err != nil {
		return fmt.Errorf("raftgroup: store promise: %w", err)
	}
	if err := b.Commit(); err != nil {
		return fmt.Errorf("raftgroup: store promise: %w", err)
	}
	if err := h.cfg.Engine.Flush(h.ctx); err != nil {
		return fmt.Errorf("raftgroup: store promise: %w", err)
	}
	return nil
}

// shrinkPromise stores this run's promise in place of a longer one of an earlier run when the
// embargo has ended: no promise of an earlier run stands then. A crash before the store leaves the
// longer one, and the next embargo is longer than it need be.
func (h *Host) shrinkPromise() {
	for now := h.cfg.Clock.Now(); now < h.embargo; now = h.cfg.Clock.Now() {
		if clock.Sleep(h.ctx, h.cfg.Clock, h.embargo.Sub(now)) != nil {
			return
		}
	}
	if err := h.storePromise(); err != nil && h.ctx.Err() == nil {
		h.log.Warn("the next start waits longer than necessary before it votes", zap.Error(err))
	}
}

// RegisterHandlers registers the host's methods with a bus that is not started yet.
func (h *Host) RegisterHandlers(r Registrar) {
	r.HandleSend(transport.MethodRaft, transport.ClassRaft, h.handleFrame)
	r.HandleSend(transport.MethodRaftControl, transport.ClassControl, h.handleFrame)
	r.HandleStream(transport.MethodRaftSnapshot, transport.ClassBulk, h.handleSnapshot)
}

// Start starts the host's goroutines. Groups may be opened before or after.
func (h *Host) Start() {
	h.lifecycleMu.Lock()
	defer h.lifecycleMu.Unlock()
	if h.started || h.stopping.Load() {
		return
	}
	h.started = true
	for _, w := range h.workers {
		h.wg.Go(w.run)
	}
	for _, a := range h.appliers {
		h.applyWG.Go(a.run)
	}
	h.wg.Go(h.tickLoop)
	h.wg.Go(h.peers.probeLoop)
	h.wg.Go(h.trunc.loop)
	if h.promiseShrinks {
		h.wg.Go(h.shrinkPromise)
	}
	h.snaps.start()
	h.removeOn = h.cfg.Engine.OnDurable(h.trunc.wakeUp)
}

// Stop ends the host's work and waits for its goroutines, until ctx ends. It flushes
// nothing: entries that are committed and not applied are applied after the next start.
// It runs all outstanding callbacks before it returns.
func (h *Host) Stop(ctx context.Context) error {
	h.lifecycleMu.Lock()
	defer h.lifecycleMu.Unlock()
	if h.stopping.Swap(true) {
		return nil
	}
	h.cancel()
	if !h.started {
		return nil
	}
	h.removeOn()
	for _, g := range h.all() {
		g.w.call(g, g.close)
	}
	for _, w := range h.workers {
		w.stop()
	}
	done := make(chan struct{})
	go func() {
		h.wg.Wait()
		// The appliers stop last: a running install still releases a group whose
		// callbacks wait.
		h.snaps.wg.Wait()
		for _, a := range h.appliers {
			a.stop()
		}
		h.applyWG.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("raftgroup: stop: %w", context.Cause(ctx))
	}
}

// Bootstrap writes the first applied record of a new group's replica into b, at
// (InitIndex, InitTerm). All replicas must write the same record. It has to be durable
// before Open, unless replaying a log after a crash writes it again, as for a split.
func (h *Host) Bootstrap(b *engine.Batch, g keyspace.GroupID, replicas []keyspace.Replica, payload []byte) error {
	return b.SetApplied(g, engine.Applied{
		Index: InitIndex, Term: InitTerm, Replicas: replicas, ConfIndex: InitIndex, Payload: payload,
	})
}

// tickLoop runs the host's only timer.
func (h *Host) tickLoop() {
	t := h.cfg.Clock.NewTimer(h.cfg.TickInterval)
	defer t.Stop()
	for n := uint64(1); ; n++ {
		select {
		case <-t.C():
		case <-h.ctx.Done():
			return
		}
		h.tick(n)
		// Reset after the work, so that ticks are never closer than the interval.
		t.Reset(h.cfg.TickInterval)
	}
}

func (h *Host) tick(n uint64) {
	now := h.cfg.Clock.Now()
	h.mutated.tick(now)
	if ahead := h.suspects.tick(h.cfg.Clock, h.cfg.margin(h.cfg.ElectionTimeout)); ahead != 0 {
		h.DropLeases(fmt.Sprintf("the wall clock is %v ahead of the monotonic one: this machine may have been paused", ahead))
	}
	h.peers.tick(now, n)
	awake, f := 0, flagTick
	if h.diskStalled.Load() {
		f = flagExpire
	} else {
		h.pacer.tick()
	}
	for _, w := range h.workers {
		awake += w.tick(f)
	}
	h.sleepTicks.Store(h.cfg.sleepTicks(awake))
	h.votes.expire(now.Add(-10 * h.cfg.ElectionTimeout))
	h.trunc.tick(now, n)
	h.forgetPromises(now)
	h.m.awake.Set(float64(awake))
	h.m.proposalBytes.Set(float64(h.proposals.Load()))
	h.m.inboundBytes.Set(float64(h.inbound.Load()))
	h.m.pending.Set(float64(h.pending.Load()))
	// In this order: an entry must never count as applied but not committed.
	h.m.applied.Set(float64(h.applied.Load()))
	h.m.committed.Set(float64(h.committed.Load()))
}

// MaxEntryBytes returns how much data one proposal may have.
func (h *Host) MaxEntryBytes() int64 { return h.maxEntry }

// ElectionTimeout returns the configured election timeout.
func (h *Host) ElectionTimeout() time.Duration { return h.cfg.ElectionTimeout }
