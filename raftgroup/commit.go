package raftgroup

import (
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Commit is how entries went through the log of a leader, for whoever wants to know what took long.
type Commit struct {
	// By is the node whose acknowledgement made the quorum. Of two that came in one pass it is the last one.
	By keyspace.NodeID
	// Disk is from the commit until the entries were durable here, Apply from there until they were applied.
	Disk, Apply time.Duration
}

// commitState is what the worker knows of the entries that it hands out to be applied. All times are those of passes.
type commitState struct {
	// acked is the node that acknowledged new entries last, by the last one of the last commit.
	acked, by keyspace.NodeID
	// since is when the first entry was committed that is not handed out, 0 if there is none.
	since clock.Time
}

// acknowledged notes that the replica on the node has entries up to the index. Learners make no quorum.
func (g *Group) acknowledged(id keyspace.ReplicaID, node keyspace.NodeID, index uint64) {
	if g.isLeader && index > g.commit && g.conf.votes(id) {
		g.commits.acked = node
	}
}

// noteCommit notes that the commit index has risen.
func (g *Group) noteCommit() {
	g.commits.by = g.commits.acked
	if g.commits.since == 0 {
		g.commits.since = g.w.now
	}
}

// handOut returns the task to apply raft's entries. Raft gives out only what is durable here.
func (g *Group) handOut(m *pb.Message) applyTask {
	c := &g.commits
	t := applyTask{kind: taskEntries, msg: m, by: c.by, at: g.w.now}
	if c.since != 0 {
		t.disk = g.w.now.Sub(c.since)
	}
	if ents := m.GetEntries(); len(ents) > 0 && ents[len(ents)-1].GetIndex() >= g.commit {
		c.since = 0
	}
	return t
}

// noteApplied notes how the entries of a turn went, of which the last ones were applied at the time.
func (s *applyState) noteApplied(t *applyTurn, now clock.Time) {
	first, last := &t.tasks[t.first], &t.tasks[t.next-1]
	s.commit = Commit{By: last.by, Apply: now.Sub(first.at)}
	for i := t.first; i < t.next; i++ {
		s.commit.Disk = max(s.commit.Disk, t.tasks[i].disk)
	}
}

// Committed says how the entries went that were applied last. It may be called in StateMachine.Applied alone.
func (g *Group) Committed() Commit { return g.apply.commit }
