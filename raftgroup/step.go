package raftgroup

import (
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// visit does everything that a group has to do in one pass, in this order: durable appends, applied entries, messages, calls,
// reads, proposals, the tick. Then it asks raft once for everything that follows.
func (g *Group) visit(k *work) {
	if g.closed {
		g.refuse(k)
		return
	}
	g.appends -= k.records
	for _, m := range k.appended {
		g.respond(m)
	}
	for i := range k.applied {
		g.onApplied(&k.applied[i])
	}
	for _, m := range k.msgs {
		g.step(m)
	}
	for i, f := range k.calls {
		if f(); g.closed {
			k.msgs, k.calls = nil, k.calls[i+1:]
			g.refuse(k)
			return
		}
	}
	if len(k.reads) > 0 {
		g.addReads(k.reads)
	}
	if len(k.props) > 0 {
		g.propose(k.props)
	}
	if k.flags&flagWakePaced != 0 {
		g.wakePaced()
	}
	if k.flags&flagClientWake != 0 {
		g.wakeByClient()
	}
	if k.flags&flagCommitNotice != 0 {
		g.notices.rode = false
		g.sendCommitNotices()
	}
	if k.flags&flagTick != 0 {
		g.tick()
	}
	if k.flags&flagExpire != 0 {
		g.expireReads()
	}
	if k.flags&(flagTruncate|flagCutOff) != 0 {
		g.truncate(k.flags&flagCutOff != 0)
	}
	g.trySleepSoon()
	g.ready()
	g.publish()
}

// refuse answers everything that arrived for a closed group.
func (g *Group) refuse(k *work) {
	err := ErrClosed
	if g.h.stopping.Load() {
		err = ErrStopped
	}
	for _, m := range k.msgs {
		if m.kind == pb.MsgApp {
			g.h.inbound.Add(-m.bytes)
		}
	}
	for _, f := range k.calls {
		f()
	}
	for _, p := range k.props {
		g.drop(p, err)
	}
	if len(k.reads) > 0 {
		g.answerReads(slices.Clone(k.reads), 0, err) // the worker reuses k before the reads are answered
	}
}

// respond delivers one response of a storage message: to raft, or to a peer because its
// contents are durable now.
func (g *Group) respond(m *pb.Message) {
	if m.GetTo() != uint64(g.self) {
		g.send(m)
		return
	}
	if m.GetType() == pb.MsgStorageAppendResp && m.GetSnapshot() != nil {
		g.installed(m.GetSnapshot())
	}
	if m.GetType() == pb.MsgAppResp {
		g.acknowledged(g.self, g.h.cfg.Node, m.GetIndex())
	}
	// Raft rejects its own answer about entries if the configuration no longer names this
	// replica. It has no use for it then.
	_ = g.rn.Step(m)
}

// onApplied tells raft how far the group is applied, configuration changes first.
func (g *Group) onApplied(d *applyDone) {
	for i := range d.confs {
		g.applyConf(&d.confs[i])
	}
	if d.at.Index <= g.applied || d.at.Index > g.commit {
		panic(fmt.Sprintf("raftgroup: group %s: applied %d after %d, committed %d", g.id, d.at.Index, g.applied, g.commit))
	}
	g.h.applied.Add(int64(d.at.Index - g.applied))
	g.applied, g.appliedTerm = d.at.Index, d.at.Term
	if g.isLeader && g.appliedTerm == g.term && !g.lease.ready {
		g.lease.ready, g.lease.dirty = true, true
		g.issueReads()
	}
	g.releaseApplied()
	if err := g.rn.Step(d.resp); err != nil {
		panic(fmt.Sprintf("raftgroup: group %s: own %s refused: %v", g.id, d.resp.GetType(), err))
	}
	g.confirmReads()
	if g.isLeader {
		g.leaveJoint()
	}
}

// step takes one message from a peer.
func (g *Group) step(m *message) {
	if m.kind == pb.MsgApp {
		g.h.inbound.Add(-m.bytes)
	}
	if !g.checkSender(m) {
		return
	}
	switch m.kind {
	case kindSleep:
		g.onSleepNotice(m)
		return
	case kindRemoved:
		g.onRemoved(m)
		return
	case kindCommitNotice:
		g.onCommitNotice(m)
		return
	case pb.MsgVote, pb.MsgPreVote:
		if g.notifyRemoved(m) {
			return
		}
	case pb.MsgHeartbeatResp:
		if g.sleep.asleep && g.isLeader && m.term == g.term {
			return // answers a heartbeat from before the sleep; its promise was dropped then
		}
	case pb.MsgAppResp:
		if g.sleep.asleep && g.isLeader && m.term == g.term && !m.raft.GetReject() && m.raft.GetIndex() == g.last {
			_ = g.rn.Step(m.raft) // a second answer, or that of a follower that is just back, which asks for more if it needs more
			return
		}
	default:
	}
	g.wakeFor(m)
	switch m.kind {
	case kindWake:
		return
	case pb.MsgVote, pb.MsgPreVote:
		if g.refusesVote(m) {
			return
		}
		if m.kind == pb.MsgVote && m.term > g.term {
			g.sleep.campaign = false // somebody has won the pre-votes
		}
	case pb.MsgReadIndex:
		if g.refusesRead() {
			return
		}
	case pb.MsgTimeoutNow:
		if g.embargoed() {
			return
		}
	case pb.MsgHeartbeat:
		if g.lostEntries(m, m.raft.GetCommit()) {
			return
		}
		g.makePromise(m)
		g.heardLeader(m)
		g.takeNeed(m)
	case pb.MsgHeartbeatResp:
		g.onHeartbeatResp(m)
	case pb.MsgApp:
		g.heardLeader(m)
	case pb.MsgAppResp:
		if !m.raft.GetReject() {
			g.acknowledged(m.from, m.node, m.raft.GetIndex())
		}
	default: // raft's alone
	}
	// Raft decides what to do with a message from the network; its errors need no action.
	_ = g.rn.Step(m.raft)
}

// wakeFor wakes the group for a message. A follower's answer does not count as activity,
// nor does its request while the leader is awake: they must not keep a leader from
// sleeping.
func (g *Group) wakeFor(m *message) {
	idle, asleep := g.sleep.idle, g.sleep.asleep
	answer := m.kind == pb.MsgHeartbeatResp || m.kind == pb.MsgAppResp
	if g.wake(); answer || m.kind == kindWake && !asleep {
		g.sleep.idle = idle
	}
	g.sleep.soon = g.sleep.soon && answer
}

// notifyRemoved answers a candidate that this leader's configuration does not know. Such
// a candidate may neither wake nor disturb the group.
func (g *Group) notifyRemoved(m *message) bool {
	if !g.isLeader || !g.lease.ready || m.from < 1 {
		return false
	}
	if _, member := g.conf.find(m.from); member {
		return false
	}
	g.sendHost(&message{group: g.id, kind: kindRemoved, to: m.from, from: g.self, term: g.term})
	return true
}

// ready handles raft's Readys until there are no more. Appends that write nothing are
// answered at once, which may cause another Ready.
func (g *Group) ready() {
	g.readDeferred = false
	for round := 0; g.rn.HasReady(); round++ {
		if round == readyRoundsMax || g.readDeferred {
			if !g.h.failed.Load() {
				g.w.call(g, func() {}) // after the next group's turn
			}
			break
		}
		g.inReady = true
		rd := g.rn.Ready()
		g.inReady = false
		g.handleReady(rd)
		for len(g.immediate) > 0 {
			now := g.immediate
			g.immediate = nil
			for _, m := range now {
				g.respond(m)
			}
		}
	}
}

// handleReady does what a Ready asks for. A candidate asks for votes only after its own
// vote is durable. Raft counts any quorum, so a candidate that lost its own vote in a
// crash could be elected again in the same term, with another log.
func (g *Group) handleReady(rd raft.Ready) {
	g.noteState(rd)
	if len(rd.ReadStates) > 0 {
		g.onReadStates(rd.ReadStates)
	}
	var votes []*pb.Message
	for _, m := range rd.Messages {
		switch {
		case m.GetType() == pb.MsgVote:
			votes = append(votes, m)
		case m.GetTo() == raft.LocalAppendThread:
			m.Responses = append(m.Responses, votes...)
			votes = nil
			g.append(m)
		case m.GetTo() == raft.LocalApplyThread:
			g.w.schedule(g, g.handOut(m))
		case m.GetType() == pb.MsgSnap:
			g.sendSnapshot(m)
		default:
			g.send(m)
		}
	}
	for _, m := range votes {
		if g.saved != (savedState{g.term, uint64(g.self)}) || g.appends > 0 {
			panic(fmt.Sprintf("raftgroup: group %s: a vote asked for in term %d without storing it, stored %+v", g.id, g.term, g.saved))
		}
		g.send(m)
	}
}

// noteState records term, commit and leader before any message leaves that depends on
// them.
func (g *Group) noteState(rd raft.Ready) {
	term, lead, isLeader := g.term, g.lead, g.isLeader
	if rd.HardState != nil {
		if rd.HardState.GetTerm() < g.term || rd.HardState.GetCommit() < g.commit {
			panic(fmt.Sprintf("raftgroup: group %s: term %d commit %d after term %d commit %d", g.id,
				rd.HardState.GetTerm(), rd.HardState.GetCommit(), g.term, g.commit))
		}
		if rd.HardState.GetCommit() > g.commit {
			g.noteCommit()
		}
		g.h.committed.Add(int64(rd.HardState.GetCommit() - g.commit))
		g.term, g.commit = rd.HardState.GetTerm(), rd.HardState.GetCommit()
	}
	if rd.SoftState != nil {
		g.lead, g.isLeader = keyspace.ReplicaID(rd.SoftState.Lead), rd.SoftState.RaftState == raft.StateLeader
	}
	if g.term == term && g.lead == lead && g.isLeader == isLeader {
		return
	}
	if g.isLeader != isLeader {
		g.h.m.leaders.Add(float64(boolInt(g.isLeader) - boolInt(isLeader)))
	}
	if g.term != term || g.isLeader != isLeader {
		g.forgetCommitNotices()
		g.sleep.soon = false
		g.resetLease()
		g.public.leading.Store(0)
		g.abandonProposals()
		g.failChanges(ErrUnknownFate)
		if isLeader {
			g.endTransfer(nil)
			g.h.snaps.cancel(g)
			g.trunc.pins = nil
		}
	}
	if g.isLeader && (!isLeader || g.term != term) {
		g.changes.pending = g.last + 1
		g.sleep.idle, g.sleep.campaign = 0, false
		g.trunc.need, g.trunc.told = 0, 0
		g.public.leading.Store(g.term)
	}
	if g.lead != 0 {
		g.sleep.leaderBoot = g.h.peers.boot(g.nodeOf(g.lead))
	}
	g.h.m.leaderChanges.Add(float64(boolInt(g.lead != lead && g.lead != 0)))
	g.retryReads()
	g.notifyLeader()
	g.issueReads()
}

// notifyLeader tells the state machine of the leader, in order with what it applies.
func (g *Group) notifyLeader() {
	if g.closed {
		return
	}
	s := LeaderState{Term: g.term, Leader: g.lead, IsLeader: g.isLeader}
	if g.lead != 0 {
		s.LeaderNode = g.nodeOf(g.lead)
	}
	g.public.term.Store(s.Term)
	g.public.leader.Store(uint64(s.Leader))
	g.public.leaderNode.Store(uint64(s.LeaderNode))
	g.w.schedule(g, applyTask{kind: taskLeader, leader: s})
}

// send sends one of raft's messages.
func (g *Group) send(m *pb.Message) {
	node := g.nodeOf(keyspace.ReplicaID(m.GetTo()))
	if node == 0 {
		return // a replica that was removed, or whose node is not known
	}
	switch m.GetType() {
	case pb.MsgHeartbeat:
		if g.h.diskStalled.Load() || g.sparesHeartbeat(m) {
			return // a node whose disk is stalled must not lead
		}
		g.stampHeartbeat(m)
	case pb.MsgApp:
		if g.h.diskStalled.Load() {
			// Followers also count entries as a sign of life. Under load they would stay
			// with a leader that cannot apply anything.
			g.rn.ReportUnreachable(m.GetTo())
			return
		}
		if g.holdCommitNotice(m) {
			return
		}
	case pb.MsgHeartbeatResp:
		if len(m.GetContext()) == 0 {
			return // answers a commit notice, see onCommitNotice
		}
		g.checkPromise()
	case pb.MsgPreVoteResp:
		if m.GetReject() {
			g.yieldNoMore()
		}
	case pb.MsgTimeoutNow:
		if g.isLeader && !g.lease.givenUp {
			panic(fmt.Sprintf("raftgroup: group %s: transfer in term %d with the lease not given up", g.id, g.term))
		}
	default: // sent unchanged
	}
	g.w.out.raft(g, node, m)
}

// publish ends a visit.
func (g *Group) publish() {
	if mutation.Is(mutation.PromiseForgotten) && g.lead == 0 {
		g.promise.until = 0
	}
	g.publishLease()
	p := &g.public
	p.commit.Store(g.commit)
	p.last.Store(g.last)
	p.applied.Store(g.applied)
	p.receiving.Store(g.receiving != nil || g.installing != nil)
}
