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

// handleFrame takes one frame from the bus. It runs on the goroutine that reads the bus,
// decodes the frame, and queues the messages at their workers.
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
	var unknown []*message
	for i := range msgs {
		m := &msgs[i]
		g := h.mu.groups[m.group]
		if g == nil || g.self != m.to {
			if _, closed := h.quarantine.Has(m.group, m.to); !closed {
				unknown = append(unknown, m)
			}
			continue
		}
		if m.kind == pb.MsgApp && len(m.raft.GetEntries()) > 0 && overloaded {
			// The leader refuses proposals when its own wal is overloaded. A follower has
			// only this way: raft resends what is not acknowledged.
			h.m.overloadDropped.Inc()
			continue
		}
		if m.kind == pb.MsgApp && !h.admit(m) {
			continue
		}
		byWorker[g.w.no] = append(byWorker[g.w.no], routed{g, m})
	}
	// Buffered under the lock that Open takes, so that Open misses none.
	var told []*message
	if len(unknown) > 0 {
		told = h.votes.add(unknown, h.cfg.Clock.Now(), h.cfg.ElectionTimeout, h.m)
	}
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

// admit charges the entries of a MsgApp to the host's budget for entries that wait for a
// worker. A message that does not fit is lost, as in a network.
func (h *Host) admit(m *message) bool {
	if v := h.inbound.Add(m.bytes); v > h.cfg.MaxInboundBytes && v != m.bytes {
		h.inbound.Add(-m.bytes)
		h.m.inboundDropped.Inc()
		return false
	}
	return true
}

// voteBuffer keeps the newest vote and pre-vote of each sender for replicas that are not
// open here. After a split, peers may contact the new replica before the local parent has
// applied the split. Entries are not kept; raft sends them again.
type voteBuffer struct {
	mu     sync.Mutex
	groups map[replicaKey]*bufferedVotes
}

type replicaKey struct {
	group keyspace.GroupID
	to    keyspace.ReplicaID
}

type bufferedVotes struct {
	votes []*message
	told  clock.Time // when Config.Unknown was last called
	used  clock.Time
}

func (p *voteBuffer) init() { p.groups = make(map[replicaKey]*bufferedVotes) }

// add keeps votes and returns the messages of which Unknown is to be told.
func (p *voteBuffer) add(msgs []*message, now clock.Time, every time.Duration, m *Metrics) (told []*message) {
	if len(msgs) == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, msg := range msgs {
		key := replicaKey{msg.group, msg.to}
		e := p.groups[key]
		if e == nil {
			if len(p.groups) >= bufferedGroupsMax {
				continue
			}
			e = new(bufferedVotes)
			p.groups[key] = e
		}
		e.used = now
		if msg.kind == pb.MsgVote || msg.kind == pb.MsgPreVote {
			e.add(msg)
			m.votesBuffered.Inc()
		}
		if e.told == 0 || now.Sub(e.told) >= every {
			e.told = now
			told = append(told, msg)
		}
	}
	return told
}

// add replaces an older message of the same kind and sender.
func (e *bufferedVotes) add(m *message) {
	for i, o := range e.votes {
		if o.kind == m.kind && o.from == m.from {
			if m.term >= o.term {
				e.votes[i] = m
			}
			return
		}
	}
	if len(e.votes) < bufferedPerGroupMax {
		e.votes = append(e.votes, m)
	}
}

// take removes and returns the votes for a replica that is being opened.
func (p *voteBuffer) take(group keyspace.GroupID, to keyspace.ReplicaID) []*message {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.groups[replicaKey{group, to}]
	if e == nil {
		return nil
	}
	delete(p.groups, replicaKey{group, to})
	return e.votes
}

// expire drops the votes last used before limit.
func (p *voteBuffer) expire(limit clock.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, e := range p.groups {
		if e.used < limit {
			delete(p.groups, k)
		}
	}
}
