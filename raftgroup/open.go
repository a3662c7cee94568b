package raftgroup

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// Open opens a group's replica from its applied record and the wal. A group without an
// applied record is an empty replica that waits for a snapshot. The group begins asleep,
// and the pacer wakes it. The state machine must already show the state of the applied
// record, because its methods may be called from now on. at is the position of the record
// that it was loaded from, zero if there was none. Open fails if the engine's record is
// at another position by now. A group that was removed here must be removed again first
// (see Removed). A replica in quarantine gets a group that refuses everything.
func (h *Host) Open(id keyspace.GroupID, self keyspace.ReplicaID, at Position, sm StateMachine) (*Group, error) {
	if h.stopping.Load() {
		return nil, ErrStopped
	}
	if id == 0 || self == 0 || uint64(self) >= localTargetMin {
		return nil, fmt.Errorf("raftgroup: open group %s: replica %d", id, self)
	}
	// First of all: of two concurrent calls that both decide to reset the log, the slower
	// one would reset it under the other's open group.
	if err := h.reserve(id); err != nil {
		return nil, err
	}
	if q, ok := h.quarantine.Has(id, self); ok {
		h.unreserve(id)
		g := h.shut(id, self, sm)
		if m, ok := sm.(Quarantiner); ok {
			m.Quarantined(q.Reason)
		}
		return g, nil
	}
	g, err := h.load(id, self, at, sm)
	if err != nil {
		h.unreserve(id)
		return nil, fmt.Errorf("raftgroup: open group %s: %w", id, err)
	}
	h.admitGroup(g)
	return g, nil
}

// load builds a group that is not registered yet.
func (h *Host) load(id keyspace.GroupID, self keyspace.ReplicaID, at Position, sm StateMachine) (*Group, error) {
	a, initialised, err := h.cfg.Engine.Applied(id)
	if err != nil {
		return nil, err
	}
	if have := (Position{a.Index, a.Term}); have != at {
		return nil, fmt.Errorf("the state machine was loaded at %v, the applied record is at %v", at, have)
	}
	g := &Group{
		h: h, id: id, self: self, sm: sm, log: h.cfg.WAL.Group(id), awakeAt: -1,
		zap: h.log.WithLazy(zap.Stringer("group", id), zap.Uint64("replica", uint64(self))),
	}
	g.w, g.a = h.workerOf(id)
	hs, err := g.reconcile(a, initialised)
	if err != nil {
		return nil, err
	}
	g.saved.note(g.log.HardState())
	g.mutateReplay(&a)
	g.apply.at = Position{a.Index, a.Term}
	g.apply.replicas, g.apply.confIndex, g.apply.payload = a.Replicas, a.ConfIndex, a.Payload
	g.conf = configurationOf(a.Replicas, a.ConfIndex)
	g.applied, g.appliedTerm = a.Index, a.Term
	g.term, g.commit, g.last = hs.GetTerm(), hs.GetCommit(), g.log.LastIndex()
	if g.sleep.soleVoter, err = g.soleVoter(); err != nil {
		return nil, err
	}
	g.sleep.asleep = true
	g.rn, err = raft.NewRawNode(h.raftConfig(g, hs, a))
	if err != nil {
		return nil, err
	}
	g.public.replicas.Store(&a.Replicas)
	g.public.asleep.Store(true)
	g.public.term.Store(g.term)
	g.publish()
	if d, ok, err := h.cfg.Engine.DurableApplied(id); err != nil {
		return nil, err
	} else if ok {
		g.public.durable.Store(d.Index)
	}
	return g, nil
}

// reconcile makes log and applied record agree after whatever a crash has left, and
// returns the hard state to begin with.
//
//   - No record: the log may hold votes of a replica that never got a snapshot. A log
//     with more belongs to a record that is lost, or that a split which is yet to be
//     replayed makes again. Its entries may be acknowledged, so Open refuses.
//   - The log ends before the record or contradicts it: a snapshot or a split made the
//     record durable before the log. The log is reset to the record's position.
//   - The log begins behind the record: entries that were never applied are lost. Open
//     refuses.
//   - Otherwise the log continues the record. Everything up to the record is committed,
//     although the hard state may not say so yet.
func (g *Group) reconcile(a engine.Applied, initialised bool) (*pb.HardState, error) {
	if g.log.Removed() {
		return nil, fmt.Errorf("%w: the replica was removed", ErrClosed)
	}
	old := g.log.HardState()
	hs := &pb.HardState{Term: ptr(old.GetTerm()), Vote: ptr(old.GetVote()), Commit: ptr(old.GetCommit())}
	if hs.GetTerm() < a.Term {
		hs.Term, hs.Vote = ptr(a.Term), ptr(uint64(0))
	}
	base, _ := g.log.Base()
	last := g.log.LastIndex()
	fits := base <= a.Index && a.Index <= last
	if fits {
		term, err := g.log.Term(a.Index)
		if err != nil {
			return nil, err
		}
		fits = term == a.Term
	}
	switch {
	case !initialised && !g.log.Exists():
		return hs, nil
	case !initialised && (base > 0 || last > 0):
		return nil, fmt.Errorf("%w: %w: log from %d to %d", errCorrupt, ErrNoRecord, base, last)
	case fits:
	case base > a.Index && initialised:
		return nil, fmt.Errorf("%w: applied %d, log begins behind %d", errCorrupt, a.Index, base)
	default:
		hs.Commit = ptr(a.Index)
		b := g.h.cfg.WAL.NewBatch()
		b.Reset(g.id, a.Index, a.Term, hs)
		// Anything of this group that becomes durable later lies behind it in the wal.
		b.SetSync(false)
		g.h.cfg.WAL.Submit(b, nil)
	}
	hs.Commit = ptr(max(hs.GetCommit(), a.Index))
	if last := g.log.LastIndex(); hs.GetCommit() > last {
		return nil, fmt.Errorf("%w: committed %d, log ends at %d", errCorrupt, hs.GetCommit(), last)
	}
	return hs, nil
}

// soleVoter reports whether this replica is its group's only voter, and whether nothing
// in its log beyond the applied record can have added another.
func (g *Group) soleVoter() (bool, error) {
	if !g.conf.soleVoter(g.self) {
		return false, nil
	}
	for lo, last := g.applied+1, g.log.LastIndex(); lo <= last; {
		ents, err := g.log.Entries(lo, last+1, maxCommittedPerReady)
		if err != nil {
			return false, err
		}
		for _, e := range ents {
			if e.GetType() != pb.EntryNormal {
				return false, nil
			}
		}
		lo += uint64(len(ents))
	}
	return true, nil
}

func (h *Host) raftConfig(g *Group, hs *pb.HardState, a engine.Applied) *raft.Config {
	return &raft.Config{
		ID:                        uint64(g.self),
		ElectionTick:              h.cfg.electionTicks(),
		HeartbeatTick:             1,
		Storage:                   &storage{g: g, hard: hs, conf: confStateOf(a.Replicas)},
		Applied:                   a.Index,
		AsyncStorageWrites:        true,
		MaxSizePerMsg:             maxSizePerMsg,
		MaxCommittedSizePerReady:  maxCommittedPerReady,
		MaxUncommittedEntriesSize: 0, // no limit: entries with allocated revisions must not be dropped
		MaxInflightMsgs:           maxInflightMsgs,
		MaxInflightBytes:          h.cfg.MaxPeerInflightBytes,
		CheckQuorum:               true,
		PreVote:                   !h.cfg.NoPreVote,
		ReadOnlyOption:            raft.ReadOnlySafe,
		Logger:                    raftLogger{g.zap},
		DisableProposalForwarding: true,
		StepDownOnRemoval:         true,
	}
}

// admitGroup registers a loaded group and starts it.
func (h *Host) admitGroup(g *Group) {
	h.committed.Add(int64(g.commit - g.applied))
	h.mu.Lock()
	delete(h.mu.reserved, g.id)
	g.promise.until = h.mu.promises[g.id]
	h.mu.groups[g.id] = g
	votes := h.votes.take(g.id, g.self)
	h.m.groups.Set(float64(len(h.mu.groups)))
	h.mu.Unlock()
	h.peers.change(nil, g.conf.replicas)
	g.w.call(g, g.notifyLeader)
	g.w.flag(g, flagTruncate) // a previous run may have ended before it truncated
	for _, m := range votes {
		g.w.deliver([]routed{{g, m}})
	}
	h.pacer.add([]*Group{g})
}

var errCorrupt = errors.New("raftgroup: log and applied record contradict each other")
