package raftgroup

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// peers is what the host knows about the other nodes. Every node tells each of them at
// short intervals that it lives and that its disks move, also those that it shares no
// group with: who holds no range is a gateway yet, and must know whom to ask.
type peers struct {
	h  *Host
	mu struct {
		sync.RWMutex
		nodes     map[keyspace.NodeID]*peer
		listeners []func(keyspace.NodeID, bool)
	}
	// The rest belongs to the ticker.
	sequence   uint64
	wal, store watched
	probe      chan struct{}
	// centralAt is when this node last heard half of the others; lonely says that this is
	// longer ago than the liveness timeout, and is for the workers to read.
	centralAt clock.Time
	lonely    atomic.Bool
}

// watched is a count that grows while a disk moves.
type watched struct {
	count uint64
	moved clock.Time // when it last grew, or nothing was to be done
}

// look returns for how long the disk has stood still though something was to be done.
func (w *watched) look(now clock.Time, count uint64, idle bool) time.Duration {
	if count != w.count || idle {
		w.count, w.moved = count, now
	}
	return now.Sub(w.moved)
}

type peer struct {
	groups   int // how many of this host's groups have a replica there
	boot     keyspace.BootID
	before   keyspace.BootID // the run before that, whose late messages are none of this one
	sequence uint64
	healthy  clock.Time // when it last said that all is well
	alive    bool
	central  bool // it has said that it hears half of the others, or more
}

func (p *peers) init(h *Host) {
	p.h = h
	p.mu.nodes = make(map[keyspace.NodeID]*peer)
	p.wal.moved = h.cfg.Clock.Now()
	p.store.moved, p.centralAt = p.wal.moved, p.wal.moved
	p.probe = make(chan struct{}, 1)
}

// change moves a group's references from its old replicas' nodes to the new ones'.
func (p *peers) change(before, after []keyspace.Replica) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range after {
		if r.Node != p.h.cfg.Node {
			p.nodeLocked(r.Node).groups++
		}
	}
	for _, r := range before {
		if r.Node == p.h.cfg.Node {
			continue
		}
		if n := p.nodeLocked(r.Node); n.groups > 0 {
			n.groups--
		}
	}
}

func (p *peers) nodeLocked(id keyspace.NodeID) *peer {
	n := p.mu.nodes[id]
	if n == nil {
		n = new(peer)
		p.mu.nodes[id] = n
	}
	return n
}

// livenessEvery is how many ticks lie between two liveness messages: five fit into
// the timeout, so that a lost one is no death.
func (c *Config) livenessEvery() uint64 {
	return uint64(max(1, c.LivenessTimeout/5/c.TickInterval))
}

// tick looks at the own disks, tells the peers, and notices who has fallen silent.
func (p *peers) tick(now clock.Time, n uint64) {
	p.checkDisks(now)
	var died []keyspace.NodeID
	alive := 0
	p.mu.Lock()
	for id, q := range p.mu.nodes {
		if q.alive && now.Sub(q.healthy) > p.h.cfg.LivenessTimeout {
			q.alive = false
			died = append(died, id)
		}
		if q.groups == 0 && !q.alive {
			delete(p.mu.nodes, id)
		}
		alive += boolInt(q.alive)
	}
	p.mu.Unlock()
	p.h.m.peersAlive.Set(float64(alive))
	if n == 1 || n%p.h.cfg.livenessEvery() == 0 {
		p.tell(p.look(now, alive))
	}
	slices.Sort(died)
	for _, id := range died {
		p.died(id)
	}
}

// look says whether this node hears half of the others or more, of whom alive live. One
// that has not for a liveness timeout gives up what it leads, group by group, where a voter
// can take over that does: it may be the only one that hears this node, and then everybody
// else waits for a leader that nobody can reach.
func (p *peers) look(now clock.Time, alive int) (central bool) {
	if central = 2*alive >= len(p.h.cfg.Bus.Peers()); central {
		p.centralAt = now
	}
	lonely := now.Sub(p.centralAt) > p.h.cfg.LivenessTimeout
	if p.lonely.Swap(lonely) != lonely {
		p.h.log.Warn("how many peers are heard has changed", zap.Bool("lonely", lonely), zap.Int("heard", alive))
	}
	if lonely {
		p.h.pacer.add(p.affected(func(g *Group) bool {
			return g.public.leading.Load() != 0 && p.hasHeir(*g.public.replicas.Load()...)
		}))
	}
	return central
}

// hasHeir says whether one of the replicas is a voter that this node hears, whose node hears
// half of the others or more.
func (p *peers) hasHeir(replicas ...keyspace.Replica) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return slices.ContainsFunc(replicas, func(r keyspace.Replica) bool {
		q := p.mu.nodes[r.Node]
		return q != nil && q.alive && q.central && r.Role == keyspace.RoleVoter
	})
}

// tell sends one liveness message to each node. One that cannot be sent is as good
// as lost.
func (p *peers) tell(central bool) {
	p.sequence++
	msg := encodeLiveness(liveness{boot: p.h.cfg.Boot, healthy: !p.h.stuck.Load(), central: central, sequence: p.sequence})
	for _, id := range p.h.cfg.Bus.Peers() {
		_ = p.h.cfg.Bus.Send(id, transport.MethodRaftControl, 0, slices.Clone(msg))
	}
}

// checkDisks decides whether this node's wal and store move. While one does not, the
// host neither ticks its groups nor answers for its health: its leaders send no
// heartbeats, lose their leases, and others take over.
//
// A store that holds a commit up because it flushes slowly is another matter: every
// replica has to take in the same, so that to lead elsewhere would help nobody.
func (p *peers) checkDisks(now clock.Time) {
	limit := p.h.cfg.ElectionTimeout
	syncs, pending := p.h.cfg.WAL.Progress()
	// A long queue is no sign of a disk that stands still: fsyncs complete meanwhile.
	wal := min(pending, p.wal.look(now, syncs, pending == 0)) >= limit
	var applying time.Duration
	for _, a := range p.h.appliers {
		applying = max(applying, a.pending(now))
	}
	still := p.store.look(now, p.h.cfg.Engine.Progress(), applying == 0)
	store := min(applying, still) >= limit
	p.h.m.walStuck.Set(float64(boolInt(wal)))
	p.h.m.applyStuck.Set(float64(boolInt(store)))
	// Who has failed waits for nothing any more, and is on its way down.
	failed := p.h.failed.Load() || p.h.cfg.WAL.Err() != nil || p.h.cfg.Engine.Err() != nil
	if stuck := wal || store || failed; p.h.stuck.Swap(stuck) != stuck {
		p.h.log.Warn("the progress of wal and store has changed", zap.Bool("stuck", stuck),
			zap.Duration("pending", pending), zap.Duration("applying", applying), zap.Bool("failed", failed))
	}
	// An idle wal proves nothing: it is asked to sync now and then.
	if pending == 0 && p.sequence%5 == 0 && !p.h.stopping.Load() {
		select {
		case p.probe <- struct{}{}:
		default:
		}
	}
}

// probeLoop is the goroutine that asks the wal for an fsync, one at a time.
func (p *peers) probeLoop() {
	for {
		select {
		case <-p.probe:
		case <-p.h.ctx.Done():
			return
		}
		// Its error is the wal's own matter; its success shows in Progress.
		_ = p.h.cfg.WAL.Sync(p.h.ctx)
	}
}

// heard takes a peer's liveness message.
func (p *peers) heard(from keyspace.NodeID, l liveness) {
	now := p.h.cfg.Clock.Now()
	p.mu.Lock()
	q := p.nodeLocked(from)
	restarted := q.boot != 0 && q.boot != l.boot
	if !restarted && q.boot == l.boot && l.sequence <= q.sequence || restarted && l.boot == q.before {
		p.mu.Unlock()
		return // an old message may not prolong a life
	}
	if restarted {
		q.before = q.boot
	}
	q.boot, q.sequence, q.central = l.boot, l.sequence, l.central
	was := q.alive
	if q.alive = l.healthy; l.healthy {
		q.healthy = now
	}
	is := q.alive
	p.mu.Unlock()
	switch {
	case was && !is:
		p.died(from)
	case is && (!was || restarted):
		p.returned(from, restarted)
	}
}

// died wakes, paced, the groups whose leader was on the node.
func (p *peers) died(node keyspace.NodeID) {
	p.h.log.Warn("peer has lost liveness", zap.Stringer("peer", node))
	p.h.pacer.add(p.affected(func(g *Group) bool {
		return keyspace.NodeID(g.public.leaderNode.Load()) == node
	}))
	p.notify(node, false)
}

// returned wakes, paced, the groups that this host leads and that have a replica
// on the node, which may lag; and after a restart those that the node led.
func (p *peers) returned(node keyspace.NodeID, restarted bool) {
	p.h.log.Info("peer lives", zap.Stringer("peer", node), zap.Bool("restarted", restarted))
	p.h.pacer.add(p.affected(func(g *Group) bool {
		if g.public.leading.Load() != 0 {
			return hasNode(g.public.replicas.Load(), node)
		}
		return restarted && keyspace.NodeID(g.public.leaderNode.Load()) == node
	}))
	p.notify(node, true)
}

func (p *peers) affected(is func(*Group) bool) []*Group {
	return slices.DeleteFunc(p.h.all(), func(g *Group) bool { return !is(g) })
}

func hasNode(replicas *[]keyspace.Replica, node keyspace.NodeID) bool {
	return replicas != nil && slices.ContainsFunc(*replicas, func(r keyspace.Replica) bool { return r.Node == node })
}

func (p *peers) notify(node keyspace.NodeID, alive bool) {
	p.mu.RLock()
	listeners := p.mu.listeners
	p.mu.RUnlock()
	for _, f := range listeners {
		f(node, alive)
	}
}

// dead says whether the node was alive in this host's time and is no more. One that
// was never heard of may be about to start, as all do when a cluster does.
func (p *peers) dead(node keyspace.NodeID) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	q := p.mu.nodes[node]
	return q != nil && q.boot != 0 && !q.alive
}

// lost says whether the node has lost liveness, or runs anew since boot was seen. A
// node whose first liveness message is still to come is not lost: who asks has heard
// from it as from a leader. Taken for lost, the first leaders of a cluster would be
// deposed by the first clients, and the revisions that they hold with them.
func (p *peers) lost(node keyspace.NodeID, boot keyspace.BootID) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	q := p.mu.nodes[node]
	return q != nil && q.boot != 0 && (!q.alive || boot != 0 && q.boot != boot)
}

func (p *peers) boot(node keyspace.NodeID) keyspace.BootID {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if q := p.mu.nodes[node]; q != nil {
		return q.boot
	}
	return 0
}

// Liveness says whether the node is alive as far as this one knows: it was heard
// from within the liveness timeout, and its disks move. The own node always is.
func (h *Host) Liveness(node keyspace.NodeID) bool {
	if node == h.cfg.Node {
		return true
	}
	h.peers.mu.RLock()
	defer h.peers.mu.RUnlock()
	q := h.peers.mu.nodes[node]
	return q != nil && q.alive
}

// Central says whether the node hears half of the other nodes or more: a peer by its last
// liveness message, so that one that is not alive is not central. The own node is until it
// has not for a liveness timeout. Who is not hands over what it leads.
func (h *Host) Central(node keyspace.NodeID) bool {
	if node == h.cfg.Node {
		return !h.peers.lonely.Load()
	}
	h.peers.mu.RLock()
	defer h.peers.mu.RUnlock()
	q := h.peers.mu.nodes[node]
	return q != nil && q.alive && q.central
}

// OnLiveness registers a listener for nodes that begin or cease to be alive, or
// that have restarted. It is called from goroutines of the host and the bus and
// must not block.
func (h *Host) OnLiveness(f func(node keyspace.NodeID, alive bool)) {
	h.peers.mu.Lock()
	defer h.peers.mu.Unlock()
	h.peers.mu.listeners = append(slices.Clone(h.peers.mu.listeners), f)
}

// Stuck says that this node's wal or store does not move.
func (h *Host) Stuck() bool { return h.stuck.Load() }
