package shard

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/rangefeed"
)

// proposer takes entries for the group's log.
type proposer interface {
	// Propose is as raftgroup.Group.Propose.
	Propose(term uint64, data []byte, dropped func(error)) error
}

// confirmer says whether a leadership still stands.
type confirmer interface {
	// LeaseHeld says whether the lease of the term holds now.
	LeaseHeld(term uint64) bool
	// ReadIndex is as raftgroup.Group.ReadIndex.
	ReadIndex(done func(index uint64, err error))
}

// mover changes who leads.
type mover interface {
	Campaign()
	// Wake wakes a sleeping group, its leader too.
	Wake()
	// CanTransfer says why Transfer would fail at once. It changes nothing.
	CanTransfer(ctx context.Context, to keyspace.ReplicaID) error
	Transfer(ctx context.Context, to keyspace.ReplicaID) error
}

// observer tells what raft knows of the group.
type observer interface {
	Status() raftgroup.Status
	Progress(ctx context.Context) ([]raftgroup.Progress, error)
}

// group is what a replica needs of its raft group.
type group interface {
	proposer
	confirmer
	mover
	observer
	changer
}

// Replica is one replica of a range. The host of raft groups calls it from its
// apply pool, callers from their own goroutines, the node's evaluation pool with one
// goroutine at a time, the sequencer's client from its own.
//
// Lock order: a replica's mu, then the pool's or the meter's. None is held over the disk, the
// network, the sequencer or a caller's answer.
type Replica struct {
	node  *Node
	id    keyspace.RangeID
	store eval.EngineStore
	group group
	log   *zap.Logger

	// Only the host's apply pool touches these, one call at a time.
	applying applyState

	// appliedBatches counts calls of Applied. It is raised before the overlay loses
	// what was applied.
	appliedBatches atomic.Uint64

	mu sync.Mutex
	// Everything below is guarded by mu.

	// rec, confIndex and replicas are the applied state; position is where in the log.
	rec       command.Record
	confIndex uint64
	replicas  []keyspace.Replica
	position  raftgroup.Position
	// resolved is applyState.resolved of it.
	resolved keyspace.Revision
	live     eval.LiveCounts

	// leader is what raft last said. lead is set while this replica leads, has applied
	// an entry of its term, and may evaluate and propose.
	leader raftgroup.LeaderState
	lead   *leadership
	// changed is closed and made anew when leader, lead, rec's span or merge, change or closed
	// change, for those who wait for one of them. nil until somebody does.
	changed chan struct{}

	// queue holds the calls that wait for evaluation.
	queue      []*call
	queueBytes int64
	// barrier is a call that was put back too often: nothing that came after it is
	// evaluated before it.
	barrier    *call
	evaluating bool
	overlay    *eval.Overlay
	// locks are those of transactions over several ranges, and the calls that wait for them.
	// fence is the record's, or that of what is on its way.
	locks locktable.Table
	fence uint64
	// marks are the applied marks of leases, and registrations those that come or go; nil
	// where there are none.
	marks         map[keyspace.LeaseID]keyspace.LeaseIncarnation
	registrations map[keyspace.LeaseID]*registration
	// pins hold compaction back for what transactions are still to read.
	pins pins
	// epochs name what the node's version cache knows of this replica.
	epochs eval.KeyEpochs
	// The pipeline: filling collects what is evaluated, sequencing is the one batch
	// for which revisions are asked or that is being proposed, proposed are those in
	// the log's hands, oldest first, lost those of a former leadership whose fate only
	// the log knows.
	batches    uint64
	filling    *batch
	sequencing *batch
	mutated    mutationState //nolint:unused // used with the build tag planted
	proposed   []*batch
	lost       []*batch
	// confirming counts the answers that wait for a confirmation of the leadership.
	confirming int

	// closed counts the reasons to evaluate nothing; draining is the one that never
	// ends: the node stops.
	closed   int
	draining bool
	// change is the change of the range itself that this leader has proposed and not applied.
	change *pendingChange
	// altering counts the changes of the members that this leadership has under way: while
	// there is one, no merge begins, which it must not meet.
	altering int
	// children are the ranges that were last split off, for those who were routed by
	// an older descriptor; at most maxChildren.
	children []keyspace.Descriptor
	// compacting is the compacted revision that is on its way through the log, and
	// counting says that a scan for the live-key count is.
	compacting keyspace.Revision
	counting   bool
	// lookingAgain says that the keeper comes again for what it could not do.
	lookingAgain bool
	// removedTo is the compacted revision up to which old versions are gone here.
	removedTo keyspace.Revision
	// removeFrom is where the removal goes on, nil at its beginning.
	removeFrom []byte
	// removing is closed when the step of removal that runs has ended; nil while none
	// does. receiving says that a snapshot comes in, and that none may begin.
	removing  chan struct{}
	receiving bool
	// installs counts the snapshots that have replaced the state.
	installs uint64
	// stopped says that the replica has ended, and ended why.
	stopped bool
	ended   *kverror.Error
	// absorbed says that another range has taken this one's place by a merge.
	absorbed bool
	// introduced is the descriptor by which a replica without data was opened.
	introduced keyspace.Descriptor
	// feeds get what is applied.
	feeds rangefeed.Feeds
	// load counts what the replica does.
	load load.Range
}

// Range returns the range's id.
func (r *Replica) Range() keyspace.RangeID { return r.id }

// Descriptor returns the applied descriptor: for this replica the truth.
func (r *Replica) Descriptor() keyspace.Descriptor {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.descriptorLocked()
}

func (r *Replica) descriptorLocked() keyspace.Descriptor {
	return r.rec.Descriptor(r.confIndex, r.replicas)
}

// Leader returns what this replica knows of its group's leader.
func (r *Replica) Leader() raftgroup.LeaderState {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leader
}

// errorLocked returns an error with what helps the router: this replica's
// descriptor and the leader that it knows.
func (r *Replica) errorLocked(k kverror.Kind, detail string) *kverror.Error {
	e := &kverror.Error{Kind: k, Detail: detail, Leader: r.leader.LeaderNode}
	if r.rec.Generation != 0 {
		e.Descriptors = append([]keyspace.Descriptor{r.descriptorLocked()}, r.children...)
	}
	return e
}

// servesLocked says whether the request may be served here at all. wait is set
// where that will be known soon: a leader that has not applied an entry of its term.
func (r *Replica) servesLocked(req *rangeapi.Request) (wait <-chan struct{}, err error) {
	if wait, err = r.leadsLocked(req.Generation); wait != nil || err != nil {
		return wait, err
	}
	if !rangeapi.HoldsOp(r.rec.Span, req.Op) {
		bounds, _ := rangeapi.Bounds(req.Op)
		return nil, r.errorLocked(kverror.WrongRange, fmt.Sprintf("%s is outside of %s", bounds, r.rec.Span))
	}
	return nil, nil
}

// leadsLocked says whether this replica leads the range of the generation, as
// servesLocked does.
func (r *Replica) leadsLocked(g keyspace.Generation) (wait <-chan struct{}, err error) {
	switch {
	case r.stopped:
		return nil, r.ended
	case r.awaitsLocked(g):
		return r.changedLocked(), nil
	case g != r.rec.Generation:
		detail := fmt.Sprintf("range %s has generation %d, the request %d", r.id, r.rec.Generation, g)
		return nil, r.errorLocked(kverror.WrongRange, detail)
	case !r.leader.IsLeader:
		return nil, r.errorLocked(kverror.NotLeader, "")
	case r.lead == nil || r.rec.Merge.StandsStill():
		return r.changedLocked(), nil
	}
	return nil, nil
}

// takesLocked says whether a request may go into the pipeline.
func (r *Replica) takesLocked(req *rangeapi.Request) error {
	_, err := r.servesLocked(req)
	if err == nil && r.draining {
		err = r.errorLocked(kverror.Busy, "the node hands its leaderships over")
	}
	if err == nil && req.Generation != r.rec.Generation {
		err = errNotYet
	}
	return err
}

// changedLocked returns a channel that is closed at the next change of what a
// request may depend on.
func (r *Replica) changedLocked() <-chan struct{} {
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.changed
}

func (r *Replica) notifyLocked() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// idleLocked says whether the pipeline is empty: nothing is being evaluated, has
// or awaits revisions, or waits for a confirmation.
func (r *Replica) idleLocked() bool {
	return !r.evaluating && r.change == nil && r.filling == nil && r.sequencing == nil && len(r.proposed) == 0 && r.confirming == 0
}

// closePipeline keeps new requests from evaluation and waits until what is under
// way is proposed, applied and answered, or leadership is lost. The caller must
// call reopen, also after an error.
func (r *Replica) closePipeline(ctx context.Context) error {
	r.mu.Lock()
	r.closed++
	for !r.idleLocked() {
		ch := r.changedLocked()
		r.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return fmt.Errorf("shard: range %s: close the pipeline: %w", r.id, ctx.Err())
		}
		r.mu.Lock()
	}
	r.mu.Unlock()
	return nil
}

func (r *Replica) reopen() {
	r.mu.Lock()
	r.closed--
	r.notifyLocked()
	care := r.closed == 0 && r.needsCareLocked() // a compaction waits for this
	r.mu.Unlock()
	r.node.pool.schedule(r)
	if care {
		r.node.keeper.note(r)
	}
}

// becomeLocked starts a leadership: everything that earlier leaders committed is
// applied here, so that the last applied batch is the one to build on.
func (r *Replica) becomeLocked(term uint64) {
	r.lead = &leadership{term: term, last: r.rec.Last, hash: r.rec.Hash, revision: r.rec.LastRevision}
	r.overlay = eval.NewOverlay()
	r.fence = r.rec.Fence
	r.mutateKept()
}

// LeaderChanged implements raftgroup.StateMachine.
func (r *Replica) LeaderChanged(s raftgroup.LeaderState) {
	var out answers
	r.mu.Lock()
	old := r.leader
	r.leader = s
	if r.lead != nil && (!s.IsLeader || s.Term != r.lead.term) {
		r.loseLocked(&out)
	}
	if s.IsLeader && s.Ready && r.lead == nil && !r.stopped && r.group != nil {
		r.becomeLocked(s.Term)
	}
	if !s.IsLeader {
		r.failQueueLocked(&out, r.errorLocked(kverror.NotLeader, "the leader changed"))
	}
	r.notifyLocked()
	lead, gained := r.lead, r.leader.IsLeader && !old.IsLeader
	r.mu.Unlock()
	out.send(r.node)

	if gained {
		r.node.metrics.leaders.Inc()
	} else if old.IsLeader && !s.IsLeader {
		r.node.metrics.leaders.Dec()
	}
	if lead != nil {
		r.leads()
	}
}

// leads begins what a leader does. Whoever becomes one reports its descriptor: a
// report may have died with the leader before it.
func (r *Replica) leads() {
	r.mu.Lock()
	care, watched := r.needsCareLocked() || r.heldBackLocked(), !r.locks.Empty()
	d := r.descriptorLocked()
	r.load.Measure() // it may have been too large under another leader
	r.mu.Unlock()
	r.node.pool.schedule(r)
	if watched {
		r.node.pushes.note(r)
	}
	r.node.cfg.Reporter.ReportDescriptors(d)
	if care {
		r.node.keeper.note(r)
	}
}

// opened gives the replica its group, whose first words it may have heard already.
func (r *Replica) opened(g group) {
	r.mu.Lock()
	r.group = g
	if r.leader.IsLeader && r.leader.Ready && r.lead == nil && !r.stopped {
		r.becomeLocked(r.leader.Term)
	}
	leads := r.lead != nil
	r.notifyLocked()
	r.mu.Unlock()
	if leads {
		r.leads()
	}
}

// loseLocked ends the leadership: what was not proposed is discarded, of what was
// the log will tell, the overlay is gone, and those who wait for it start over.
func (r *Replica) loseLocked(out *answers) {
	failed := r.errorLocked(kverror.Dropped, "the leadership ended before the proposal")
	r.mutateKeep()
	pending := r.proposed
	r.proposed = nil
	for _, b := range []*batch{r.sequencing, r.filling} {
		if b != nil && !slices.Contains(pending, b) {
			pending = append(pending, b)
		}
	}
	r.sequencing, r.filling = nil, nil
	lostFrom := len(r.lost)
	for _, b := range pending {
		b.end(false)
		for _, c := range b.take(&b.parked, placeParked) {
			out.add(c, failed)
		}
		for _, c := range b.take(&b.held, placeHeld) {
			r.confirming--
			out.add(c, failed)
		}
		if b.link.Number == 0 || b.refused {
			failCalls(b, out, failed)
			continue
		}
		for _, c := range b.calls {
			c.isAt(placeBatch, b)
			c.lost.Store(true)
		}
		r.lost = append(r.lost, b)
	}
	if len(r.lost) > lostFrom {
		lost := slices.Clone(r.lost[lostFrom:])
		r.node.after(r.node.cfg.Limits.FateTimeout, func() { r.fateTimeout(lost) })
	}
	r.lead, r.overlay = nil, eval.NewOverlay()
	r.wokenLocked(r.locks.DropPending())
	r.dropRegistrationsLocked()
	r.queueWokenLocked()
	r.barrier = nil
	r.compacting, r.counting = 0, false
	r.altering = 0
	// Whether the change happened, the log says; this replica answers nothing for
	// anybody until it leads again, by when it has applied it.
	r.endChangeLocked(kverror.New(kverror.LeaderChanged, "the leadership ended"))
}

// failQueueLocked answers everything that waits for evaluation.
func (r *Replica) failQueueLocked(out *answers, err error) {
	for _, c := range r.queue {
		c.isAt(placeQueue, nil)
		out.add(c, err)
	}
	clear(r.queue)
	r.queue, r.queueBytes, r.barrier = r.queue[:0], 0, nil
}

// stop ends the replica with its node.
func (r *Replica) stop() { r.end(kverror.New(kverror.Stopped, "node %s stops", r.node.cfg.Self)) }

// end ends the replica: every caller gets an answer, and who comes later the same.
func (r *Replica) end(why *kverror.Error) {
	var out answers
	r.mu.Lock()
	if !r.absorbed || r.ended == nil {
		r.ended = why // else whoever comes learns where the keys are
	}
	r.stopped = true
	if r.lead != nil {
		r.loseLocked(&out)
	}
	r.failQueueLocked(&out, why)
	r.unknownLocked(&out)
	r.feeds.End(why)
	r.notifyLocked()
	r.mu.Unlock()
	out.send(r.node)
}

// answers are collected under mu and sent without it.
type answers struct {
	list []answer
	// confirm are calls whose answer needs a confirmed leadership.
	confirm []*call
	// register are registrations that are to be asked for.
	register []*registration
}

type answer struct {
	c   *call
	err error
}

// add notes the answer of a call: its draft, or the error.
func (a *answers) add(c *call, err error) {
	c.moveTo(placeAnswered, nil)
	a.list = append(a.list, answer{c, err})
}

// toConfirm notes a call whose answer needs a confirmed leadership.
func (a *answers) toConfirm(c *call) {
	c.moveTo(placeConfirming, nil)
	a.confirm = append(a.confirm, c)
}

// send gives the callers their answers.
func (a *answers) send(n *Node) {
	for _, x := range a.list {
		if x.err == nil {
			x.c.answer(n, x.c.draft.Op, nil)
		} else {
			x.c.answer(n, nil, x.err)
		}
	}
	for _, reg := range a.register {
		reg.ask()
	}
}
