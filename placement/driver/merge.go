package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// Merger has nodes take the steps of merges. It is package shard's, reached over the bus.
type Merger interface {
	// Merge has a node take one step. An error may be that of a step that is taken all the
	// same.
	Merge(ctx context.Context, node keyspace.NodeID, order keyspace.MergeOrder) error
}

// Times of a merge.
const (
	// MergeStill is how long the right range may stand still until the merge is committed;
	// then the merge is aborted.
	MergeStill = 2 * time.Second
	// StoreSmall is how long storing may take for what is stored while the right range
	// stands still to take little time too.
	StoreSmall = 50 * time.Millisecond
	// MergePatience is how long a merge that does not get on is tried before it is aborted.
	// While a replica is being moved, the patience of operations counts, unless the node to
	// which it moves is silent for so long. Until the merge is over, nothing else is done to
	// both ranges.
	MergePatience = 30 * time.Second
	// mergePause lies between two steps, and grows to operationPauseMax while a merge does not
	// get on. It is never 0: what fails at once would be tried for ever.
	mergePause = time.Millisecond
)

// abortion says that a merge is to be aborted, and why.
type abortion struct{ why error }

func (a abortion) Error() string { return a.why.Error() }
func (a abortion) Unwrap() error { return a.why }

// mayMerge refuses a merge that would soon be aborted.
func (s *Driver) mayMerge(v *fsm.View, op *fsm.Operation, left *keyspace.Descriptor) error {
	right, err := v.CheckMerge(op, left)
	if err != nil {
		return err
	}
	if s.o.Merger == nil {
		return kverror.New(kverror.BadRequest, "merge range %s: nobody here merges ranges", op.Range)
	}
	for _, m := range slices.Concat(left.Replicas, right.Replicas) {
		if !s.o.Alive(m.Node) {
			return kverror.New(kverror.BadRequest, "merge range %s: node %s does not live, and each replica of both ranges is needed: start it, or wait until its replicas are rebuilt elsewhere", op.Range, m.Node)
		}
	}
	if err := s.tracker.Load().closes(left, right); err != nil {
		return kverror.New(kverror.BadRequest, "merge range %s: %v: wait until it is rebuilt", op.Range, err)
	}
	return nil
}

// carryMerge works on one merge until it is over or the term is.
func (o *operator) carryMerge(ctx context.Context, op fsm.Operation) {
	log := o.s.o.Logger.With(zap.Stringer("range", op.Range), zap.Uint64("operation", op.ID), zap.Stringer("right", op.Right))
	log.Info("merge begins, or goes on", zap.String("why", op.Why), zap.Stringer("phase", op.Phase))
	last, pause := o.s.o.Clock.Now(), mergePause
	heard := last // of the node to which a replica moves
	// Whoever led before may have frozen the right range. A check of the remaining steps would take
	// longer than the range may stand still. So it is released.
	inherited := op.Phase == fsm.MergeBinding
	for ctx.Err() == nil {
		now, ok := o.now(&op)
		if !ok {
			committed := op.Phase == fsm.MergeCommitted
			log.Info("merge is over", zap.Bool("committed", committed))
			o.s.o.Metrics.OperationsEnded.WithLabelValues(op.Kind.String(), howEnded(committed)).Inc()
			return
		}
		op = now
		var moved bool
		var err error
		if inherited && op.Phase == fsm.MergeBinding {
			err = abortion{errors.New("the leader of placement has changed in the midst of it")}
		} else {
			moved, err = o.stepMerge(ctx, &op)
		}
		var abort abortion
		patience, at := MergePatience, o.s.o.Clock.Now()
		if op.To != 0 {
			patience = o.s.o.OperationPatience + o.copyTime(op.Right)
		}
		if op.To == 0 || o.s.o.Alive(op.To) {
			heard = at
		}
		switch late := at.Sub(last) > patience || at.Sub(heard) > MergePatience; {
		case ctx.Err() != nil:
			return
		case errors.As(err, &abort), late && op.Phase.Undecided():
			if aerr := o.abort(ctx, &op); aerr != nil {
				log.Debug("merge cannot be aborted yet", zap.Error(aerr), zap.NamedError("why", err))
				break
			}
			log.Info("merge is aborted", zap.Error(err))
			moved = true
		case err != nil:
			log.Debug("merge waits", zap.Stringer("phase", op.Phase), zap.Error(err))
		}
		if pause = min(2*pause, operationPauseMax); moved {
			last, pause = o.s.o.Clock.Now(), mergePause
		}
		if clock.Sleep(ctx, o.s.o.Clock, pause) != nil {
			return
		}
	}
}

// now returns the operation as it is by now, if it is not over.
func (o *operator) now(op *fsm.Operation) (fsm.Operation, bool) {
	all := o.s.o.Group.View().Operations()
	i, ok := slices.BinarySearchFunc(all, op.ID, func(x fsm.Operation, id uint64) int { return cmp.Compare(x.ID, id) })
	if !ok {
		return fsm.Operation{}, false
	}
	return all[i], true
}

func (o *operator) abort(ctx context.Context, op *fsm.Operation) error {
	return o.s.o.Group.Propose(ctx, o.term, fsm.AbortMerge{Merge: refOf(op)}).Err
}

func refOf(op *fsm.Operation) fsm.MergeRef { return fsm.MergeRef{Range: op.Range, ID: op.ID} }

// stepMerge does what is next for a merge. All that it does may have been done before.
func (o *operator) stepMerge(ctx context.Context, op *fsm.Operation) (moved bool, err error) {
	select {
	case o.slots <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	defer func() { <-o.slots }()
	ctx, cancel := clock.WithTimeout(ctx, o.s.o.Clock, OperationStep)
	defer cancel()
	switch op.Phase {
	case fsm.MergePreparing, fsm.MergeBinding:
		return o.prepareMerge(ctx, op)
	case fsm.MergeCommitted:
		err = o.orderLeader(ctx, op.Range, keyspace.MergeOrder{Step: keyspace.MergeAbsorb, ID: op.ID})
	case fsm.MergeAborted:
		for _, id := range []keyspace.RangeID{op.Right, op.Range} {
			if err == nil {
				err = o.orderLeader(ctx, id, keyspace.MergeOrder{Step: keyspace.MergeRelease, ID: op.ID})
			}
		}
	}
	if err != nil {
		return false, err
	}
	res := o.s.o.Group.Propose(ctx, o.term, fsm.EndOperation{Range: op.Range, ID: op.ID})
	return res.Err == nil, res.Err
}

// orderLeader has the leader of a range take a step.
func (o *operator) orderLeader(ctx context.Context, id keyspace.RangeID, order keyspace.MergeOrder) error {
	_, leader, err := o.look(ctx, id)
	if err != nil {
		return err
	}
	order.Range = id
	return o.s.o.Merger.Merge(ctx, leader, order)
}

// prepareMerge brings a merge to where it can be committed, and commits it.
func (o *operator) prepareMerge(ctx context.Context, op *fsm.Operation) (moved bool, err error) {
	left, leader, err := o.look(ctx, op.Range)
	if err != nil {
		return false, err
	}
	right, second, err := o.look(ctx, op.Right)
	if err != nil {
		return false, err
	}
	if err := o.tracker.closes(&left, &right); err != nil {
		return false, abortion{err}
	}
	switch {
	case !slices.Equal(left.Span.End, right.Span.Start) || len(left.Span.End) == 0:
		return false, abortion{fmt.Errorf("range %s of %s and range %s of %s are no neighbours any more", left.Range, left.Span, right.Range, right.Span)}
	case fsm.Joint(&left) || fsm.Joint(&right):
		return false, errors.New("members are being changed")
	case op.To != 0 || !fsm.Mergeable(&left, &right):
		return o.align(ctx, op, &left, &right, second)
	case second != leader:
		// Who waits at the right range learns of its end the sooner.
		err = o.s.o.Mover.TransferTo(ctx, second, right.Range, leader)
		return err == nil, err
	}
	// What is decided at the commit is decided by the map.
	if res := o.s.o.Group.Propose(ctx, o.term, fsm.Report{Descriptors: []keyspace.Descriptor{left, right}}); res.Err != nil {
		return false, res.Err
	}
	if op.Phase == fsm.MergePreparing {
		// Before the first order: whatever becomes of it, and whoever leads then, an abort
		// releases both ranges.
		if res := o.s.o.Group.Propose(ctx, o.term, fsm.BindMerge{Merge: refOf(op)}); res.Err != nil {
			return false, res.Err
		}
	}
	bind := keyspace.MergeOrder{
		Step: keyspace.MergeBind, ID: op.ID, Range: left.Range, Generation: left.Generation, ConfIndex: left.ConfIndex,
		Other: right.Range, Hull: keyspace.Span{Start: left.Span.Start, End: right.Span.End},
	}
	if err := o.s.o.Merger.Merge(ctx, leader, bind); err != nil {
		return false, err
	}
	if err := o.store(ctx, op, &right); err != nil {
		return false, err
	}
	return true, o.decideMerge(ctx, op, &left, &right, leader)
}

// store has every node store what it has applied, while both ranges serve yet, so that little
// is left to be stored when one of them does not. The nodes store one after the other, so that
// a quorum has its disks and processors for requests. If that took long, all store once more
// what was written meanwhile. No more often: each time brings every store a small table that
// has to be merged with the others.
func (o *operator) store(ctx context.Context, op *fsm.Operation, right *keyspace.Descriptor) error {
	order := keyspace.MergeOrder{Step: keyspace.MergeStore, ID: op.ID, Range: right.Range}
	began := o.s.o.Clock.Now()
	for _, m := range right.Replicas {
		if err := o.s.o.Merger.Merge(ctx, m.Node, order); err != nil {
			return fmt.Errorf("node %s: %w", m.Node, err)
		}
	}
	if o.s.o.Clock.Now().Sub(began) <= StoreSmall {
		return nil
	}
	return o.orderAll(ctx, right, order)
}

// decideMerge freezes the right range, commits the merge and has the left range absorb. The
// right range stands still meanwhile: nothing waits that need not, and what fails is not tried
// again, but aborted. Where that is not known to have failed, the phase tells.
func (o *operator) decideMerge(ctx context.Context, op *fsm.Operation, left, right *keyspace.Descriptor, leader keyspace.NodeID) error {
	still, cancel := clock.WithTimeout(ctx, o.s.o.Clock, MergeStill)
	defer cancel()
	began := o.s.o.Clock.Now()
	release := o.hold(still, op, leader)
	defer release()
	frozen, err := o.freeze(still, op, left, right, leader)
	settled := o.s.o.Clock.Now().Sub(began)
	if err == nil {
		err = o.s.o.Group.Propose(still, o.term, fsm.CommitMerge{Merge: refOf(op), Left: fsm.VersionOf(left), Right: fsm.VersionOf(right)}).Err
	}
	if late := errors.Is(context.Cause(ctx), context.DeadlineExceeded); err != nil && (ctx.Err() == nil || late) {
		// Aborting is decided by the same state as committing: of the two it takes one. A step
		// whose time storing has used up is no reason to stand still.
		return abortion{err}
	}
	if err != nil {
		return err
	}
	log := o.s.o.Logger.With(zap.Stringer("range", op.Range), zap.Uint64("operation", op.ID), zap.Stringer("right", op.Right))
	log.Info("merge is committed", zap.Duration("frozen-after", frozen), zap.Duration("settled-after", settled),
		zap.Duration("committed-after", o.s.o.Clock.Now().Sub(began)))
	// At once, at the known leader. If this fails, the next step asks for the leader and
	// repeats it.
	err = o.s.o.Merger.Merge(ctx, leader, keyspace.MergeOrder{Step: keyspace.MergeAbsorb, ID: op.ID, Range: left.Range})
	log.Info("merge is executed", zap.Duration("absorbed-after", o.s.o.Clock.Now().Sub(began)), zap.Error(err))
	return nil
}

// hold has the left range's leader hold it ready to absorb until the returned function is
// called. Draining the left range takes about as long as the freeze and the commit. Done at
// the same time, the right range stands still for less time, and the left one no longer than
// that. Whether it is held changes nothing but the time.
func (o *operator) hold(ctx context.Context, op *fsm.Operation, leader keyspace.NodeID) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wait sync.WaitGroup
	wait.Go(func() {
		_ = o.s.o.Merger.Merge(ctx, leader, keyspace.MergeOrder{Step: keyspace.MergeHold, ID: op.ID, Range: op.Range})
	})
	return func() {
		cancel()
		wait.Wait()
	}
}

// freeze freezes the right range, and returns once that is durable on each node that holds it,
// and after how long it was known to be frozen. The nodes are told before it is: each waits for
// its own replica, and an answer on its way to here and an order back take time too.
func (o *operator) freeze(ctx context.Context, op *fsm.Operation, left, right *keyspace.Descriptor, leader keyspace.NodeID) (frozen time.Duration, err error) {
	g, ctx := errgroup.WithContext(ctx)
	began := o.s.o.Clock.Now()
	g.Go(func() error {
		err := o.s.o.Merger.Merge(ctx, leader, keyspace.MergeOrder{
			Step: keyspace.MergeFreeze, ID: op.ID, Range: right.Range, Generation: right.Generation, ConfIndex: right.ConfIndex, Other: left.Range,
		})
		frozen = o.s.o.Clock.Now().Sub(began)
		return err
	})
	settle := keyspace.MergeOrder{Step: keyspace.MergeSettle, ID: op.ID, Range: right.Range}
	for _, m := range right.Replicas {
		g.Go(func() error {
			if err := o.s.o.Merger.Merge(ctx, m.Node, settle); err != nil {
				return fmt.Errorf("node %s: %w", m.Node, err)
			}
			return nil
		})
	}
	err = g.Wait()
	return frozen, err
}

// orderAll has every node that holds the range take a step, all at the same time.
func (o *operator) orderAll(ctx context.Context, d *keyspace.Descriptor, order keyspace.MergeOrder) error {
	order.Range = d.Range
	errs := make([]error, len(d.Replicas))
	var wait sync.WaitGroup
	for i, m := range d.Replicas {
		wait.Go(func() {
			if errs[i] = o.s.o.Merger.Merge(ctx, m.Node, order); errs[i] != nil {
				errs[i] = fmt.Errorf("node %s: %w", m.Node, errs[i])
			}
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}

// align moves the right range's replicas to where the left one's are, one step of one move
// at a time.
func (o *operator) align(ctx context.Context, op *fsm.Operation, left, right *keyspace.Descriptor, leader keyspace.NodeID) (moved bool, err error) {
	ref := refOf(op)
	if op.To == 0 {
		from, to := misplaced(left, right)
		if to == 0 {
			return false, abortion{fmt.Errorf("range %s has other replicas than range %s, or learners", right.Range, left.Range)}
		}
		res := o.s.o.Group.Propose(ctx, o.term, fsm.AlignMerge{Merge: ref, From: from, To: to})
		return res.Err == nil, res.Err
	}
	move := fsm.Operation{ID: op.ID, Range: op.Right, Kind: fsm.OperationMove, From: op.From, To: op.To, Replica: op.Replica, Leaving: op.Leaving}
	switch st := NextStep(&move, right, leader, o.tracker.votes(right, o.s.o.Alive)); {
	case st.Done:
		res := o.s.o.Group.Propose(ctx, o.term, fsm.AlignMerge{Merge: ref})
		return res.Err == nil, res.Err
	case st.Transfer:
		err = o.s.o.Mover.TransferTo(ctx, leader, right.Range, st.Leader)
	case len(st.Change) > 0:
		err = o.s.o.Mover.ChangeMembers(ctx, leader, right.Range, right.ConfIndex, st.Change)
	default:
		err = errors.New(st.Stuck)
	}
	return err == nil, err
}

// misplaced returns a node with only the right range and a node with only the left one, 0 for
// none.
func misplaced(left, right *keyspace.Descriptor) (from, to keyspace.NodeID) {
	for _, m := range right.Replicas {
		if _, ok := left.ReplicaOn(m.Node); !ok {
			from = m.Node
		}
	}
	for _, m := range left.Replicas {
		if _, ok := right.ReplicaOn(m.Node); !ok && from != 0 {
			to = m.Node
		}
	}
	return from, to
}
