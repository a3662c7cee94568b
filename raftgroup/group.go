package raftgroup

import (
	"context"
	"fmt"
	"sync/atomic"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// Group is one raft group's replica on this host. Its exported methods may be called from many goroutines.
type Group struct {
	h    *Host
	w    *worker
	a    *applier
	id   keyspace.GroupID
	self keyspace.ReplicaID
	sm   StateMachine
	log  *wal.GroupLog
	zap  *zap.Logger

	// Guarded by w.mu.
	work    *work
	queued  bool
	awakeAt int // index in w.mu.awake, -1 while asleep
	// afterRead is how many more visits without a read of the log's files are for the worker's goroutine.
	afterRead int

	apply    applyState   // its fields say who guards and owns them
	public   published    // atomics, for readers without a lock
	inflight atomic.Int64 // bytes of proposals not yet applied
	broken   atomic.Bool  // nothing may be applied any more, see Host.Quarantine

	// Everything below is owned by the worker's pass.
	closed bool
	rn     *raft.RawNode

	// What raft last said in a Ready.
	term, commit, last uint64
	lead               keyspace.ReplicaID
	isLeader           bool
	// applied is the applied index that raft knows, appliedTerm its term.
	applied, appliedTerm uint64
	// conf is the configuration as of applied.
	conf    configuration
	learned []route

	// appends counts appends that wait for the wal, or whose responses do.
	appends   int
	immediate []*pb.Message // responses of appends that wrote nothing
	saved     savedState
	unsaved   *pb.HardState // a commit index that the wal does not have yet
	notices   commitNotices
	// inReady says that a call of raft's Ready is running. readDeferred says that it got
	// no entries because the pass has read its share.
	inReady, readDeferred bool
	// installing is the snapshot that raft has accepted and the engine has not installed; held are the appends behind it.
	installing *install
	held       []*pb.Message
	receiving  *incomingSnapshot
	// resetting is a snapshot whose reset of the log is on its way to the disk.
	resetting *incomingSnapshot
	// snapshotAgain is the earliest time for the next snapshot after a failure.
	snapshotAgain clock.Time
	// snapshotFailed is the error of the last snapshot to each follower, until one is
	// installed.
	snapshotFailed map[keyspace.ReplicaID]string

	lease    leaseState
	sleep    sleepState
	promise  promiseState
	reads    readState
	trunc    truncState
	proposed proposedState
	changes  changeState
	commits  commitState
}

// published is what other goroutines may read without asking the worker.
type published struct {
	// leading is the term in which this replica leads, 0 if it does not.
	leading atomic.Uint64
	// leaseTerm and leaseUntil are described at Lease.
	leaseTerm  atomic.Uint64
	leaseUntil atomic.Int64
	// leaseFrom is Host.leasesFrom as the worker knew it when it published leaseUntil. With
	// another one the lease was dropped since.
	leaseFrom atomic.Int64

	term, leader, leaderNode, commit, last, applied, durable atomic.Uint64
	// readers counts the ReadIndex waiters that were not called yet.
	readers atomic.Int64
	// applying is the index that the applier has committed to the engine; applied follows
	// it.
	applying                 atomic.Uint64
	asleep, receiving, dirty atomic.Bool
	replicas                 atomic.Pointer[[]keyspace.Replica]
	// wakeWanted is 1 while the group is in the pacer's queue.
	wakeWanted atomic.Uint32
}

// ID returns the group's id.
func (g *Group) ID() keyspace.GroupID { return g.id }

// Replica returns the id of this host's replica.
func (g *Group) Replica() keyspace.ReplicaID { return g.self }

// Propose gives data to raft if the group leads here in exactly that term. It never
// blocks and never forwards. An error means that nothing was accepted: ErrNotLeader,
// ErrFull, ErrTooLarge, ErrClosed or ErrStopped.
//
// Otherwise dropped, which may be nil, is called in order with Applied, if and only if
// the data certainly was not appended to any log and never will be. Propose does not
// report a loss of leadership after the append: the fate is then unknown, and the state
// machine sees the entry if it survives. The data must not be changed any more.
func (g *Group) Propose(term uint64, data []byte, dropped func(error)) error {
	switch {
	case len(data) == 0 || int64(len(data)) > g.h.maxEntry:
		return fmt.Errorf("%w: %d bytes", ErrTooLarge, len(data))
	case g.public.leading.Load() != term || term == 0:
		return ErrNotLeader
	case g.h.diskStalled.Load() && len(*g.public.replicas.Load()) > 1:
		// Others are about to lead, so the proposal would be lost. A sole replica keeps
		// it until the disk moves.
		return fmt.Errorf("%w: a disk of this node does not move", ErrNotLeader)
	case g.h.cfg.WAL.Overloaded():
		g.h.m.full.Inc()
		return fmt.Errorf("%w: the wal's queue", ErrFull)
	}
	n := int64(len(data)) + entryOverheadBytes
	if err := g.reserve(n); err != nil {
		g.h.m.full.Inc()
		return err
	}
	g.w.mu.Lock()
	k := g.w.workOf(g)
	if k != nil {
		k.props = append(k.props, proposal{term, data, n, dropped})
	}
	g.w.mu.Unlock()
	if k == nil {
		g.release(1, n)
		return ErrStopped
	}
	g.w.help()
	return nil
}

// Lease returns the term in which this replica leads and holds the leader lease, and when
// that lease ends on this node's clock. If ok is false there is no lease, and a reader
// needs ReadIndex. A read is linearizable if it arrived before the clock was read, the
// clock was below until, and the state is read afterwards.
func (g *Group) Lease() (term uint64, until clock.Time, ok bool) {
	// A lease is revoked before the term changes and granted after. So if the term is the
	// same before and after, what was read between belongs to it.
	term = g.public.leaseTerm.Load()
	from := g.public.leaseFrom.Load()
	until = clock.Time(g.public.leaseUntil.Load())
	if from != g.h.leasesFrom.Load() {
		until = 0
	}
	if until == 0 || g.public.leaseTerm.Load() != term {
		return 0, 0, false
	}
	return term, until, true
}

// LeaseHeld reads the clock and reports whether the lease of the term holds now.
func (g *Group) LeaseHeld(term uint64) bool {
	now := g.h.leaseClock()
	t, until, ok := g.Lease()
	return ok && t == term && now < until
}

// ReadIndex calls done, in order with Applied, once this replica has applied everything
// that was committed anywhere when ReadIndex was called. It works on followers too.
// Waiting reads share rounds: one round is under way at a time, and later reads join the
// next. It fails with ErrFull, ErrClosed or ErrStopped, or with ErrNoLeader after three
// election timeouts. The latter also applies if a leader has answered but its index is
// not applied here by then.
func (g *Group) ReadIndex(done func(index uint64, err error)) {
	if g.public.readers.Add(1) > int64(g.h.cfg.MaxReads) {
		g.public.readers.Add(-1)
		done(0, ErrFull)
		return
	}
	g.w.mu.Lock()
	k := g.w.workOf(g)
	if k != nil {
		k.reads = append(k.reads, readWaiter{done: done})
		g.w.wakeLocked()
	}
	g.w.mu.Unlock()
	if k == nil {
		g.public.readers.Add(-1)
		done(0, ErrStopped)
	}
}

// Wake wakes the group, and its leader if that is elsewhere. Call it when a client asks a
// follower for a leader that the follower does not know.
func (g *Group) Wake() { g.w.flag(g, flagClientWake) }

// Campaign makes this replica campaign now, unless its promise or the embargo after the
// host's start forbids it.
func (g *Group) Campaign() { g.w.call(g, func() { g.campaignWhenFree() }) }

// Status returns what the worker last published.
func (g *Group) Status() Status {
	p := &g.public
	s := Status{
		Group: g.id, Replica: g.self,
		Term: p.term.Load(), Leader: keyspace.ReplicaID(p.leader.Load()),
		LeaderNode: keyspace.NodeID(p.leaderNode.Load()),
		IsLeader:   p.leading.Load() != 0, Asleep: p.asleep.Load(),
		Commit: p.commit.Load(), Last: p.last.Load(), Applied: p.applied.Load(),
		DurableApplied: p.durable.Load(), InflightBytes: g.inflight.Load(),
		Receiving: p.receiving.Load(),
	}
	if r := p.replicas.Load(); r != nil {
		s.Replicas = *r
	}
	return s
}

// Progress asks the worker for this leader's knowledge of all replicas, itself included.
// It returns ErrNotLeader on a follower.
func (g *Group) Progress(ctx context.Context) ([]Progress, error) {
	type answer struct {
		p   []Progress
		err error
	}
	ch := make(chan answer, 1)
	if !g.w.call(g, func() {
		if g.closed {
			ch <- answer{nil, ErrClosed}
			return
		}
		p, err := g.progress()
		ch <- answer{p, err}
	}) {
		return nil, ErrStopped
	}
	select {
	case a := <-ch:
		return a.p, a.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
