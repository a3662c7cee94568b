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
	// waiting are the reads that arrived since the current round began.
	waiting []readWaiter
	// issued are the reads of the round with the context ctx; ctx is nil if there is
	// none.
	issued []readWaiter
	ctx    []byte
	ticks  int // since the round began
	// confirmed are the reads whose index is known but not applied here yet.
	confirmed []confirmedReads
}

type confirmedReads struct {
	index   uint64
	waiters []readWaiter
}

// open reports whether any read waits.
func (r *readState) open() bool {
	return len(r.waiting)+len(r.issued)+len(r.confirmed) > 0
}

// addReads adds new waiters.
func (g *Group) addReads(reads []readWaiter) {
	r := &g.reads
	for _, w := range reads {
		w.since = g.w.now
		r.waiting = append(r.waiting, w)
	}
	g.wake()
	g.sleep.soon, g.sleep.read = false, true
	g.issueReads()
}

// issueReads begins a round if there are waiters and none is under way. Raft silently
// drops a request while it knows no leader, so the round waits for one. For a sole voter
// raft answers at once with its commit index. After a restart that may be lower than what
// it has acknowledged, so a leader asks only after it has applied an entry of its own
// term.
func (g *Group) issueReads() {
	r := &g.reads
	if len(r.waiting) == 0 || r.ctx != nil {
		return
	}
	if st := g.rn.BasicStatus(); st.Lead == raft.None || st.RaftState == raft.StateLeader && !g.lease.ready {
		return
	}
	// Each round has its own context, so answers to older rounds are ignored.
	r.ctx = binary.LittleEndian.AppendUint64(make([]byte, 0, readContextBytes), g.h.readNonce)
	r.ctx = binary.LittleEndian.AppendUint64(r.ctx, g.h.readNumber.Add(1))
	r.issued, r.waiting, r.ticks = r.waiting, nil, 0
	g.h.m.readIndexes.Inc()
	g.rn.ReadIndex(r.ctx)
}

// retryReads restarts the current round: the leader lost leadership, or the request or
// its answer was lost.
func (g *Group) retryReads() {
	r := &g.reads
	if r.ctx == nil {
		return
	}
	r.waiting, r.issued, r.ctx = append(r.issued, r.waiting...), nil, nil
}

// onReadStates handles raft's confirmations.
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

// confirmReads answers the reads whose index is applied.
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

// answerReads calls the waiters from the pool, behind all earlier tasks of the group.
func (g *Group) answerReads(waiters []readWaiter, index uint64, err error) {
	g.w.schedule(g, applyTask{kind: taskCall, call: func() {
		for _, w := range waiters {
			w.done(index, err)
		}
		g.public.readers.Add(-int64(len(waiters)))
	}})
}

// refusesRead reports whether raft would answer a follower's request too early; see
// issueReads. The follower asks again.
func (g *Group) refusesRead() bool { return g.conf.soleVoter(g.self) && !g.lease.ready }

// tickReads fails reads that waited too long, and repeats a follower's unanswered
// request. A leader's round needs no repetition: each of its heartbeats repeats it.
func (g *Group) tickReads() {
	r := &g.reads
	if r.ctx != nil {
		switch r.ticks++; {
		case g.isLeader:
		case r.ticks > g.h.cfg.electionTicks():
			g.h.m.slowReads.Inc()
			g.retryReads()
		case r.ticks%g.h.cfg.retryTicks() == 0:
			// The request may have been lost on its way to a sleeping leader. With one
			// request per election timeout, this replica would take that leader for dead
			// first. The context stays the same, so a late answer to the first request
			// still counts.
			g.h.m.slowReads.Inc()
			g.rn.ReadIndex(r.ctx)
		}
	}
	g.expireReads()
	g.issueReads()
}

// expireReads fails reads that waited too long, for a leader or for their index to be
// applied here.
func (g *Group) expireReads() {
	r := &g.reads
	if !r.open() {
		return
	}
	limit := g.w.now.Add(-3 * g.h.cfg.ElectionTimeout)
	if late := expired(&r.issued, limit); len(late) > 0 {
		if g.failLate(late); len(r.issued) == 0 {
			r.ctx = nil
		}
	}
	if late := expired(&r.waiting, limit); len(late) > 0 {
		g.failLate(late)
	}
	for i := range r.confirmed {
		if late := expired(&r.confirmed[i].waiters, limit); len(late) > 0 {
			g.failLate(late)
		}
	}
	r.confirmed = slices.DeleteFunc(r.confirmed, func(c confirmedReads) bool { return len(c.waiters) == 0 })
}

// failLate fails reads that no leader has confirmed in time.
func (g *Group) failLate(late []readWaiter) {
	g.h.m.failedReads.Add(float64(len(late)))
	g.answerReads(late, 0, ErrNoLeader)
}

// expired cuts off the waiters that wait since before limit; they are the first ones.
func expired(waiters *[]readWaiter, limit clock.Time) []readWaiter {
	n := 0
	for n < len(*waiters) && (*waiters)[n].since < limit {
		n++
	}
	late := (*waiters)[:n:n]
	*waiters = (*waiters)[n:]
	return late
}

// failReads fails all waiting reads.
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
