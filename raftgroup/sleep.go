package raftgroup

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/quorum"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// sleepState is the worker's side of sleep.
type sleepState struct {
	asleep bool
	// idle counts a leader's ticks since its last activity.
	idle int
	// silent counts a follower's ticks since it last heard its leader.
	silent int
	// campaign says that this replica campaigns as soon as it may, and asks for pre-votes again while they are undecided. It
	// has asked asks times, the last time at asked.
	campaign bool
	asks     int
	asked    clock.Time
	// yields says that another replica was chosen to campaign first.
	yields bool
	// leaderBoot is the boot id of the leader's node when the leader was last heard.
	leaderBoot keyspace.BootID
	// soon says that this leader has woken for a proposal, and that nobody else wants it awake since. It ends with the leadership and with sleep.
	soon bool
	// read says that somebody has asked for a ReadIndex since the group woke: more of its reads may be under way by the lease.
	read bool
	// removed says that a leader has told this replica that it is not a member.
	removed bool
	// soleVoter says that this replica was the only voter when it was opened, and its log has nothing that could change that.
	soleVoter bool
}

// wakePaced is the group's turn in the pacer: after it was opened, or because a node died, restarted or returned.
func (g *Group) wakePaced() {
	g.public.wakeWanted.Store(0)
	if len(g.conf.replicas) == 0 || g.sleep.removed {
		return // an empty or removed replica can only wait
	}
	g.wake()
	if g.sleep.soon = false; g.isLeader {
		if !g.giveUpLead() {
			g.handOver()
		}
		return
	}
	if g.learnsLeader() {
		return
	}
	if g.forgetLostLeader(); g.lead == 0 && g.sleep.silent == 0 {
		g.chooseCandidate(0)
	}
}

// learnsLeader reports whether this visit's messages came from a leader that ready has yet to note. That one lives:
// the replica need not look for another.
func (g *Group) learnsLeader() bool {
	lead := keyspace.ReplicaID(g.rn.BasicStatus().Lead)
	return lead != 0 && lead != g.lead
}

// giveUpLead ends a leadership that others take over, because this node has lost its links to them. Raft ends it only one to
// two election timeouts after a client has woken the group, and until then its requests come here. A quorum that has answered
// heartbeats proves that the links carry them.
func (g *Group) giveUpLead() bool {
	if clock.Time(g.conf.voters.CommittedIndex(g)) > g.w.now || !othersCanLead(g.conf.replicas, g.h.peers.lostNodes(g.w.now)) {
		return false
	}
	// Raft first asks whom it has heard since the last such check, which may be long ago.
	for range 2 {
		check := &pb.Message{Type: pb.MsgCheckQuorum.Enum(), From: ptr(raft.LocalAppendThread)}
		if err := g.rn.Step(check); err != nil {
			panic(fmt.Sprintf("raftgroup: group %s: own %s refused: %v", g.id, check.GetType(), err))
		}
	}
	return true
}

// handOver transfers leadership to a replica that others can reach if this node is
// isolated. The next round of the ticker retries a failed transfer.
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
	g.sleep.removed, g.sleep.soon = false, false
	g.wake()
	if g.isLeader || g.learnsLeader() {
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
		if !g.trySleep() && !g.trySleepSoon() {
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
		// The leader may be alive and asleep: this replica missed the notice, or another node woke it, such as a candidate that
		// cannot reach the leader. An awake leader is heard in each tick, or in each second one if its node ticks at half the
		// rate. A request at the tick at which that leader falls asleep would wake it again, each time. So two silent ticks are
		// no reason to ask.
		if g.lead != 0 && g.sleep.silent > 2 && g.sleep.silent%g.h.cfg.retryTicks() == 0 {
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

// trySleep puts a leader's group to sleep that has been idle for long enough.
func (g *Group) trySleep() bool {
	after := g.h.sleepTicks.Load()
	if g.sleep.read {
		after = g.h.cfg.idleTicks()
	}
	if int64(g.sleep.idle) < after || !g.maySleep() {
		return false
	}
	g.sleepAll(false)
	return true
}

// trySleepSoon puts a leader's group to sleep as soon as its followers have the entries that it has woken for, and know that
// they are committed. It does so where the host has many awake groups: each of them gets little then, and its ticks and
// heartbeats until it sleeps would cost more than its entries. A group that somebody has read keeps the lease, and sleeps by its ticks.
// So does one whose entries are durable already: no flush will wake it to tell its followers that nobody needs them.
func (g *Group) trySleepSoon() bool {
	if !g.sleep.soon || g.notices.listed || g.public.durable.Load() >= g.last || !g.h.crowded() || !g.maySleep() {
		return false
	}
	g.sleepAll(true)
	return true
}

// crowded says that idle groups fall asleep sooner.
func (h *Host) crowded() bool { return h.sleepTicks.Load() < h.cfg.idleTicks() }

// maySleep reports whether nobody would miss the heartbeats of this leader's group: nothing is under way, and every
// live follower has the whole log. A follower on a dead node may lag; its return wakes the group.
func (g *Group) maySleep() bool {
	if g.h.cfg.SleepAfter < 0 || g.id.IsSystem() || g.h.diskStalled.Load() {
		return false
	}
	return g.lease.ready && g.applied == g.last && g.commit == g.last && !g.conf.joint && g.appends == 0 &&
		!g.reads.open() && len(g.changes.waiters) == 0 && g.changes.transfer == nil && g.installing == nil &&
		g.inflight.Load() == 0 && len(g.trunc.pins) == 0 && len(g.notices.held) == 0 && g.followersIdle()
}

// sleepAll sends the followers to sleep, and falls asleep. A notice that follows an entry at once stays behind it and its
// commit notice.
func (g *Group) sleepAll(behind bool) {
	now := uint64(g.w.now)
	for _, r := range g.conf.replicas {
		if r.ID != g.self {
			g.sendHost(&message{
				group: g.id, kind: kindSleep, to: r.ID, from: g.self,
				term: g.term, commit: g.commit, number: now, behind: behind,
			})
		}
	}
	g.fallAsleep()
}

// followersIdle reports whether all live followers have the whole log and a quorum is alive.
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

// onSleepNotice lets a follower sleep if it has everything that the leader has, unless the leader has woken since.
func (g *Group) onSleepNotice(m *message) {
	if g.sleep.asleep || g.isLeader || m.term != g.term || m.from != g.lead ||
		g.promise.answeredTerm == m.term && g.promise.answered > m.number {
		return
	}
	if g.rn.BasicStatus().GetCommit() < m.commit || g.reads.open() || g.installing != nil || g.receiving != nil {
		// Something is under way here that the leader does not know of: a lost request or a lost commit index. If the leader fell
		// silent, this replica would take it for dead.
		g.sendHost(&message{group: g.id, kind: kindWake, to: m.from, from: g.self, term: g.term})
		return
	}
	if st := g.rn.BasicStatus(); st.RaftState != raft.StateFollower || st.GetTerm() != m.term || st.Lead != uint64(m.from) {
		return
	}
	g.sleep.leaderBoot = g.h.peers.boot(m.node)
	g.fallAsleep()
}

// onRemoved handles a leader's hint that this replica is not a member of the group. The replica stops campaigning, so it disturbs
// nobody, and its owner asks placement. The hint is ignored if the leader's term is below that of an entry applied here: that
// leader may not know of this replica yet. The replica's own term says nothing, because without pre-votes each campaign raises
// it.
func (g *Group) onRemoved(m *message) {
	if g.isLeader || g.sleep.removed || m.term < g.appliedTerm {
		return
	}
	g.sleep.removed, g.sleep.campaign = true, false
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
