package raftgroup

import (
	"context"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/confentry"
)

// changeState is the worker's side of configuration changes and transfers.
type changeState struct {
	// pending is the index of the newest change that this leader knows to be in the log,
	// or the end of the log when it began to lead.
	pending uint64
	waiters []confWaiter
	// transfer is called when leadership has moved to transferTo, or when that failed.
	transfer   func(error)
	transferTo keyspace.ReplicaID
	ticks      int // since the transfer began
}

type confWaiter struct {
	number uint64
	seen   bool
	done   func(error)
}

// ChangeConf changes the group's members. It returns nil once the final configuration is
// applied here. Several changes pass through a joint configuration, which the group
// leaves by itself. The change is proposed only if the group leads here in that term.
// Several changes at once must change the voters and may name each replica once. A
// replica is added as a learner and promoted when it is caught up. payload, which may be
// nil, becomes the Data of the entry.
//
// ErrUnknownFate says that leadership or ctx ended while the change was under way. After
// any other error nothing was changed.
func (g *Group) ChangeConf(ctx context.Context, term uint64, changes []ConfChange, payload []byte) error {
	ch := make(chan error, 1)
	finish := func(err error) { ch <- err }
	if !g.w.call(g, func() { g.proposeConf(term, changes, payload, finish) }) {
		return ErrStopped
	}
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknownFate, context.Cause(ctx))
	}
}

func (g *Group) proposeConf(term uint64, changes []ConfChange, payload []byte, done func(error)) {
	if err := g.checkConf(term, changes); err != nil {
		done(err)
		return
	}
	g.wake()
	number := g.h.readNonce ^ g.h.readNumber.Add(1)
	typ, data, err := pb.MarshalConfChange(encodeConf(number, changes, payload))
	if err != nil {
		done(fmt.Errorf("%w: %w", ErrConfInvalid, err))
		return
	}
	m := &pb.Message{
		Type: pb.MsgProp.Enum(), From: ptr(uint64(g.self)),
		Entries: []*pb.Entry{{Type: typ.Enum(), Data: data}},
	}
	if err := g.rn.Step(m); err != nil {
		done(ErrDropped)
		return
	}
	if m.GetEntries()[0].GetType() == pb.EntryNormal {
		done(ErrConfPending) // raft has replaced it by an empty entry
		return
	}
	g.changes.waiters = append(g.changes.waiters, confWaiter{number: number, done: done})
}

// checkConf refuses changes that raft would turn into an empty entry or, worse, that
// would make raft panic when they are applied.
func (g *Group) checkConf(term uint64, changes []ConfChange) error {
	if g.closed {
		return ErrClosed
	}
	switch st := g.rn.BasicStatus(); {
	case st.RaftState != raft.StateLeader || st.GetTerm() != term:
		return ErrNotLeader
	case !g.lease.ready || g.conf.joint || g.changes.pending > g.applied || len(g.changes.waiters) > 0:
		return ErrConfPending
	case st.LeadTransferee != raft.None:
		return ErrDropped
	case len(changes) == 0:
		return fmt.Errorf("%w: no change", ErrConfInvalid)
	}
	voters, touched := 0, false
	for i, c := range changes {
		if slices.ContainsFunc(changes[:i], func(o ConfChange) bool { return o.Replica == c.Replica }) {
			return fmt.Errorf("%w: replica %d named twice", ErrConfInvalid, c.Replica)
		}
		changed, err := g.checkChange(c)
		if err != nil {
			return err
		}
		touched = touched || changed
	}
	if len(changes) > 1 && !touched {
		return fmt.Errorf("%w: several changes that leave the voters as they are", ErrConfInvalid)
	}
	c := confentry.Entry{CC: encodeConf(0, changes, nil)}
	for _, r := range c.Apply(g.conf.replicas) {
		voters += boolInt(r.Role == keyspace.RoleVoter || r.Role == keyspace.RoleVoterIncoming)
	}
	if voters == 0 {
		return fmt.Errorf("%w: no voter left", ErrConfInvalid)
	}
	return nil
}

// checkChange checks one change and reports whether it changes the voters.
func (g *Group) checkChange(c ConfChange) (voters bool, err error) {
	r, member := g.conf.find(c.Replica)
	switch c.Type {
	case AddLearner:
		if member || c.Replica == 0 || c.Node == 0 || uint64(c.Replica) >= localTargetMin {
			return false, fmt.Errorf("%w: add %d on node %s", ErrConfInvalid, c.Replica, c.Node)
		}
		for _, o := range g.conf.replicas {
			if o.Node == c.Node {
				return false, fmt.Errorf("%w: node %s has replica %d already", ErrConfInvalid, c.Node, o.ID)
			}
		}
		return false, nil
	case Promote:
		if !member || r.Role != keyspace.RoleLearner {
			return false, fmt.Errorf("%w: promote %d", ErrConfInvalid, c.Replica)
		}
		return true, g.checkCaughtUp(r)
	case Demote, RemoveReplica:
		if !member || c.Type == Demote && r.Role != keyspace.RoleVoter {
			return false, fmt.Errorf("%w: demote or remove %d", ErrConfInvalid, c.Replica)
		}
		if c.Replica == g.self {
			return false, ErrRemovesLeader
		}
		return r.Role == keyspace.RoleVoter, nil
	}
	return false, fmt.Errorf("%w: type %d", ErrConfInvalid, c.Type)
}

// promoteLagMax is how many entries a replica may lag when it becomes a voter.
const promoteLagMax = 1024

func (g *Group) checkCaughtUp(r keyspace.Replica) error {
	ps, err := g.progress()
	if err != nil {
		return err
	}
	for _, p := range ps {
		if p.Replica.ID == r.ID && p.Active && p.Replicating && p.Match+promoteLagMax >= g.commit {
			return nil
		}
	}
	return fmt.Errorf("%w: replica %d", ErrNotCaughtUp, r.ID)
}

// applyConf tells raft of a change that the applier has applied.
func (g *Group) applyConf(c *appliedConf) {
	cs := g.rn.ApplyConfChange(c.CC)
	g.setConf(c.after, c.index)
	if want := confStateOf(c.after); want.Equivalent(cs) != nil {
		panic(fmt.Sprintf("raftgroup: group %s: configuration at %d: raft has %v, the applied record %v", g.id, c.index, cs, want))
	}
	for i := range g.changes.waiters {
		w := &g.changes.waiters[i]
		w.seen = w.seen || c.Number != 0 && w.number == c.Number
	}
	if g.isLeader {
		// The round under way may now be complete, or may have no voter left to answer
		// it.
		g.retryReads()
		g.issueReads()
	}
	if g.conf.joint {
		return
	}
	g.changes.waiters = slices.DeleteFunc(g.changes.waiters, func(w confWaiter) bool {
		if w.seen {
			w.done(nil)
		}
		return w.seen
	})
}

// setConf installs a configuration as the group's own.
func (g *Group) setConf(replicas []keyspace.Replica, index uint64) {
	g.h.peers.change(g.conf.replicas, replicas)
	g.conf = configurationOf(replicas, index)
	g.public.replicas.Store(&replicas)
	g.learned = slices.DeleteFunc(g.learned, func(r route) bool {
		_, known := g.conf.find(r.id)
		return known
	})
	g.lease.dirty = true
}

// leaveJoint proposes the end of a joint configuration, whoever began it. A leader that
// this would remove or demote hands leadership over first. Otherwise it would drop
// accepted proposals and leave the group without a leader for an election timeout.
func (g *Group) leaveJoint() {
	if !g.conf.joint || !g.lease.ready || g.changes.pending > g.applied || g.changes.transfer != nil {
		return
	}
	if _, stays := g.conf.voters[0][uint64(g.self)]; !stays {
		// If no replica can take over yet, the next tick tries again.
		g.beginTransfer(0, func(error) {})
		return
	}
	typ := pb.EntryConfChangeV2
	m := &pb.Message{
		Type: pb.MsgProp.Enum(), From: ptr(uint64(g.self)),
		Entries: []*pb.Entry{{Type: typ.Enum()}},
	}
	// A refusal does no harm: the next tick tries again.
	_ = g.rn.Step(m)
}

// failChanges fails the waiting changes when leadership ends.
func (g *Group) failChanges(err error) {
	for _, w := range g.changes.waiters {
		w.done(err)
	}
	g.changes.waiters = nil
}

// Transfer moves leadership to another voter; 0 chooses the best. It first gives the
// lease up for the rest of the term, even if the transfer fails. Raft drops proposals
// while the transfer is under way. Transfer returns nil once this replica no longer
// leads.
func (g *Group) Transfer(ctx context.Context, to keyspace.ReplicaID) error {
	ch := make(chan error, 1)
	if !g.w.call(g, func() { g.beginTransfer(to, func(err error) { ch <- err }) }) {
		return ErrStopped
	}
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknownFate, context.Cause(ctx))
	}
}

// CanTransfer returns nil if Transfer to the replica, or to any for 0, would begin now.
// Otherwise it returns ErrNotLeader, or ErrNotCaughtUp if no eligible voter follows the
// log. It changes nothing, so a caller that must first end something can ask before.
func (g *Group) CanTransfer(ctx context.Context, to keyspace.ReplicaID) error {
	ch := make(chan error, 1)
	ask := func() {
		switch {
		case g.closed:
			ch <- ErrClosed
		case g.rn.BasicStatus().RaftState != raft.StateLeader:
			ch <- ErrNotLeader
		default:
			_, err := g.transferTarget(to)
			ch <- err
		}
	}
	if !g.w.call(g, ask) {
		return ErrStopped
	}
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (g *Group) beginTransfer(to keyspace.ReplicaID, done func(error)) {
	switch {
	case g.closed:
		done(ErrClosed)
		return
	case g.rn.BasicStatus().RaftState != raft.StateLeader:
		done(ErrNotLeader)
		return
	case g.changes.transfer != nil:
		done(ErrDropped)
		return
	}
	target, err := g.transferTarget(to)
	if err != nil {
		done(err)
		return
	}
	// Before raft sends MsgTimeoutNow, and for the rest of this term: the message may
	// arrive long after, and its vote respects no promise.
	g.giveUpLease()
	g.wake()
	g.changes.transfer, g.changes.transferTo, g.changes.ticks = done, target, 0
	g.rn.TransferLeader(uint64(target))
}

func (g *Group) transferTarget(to keyspace.ReplicaID) (keyspace.ReplicaID, error) {
	ps, err := g.progress()
	if err != nil {
		return 0, err
	}
	best, match := keyspace.ReplicaID(0), uint64(0)
	for _, p := range ps {
		if p.Replica.ID == g.self || (to != 0 && p.Replica.ID != to) || !p.Replicating || !p.NodeAlive && !p.Active ||
			p.Replica.Role != keyspace.RoleVoter && p.Replica.Role != keyspace.RoleVoterIncoming {
			continue
		}
		if best == 0 || p.Match > match {
			best, match = p.Replica.ID, p.Match
		}
	}
	if best == 0 {
		return 0, fmt.Errorf("%w: transfer to %d", ErrNotCaughtUp, to)
	}
	return best, nil
}

// tickTransfer ends a transfer that raft has given up by now.
func (g *Group) tickTransfer() {
	if g.changes.transfer == nil {
		return
	}
	if g.changes.ticks++; g.changes.ticks > g.h.cfg.electionTicks()+1 {
		g.endTransfer(ErrTransferFailed)
	}
}

func (g *Group) endTransfer(err error) {
	if done := g.changes.transfer; done != nil {
		g.changes.transfer = nil
		done(err)
	}
}

// progress lists this leader's knowledge of the replicas.
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
