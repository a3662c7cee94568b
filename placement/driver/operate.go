package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// Mover changes who holds and leads ranges. It is package shard's, reached over the bus.
type Mover interface {
	// Look returns the range as the node's replica has it, and whom that takes for the
	// leader; 0 is nobody. Only what a leader says of itself is to be acted on.
	Look(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error)
	// ChangeMembers changes the members of a range that the node leads, if confIndex is
	// the index of their configuration.
	ChangeMembers(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error
	// TransferTo has another node, or with 0 the one that is best off, lead a range that the
	// node leads.
	TransferTo(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error
}

// Bounds of carrying operations out.
const (
	// operationsAtOnce is how many are worked on at a time; the others wait for a place.
	operationsAtOnce = 64
	// OperationStep is how long one step may take.
	OperationStep = 10 * time.Second
	// operationPauseMin and operationPauseMax lie between the steps of one that does not get
	// on: its new replica is being filled, or its leader is away.
	operationPauseMin = 50 * time.Millisecond
	operationPauseMax = time.Second
	// operationPatience is OperationPatience's default.
	operationPatience = 10 * time.Minute
	// copyBytesPerSecond is CopyBytesPerSecond's default.
	copyBytesPerSecond = 64 << 20
	// copySlack is how many times the time that a copy takes, alone and at the bound, it is
	// given: a node receives and sends a few at a time.
	copySlack = 2 * nodeCopies
	// TransferPatience is what there is for a change of the leader that is for balance alone.
	TransferPatience = 20 * time.Second
	// ownPatience is what there is for a change of the placement group that is no repair.
	ownPatience = time.Minute
	// operationSweep is how often the leader looks for operations that nobody works on.
	operationSweep = 5 * time.Second
)

// operator executes the operations of a leadership.
type operator struct {
	s     *Driver
	term  uint64
	slots chan struct{}

	// tracker is told who leads ranges.
	tracker *Tracker
	// over is told how operations on ranges have ended: done, or given up.
	over func(op *fsm.Operation, done bool)

	mu sync.Mutex
	// Guarded by mu: those that are worked on.
	running map[keyspace.RangeID]*work
}

// work is an operation that is worked on.
type work struct {
	// operation is its id.
	operation uint64
	// abandoned says why it is to be given up, "" if it is not. The operator's mu guards it.
	abandoned string
}

// newOperator returns the operator of a leadership.
func newOperator(s *Driver, term uint64, h *Tracker) *operator {
	return &operator{s: s, term: term, slots: make(chan struct{}, operationsAtOnce), tracker: h, running: map[keyspace.RangeID]*work{}}
}

// run is a duty of the leader: every operation is worked on until it is over. It ends
// with the term; the next leader goes on.
func (o *operator) run(ctx context.Context) {
	s := o.s
	var wait sync.WaitGroup
	defer wait.Wait()
	began, tidied := s.o.Group.View().Index, s.o.Clock.Now()
	for {
		if now := s.o.Clock.Now(); now.Sub(tidied) >= operationSweep {
			o.tidyOwn(ctx)
			tidied = now
		}
		for _, op := range s.o.Group.View().Operations() {
			if mutation.Is(mutation.OperationForgotten) && op.ID <= began {
				continue
			}
			if o.mover(op.Range) != nil && o.begin(op.Range, op.ID) {
				wait.Go(func() {
					defer o.end(op.Range)
					o.carryOut(ctx, op)
				})
			}
		}
		sweep, cancel := clock.WithTimeout(ctx, s.o.Clock, operationSweep)
		select {
		case <-sweep.Done():
		case <-s.kick:
		}
		cancel()
		if ctx.Err() != nil {
			return
		}
	}
}

// tidyOwn has learners of the placement group removed that no operation has: the answer
// was lost and the operation given up. Those of ranges are decided upon.
func (o *operator) tidyOwn(ctx context.Context) {
	v := o.s.o.Group.View()
	own := v.PlacementGroup()
	i := slices.IndexFunc(own.Replicas, func(m keyspace.Replica) bool { return m.Role == keyspace.RoleLearner })
	busy := slices.ContainsFunc(v.Operations(), func(op fsm.Operation) bool { return op.Range == fsm.OwnGroup })
	if i < 0 || busy || fsm.Joint(&own) {
		return
	}
	op := fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationTidy, From: own.Replicas[i].Node, Reason: decide.Learner, Why: "a learner that no operation has"}
	if _, err := o.s.Begin(ctx, o.term, &op); err != nil {
		o.s.o.Logger.Info("learner of the placement group is not removed yet", zap.Error(err))
	}
}

func (o *operator) begin(id keyspace.RangeID, operation uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.running[id] != nil {
		return false
	}
	o.running[id] = &work{operation: operation}
	return true
}

// works says whether the operation is worked on yet. When it is not any more, the decider has
// been told how it has ended, if it ever will be.
func (o *operator) works(op *fsm.Operation) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	w := o.running[op.Range]
	return w != nil && w.operation == op.ID
}

// abandon has an operation on a range given up, and not one that has begun there since that was
// decided.
func (o *operator) abandon(id keyspace.RangeID, operation uint64, why string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w := o.running[id]; w != nil && w.operation == operation {
		w.abandoned = why
	}
}

func (o *operator) abandoned(id keyspace.RangeID) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w := o.running[id]; w != nil {
		return w.abandoned
	}
	return ""
}

func (o *operator) end(id keyspace.RangeID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.running, id)
}

// carryOut works on one operation until it is over or the term is. An operation that makes no
// step for long, or is abandoned, is ended where it stands. What it leaves behind, perhaps a
// learner, is decided upon anew.
func (o *operator) carryOut(ctx context.Context, op fsm.Operation) {
	if op.Kind == fsm.OperationMerge {
		o.carryMerge(ctx, op)
		return
	}
	log := o.s.o.Logger.With(zap.Stringer("range", op.Range), zap.Uint64("operation", op.ID), zap.Stringer("what", &op))
	log.Info("operation begins", zap.Stringer("reason", op.Reason), zap.String("why", op.Why))
	last, pause := o.s.o.Clock.Now(), operationPauseMin
	for ctx.Err() == nil {
		if _, ok := o.now(&op); !ok {
			return // it has ended between a look at all and its turn
		}
		over, moved, err := o.step(ctx, &op)
		abandoned := o.abandoned(op.Range)
		// An operation that makes steps is not given up: its replica may have become a voter
		// this moment.
		giveUp := o.s.o.Clock.Now().Sub(last) > o.patience(&op) || abandoned != "" && !moved
		if over || giveUp {
			if res := o.s.o.Group.Propose(ctx, o.term, fsm.EndOperation{Range: op.Range, ID: op.ID}); res.Err == nil {
				log.Info("operation is over", zap.Bool("given-up", !over), zap.String("abandoned", abandoned), zap.Error(err))
				o.s.o.Metrics.OperationsEnded.WithLabelValues(op.Kind.String(), howEnded(over)).Inc()
				// An operation that waited for a node that is silent now is not decided that
				// way again.
				if op.Range != fsm.OwnGroup {
					o.over(&op, over || abandoned != "")
				}
				return
			}
		}
		if pause = min(2*pause, operationPauseMax); moved {
			last, pause = o.s.o.Clock.Now(), operationPauseMin
		} else if err != nil {
			log.Debug("operation waits", zap.Error(err))
		}
		if clock.Sleep(ctx, o.s.o.Clock, pause) != nil {
			return
		}
	}
}

// patience returns how long an operation may take no step. A transfer for balance may not block
// the range for long, since each attempt stops the range for a moment and nothing else is done
// for it. A change of the placement group for its zones or its number of voters may not block
// its repair for long, and its copy is a small one.
func (o *operator) patience(op *fsm.Operation) time.Duration {
	switch most := o.s.o.OperationPatience; {
	case op.Kind == fsm.OperationTransfer && op.Reason != decide.Drain:
		return min(most, TransferPatience)
	case op.Range == fsm.OwnGroup && (op.Reason == decide.Zones || op.Reason == decide.Factor):
		return min(most, ownPatience)
	case op.Kind.Adds():
		return most + o.copyTime(op.Range)
	default:
		return most
	}
}

// step does the next thing for an operation. over says that nothing is left to do, moved
// that something was done.
func (o *operator) step(ctx context.Context, op *fsm.Operation) (over, moved bool, err error) {
	select {
	case o.slots <- struct{}{}:
	case <-ctx.Done():
		return false, false, ctx.Err()
	}
	defer func() { <-o.slots }() // nobody else's place is kept while this one pauses
	ctx, cancel := clock.WithTimeout(ctx, o.s.o.Clock, OperationStep)
	defer cancel()
	d, leader, err := o.look(ctx, op.Range)
	if err != nil {
		return false, false, err
	}
	if to, ok := d.ReplicaOn(op.To); ok && (to.Role == keyspace.RoleLearner || op.Kind == fsm.OperationTransfer) && o.tracker.closed(&d, op.To) {
		o.abandon(op.Range, op.ID, fmt.Sprintf("replica %d, for which it is, is in quarantine", to.ID))
		return false, false, errors.New("a replica in quarantine neither takes a copy nor leads")
	}
	st, mover := NextStep(op, &d, leader, o.tracker.votes(&d, o.s.o.Alive)), o.mover(op.Range)
	switch {
	case st.Done && op.Range == fsm.OwnGroup:
		return true, true, nil
	case st.Done:
		// The map is to have it before the operation is gone: what is decided next is decided
		// by the map.
		res := o.s.o.Group.Propose(ctx, o.term, fsm.Report{Descriptors: []keyspace.Descriptor{d}})
		return res.Err == nil, true, res.Err
	case st.Transfer:
		if err = mover.TransferTo(ctx, leader, op.Range, st.Leader); err != nil && st.Leader != 0 && mustLeave(op, leader) {
			err = o.leadElsewhere(ctx, op, &d, st.Leader, err)
		}
	case len(st.Change) > 0:
		err = mover.ChangeMembers(ctx, leader, op.Range, d.ConfIndex, st.Change)
	default:
		return false, false, errors.New(st.Stuck)
	}
	return false, err == nil, err
}

// leadElsewhere has the lead of a range leave op.From, where the node to which it was to go
// first has failed with err. The lead of a drained node does not go to another node that would
// hand it on. Otherwise two drained nodes would send it to each other for as long as nobody
// else can lead.
func (o *operator) leadElsewhere(ctx context.Context, op *fsm.Operation, d *keyspace.Descriptor, failed keyspace.NodeID, err error) error {
	mover := o.mover(op.Range)
	if op.Kind != fsm.OperationTransfer {
		return mover.TransferTo(ctx, op.From, op.Range, 0)
	}
	v, votes := o.s.o.Group.View(), o.tracker.votes(d, o.s.o.Alive)
	for _, m := range d.Replicas {
		if m.Node == op.From || m.Node == failed || m.Role != keyspace.RoleVoter || !serves(v, m.Node) ||
			!votes(m.Node) || !o.s.o.Central(m.Node) {
			continue
		}
		if err = mover.TransferTo(ctx, op.From, op.Range, m.Node); err == nil {
			return nil
		}
	}
	return err
}

// Begin begins an operation on a range, or on the placement group, as the map has it, and
// returns it with its id.
func (s *Driver) Begin(ctx context.Context, term uint64, op *fsm.Operation) (fsm.Operation, error) {
	v := s.o.Group.View()
	d, ok := v.Of(op.Range)
	if !ok {
		return fsm.Operation{}, kverror.New(kverror.BadRequest, "there is no range %s", op.Range)
	}
	if op.Kind == fsm.OperationMerge {
		if err := s.mayMerge(v, op, &d); err != nil {
			return fsm.Operation{}, err
		}
	} else if err := v.CheckOperation(op, &d); err != nil {
		return fsm.Operation{}, err
	}
	if op.Kind.Adds() && !s.o.Alive(op.To) {
		return fsm.Operation{}, kverror.New(kverror.BadRequest, "%s %s: node %s does not live", op.Kind, fsm.GroupName(op.Range), op.To)
	}
	res := s.o.Group.Propose(ctx, term, fsm.BeginOperation{Generation: d.Generation, ConfIndex: d.ConfIndex, Operation: *op})
	if res.Err != nil {
		return fsm.Operation{}, res.Err
	}
	s.kick.Set()
	return res.Operation, nil
}
