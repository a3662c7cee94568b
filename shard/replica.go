package shard

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
	"github.com/skeindb/skein/shard/rangefeed"
	"github.com/skeindb/skein/shard/removal"
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
	// Committed is as raftgroup.Group.Committed.
	Committed() raftgroup.Commit
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
	store *Store
	id    keyspace.RangeID
	data  eval.EngineStore
	// reader answers reads from the store.
	reader eval.Reader
	group  group
	log    *zap.Logger

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

	// leader is what raft last said.
	leader raftgroup.LeaderState
	// pipe carries the operations of this replica while it leads.
	pipe pipeline.Pipeline
	// changed is closed and made anew when leader, rec's span or merge, change, or what pipe says
	// changes, for those who wait for one of them. nil until somebody does.
	changed chan struct{}

	// locks are the locks of transactions over several ranges, with the calls that wait for them.
	// fence is the record's fence, or a higher one that an entry on its way brings.
	locks locktable.Table
	fence uint64
	// leases are those that have keys here, or ask for it.
	leases leases
	// pins hold compaction back for what transactions are still to read.
	pins removal.Pins
	// epochs name what the node's version cache knows of this replica.
	epochs eval.KeyEpochs
	// change is the change of the range itself that this leader has proposed and not applied.
	change *pendingChange
	// altering counts the changes of the members that this leadership has under way: while
	// there is one, no merge begins, which it must not meet.
	altering int
	// children are the ranges that were last split off, for those who were routed by
	// an older descriptor; at most maxChildren.
	children []keyspace.Descriptor
	// upkeep is what maintenance has under way and has done.
	upkeep upkeep
	// installs counts the snapshots that have replaced the state.
	installs uint64
	// stopped says that the replica has ended, and ended why.
	stopped bool
	ended   *kverror.Error
	// doubt is set while replicas have different hashes.
	doubt *doubt
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

// servesLocked reports whether the request may be served here at all. wait is set if that will
// be known soon: the leader has not applied an entry of its term yet.
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
	case r.awaitsLocked(g), r.doubt != nil && !r.doubt.loud:
		return r.changedLocked(), nil
	case r.doubt != nil:
		return nil, r.doubtedLocked()
	case g != r.rec.Generation:
		detail := fmt.Sprintf("range %s has generation %d, the request %d", r.id, r.rec.Generation, g)
		return nil, r.errorLocked(kverror.WrongRange, detail)
	case !r.leader.IsLeader:
		return nil, r.errorLocked(kverror.NotLeader, "")
	case !r.pipe.Leads() || r.rec.Merge.StandsStill():
		return r.changedLocked(), nil
	}
	return nil, nil
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

// idleLocked says whether the pipeline is empty, and no change of the range is under way.
func (r *Replica) idleLocked() bool { return r.change == nil && r.pipe.Idle() }

// closePipeline keeps new requests from evaluation and waits until what is under
// way is proposed, applied and answered, or leadership is lost. The caller must
// call reopen, also after an error.
func (r *Replica) closePipeline(ctx context.Context) error {
	r.mu.Lock()
	r.pipe.Close()
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
	r.pipe.Reopen()
	r.notifyLocked()
	care := !r.pipe.Closed() && r.needsCareLocked() // a compaction waits for this
	r.mu.Unlock()
	r.pipe.Schedule()
	if care {
		r.store.maintenance.note(r)
	}
}

// awaitsLocked says whether the generation is one that this leader may be about to have:
// the map has a merge as soon as it is committed.
func (r *Replica) awaitsLocked(g keyspace.Generation) bool {
	return g > r.rec.Generation && r.rec.Merge.Role == command.MergeTarget && r.leader.IsLeader
}

// wokenLocked has the pool evaluate those who have their turn, if there are any.
func (r *Replica) wokenLocked(woken bool) {
	if woken {
		r.pipe.Schedule()
	}
}

// positionLocked is the range's feed position. The child of a split that has applied no
// batch has the events from before the split all the same. So its position is not zero:
// whoever has none of these events is not there. It is below all others, whose terms are
// above 0.
func (r *Replica) positionLocked() rangeapi.FeedPosition {
	if m := rangeapi.FeedPosition(r.rec.Last); m != (rangeapi.FeedPosition{}) {
		return m
	}
	return rangeapi.FeedPosition{Number: 1}
}

// endChangeLocked says what became of the change that this leader had proposed.
func (r *Replica) endChangeLocked(err error) {
	if r.change == nil {
		return
	}
	r.change.err = err
	close(r.change.done)
	r.change = nil
}

// doubt is the state of a replica that knows that another one has counted another hash. One of the two is
// wrong. A replica in doubt answers nothing, and votes, stores and applies on. It asks the other voters
// for their hashes.
type doubt struct {
	// found says that this replica itself counted otherwise than its leader. Whom such a replica asks
	// comes into doubt too. Nobody else spreads it, so it ends.
	found bool
	since clock.Time
	pause time.Duration
	// loud says that callers do not wait for the end any more.
	loud bool
}

// endDoubtLocked ends a doubt, if there is one.
func (r *Replica) endDoubtLocked() {
	if r.doubt != nil {
		r.doubt = nil
		r.store.metrics.doubts.Dec()
		r.notifyLocked()
		r.pipe.Schedule()
	}
}

// doubtedLocked is the answer of a replica in doubt.
func (r *Replica) doubtedLocked() *kverror.Error {
	return kverror.New(kverror.Corrupt, "range %s: its replicas have different hashes, and too few of them agree", r.id)
}

// fmtHash returns the form of a range's hash for people.
func fmtHash(h uint64) string { return fmt.Sprintf("%016x", h) }
