package raftgroup

import (
	"fmt"

	pb "go.etcd.io/raft/v3/raftpb"
)

// append handles raft's MsgStorageAppend. Its writes go into the pass's batch, and its
// responses wait until that is durable. Appends of one group stay in order, even behind a
// snapshot that is being installed.
//
// A new commit index alone needs no fsync: no response depends on it, and the leader
// sends it again after a crash. While a leader holds commit notices it holds its own record of the index too: the next
// entry carries it.
func (g *Group) append(m *pb.Message) {
	if g.installing != nil {
		g.held = append(g.held, m)
		return
	}
	if m.GetSnapshot() != nil {
		g.beginInstall(m)
		return
	}
	var hs *pb.HardState
	if m.Term != nil && (m.GetTerm() != 0 || m.GetVote() != 0 || m.GetCommit() != 0) {
		hs = &pb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
	}
	ents, responses := m.GetEntries(), m.GetResponses()
	if hs == nil {
		hs = g.unsaved
	}
	g.unsaved = nil
	sync := hs != nil && g.saved.note(hs) || len(ents) > 0
	if !sync && len(responses) == 0 && g.notices.listed {
		g.unsaved = hs
		return
	}
	if hs != nil || len(ents) > 0 {
		g.w.walBatch().Append(g.id, hs, ents)
	}
	if !sync && g.appends == 0 {
		// There is nothing to sync and nothing in flight, so the responses' contents are
		// durable.
		g.immediate = append(g.immediate, responses...)
		return
	}
	g.noteAppend(ents)
	if sync || len(responses) > 0 {
		g.appends++
		g.w.afterDurable(g, responses, sync)
	}
}

// saveCommit stores the commit index that was held back.
func (g *Group) saveCommit() {
	if hs := g.unsaved; hs != nil {
		g.unsaved = nil
		g.w.walBatch().Append(g.id, hs, nil)
	}
}

// savedState is the part of the last hard state given to the wal that must be durable
// before any message depends on it.
type savedState struct{ term, vote uint64 }

// note records a hard state and reports whether term or vote are new.
func (s *savedState) note(hs *pb.HardState) bool {
	old := *s
	*s = savedState{hs.GetTerm(), hs.GetVote()}
	return *s != old
}

// noteAppend accounts for new entries at the end of the log.
func (g *Group) noteAppend(ents []*pb.Entry) {
	if len(ents) == 0 {
		return
	}
	g.last = ents[len(ents)-1].GetIndex()
	g.trunc.appended(ents, g.h.cfg.MaxLagBytes)
	if !g.isLeader {
		return
	}
	if a := g.proposed.accepted; a.count > 0 {
		a.index = g.last
		g.proposed.held = append(g.proposed.held, a)
		g.proposed.accepted = heldProposals{}
	}
	for _, e := range ents {
		if e.GetType() != pb.EntryNormal {
			g.changes.pending = e.GetIndex()
		}
	}
}

// lostEntries reports whether a leader counts on entries up to commit that this replica
// has acknowledged but that are not in its log. A crash does not cause that, but an old
// copy of the directory or a lying disk does. The node must stop before it votes for a
// candidate that lacks the entries too.
func (g *Group) lostEntries(m *message, commit uint64) bool {
	if m.term < g.term || commit <= g.last {
		return false
	}
	g.h.fail(fmt.Errorf("raftgroup: group %s: node %s expects entry %d in this log, which ends at %d: "+
		"the directory is an old copy, or the disk has lost what was synced", g.id, m.node, commit, g.last))
	return true
}

// beginInstall sends raft's snapshot to the engine, behind everything of the group that
// is still being applied. Until it is durable, no response of this append leaves and no
// later append is written.
func (g *Group) beginInstall(m *pb.Message) {
	r := g.receiving
	index := m.GetSnapshot().GetMetadata().GetIndex()
	if r == nil || r.head.applied.Index != index {
		panic(fmt.Sprintf("raftgroup: group %s: raft wants to install a snapshot at %d that is not here", g.id, index))
	}
	g.unsaved = nil // the snapshot is newer
	g.receiving, g.installing = nil, &install{g: g, r: r, msg: m}
	g.setConf(r.head.applied.Replicas, r.head.applied.ConfIndex)
	g.last = index
	g.w.schedule(g, applyTask{kind: taskInstall, install: g.installing})
}

// finishInstall resets the log to the snapshot's position, makes raft's responses wait
// for that, and continues with the appends that were held back.
func (g *Group) finishInstall(i *install) {
	if g.closed {
		i.r.result <- ErrClosed
		return
	}
	a := &i.r.head.applied
	var hs *pb.HardState
	if i.msg.GetTerm() != 0 {
		hs = &pb.HardState{Term: i.msg.Term, Vote: i.msg.Vote, Commit: i.msg.Commit}
		g.saved.note(hs)
	}
	g.w.walBatch().Reset(g.id, a.Index, a.Term, hs)
	g.trunc.marks, g.trunc.bytes = nil, 0
	g.appends++
	g.w.afterDurable(g, i.msg.GetResponses(), true)
	g.installing = nil
	g.resetting = i.r
	held := g.held
	g.held = nil
	for _, m := range held {
		g.append(m)
	}
}

// installed notes that raft's snapshot is durable in engine and wal.
func (g *Group) installed(s *pb.Snapshot) {
	index := s.GetMetadata().GetIndex()
	if d := g.public.applying.Load(); d < index {
		panic(fmt.Sprintf("raftgroup: group %s: snapshot at %d is answered, installed %d", g.id, index, d))
	}
	if index > g.applied {
		g.h.applied.Add(int64(index - g.applied))
		g.applied, g.appliedTerm = index, s.GetMetadata().GetTerm()
	}
	g.h.m.snapshotsReceived.Inc()
	if r := g.resetting; r != nil {
		g.resetting = nil
		r.result <- nil
	}
}
