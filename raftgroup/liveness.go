package raftgroup

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/quorum"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// peers is the host's knowledge of the other nodes. Every node sends every other one a short message at regular intervals: it
// lives and its disks make progress. Nodes without a common group do so too: a node without ranges is still a gateway and
// must know which nodes live.
//
// A message goes with a heartbeat or its answer, or as the answer to the peer's, once it is due.
// A packet of its own would cost both sides as much again, and so would its acknowledgement.
type peers struct {
	h  *Host
	mu struct {
		sync.RWMutex
		nodes map[keyspace.NodeID]*peer
		// members are those that SetMembers has named; nil before.
		members []keyspace.NodeID
		// sequence numbers this node's liveness messages. connected and heard are what they say, as of the time round.
		sequence  uint64
		connected bool
		heard     []keyspace.NodeID
		round     clock.Time
	}
	// The rest is owned by the ticker.
	wal, store diskProgress
	probe      wake.Signal
	// connectedAt is when this node last heard at least half of the other members. isolated says
	// that this is too long ago, see updateConnectivity; workers read it.
	connectedAt clock.Time
	isolated    atomic.Bool
	// lastLost is what lostNodes returned last.
	lastLost map[keyspace.NodeID]bool
}

type peer struct {
	groups    int // how many of this host's groups have a replica there
	boot      keyspace.BootID
	before    keyspace.BootID // the run before that; its late messages do not count
	sequence  uint64
	healthy   clock.Time // when it last reported healthy disks
	alive     bool
	connected bool // it reported that it is connected, see updateConnectivity
	hears     []keyspace.NodeID
	told      clock.Time // when it was last sent a liveness message
	rode      bool       // that one, or the one before answers, went with a frame that went anyway
}

func (p *peers) init(h *Host) {
	p.h = h
	p.mu.nodes = make(map[keyspace.NodeID]*peer)
	p.wal.moved = h.cfg.Clock.Now()
	p.store.moved, p.connectedAt = p.wal.moved, p.wal.moved
	p.probe = wake.New()
}

// change moves a group's references from the nodes of its old replicas to those of the
// new ones.
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

// tick checks this node's disks, tells the peers what is due, and notices peers that fell silent.
func (p *peers) tick(now clock.Time, n uint64) {
	p.checkDisks(now, n)
	var died, heard []keyspace.NodeID
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
		if q.alive {
			heard = append(heard, id)
		}
	}
	p.mu.Unlock()
	p.h.m.peersAlive.Set(float64(alive))
	if n == 1 || n%p.h.cfg.livenessEvery() == 0 {
		slices.Sort(heard)
		// Twice the interval is late, as a leader's heartbeat is with etcd.
		if round := p.startRound(now, p.updateConnectivity(now), heard); round != 0 && now.Sub(round) > 2*p.h.cfg.livenessInterval() {
			p.h.m.heartbeatFailures.Inc()
		}
		p.updateLost(now)
	}
	for _, id := range p.h.cfg.Bus.Peers() {
		p.tell(id, now, dueAlone)
	}
	slices.Sort(died)
	for _, id := range died {
		p.died(id)
	}
}

// SetMembers names the cluster's nodes that have started and were not removed. They alone count for whether this node hears
// half of the others. The bus also knows nodes that were removed or have not started. With those counted, every node would be
// isolated once enough others had been replaced. Before the first call all peers of the bus count.
func (h *Host) SetMembers(nodes []keyspace.NodeID) {
	h.peers.mu.Lock()
	defer h.peers.mu.Unlock()
	h.peers.mu.members = append([]keyspace.NodeID{}, nodes...)
}

// countMembers counts the other members, and those of them that live.
func (p *peers) countMembers() (others, heard int) {
	p.mu.RLock()
	members := p.mu.members
	p.mu.RUnlock()
	if members == nil || mutation.Is(mutation.RemovedCounted) {
		members = p.h.cfg.Bus.Peers()
	}
	for _, id := range members {
		if id != p.h.cfg.Node {
			others, heard = others+1, heard+boolInt(p.look(id).alive)
		}
	}
	return others, heard
}

// updateConnectivity reports whether this node is connected: it hears at least half of the
// others, and what leaders need (hearsNeeded). A node that has not been for more than a liveness timeout and an interval is
// isolated. It hands each of its leaderships over if a connected voter can take over. It may be the only leader that can reach
// this node, while all other nodes wait for a leader that they cannot reach. By the interval others have said that they
// miss a needed node too: each pair of nodes speaks at its own times.
func (p *peers) updateConnectivity(now clock.Time) (connected bool) {
	others, heard := p.countMembers()
	if connected = 2*heard >= others && p.hearsNeeded(); connected {
		p.connectedAt = now
	}
	isolated := now.Sub(p.connectedAt) > p.h.cfg.LivenessTimeout+p.h.cfg.livenessInterval()
	if p.isolated.Swap(isolated) != isolated {
		p.h.log.Warn("connectivity to peers changed", zap.Bool("isolated", isolated), zap.Int("heard", heard), zap.Int("others", others))
	}
	if isolated {
		p.h.pacer.add(p.affected(func(g *Group) bool {
			return g.public.leading.Load() != 0 && p.hasTransferTarget(*g.public.replicas.Load()...)
		}))
	}
	return connected
}

// hearsNeeded reports whether this node hears the node that leaders need. If no other node
// hears it either, nobody could lead better than this one.
func (p *peers) hearsNeeded() bool {
	if p.h.cfg.Needed == nil {
		return true
	}
	needed := p.h.cfg.Needed()
	return needed == 0 || p.h.Liveness(needed) || len(p.h.Relays(needed)) == 0
}

// hasTransferTarget reports whether one of the replicas is a voter on a live node that
// itself hears at least half of the others.
func (p *peers) hasTransferTarget(replicas ...keyspace.Replica) bool {
	return slices.ContainsFunc(replicas, func(r keyspace.Replica) bool {
		q := p.look(r.Node)
		return q.alive && q.connected && r.Role == keyspace.RoleVoter
	})
}

// startRound notes what liveness messages say until the next round, and returns when the last one was; 0 at the first.
func (p *peers) startRound(now clock.Time, connected bool, heard []keyspace.NodeID) (last clock.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, p.mu.round, p.mu.connected, p.mu.heard = p.mu.round, now, connected, heard
	return last
}

// A liveness message is due if the last one is older than a part of the interval. Of two nodes, the one whose tick comes first
// after an interval begins, and the other one answers. A heartbeat takes the part of that tick from then on.
const (
	dueAlone  = 15 // sixteenths: at a tick, which may come a little early
	dueAnswer = 8
	dueAlong  = 2  // with a frame that goes anyway
	dueAgain  = 12 // with another one, after a message that went so: many groups send frames all the time
)

// tell sends a node a liveness message if one is due: the last one is so many sixteenths of an interval old. One that
// cannot be sent counts as lost. It sends none where no round has begun for two intervals: the ticker stands still. Workers and
// readers that still run do not show that this node lives.
func (p *peers) tell(to keyspace.NodeID, now clock.Time, sixteenths time.Duration) {
	interval := p.h.cfg.livenessInterval()
	p.mu.Lock()
	q, due := p.mu.nodes[to], now == p.mu.round // who was never heard is told in rounds alone
	along := sixteenths == dueAlong
	if q != nil {
		if along && q.rode {
			sixteenths = dueAgain
		}
		due = q.told == 0 || now.Sub(q.told) >= interval*sixteenths/16
	}
	if !due || p.mu.round == 0 || now.Sub(p.mu.round) > 2*interval {
		p.mu.Unlock()
		return
	}
	if q != nil {
		q.told, q.rode = now, along || q.rode && sixteenths == dueAnswer
	}
	p.mu.sequence++
	msg := encodeLiveness(liveness{
		boot: p.h.cfg.Boot, healthy: !p.h.diskStalled.Load(), connected: p.mu.connected, sequence: p.mu.sequence, heard: p.mu.heard,
	})
	p.mu.Unlock()
	_ = p.h.cfg.Bus.Send(to, transport.MethodRaftControl, 0, msg)
}

// heard handles a peer's liveness message.
func (p *peers) heard(from keyspace.NodeID, l liveness) {
	now := p.h.cfg.Clock.Now()
	p.mu.Lock()
	q := p.nodeLocked(from)
	restarted := q.boot != 0 && q.boot != l.boot
	if !restarted && q.boot == l.boot && l.sequence <= q.sequence || restarted && l.boot == q.before {
		p.mu.Unlock()
		return // an old message must not prolong a life
	}
	if restarted {
		q.before = q.boot
	}
	q.boot, q.sequence, q.connected, q.hears = l.boot, l.sequence, l.connected, l.heard
	was := q.alive
	if q.alive = l.healthy; l.healthy {
		q.healthy = now
	}
	is := q.alive
	p.mu.Unlock()
	p.tell(from, now, dueAnswer)
	switch {
	case was && !is:
		p.died(from)
	case is && (!was || restarted):
		p.returned(from, restarted)
	}
}

// died queues the groups whose leader was on the node for a paced wake-up.
func (p *peers) died(node keyspace.NodeID) {
	p.h.log.Warn("peer is not heard any more, and counts as dead", zap.Stringer("peer", node))
	p.h.pacer.add(p.affected(func(g *Group) bool {
		return keyspace.NodeID(g.public.leaderNode.Load()) == node
	}))
}

// lostNodes returns the nodes that this one no longer hears, and whether others hear them. A node counts only four intervals
// after it lost liveness: others that miss it as well have said so by then, though each pair of nodes speaks at its own times.
func (p *peers) lostNodes(now clock.Time) map[keyspace.NodeID]bool {
	patience := p.h.cfg.LivenessTimeout + 4*p.h.cfg.livenessInterval()
	lost := make(map[keyspace.NodeID]bool)
	p.mu.RLock()
	for id, q := range p.mu.nodes {
		if q.boot != 0 && !q.alive && now.Sub(q.healthy) > patience {
			lost[id] = false
		}
	}
	p.mu.RUnlock()
	for id := range lost {
		lost[id] = len(p.h.Relays(id)) > 0
	}
	return lost
}

// updateLost queues the groups that this host leads and that others can lead now for a paced
// wake-up. They give the lead up.
func (p *peers) updateLost(now clock.Time) {
	lost := p.lostNodes(now)
	if maps.Equal(lost, p.lastLost) {
		return
	}
	p.lastLost = lost
	p.h.pacer.add(p.affected(func(g *Group) bool {
		return g.public.leading.Load() != 0 && othersCanLead(*g.public.replicas.Load(), lost)
	}))
}

// othersCanLead reports whether this node does not hear a quorum of the replicas, while a quorum lives. Where nobody else can
// lead, as after the deaths of nodes, a leader that gave the lead up would only add to the groups that campaign in vain.
func othersCanLead(replicas []keyspace.Replica, lost map[keyspace.NodeID]bool) bool {
	behind := func(r keyspace.Replica) bool { return lost[r.Node] }
	if !slices.ContainsFunc(replicas, behind) || mutation.Is(mutation.LeadKeptUnheard) {
		return false
	}
	hears, lives := make(map[uint64]bool, len(replicas)), make(map[uint64]bool, len(replicas))
	for _, r := range replicas {
		heard, gone := lost[r.Node]
		hears[uint64(r.ID)], lives[uint64(r.ID)] = !gone, !gone || heard
	}
	voters := configurationOf(replicas, 0).voters
	return voters.VoteResult(hears) != quorum.VoteWon && voters.VoteResult(lives) == quorum.VoteWon
}

// returned queues groups for a paced wake-up. This host leads them, and their replicas on the node may lag. After a restart it also
// queues those that the node led.
func (p *peers) returned(node keyspace.NodeID, restarted bool) {
	p.h.log.Info("peer is heard", zap.Stringer("peer", node), zap.Bool("restarted", restarted))
	p.h.pacer.add(p.affected(func(g *Group) bool {
		if g.public.leading.Load() != 0 {
			return hasNode(g.public.replicas.Load(), node)
		}
		return restarted && keyspace.NodeID(g.public.leaderNode.Load()) == node
	}))
}

func (p *peers) affected(is func(*Group) bool) []*Group {
	return slices.DeleteFunc(p.h.all(), func(g *Group) bool { return !is(g) })
}

func hasNode(replicas *[]keyspace.Replica, node keyspace.NodeID) bool {
	return replicas != nil && slices.ContainsFunc(*replicas, func(r keyspace.Replica) bool { return r.Node == node })
}

// dead reports whether the node was alive in this host's time and no longer is. A node
// that was never heard of may be about to start, as all are when a cluster starts.
func (p *peers) dead(node keyspace.NodeID) bool {
	q := p.look(node)
	return q.boot != 0 && !q.alive
}

// lost reports whether the node has lost liveness, or has restarted since boot was seen. A node whose first liveness message
// is outstanding is not lost: the caller has heard from it as a leader. Otherwise the first clients would depose a new
// cluster's first leaders, together with the revisions allocated to them.
func (p *peers) lost(node keyspace.NodeID, boot keyspace.BootID) bool {
	q := p.look(node)
	return q.boot != 0 && (!q.alive || boot != 0 && q.boot != boot)
}

func (p *peers) boot(node keyspace.NodeID) keyspace.BootID { return p.look(node).boot }

// look returns what is known of a node, the zero peer if nothing is.
func (p *peers) look(node keyspace.NodeID) (q peer) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if at := p.mu.nodes[node]; at != nil {
		q = *at
	}
	return q
}

// BootOf returns the boot in which the node was last heard, 0 if it was not.
func (h *Host) BootOf(node keyspace.NodeID) keyspace.BootID {
	if node == h.cfg.Node {
		return h.cfg.Boot
	}
	return h.peers.boot(node)
}

// Liveness reports whether the node is alive as far as this node knows: it was heard from
// within the liveness timeout, and its disks make progress. This node itself always is.
func (h *Host) Liveness(node keyspace.NodeID) bool {
	return node == h.cfg.Node || h.peers.look(node).alive
}

// Relays returns the live nodes that hear a node, as far as this one knows, in ascending
// order.
func (h *Host) Relays(node keyspace.NodeID) (relays []keyspace.NodeID) {
	h.peers.mu.RLock()
	defer h.peers.mu.RUnlock()
	for id, q := range h.peers.mu.nodes {
		if _, hears := slices.BinarySearch(q.hears, node); q.alive && hears {
			relays = append(relays, id)
		}
	}
	slices.Sort(relays)
	return relays
}

// Heard reports whether the node is alive as far as this node or a live node that it hears
// knows. A node that only others hear lives behind a broken link.
func (h *Host) Heard(node keyspace.NodeID) bool {
	return h.Liveness(node) || len(h.Relays(node)) > 0 && !mutation.Is(mutation.UnheardCountsDead)
}

// Reached reports whether the node is alive as far as this node knows, or at least half of the
// other members of the cluster hear it. What only few nodes hear takes no part in most groups.
func (h *Host) Reached(node keyspace.NodeID) bool {
	if h.Liveness(node) {
		return true
	}
	others, _ := h.peers.countMembers() // the node is one of them
	relays := len(h.Relays(node))
	return relays > 0 && 2*relays >= others-1
}

// SilentFor returns for how long a peer that is not alive has been so; 0 if it is alive, or has not been
// heard since the start of this node.
func (h *Host) SilentFor(node keyspace.NodeID) time.Duration {
	q := h.peers.look(node)
	if q.alive || q.healthy == 0 {
		return 0
	}
	return h.cfg.Clock.Now().Sub(q.healthy)
}

// Connected reports whether the node hears at least half of the other nodes, and the node that leaders need (Config.Needed).
// For a peer its last liveness message decides, and a peer that is not alive is not connected. This node stays connected until
// it has heard fewer for longer, see updateConnectivity. A node that is not connected hands over its leaderships.
func (h *Host) Connected(node keyspace.NodeID) bool {
	if node == h.cfg.Node {
		return !h.peers.isolated.Load()
	}
	q := h.peers.look(node)
	return q.alive && q.connected
}
