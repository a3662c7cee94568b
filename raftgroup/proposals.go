package raftgroup

import (
	"fmt"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
)

// proposal is one Propose on its way to raft.
type proposal struct {
	term    uint64
	data    []byte
	bytes   int64
	dropped func(error)
}

// propose gives raft all proposals of the term in which this replica leads, as one
// message, so that they leave as one MsgApp for each peer.
func (g *Group) propose(props []proposal) {
	st := g.rn.BasicStatus()
	m := &pb.Message{Type: pb.MsgProp.Enum(), From: ptr(uint64(g.self))}
	bytes := int64(0)
	for _, p := range props {
		if st.RaftState != raft.StateLeader || st.GetTerm() != p.term {
			g.drop(p, ErrNotLeader)
			continue
		}
		m.Entries = append(m.Entries, &pb.Entry{Data: p.data})
		bytes += p.bytes
	}
	if len(m.Entries) == 0 {
		return
	}
	// The entries wake the followers. Writers need no lease, so no heartbeat is sent: its
	// responses would cost as much as those to the entries.
	if g.wakeWithoutHeartbeat() {
		g.sleep.soon = true
	}
	if err := g.rn.Step(m); err != nil {
		for _, p := range props {
			if st.GetTerm() == p.term {
				g.drop(p, ErrDropped)
			}
		}
		return
	}
	g.h.m.proposals.Add(float64(len(m.Entries)))
	g.proposed.accepted.count += int64(len(m.Entries))
	g.proposed.accepted.bytes += bytes
}

// drop answers a proposal that certainly was not appended.
func (g *Group) drop(p proposal, err error) {
	g.release(1, p.bytes)
	g.h.m.dropped.Inc()
	g.h.m.failed.Inc()
	if p.dropped != nil {
		g.w.schedule(g, applyTask{kind: taskCall, call: func() { p.dropped(err) }})
	}
}

// proposedState accounts for the bytes of proposals that raft has accepted.
type proposedState struct {
	accepted heldProposals // in no append yet, so without an index
	held     []heldProposals
}

// heldProposals are released once the log is applied up to index.
type heldProposals struct {
	index        uint64
	count, bytes int64
}

// releaseApplied releases the bytes of applied proposals.
func (g *Group) releaseApplied() {
	p := &g.proposed
	n := 0
	for n < len(p.held) && p.held[n].index <= g.applied {
		g.release(p.held[n].count, p.held[n].bytes)
		n++
	}
	if p.held = p.held[n:]; len(p.held) == 0 {
		p.held = nil
	}
}

// abandonProposals releases all bytes: a replica that lost leadership owes no answers.
func (g *Group) abandonProposals() {
	p := &g.proposed
	for _, h := range append(p.held, p.accepted) {
		g.release(h.count, h.bytes)
		g.h.m.failed.Add(float64(h.count))
	}
	*p = proposedState{}
}

// reserve takes n bytes for one proposal from the budgets of the group and the node. One
// proposal always fits if there is no other.
func (g *Group) reserve(n int64) error {
	if v := g.inflight.Add(n); v > g.h.cfg.MaxGroupInflightBytes && v != n {
		g.inflight.Add(-n)
		return fmt.Errorf("%w: %d bytes in flight in group %s", ErrFull, v-n, g.id)
	}
	if v := g.h.proposals.Add(n); v > g.h.cfg.MaxProposalBytes && v != n {
		g.h.proposals.Add(-n)
		g.inflight.Add(-n)
		return fmt.Errorf("%w: %d bytes of proposals on this node", ErrFull, v-n)
	}
	g.h.pending.Add(1)
	return nil
}

// release returns the bytes of that many proposals to the budgets.
func (g *Group) release(proposals, n int64) {
	if v := g.inflight.Add(-n); v < 0 {
		panic(fmt.Sprintf("raftgroup: group %s: %d bytes in flight after the release of %d", g.id, v, n))
	}
	g.h.proposals.Add(-n)
	g.h.pending.Add(-proposals)
}
