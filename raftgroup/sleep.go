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
	// idle counts a leader's ticks since there was last something to do.
	idle int
	// silent counts a follower's ticks since it last heard its leader.
	silent int
	// campaign says that this replica is to campaign as soon as it may.
	campaign bool
	// yields says that another replica was chosen to campaign first.
	yields bool
	// leaderBoot is the run of the leader's node when the leader was last heard.
	leaderBoot keyspace.BootID
	// removed says that a leader has told this replica that it is no member.
	removed bool
	// alone says that this replica was the group's sole voter when it was opened and
	// its log holds nothing that could have changed that.
	alone bool
}

// wake makes a group that sleeps one that is ticked. Every raft message does this
// to its receiver, and every client's wish.
func (g *Group) wake() {
	// The followers count on it: one that has woken waits for a heartbeat.
	if g.rouse() && g.isLeader && !g.h.stuck.Load() {
		g.rn.Tick()
	}
}

// rouse is wake for who sends something to the followers anyway: the leader's heartbeat
// waits for the next tick. It says whether the group has slept.
func (g *Group) rouse() bool {
	g.sleep.idle = 0
	if !g.sleep.asleep {
		return false
	}
	g.sleep.asleep = false
	g.lease.dirty = true // a sole voter waits for nobody's answer
	g.sleep.silent = 0
	g.public.asleep.Store(false)
	g.w.setAwake(g, true)
	g.h.m.wakes.Inc()
	if !g.isLeader {
		g.forgetLostLeader()
	}
	return true
}

// forgetLostLeader lets go of a leader that cannot be one any more. It is safe
// whatever became of that leader: the promise is the host's. Without it a sleeper
// would refuse every vote, since raft believes to have heard from its leader an
// instant ago.
func (g *Group) forgetLostLeader() {
	if g.lead == 0 || g.isLeader {
		return
	}
	if node := g.nodeOf(g.lead); node == 0 || g.h.peers.lost(node, g.sleep.leaderBoot) {
		_ = g.rn.ForgetLeader()
		g.lostLeader(0)
	}
}

// lostLeader chooses who campaigns where a leader is known to be gone: all living
// voters choose the same one, as far as they agree on who lives, so that they do
// not split the vote, and give it a head start. If it fails to, the others' timeouts run,
// which raft draws from one to two election timeouts. silent, if not 0, is a leader whose node may still count
// as living: it is heard less often than the leader.
func (g *Group) lostLeader(silent keyspace.ReplicaID) {
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

// wakePaced is the pacer's turn of this group: after its opening, or because a
// node died, restarted or came back.
func (g *Group) wakePaced() {
	g.public.wakeWanted.Store(0)
	if len(g.conf.replicas) == 0 || g.sleep.removed {
		return // without a configuration there is nothing to do but to wait
	}
	g.wake()
	if g.isLeader {
		g.handOver()
		return
	}
	if g.forgetLostLeader(); g.lead == 0 && g.sleep.silent == 0 {
		g.lostLeader(0)
	}
}

// handOver gives leadership up to a replica that others can reach, where this node hears
// hardly anybody. What fails is tried again with the next liveness message.
func (g *Group) handOver() {
	if !g.h.peers.lonely.Load() || g.changes.transfer != nil || !g.lease.ready {
		return
	}
	ps, err := g.progress()
	if err != nil {
		return
	}
	for _, p := range ps {
		// One that does not answer may not hear this one: for as long as it is waited for in
		// vain nothing is proposed, and then it would be tried again.
		if p.Replica.ID != g.self && p.Active && p.Replicating && g.h.peers.hasHeir(p.Replica) {
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
		// The leader may live and sleep: this replica has missed the notice, or was woken by
		// somebody else, such as a candidate that does not hear the leader. One that is awake
		// is heard in each tick, and is not asked after one.
		if g.lead != 0 && g.sleep.silent%max(2, g.h.cfg.askTicks()) == 0 {
			g.sendHost(&message{group: g.id, kind: kindWake, to: g.lead, from: g.self, term: g.term})
		}
	} else if g.sleep.silent == timeout {
		silent := g.lead
		_ = g.rn.ForgetLeader()
		if silent != 0 {
			g.lostLeader(silent)
		}
	}
	if g.mayTick() && g.mayCampaign() {
		g.promise.ticks++
		g.rn.Tick()
	}
	g.campaignIfFree()
}

// trySleep puts an idle leader's group to sleep. What it checks is that nobody
// would miss the heartbeats: nothing is under way, and every follower that lives
// has everything. One whose node is dead may lag; its return wakes the group.
func (g *Group) trySleep() bool {
	idle := g.h.cfg.SleepAfter
	if idle < 0 || g.id.IsSystem() || int64(g.sleep.idle)*int64(g.h.cfg.TickInterval) < int64(idle) {
		return false
	}
	if !g.lease.ready || g.applied != g.last || g.commit != g.last || g.conf.joint || g.appends > 0 ||
		g.reads.open() || len(g.changes.waiters) > 0 || g.changes.transfer != nil || g.installing != nil ||
		g.inflight.Load() != 0 || len(g.trunc.pins) > 0 || len(g.news.held) > 0 || !g.followersIdle() {
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

// followersIdle says whether all living followers have the whole log and a quorum
// lives.
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

// fallAsleep ends the ticks. A leader forgets all answers and its lease: what they
// promise ends while nobody looks.
func (g *Group) fallAsleep() {
	g.sleep.asleep = true
	g.sleep.campaign = false
	g.lease.answers, g.lease.dirty = nil, true
	g.public.leaseUntil.Store(0)
	g.public.asleep.Store(true)
	g.w.setAwake(g, false)
	g.h.m.sleeps.Inc()
}

// onSleepNotice lets a follower sleep if it has all that the leader has, and if the
// leader has not woken since it said so.
func (g *Group) onSleepNotice(m *message) {
	if g.sleep.asleep || g.isLeader || m.term != g.term || m.from != g.lead ||
		g.promise.answeredTerm == m.term && g.promise.answered > m.number {
		return
	}
	if g.commit < m.commit || g.reads.open() || g.installing != nil || g.receiving != nil {
		// Something is under way here of which the leader has not heard: a lost question, a
		// lost commit index. In its silence this replica would take it for dead.
		g.sendHost(&message{group: g.id, kind: kindWake, to: m.from, from: g.self, term: g.term})
		return
	}
	if st := g.rn.BasicStatus(); st.RaftState != raft.StateFollower || st.GetTerm() != m.term || st.Lead != uint64(m.from) {
		return
	}
	g.sleep.leaderBoot = g.h.peers.boot(m.node)
	g.fallAsleep()
}

// onRemoved takes a leader's word that this replica is no member of the group as a
// hint: it stops campaigning, so that it disturbs nobody, and its owner asks
// placement. The word of a leader whose term is below that of an entry applied here is not
// taken: it may not know of this replica yet. The replica's own term says nothing, since
// without pre-votes each candidature raises it.
func (g *Group) onRemoved(m *message) {
	if g.isLeader || g.sleep.removed || m.term < g.appliedTerm {
		return
	}
	g.sleep.removed = true
	g.zap.Info("a leader says that this replica is not a member", zap.Uint64("term", m.term), zap.Stringer("peer", m.node))
	if f := g.h.cfg.Removed; f != nil {
		id, self := g.id, g.self
		g.w.kick(g, applyTask{kind: taskCall, call: func() { f(id, self) }})
	}
	// A late message of the leader may have come after the replica asked for votes: nobody
	// is to take it for one that is led, and told everything.
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

// pacer hands out wake-ups at a bounded rate, so that the death of a node with
// many groups does not drown those that remain.
type pacer struct {
	h  *Host
	mu sync.Mutex
	// queue holds each group at most once (Group.public.wakeWanted).
	queue []*Group
	// credit is what the last tick's share left over, in groups times 1e9.
	credit int64
}

func (p *pacer) init(h *Host) { p.h = h }

// add queues groups in order of their ids: the survivors of a node's death then
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
