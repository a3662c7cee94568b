package raftgroup

import (
	"sync"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// routed is a decoded message with its group.
type routed struct {
	g *Group
	m *message
}

// handleFrame takes one frame from the bus. It runs on the goroutine that reads
// the bus, decodes, and leaves the messages with their workers.
func (h *Host) handleFrame(from keyspace.NodeID, payload []byte) {
	if h.stopping.Load() {
		return
	}
	kind, rest, err := frameKind(payload)
	if err == nil {
		switch kind {
		case frameMessages:
			err = h.handleMessages(from, rest)
		case frameLiveness:
			var l liveness
			if l, err = decodeLiveness(rest); err == nil {
				h.peers.heard(from, l)
			}
		default:
			err = errFrame
		}
	}
	if err != nil {
		h.m.malformed.Inc()
		h.log.Warn("frame dropped", zap.Stringer("peer", from), zap.Error(err))
	}
}

func (h *Host) handleMessages(from keyspace.NodeID, rest []byte) error {
	msgs, err := decodeMessages(from, rest)
	if err != nil {
		return err
	}
	byWorker := make([][]routed, len(h.workers))
	overloaded := h.cfg.WAL.Overloaded()
	h.mu.RLock()
	var strange []*message
	for i := range msgs {
		m := &msgs[i]
		g := h.mu.groups[m.group]
		if g == nil || g.self != m.to {
			strange = append(strange, m)
			continue
		}
		if m.kind == pb.MsgApp && len(m.raft.GetEntries()) > 0 && overloaded {
			// A leader refuses proposals then; this is the follower's way to say so, since
			// raft sends again what is not answered.
			h.m.overloadDropped.Inc()
			continue
		}
		if m.kind == pb.MsgApp && !h.admit(m) {
			continue
		}
		byWorker[g.w.no] = append(byWorker[g.w.no], routed{g, m})
	}
	// Parked under the lock that Open takes, so that none falls between.
	told := h.parking.park(strange, h.cfg.Clock.Now(), h.cfg.ElectionTimeout, h.m)
	h.mu.RUnlock()
	for i, rs := range byWorker {
		if len(rs) > 0 {
			h.workers[i].deliver(rs)
		}
	}
	if f := h.cfg.Unknown; f != nil {
		for _, m := range told {
			f(from, m.group, m.to)
		}
	}
	return nil
}

// admit counts the entries of a MsgApp into the host's budget for what waits for a
// worker. What does not fit is lost, as in a network.
func (h *Host) admit(m *message) bool {
	if v := h.inbound.Add(m.bytes); v > h.cfg.MaxInboundBytes && v != m.bytes {
		h.inbound.Add(-m.bytes)
		h.m.inboundDropped.Inc()
		return false
	}
	return true
}

// parking keeps the newest vote and pre-vote of each sender for replicas that are
// not open here: a range's child may hear from its peers before the local replica
// of its parent has split. Entries are not kept; they come again.
type parking struct {
	mu     sync.Mutex
	groups map[parkedKey]*parked
}

type parkedKey struct {
	group keyspace.GroupID
	to    keyspace.ReplicaID
}

type parked struct {
	votes []*message
	told  clock.Time // when Config.Unknown was last called
	used  clock.Time
}

func (p *parking) init() { p.groups = make(map[parkedKey]*parked) }

// park keeps what is worth it and returns the messages that Unknown is to be told
// of.
func (p *parking) park(msgs []*message, now clock.Time, every time.Duration, m *Metrics) (told []*message) {
	if len(msgs) == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, msg := range msgs {
		key := parkedKey{msg.group, msg.to}
		e := p.groups[key]
		if e == nil {
			if len(p.groups) >= parkedGroupsMax {
				continue
			}
			e = new(parked)
			p.groups[key] = e
		}
		e.used = now
		if msg.kind == pb.MsgVote || msg.kind == pb.MsgPreVote {
			e.keep(msg)
			m.parked.Inc()
		}
		if e.told == 0 || now.Sub(e.told) >= every {
			e.told = now
			told = append(told, msg)
		}
	}
	return told
}

// keep replaces an older message of the same kind and sender.
func (e *parked) keep(m *message) {
	for i, o := range e.votes {
		if o.kind == m.kind && o.from == m.from {
			if m.term >= o.term {
				e.votes[i] = m
			}
			return
		}
	}
	if len(e.votes) < parkedPerGroupMax {
		e.votes = append(e.votes, m)
	}
}

// claim takes what is parked for a replica that is being opened.
func (p *parking) claim(group keyspace.GroupID, to keyspace.ReplicaID) []*message {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.groups[parkedKey{group, to}]
	if e == nil {
		return nil
	}
	delete(p.groups, parkedKey{group, to})
	return e.votes
}

// expire forgets what was last used before limit.
func (p *parking) expire(limit clock.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, e := range p.groups {
		if e.used < limit {
			delete(p.groups, k)
		}
	}
}
