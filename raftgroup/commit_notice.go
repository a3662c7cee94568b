package raftgroup

import (
	"math"
	"slices"
	"time"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// commitNoticeDelay is how long a new commit index waits for the next entry, which carries it along. A message of its own costs
// each follower a pass and a wal record, just when the leader answers the client. If no entry follows, followers apply later by
// at most one and a half times this delay, and by at most four times where it waits for a ride.
const commitNoticeDelay = 2 * time.Millisecond

// commitNoticeRideMax is how long one waits where other groups of the worker send entries meanwhile. It rides with those as soon
// as it is half of commitNoticeDelay old: its followers have a frame and a pass at that time anyway.
const commitNoticeRideMax = 2 * commitNoticeDelay

// commitNoticesRiding bounds how many groups' notices ride with the entries of one pass: somebody waits for it.
const commitNoticesRiding = 16

// commitNotices are a leader's waiting messages that carry nothing but the commit index, at most one for each follower.
type commitNotices struct {
	held []*pb.Message
	// since is when held last ceased to be empty.
	since clock.Time
	// listed says that the group is on its worker's list.
	listed bool
	// rode says that the last ones left with entries of other groups.
	rode bool
}

// holdCommitNotice holds back a MsgApp that carries nothing new but the commit index, and reports whether it did. It does not
// delay a message to a follower that still lacks entries: raft may be probing it.
func (g *Group) holdCommitNotice(m *pb.Message) bool {
	g.dropCommitNotice(m.GetTo(), math.MaxUint64)
	if !g.isLeader || len(m.GetEntries()) > 0 || m.GetIndex() != g.last || m.GetTerm() != g.term {
		return false
	}
	if g.changes.pending > g.applied {
		return false // a replica that is about to be removed cannot be reached later
	}
	n := &g.notices
	if len(n.held) == 0 {
		n.since = g.w.now
	}
	n.held = append(n.held, m)
	g.scheduleCommitNotices()
	return true
}

func (g *Group) scheduleCommitNotices() {
	if !g.notices.listed {
		g.notices.listed = true
		g.w.scheduleCommitNotices(g)
	}
}

// dropCommitNotice drops the message held for a follower if it asks about no index behind index, and reports whether there was
// one. The message sent instead says at least as much.
func (g *Group) dropCommitNotice(to, index uint64) bool {
	n := &g.notices
	for i, m := range n.held {
		if m.GetTo() == to && m.GetIndex() <= index {
			last := len(n.held) - 1
			n.held[i] = n.held[last]
			n.held[last] = nil
			n.held = n.held[:last]
			return true
		}
	}
	return false
}

// forgetCommitNotices drops everything because the term or the leadership has ended.
func (g *Group) forgetCommitNotices() {
	clear(g.notices.held)
	g.notices.held = g.notices.held[:0]
}

// sendCommitNotices sends the held messages. It waits once more if they are younger than half the delay: the last entry carried
// the earlier ones, so another is probably about to follow. A follower that has acknowledged everything sent to it gets a notice
// without a response; a heartbeat repeats a lost one. Any other follower gets the MsgApp, because raft needs its response: raft
// resends only what a follower reports missing, and keeps probing one that reports nothing.
func (g *Group) sendCommitNotices() {
	n := &g.notices
	if n.listed = false; len(n.held) > 0 && g.w.now.Sub(n.since) < commitNoticeDelay/2 {
		g.scheduleCommitNotices()
		return
	}
	g.saveCommit()
	if len(n.held) == 0 {
		return
	}
	if g.h.diskStalled.Load() {
		g.forgetCommitNotices() // followers would count it as a sign of life, see send
		return
	}
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if pr.State == tracker.StateReplicate && g.dropCommitNotice(id, pr.Match) {
			g.sendHost(&message{
				group: g.id, kind: kindCommitNotice, to: keyspace.ReplicaID(id), from: g.self,
				term: g.term, commit: min(g.commit, pr.Match),
			})
		}
	})
	for _, m := range n.held {
		if node := g.nodeOf(keyspace.ReplicaID(m.GetTo())); node != 0 {
			g.w.out.raft(g, node, m)
		}
	}
	g.forgetCommitNotices()
}

// onCommitNotice handles a leader's commit index. To raft it is a heartbeat that carries only a commit index: it asks for no
// promise and gets no response (send drops responses without a context). A notice of another term or leader, or one that is out
// of date, is ignored and wakes nobody.
func (g *Group) onCommitNotice(m *message) {
	if g.isLeader || m.term != g.term || m.from != g.lead || m.commit <= g.commit || g.lostEntries(m, m.commit) {
		return
	}
	g.wake()
	g.heardLeader(m)
	_ = g.rn.Step(&pb.Message{
		Type: pb.MsgHeartbeat.Enum(), To: ptr(uint64(m.to)), From: ptr(uint64(m.from)), Term: ptr(m.term), Commit: ptr(m.commit),
	})
}

// waitingNotice is a group of the worker that holds commit notices back.
type waitingNotice struct {
	g     *Group
	since clock.Time
	// rides says that they may leave with entries of other groups: the last ones did, or such entries have left meanwhile.
	rides bool
}

// scheduleCommitNotices makes sure that the group is told to send the messages that it holds.
func (w *worker) scheduleCommitNotices(g *Group) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.notices = append(w.mu.notices, waitingNotice{g: g, since: w.now, rides: g.notices.rode})
	w.awaitNoticesLocked()
}

// awaitNoticesLocked lets the timer run while groups hold notices back. mu must be held.
func (w *worker) awaitNoticesLocked() {
	if !w.mu.noticeTimer && len(w.mu.notices) > 0 {
		w.mu.noticeTimer = true
		w.h.cfg.Clock.AfterFunc(commitNoticeDelay, w.flagCommitNotices)
	}
}

// flagCommitNotices is called by the timer.
func (w *worker) flagCommitNotices() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.noticeTimer = false
	now := w.h.cfg.Clock.Now()
	w.mu.notices = slices.DeleteFunc(w.mu.notices, func(n waitingNotice) bool {
		if wait := now.Sub(n.since); wait < commitNoticeDelay/2 || n.rides && wait < commitNoticeRideMax {
			return false
		}
		if k := w.workOf(n.g); k != nil {
			k.flags |= flagCommitNotice
		}
		return true
	})
	w.awaitNoticesLocked()
	w.wakeLocked()
}

// carryCommitNotices sends the commit notices of other groups with the entries of this pass, the oldest first. A notice rides only
// where each follower of its group gets such entries: a frame of its own can wait, as the group's next entry may still carry it.
func (w *worker) carryCommitNotices() {
	w.mu.Lock()
	for i := range w.mu.notices[:min(len(w.mu.notices), commitNoticesRiding)] {
		n := &w.mu.notices[i]
		if !n.g.noticesMayRide() {
			continue
		}
		if n.rides = true; w.now.Sub(n.g.notices.since) >= commitNoticeDelay/2 {
			n.g.notices.rode = true
			w.riding = append(w.riding, n.g)
			n.g = nil
		}
	}
	if len(w.riding) > 0 {
		w.mu.notices = slices.DeleteFunc(w.mu.notices, func(n waitingNotice) bool { return n.g == nil })
	}
	w.mu.Unlock()
	for _, g := range w.riding {
		g.sendCommitNotices()
		g.trySleepSoon()
	}
	clear(w.riding)
	w.riding = w.riding[:0]
}

// noticesMayRide says whether this pass sends entries to all followers that the group has a commit notice for.
func (g *Group) noticesMayRide() bool {
	if g.closed || len(g.notices.held) == 0 {
		return false
	}
	for _, m := range g.notices.held {
		if node := g.nodeOf(keyspace.ReplicaID(m.GetTo())); node != 0 && !g.w.out.sendsEntries(node) {
			return false
		}
	}
	return true
}
