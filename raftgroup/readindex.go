package raftgroup

import (
	"bytes"
	"encoding/binary"
	"slices"

	"go.etcd.io/raft/v3"

	"github.com/skeindb/skein/clock"
)

// readWaiter is one ReadIndex.
type readWaiter struct {
	done  func(index uint64, err error)
	since clock.Time
}

// readState is the worker's side of ReadIndex: at most one round is under way.
type readState struct {
	// waiting are those that came since the round under way began.
	waiting []readWaiter
	// issued are those of the round with the context ctx; ctx is nil where none is.
	issued []readWaiter
	ctx    []byte
	ticks  int // since the round began
	// confirmed wait until their index is applied here.
	confirmed []confirmedReads
}

type confirmedReads struct {
	index   uint64
	waiters []readWaiter
}

// open says whether anybody waits.
func (r *readState) open() bool {
	return len(r.waiting)+len(r.issued)+len(r.confirmed) > 0
}

// addReads takes in new waiters.
func (g *Group) addReads(reads []readWaiter) {
	r := &g.reads
	for _, w := range reads {
		w.since = g.w.now
		r.waiting = append(r.waiting, w)
	}
	g.wake()
	g.issueReads()
}

// issueReads begins a round if there are waiters and none is under way. Raft drops
// a request silently where it knows no leader; the round begins with the leader then.
// It answers a sole voter's at once, with what that knows to be committed, which after
// a restart is less than what it has acknowledged: a leader asks only when it has
// applied an entry of its own term.
func (g *Group) issueReads() {
	r := &g.reads
	if len(r.waiting) == 0 || r.ctx != nil {
		return
	}
	if st := g.rn.BasicStatus(); st.Lead == raft.None || st.RaftState == raft.StateLeader && !g.lease.ready {
		return
	}
	// A context of its own for each round: an answer to an older one is ignored.
	r.ctx = binary.LittleEndian.AppendUint64(make([]byte, 0, readContextBytes), g.h.readNonce)
	r.ctx = binary.LittleEndian.AppendUint64(r.ctx, g.h.readNumber.Add(1))
	r.issued, r.waiting, r.ticks = r.waiting, nil, 0
	g.h.m.readIndexes.Inc()
	g.rn.ReadIndex(r.ctx)
}

// retryReads begins the round under way anew: what it was asked of has lost
// leadership, or the question or the answer was lost.
func (g *Group) retryReads() {
	r := &g.reads
	if r.ctx == nil {
		return
	}
	r.waiting, r.issued, r.ctx = append(r.issued, r.waiting...), nil, nil
}

// onReadStates takes raft's confirmations.
func (g *Group) onReadStates(states []raft.ReadState) {
	r := &g.reads
	for _, s := range states {
		if r.ctx == nil || !bytes.Equal(s.RequestCtx, r.ctx) {
			continue
		}
		r.confirmed = append(r.confirmed, confirmedReads{s.Index, r.issued})
		r.issued, r.ctx = nil, nil
	}
	g.confirmReads()
}

// confirmReads answers those whose index is applied.
func (g *Group) confirmReads() {
	r, rest := &g.reads, g.reads.confirmed[:0]
	for _, c := range r.confirmed {
		if c.index > g.applied {
			rest = append(rest, c)
			continue
		}
		g.answerReads(c.waiters, c.index, nil)
	}
	clear(r.confirmed[len(rest):])
	r.confirmed = rest
}

// answerReads calls the waiters from the pool, behind everything of the group that
// is on its way there.
func (g *Group) answerReads(waiters []readWaiter, index uint64, err error) {
	g.w.kick(g, applyTask{kind: taskCall, call: func() {
		for _, w := range waiters {
			w.done(index, err)
		}
		g.public.readers.Add(-int64(len(waiters)))
	}})
}

// refusesRead says whether a follower's question is one that raft would answer too
// early; see issueReads. The follower asks again.
func (g *Group) refusesRead() bool { return g.conf.soleVoter(g.self) && !g.lease.ready }

// tickReads gives up on what has waited too long, and asks again where a follower
// got no answer. A leader's own round needs no repetition: each of its heartbeats
// asks again.
func (g *Group) tickReads() {
	r := &g.reads
	if r.ctx != nil {
		switch r.ticks++; {
		case g.isLeader:
		case r.ticks > g.h.cfg.electionTicks():
			g.retryReads()
		case r.ticks%g.h.cfg.askTicks() == 0:
			// The question may have been lost on its way to a leader that sleeps: asked once in
			// an election timeout, this replica would take it for dead first. In the same
			// words, so that a slow answer to the first one still counts.
			g.rn.ReadIndex(r.ctx)
		}
	}
	g.expireReads()
	g.issueReads()
}

// expireReads gives up on what has waited too long, be it for a leader or for what
// is still to be applied here.
func (g *Group) expireReads() {
	r := &g.reads
	if !r.open() {
		return
	}
	limit := g.w.now.Add(-3 * g.h.cfg.ElectionTimeout)
	if late := expired(&r.issued, limit); len(late) > 0 {
		if g.answerReads(late, 0, ErrNoLeader); len(r.issued) == 0 {
			r.ctx = nil
		}
	}
	if late := expired(&r.waiting, limit); len(late) > 0 {
		g.answerReads(late, 0, ErrNoLeader)
	}
	for i := range r.confirmed {
		if late := expired(&r.confirmed[i].waiters, limit); len(late) > 0 {
			g.answerReads(late, 0, ErrNoLeader)
		}
	}
	r.confirmed = slices.DeleteFunc(r.confirmed, func(c confirmedReads) bool { return len(c.waiters) == 0 })
}

// expired cuts those off that wait since before limit; they stand in front.
func expired(waiters *[]readWaiter, limit clock.Time) []readWaiter {
	n := 0
	for n < len(*waiters) && (*waiters)[n].since < limit {
		n++
	}
	late := (*waiters)[:n:n]
	*waiters = (*waiters)[n:]
	return late
}

// failReads ends all waiting.
func (g *Group) failReads(err error) {
	r := &g.reads
	all := append(r.issued, r.waiting...)
	for _, c := range r.confirmed {
		all = append(all, c.waiters...)
	}
	if *r = (readState{}); len(all) > 0 {
		g.answerReads(all, 0, err)
	}
}
