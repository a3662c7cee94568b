package raftgroup

import (
	"fmt"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// Open brings a group's replica to life from its applied record and the wal. A
// group without an applied record is an empty replica, which waits for a snapshot.
// It begins asleep; the pacer wakes it. The state machine must show the state of
// the applied record already: its methods may be called from now on. at is the
// position of the record that it was loaded from, zero where there was none; if the
// engine holds another one by now, Open fails. A group that was removed here must be
// removed again first (see Removed).
func (h *Host) Open(id keyspace.GroupID, self keyspace.ReplicaID, at Position, sm StateMachine) (*Group, error) {
	if h.stopping.Load() {
		return nil, ErrStopped
	}
	if id == 0 || self == 0 || uint64(self) >= localTargetMin {
		return nil, fmt.Errorf("raftgroup: open group %s: replica %d", id, self)
	}
	// Before anything is looked at: of two that decide to begin the log anew, the
	// slower one would do it under the other's feet.
	if err := h.reserve(id); err != nil {
		return nil, err
	}
	g, err := h.load(id, self, at, sm)
	if err != nil {
		h.unreserve(id)
		return nil, fmt.Errorf("raftgroup: open group %s: %w", id, err)
	}
	h.admitGroup(g)
	return g, nil
}

// reserve keeps everybody else from opening or removing the group until unreserve,
// or until it is known as open.
func (h *Host) reserve(id keyspace.GroupID) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.groups[id] != nil || h.mu.reserved[id] || h.mu.closing[id] != nil {
		return fmt.Errorf("%w: %s", ErrExists, id)
	}
	h.mu.reserved[id] = true
	return nil
}

func (h *Host) unreserve(id keyspace.GroupID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.mu.reserved, id)
}

// load builds a group that nobody knows yet.
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
	if g.sleep.alone, err = g.soleVoter(); err != nil {
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

// reconcile makes log and applied record fit after whatever a crash has left of
// them, and returns the hard state to begin with.
//
//   - No record: the log may hold votes of a replica that never got a snapshot. One
//     that holds more belongs to a record that is gone, or that a split which is
//     still to be replayed makes again. Its entries may be acknowledged: it is left
//     alone.
//   - The log ends before the record, or contradicts it: a snapshot, or a split,
//     made the record durable before the log. The log begins anew behind it.
//   - The log begins behind the record: entries are lost that nobody has applied.
//   - Else the log continues the record, and everything up to the record is
//     committed, though the hard state may not know it yet.
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
		return nil, fmt.Errorf("%w: no applied record, log from %d to %d", errCorrupt, base, last)
	case fits:
	case base > a.Index && initialised:
		return nil, fmt.Errorf("%w: applied %d, log begins behind %d", errCorrupt, a.Index, base)
	default:
		hs.Commit = ptr(a.Index)
		b := g.h.cfg.WAL.NewBatch()
		b.Reset(g.id, a.Index, a.Term, hs)
		// Whatever is durable of this group later stands behind it in the wal.
		b.SetSync(false)
		g.h.cfg.WAL.Submit(b, nil)
	}
	hs.Commit = ptr(max(hs.GetCommit(), a.Index))
	if last := g.log.LastIndex(); hs.GetCommit() > last {
		return nil, fmt.Errorf("%w: committed %d, log ends at %d", errCorrupt, hs.GetCommit(), last)
	}
	return hs, nil
}

// soleVoter says whether this replica is its group's only voter and cannot have
// been joined by another in what its log holds beyond the applied record.
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
		MaxUncommittedEntriesSize: 0, // no limit: what is sequenced must not be dropped
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

// admitGroup makes a loaded group known and lets it begin.
func (h *Host) admitGroup(g *Group) {
	h.committed.Add(int64(g.commit - g.applied))
	h.mu.Lock()
	delete(h.mu.reserved, g.id)
	g.promise.until = h.mu.promises[g.id]
	h.mu.groups[g.id] = g
	votes := h.parking.claim(g.id, g.self)
	h.m.groups.Set(float64(len(h.mu.groups)))
	h.mu.Unlock()
	h.peers.change(nil, g.conf.replicas)
	g.w.call(g, g.tellLeader)
	g.w.flag(g, flagTruncate) // a run that ended before it could may have left it to do
	for _, m := range votes {
		g.w.deliver([]routed{{g, m}})
	}
	h.pacer.add([]*Group{g})
}

// shut ends a group in its worker: what waits is answered, what comes later is
// refused, and what the wal or the applier still have of it is dropped when it
// arrives.
func (g *Group) shut() {
	if g.closed {
		return
	}
	err := ErrClosed
	if g.h.stopping.Load() {
		err = ErrStopped
	}
	g.closed = true
	g.h.m.leaders.Sub(float64(boolInt(g.isLeader)))
	g.h.applied.Add(int64(g.commit - g.applied)) // nothing of it is left to apply here
	g.resetLease()
	g.public.leading.Store(0)
	g.w.setAwake(g, false)
	g.failReads(err)
	g.failChanges(ErrUnknownFate)
	g.endTransfer(err)
	g.abandonProposals()
	g.h.snaps.drop(g)
	if r := g.settling; r != nil {
		g.settling = nil
		r.result <- err
	}
	g.h.rememberPromise(g.id, g.promise.until)
	g.h.peers.change(g.conf.replicas, nil)
	g.h.mu.Lock()
	if g.h.mu.groups[g.id] == g {
		delete(g.h.mu.groups, g.id)
	}
	g.h.m.groups.Set(float64(len(g.h.mu.groups)))
	g.h.mu.Unlock()
}

// progress lists what this leader knows about the replicas.
func (g *Group) progress() ([]Progress, error) {
	if !g.isLeader {
		return nil, ErrNotLeader
	}
	var ps []Progress
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		r, ok := g.conf.find(keyspace.ReplicaID(id))
		if !ok {
			return
		}
		ps = append(ps, Progress{
			Replica: r, Match: pr.Match, Active: pr.RecentActive || r.ID == g.self,
			Replicating: pr.State == tracker.StateReplicate, NodeAlive: g.h.Liveness(r.Node),
		})
	})
	return ps, nil
}
