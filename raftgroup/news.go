package raftgroup

import (
	"math"
	"time"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// newsDelay is how long the news that an entry is committed waits for the next entry,
// which takes it along. A message of its own costs each follower a pass and a record in
// its wal, in the very moment in which the leader answers the client. Where nothing
// follows, followers apply later by this and half of it again at most.
const newsDelay = 2 * time.Millisecond

// commitNews are the messages of a leader that say nothing but how far is committed,
// one for each follower at most, while they wait.
type commitNews struct {
	held []*pb.Message
	// since is when there were none before.
	since clock.Time
	// listed says that the group is on its worker's list.
	listed bool
}

// holdNews keeps a MsgApp back if it has no other news than the commit index, and says
// whether it did. A follower that has yet to get entries is told at once: raft may be
// probing for what it has.
func (g *Group) holdNews(m *pb.Message) bool {
	g.dropNews(m.GetTo(), math.MaxUint64)
	if !g.isLeader || len(m.GetEntries()) > 0 || m.GetIndex() != g.last || m.GetTerm() != g.term {
		return false
	}
	if g.changes.pending > g.applied {
		return false // a replica that is about to be removed is not reached later
	}
	n := &g.news
	if len(n.held) == 0 {
		n.since = g.w.now
	}
	n.held = append(n.held, m)
	g.listNews()
	return true
}

func (g *Group) listNews() {
	if !g.news.listed {
		g.news.listed = true
		g.w.newsOf(g)
	}
}

// dropNews forgets what is held for a follower and asks after nothing behind an index, and
// says whether something was: what is sent to it instead says at least as much.
func (g *Group) dropNews(to, index uint64) bool {
	n := &g.news
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

// forgetNews drops everything: the term or the leadership has ended.
func (g *Group) forgetNews() {
	clear(g.news.held)
	g.news.held = g.news.held[:0]
}

// tellNews sends what is held, unless the last entry took along what there was a moment
// ago: the next one is about to come then. A follower that has acknowledged all that was
// sent to it has nothing to answer, and is not asked: what gets lost, a heartbeat says
// again. Of any other one its answer is wanted, committed or not: raft sends again only
// what a follower says it lacks, and goes on probing one that says nothing.
func (g *Group) tellNews() {
	n := &g.news
	if n.listed = false; len(n.held) > 0 && g.w.now.Sub(n.since) < newsDelay/2 {
		g.listNews()
		return
	}
	if len(n.held) == 0 {
		return
	}
	if g.h.stuck.Load() {
		g.forgetNews() // it would be taken for a sign of life, see send
		return
	}
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if pr.State == tracker.StateReplicate && g.dropNews(id, pr.Match) {
			g.sendHost(&message{
				group: g.id, kind: kindNews, to: keyspace.ReplicaID(id), from: g.self,
				term: g.term, commit: min(g.commit, pr.Match),
			})
		}
	})
	for _, m := range n.held {
		if node := g.nodeOf(keyspace.ReplicaID(m.GetTo())); node != 0 {
			g.w.out.raft(g, node, m)
		}
	}
	g.forgetNews()
}

// onNews takes in how far is committed. It is a heartbeat to raft, of whom only a commit
// index is wanted: it neither asks for a promise nor is it answered (send drops the answer
// to one without a context). News of another term or leader, or that something newer has
// overtaken, is none, and wakes nobody.
func (g *Group) onNews(m *message) {
	if g.isLeader || m.term != g.term || m.from != g.lead || m.commit <= g.commit || g.hasForgotten(m, m.commit) {
		return
	}
	g.wake()
	g.heardLeader(m)
	_ = g.rn.Step(&pb.Message{
		Type: pb.MsgHeartbeat.Enum(), To: ptr(uint64(m.to)), From: ptr(uint64(m.from)), Term: ptr(m.term), Commit: ptr(m.commit),
	})
}

// newsOf sees to it that the group is told to send what it holds.
func (w *worker) newsOf(g *Group) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.news = append(w.mu.news, g)
	if len(w.mu.news) == 1 {
		w.h.cfg.Clock.AfterFunc(newsDelay, w.releaseNews)
	}
}

// releaseNews is called by the timer.
func (w *worker) releaseNews() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, g := range w.mu.news {
		if k := w.workOf(g); k != nil {
			k.flags |= flagNews
		}
		w.mu.news[i] = nil
	}
	w.mu.news = w.mu.news[:0]
}
