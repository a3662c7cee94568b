package raftgroup

import (
	"slices"
	"sync"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/quorum"
	"go.etcd.io/raft/v3/tracker"
	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// sleepState is the worker's side of sleep.
type sleepState struct {
	asleep bool
	// idle counts a leader's ticks since its last activity.
	idle int
	// silent counts a follower's ticks since it last heard its leader.
	silent int
	// campaign says that this replica campaigns as soon as it may.
	campaign bool
	// yields says that another replica was chosen to campaign first.
	yields bool
	// leaderBoot is the boot id of the leader's node when the leader was last heard.
	leaderBoot keyspace.BootID
	// removed says that a leader has told this replica that it is not a member.
	removed bool
	// soleVoter says that this replica was the group's only voter when it was opened, and
	// that its log holds nothing that could have changed that.
	soleVoter bool
}

// wake makes a sleeping group be ticked again. Every raft message does this to its
// receiver, and every client request.
func (g *Group) wake() {
	// The followers rely on it: a woken follower waits for a heartbeat.
	if g.wakeWithoutHeartbeat() && g.isLeader && !g.h.diskStalled.Load() {
		g.rn.Tick()
	}
}

// wakeWithoutHeartbeat is wake for a leader that sends its followers something anyway:
// the heartbeat waits for the next tick. It reports whether the group was asleep.
func (g *Group) wakeWithoutHeartbeat() bool {
	g.sleep.idle = 0
	if !g.sleep.asleep {
		return false
	}
	g.sleep.asleep = false
	g.lease.dirty = true // a sole voter needs nobody's response
	g.sleep.silent = 0
	g.public.asleep.Store(false)
	g.w.setAwake(g, true)
	g.h.m.wakes.Inc()
	if !g.isLeader {
		g.forgetLostLeader()
	}
	return true
}

// forgetLostLeader drops a leader that cannot lead any more. This is safe whatever became
// of that leader, because the host keeps its promise independently of raft. Otherwise a
// replica that slept would refuse every vote, since raft believes that it heard from its
// leader an instant ago.
func (g *Group) forgetLostLeader() {
	if g.lead == 0 || g.isLeader {
		return
	}
	if node := g.nodeOf(g.lead); node == 0 || g.h.peers.lost(node, g.sleep.leaderBoot) {
		_ = g.rn.ForgetLeader()
		g.chooseCandidate(0)
	}
}

// chooseCandidate chooses the replica that campaigns when the leader is known to be lost.
// All live voters choose the same one, as far as they agree on who lives, so they do not
// split the vote. The others give it a head start. If it fails, they campaign after
// raft's random timeouts of one to two election timeouts. silent, if not 0, is a leader
// whose node may still count as alive, because liveness messages are rarer than its
// heartbeats.
func (g *Group) chooseCandidate(silent keyspace.ReplicaID) {
	voters := make([]keyspace.ReplicaID, 0, len(g.conf.replicas))
	for _, r := range g.conf.replicas {
		if g.conf.votes(r.ID) && r.ID != silent && (r.ID == g.self || !g.h.peers.dead(r.Node)) {
			voters = append(voters, r.ID)
		}
	}
	if len(voters) == 0 {
		return
	}
	slices.Sort(voters)
	if g.sleep.yields = voters[mix(uint64(g.id))%uint64(len(voters))] != g.self; !g.sleep.yields {
		g.sleep.campaign = true
		g.campaignIfFree()
	}
}

// wakePaced is the group's turn in the pacer: after it was opened, or because a node
// died, restarted or returned.
func (g *Group) wakePaced() {
	g.public.wakeWanted.Store(0)
	if len(g.conf.replicas) == 0 || g.sleep.removed {
		return // an empty or removed replica can only wait
	}
	g.wake()
	if g.isLeader {
		g.handOver()
		return
	}
	if g.forgetLostLeader(); g.lead == 0 && g.sleep.silent == 0 {
		g.chooseCandidate(0)
	}
}

// handOver transfers leadership to a replica that others can reach if this node is
// isolated. The next liveness message retries a failed transfer.
func (g *Group) handOver() {
	if !g.h.peers.isolated.Load() || g.changes.transfer != nil || !g.lease.ready {
		return
	}
	ps, err := g.progress()
	if err != nil {
		return
	}
	for _, p := range ps {
		// A replica that does not respond may not hear this node. While the transfer
		// waits for it nothing is proposed, and then it would be tried again.
		if p.Replica.ID != g.self && p.Active && p.Replicating && g.h.peers.hasTransferTarget(p.Replica) {
			g.beginTransfer(p.Replica.ID, func(error) {})
			return
		}
	}
}

// wakeByClient wakes the group and its leader.
func (g *Group) wakeByClient() {
	if len(g.conf.replicas) == 0 {
		return
	}
	g.sleep.removed = false
	g.wake()
	if g.isLeader {
		return
	}
	if g.forgetLostLeader(); g.lead != 0 {
		g.sendHost(&message{group: g.id, kind: kindWake, to: g.lead, from: g.self, term: g.term})
	}
}

// tick is one tick of an awake group.
func (g *Group) tick() {
	if g.sleep.asleep || g.closed {
		return
	}
	g.tickReads()
	if g.isLeader {
		g.tickTransfer()
		g.sleep.idle++
		g.learnNeed(g.followerNeed())
		if len(g.trunc.pins) > 0 {
			g.truncate(false) // a pin may have expired
		}
		g.leaveJoint()
		if !g.trySleep() {
			g.rn.Tick()
		}
		return
	}
	if (len(g.conf.replicas) == 0 || g.sleep.removed) && !g.reads.open() {
		g.fallAsleep()
		return
	}
	g.sleep.silent++
	if timeout := g.h.cfg.electionTicks(); g.sleep.silent < timeout {
		// The leader may be alive and asleep: this replica missed the notice, or another
		// node woke it, such as a candidate that cannot reach the leader. An awake leader
		// is heard in each tick, so one silent tick is no reason to ask.
		if g.lead != 0 && g.sleep.silent%max(2, g.h.cfg.retryTicks()) == 0 {
			g.sendHost(&message{group: g.id, kind: kindWake, to: g.lead, from: g.self, term: g.term})
		}
	} else if g.sleep.silent == timeout {
		silent := g.lead
		_ = g.rn.ForgetLeader()
		if silent != 0 {
			g.chooseCandidate(silent)
		}
	}
	if g.mayTick() && g.mayCampaign() {
		g.promise.ticks++
		g.rn.Tick()
	}
	g.campaignIfFree()
}

// trySleep puts an idle leader's group to sleep if nobody would miss the heartbeats:
// nothing is under way, and every live follower has the whole log. A follower on a dead
// node may lag; its return wakes the group.
func (g *Group) trySleep() bool {
	idle := g.h.cfg.SleepAfter
	if idle < 0 || g.id.IsSystem() || int64(g.sleep.idle)*int64(g.h.cfg.TickInterval) < int64(idle) {
		return false
	}
	if !g.lease.ready || g.applied != g.last || g.commit != g.last || g.conf.joint || g.appends > 0 ||
		g.reads.open() || len(g.changes.waiters) > 0 || g.changes.transfer != nil || g.installing != nil ||
		g.inflight.Load() != 0 || len(g.trunc.pins) > 0 || len(g.notices.held) > 0 || !g.followersIdle() {
		return false
	}
	now := uint64(g.w.now)
	for _, r := range g.conf.replicas {
		if r.ID != g.self {
			g.sendHost(&message{
				group: g.id, kind: kindSleep, to: r.ID, from: g.self,
				term: g.term, commit: g.commit, number: now,
			})
		}
	}
	g.fallAsleep()
	return true
}

// followersIdle reports whether all live followers have the whole log and a quorum is
// alive.
func (g *Group) followersIdle() bool {
	ok, living := true, make(map[uint64]bool, len(g.conf.replicas))
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if id == uint64(g.self) {
			living[id] = true
			return
		}
		if !g.h.Liveness(g.nodeOf(keyspace.ReplicaID(id))) {
			living[id] = false
			return
		}
		living[id] = true
		if pr.State != tracker.StateReplicate || pr.Match != g.last || !pr.RecentActive {
			ok = false
		}
	})
	return ok && g.conf.voters.VoteResult(living) == quorum.VoteWon
}

// fallAsleep ends the ticks. A leader drops all responses and its lease: the promises
// expire while it sleeps.
func (g *Group) fallAsleep() {
	g.sleep.asleep = true
	g.sleep.campaign = false
	g.lease.answers, g.lease.dirty = nil, true
	g.public.leaseUntil.Store(0)
	g.public.asleep.Store(true)
	g.w.setAwake(g, false)
	g.h.m.sleeps.Inc()
}

// onSleepNotice lets a follower sleep if it has everything that the leader has, unless
// the leader has woken since.
func (g *Group) onSleepNotice(m *message) {
	if g.sleep.asleep || g.isLeader || m.term != g.term || m.from != g.lead ||
		g.promise.answeredTerm == m.term && g.promise.answered > m.number {
		return
	}
	if g.commit < m.commit || g.reads.open() || g.installing != nil || g.receiving != nil {
		// Something is under way here that the leader does not know of: a lost request or
		// a lost commit index. If the leader fell silent, this replica would take it for
		// dead.
		g.sendHost(&message{group: g.id, kind: kindWake, to: m.from, from: g.self, term: g.term})
		return
	}
	if st := g.rn.BasicStatus(); st.RaftState != raft.StateFollower || st.GetTerm() != m.term || st.Lead != uint64(m.from) {
		return
	}
	g.sleep.leaderBoot = g.h.peers.boot(m.node)
	g.fallAsleep()
}

// onRemoved handles a leader's hint that this replica is not a member of the group. The
// replica stops campaigning, so it disturbs nobody, and its owner asks placement. The
// hint is ignored if the leader's term is below that of an entry applied here: that
// leader may not know of this replica yet. The replica's own term says nothing, because
// without pre-votes each campaign raises it.
func (g *Group) onRemoved(m *message) {
	if g.isLeader || g.sleep.removed || m.term < g.appliedTerm {
		return
	}
	g.sleep.removed = true
	g.zap.Info("leader reports that this replica is not a member", zap.Uint64("term", m.term), zap.Stringer("peer", m.node))
	if f := g.h.cfg.Removed; f != nil {
		id, self := g.id, g.self
		g.w.schedule(g, applyTask{kind: taskCall, call: func() { f(id, self) }})
	}
	// A late message of the leader may have arrived after this replica asked for votes.
	// The replica must not count as led, or it would stay asleep for ever.
	_ = g.rn.ForgetLeader()
	if !g.sleep.asleep && !g.reads.open() {
		g.fallAsleep()
	}
}

// heardLeader notes a message that only a leader sends.
func (g *Group) heardLeader(m *message) {
	if m.term < g.term {
		return
	}
	g.sleep.silent = 0
	g.sleep.removed = false
	g.sleep.campaign = false
}

// pacer hands out wake-ups at a bounded rate, so that the death of a node with many
// groups does not overload the others.
type pacer struct {
	h  *Host
	mu sync.Mutex
	// queue holds each group at most once (Group.public.wakeWanted).
	queue []*Group
	// credit is the unused rest of the last tick's share, in groups times 1e9.
	credit int64
}

func (p *pacer) init(h *Host) { p.h = h }

// add queues groups in the order of their ids, so that all survivors of a node's death
// work on the same groups at the same time.
func (p *pacer) add(groups []*Group) {
	slices.SortFunc(groups, func(a, b *Group) int {
		if a.id.IsSystem() != b.id.IsSystem() {
			return boolInt(b.id.IsSystem()) - boolInt(a.id.IsSystem())
		}
		return int(min(max(int64(a.id-b.id), -1), 1))
	})
	for _, g := range groups {
		if g.id.IsSystem() {
			g.w.flag(g, flagWakePaced)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range groups {
		if !g.id.IsSystem() && g.public.wakeWanted.CompareAndSwap(0, 1) {
			p.queue = append(p.queue, g)
		}
	}
}

// tick wakes this tick's share.
func (p *pacer) tick() {
	p.mu.Lock()
	share := int64(p.h.cfg.WakesPerSecond) * int64(p.h.cfg.TickInterval)
	p.credit = min(p.credit+share, max(share, 1e9))
	n := min(int(p.credit/1e9), len(p.queue))
	p.credit -= int64(n) * 1e9
	if n == len(p.queue) && n > 0 {
		p.credit = min(p.credit, share)
	}
	batch := slices.Clone(p.queue[:n])
	rest := copy(p.queue, p.queue[n:])
	clear(p.queue[rest:])
	p.queue = p.queue[:rest]
	p.mu.Unlock()
	for _, g := range batch {
		g.w.flag(g, flagWakePaced)
	}
}
