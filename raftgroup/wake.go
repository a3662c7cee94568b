package raftgroup

import (
	"slices"

	"go.etcd.io/raft/v3"

	"github.com/skeindb/skein/keyspace"
)

// wake makes a sleeping group be ticked again. Every raft message does this to its receiver, and every client request.
func (g *Group) wake() {
	// The followers rely on it: a woken follower waits for a heartbeat.
	if g.wakeWithoutHeartbeat() && g.isLeader && !g.h.diskStalled.Load() {
		g.rn.Tick()
	}
}

// wakeWithoutHeartbeat is wake for a leader that sends its followers something anyway: the heartbeat waits for the next tick. It
// reports whether the group was asleep.
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

// forgetLostLeader drops a leader that cannot lead any more. This is safe whatever became of that leader, because the host keeps
// its promise independently of raft. Otherwise a replica that slept would refuse every vote, since raft believes that it
// heard from its leader an instant ago.
func (g *Group) forgetLostLeader() {
	if g.lead == 0 || g.isLeader {
		return
	}
	if node := g.nodeOf(g.lead); node == 0 || g.h.peers.lost(node, g.sleep.leaderBoot) {
		_ = g.rn.ForgetLeader()
		g.chooseCandidate(0)
	}
}

// chooseCandidate chooses the replica that campaigns when the leader is known to be lost. All live voters choose the same one, as
// far as they agree on who lives, so they do not split the vote. The others give it a head start. If it fails, they campaign
// after raft's random timeouts of one to two election timeouts. silent, if not 0, is a leader whose node may still count as
// alive, because liveness messages are rarer than its heartbeats.
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
	if g.sleep.yields = voters[mix(uint64(g.id))%uint64(len(voters))] != g.self; g.sleep.yields {
		g.sleep.campaign = false
		return
	}
	g.campaign()
}

// campaignWhenFree campaigns now, or at the first tick at which no promise forbids it.
func (g *Group) campaignWhenFree() {
	if g.closed || g.isLeader || !g.conf.votes(g.self) {
		return
	}
	g.wake()
	g.campaign()
}

func (g *Group) campaign() {
	if !g.sleep.campaign {
		g.sleep.campaign, g.sleep.asks, g.sleep.asked = true, 0, 0
	}
	g.campaignIfFree()
}

// campaignIfFree campaigns if that is wanted and no promise forbids it. A voter that has heard a later heartbeat of the lost leader
// refuses for a little longer. So the pre-vote is asked for again at the next ticks, as long as nobody decides it.
func (g *Group) campaignIfFree() {
	tick := g.h.cfg.TickInterval
	if !g.sleep.campaign || g.promised() || g.isLeader || !g.mayCampaign() || g.w.now < g.sleep.asked.Add(tick/2) {
		return
	}
	if g.w.now < g.promise.until.Add(tick/4) {
		return // the others answered the same heartbeat, some of them slightly later
	}
	if g.sleep.asks == 0 {
		g.h.m.elections.Inc()
	} else if g.sleep.asks == campaignAsks || g.rn.BasicStatus().RaftState != raft.StatePreCandidate {
		g.sleep.campaign = false
		return
	}
	g.sleep.asks, g.sleep.asked = g.sleep.asks+1, g.w.now
	_ = g.rn.ForgetLeader()
	_ = g.rn.Campaign()
}

// yieldNoMore has a voter campaign that rejects the chosen candidate: that one lacks entries, and with three voters it cannot win.
// It is given a tick, because with five it can.
func (g *Group) yieldNoMore() {
	if !g.sleep.yields || g.sleep.removed || g.lead != 0 || !g.conf.votes(g.self) || g.rn.BasicStatus().RaftState == raft.StateCandidate {
		return // in the last case somebody has granted it a pre-vote
	}
	g.sleep.yields = false
	g.sleep.campaign, g.sleep.asks, g.sleep.asked = true, 0, g.w.now.Add(g.h.cfg.TickInterval/2)
}

// mayCampaign reports whether the replica has applied enough of the committed entries. As a leader it could not serve earlier.
func (g *Group) mayCampaign() bool { return g.commit-g.applied <= campaignLagMax }

// heardLeader notes a message that only a leader sends.
func (g *Group) heardLeader(m *message) {
	if m.term < g.term {
		return
	}
	g.sleep.silent = 0
	g.sleep.removed, g.sleep.campaign = false, false
}

// fallAsleep ends the ticks. A leader drops all responses and its lease: the promises expire while it sleeps.
func (g *Group) fallAsleep() {
	g.sleep.asleep = true
	g.sleep.campaign, g.sleep.soon, g.sleep.read = false, false, false
	g.lease.answers, g.lease.dirty = nil, true
	g.public.leaseUntil.Store(0)
	g.public.asleep.Store(true)
	g.w.setAwake(g, false)
	g.h.m.sleeps.Inc()
}
