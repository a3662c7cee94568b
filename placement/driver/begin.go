package driver

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// facts are what a decision is checked against before it is proposed.
type facts struct {
	d *decider
	v *fsm.View
}

// Descriptor implements decide.Facts.
func (f facts) Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	k, ok := f.d.ranges[id]
	if !ok {
		return keyspace.Descriptor{}, false
	}
	row := f.v.Lookup(k.row.Descriptor.Span.Start)
	return row.Descriptor, row.Descriptor.Range == id
}

// Busy implements decide.Facts.
func (f facts) Busy(id keyspace.RangeID) bool { _, ok := f.d.under[id]; return ok }

// Node implements decide.Facts.
func (f facts) Node(id keyspace.NodeID) (decide.Node, bool) {
	row, _ := f.v.Node(id)
	n := decidedNode(&row)
	n.Silent, n.Isolated = f.d.silent(id), f.d.isolated(id)
	return n, counts(&row)
}

// begin has one decision executed. Its premises are compared with the present state here, and
// again when the entry is applied.
func (d *decider) begin(ctx context.Context, op *decide.Operation) {
	s := d.s
	log := s.o.Logger.With(zap.Stringer("range", op.Range), zap.Stringer("decided", op), zap.Stringer("reason", op.Reason))
	s.o.Metrics.Decisions.WithLabelValues(op.Reason.String(), op.Kind.String()).Inc()
	var err error
	switch wrong := op.Requires.Check(facts{d, s.o.Group.View()}); {
	case wrong != nil:
		err = kverror.New(kverror.Busy, "%v", wrong)
	case op.Kind == decide.LeaveJoint:
		// The range's leader leaves it; placement only asks how far it is.
		d.task(ctx, op.Range, d.operator.refresh)
		return
	default:
		err = d.propose(ctx, op)
	}
	if err == nil {
		log.Info("decided", zap.String("why", op.Why))
		return
	}
	log.Info("decided, and not begun", zap.String("why", op.Why), zap.Error(err))
	// A range that has changed is decided upon anew; an operation that cannot be executed
	// waits. Of what may have been begun all the same the map tells.
	if e := kverror.Of(err); e.Fate() == kverror.NotApplied {
		d.c.Refuse(op.Range, s.o.Clock.Now(), e.Kind != kverror.Busy)
	} else {
		d.c.Finish(op.Range, s.o.Clock.Now(), false)
	}
}

// propose begins the operation that was decided.
func (d *decider) propose(ctx context.Context, op *decide.Operation) error {
	is := op.Requires.Ranges[0]
	o, err := operationOf(op)
	if err != nil {
		return err
	}
	ctx, cancel := clock.WithTimeout(ctx, d.s.o.Clock, OperationStep)
	defer cancel()
	begin := fsm.BeginOperation{Generation: is.Generation, ConfIndex: is.ConfIndex, Operation: o}
	if o.Kind == fsm.OperationMerge {
		begin.Right = fsm.RangeVersion{Generation: op.Requires.Ranges[1].Generation, ConfIndex: op.Requires.Ranges[1].ConfIndex}
	}
	res := d.s.o.Group.Propose(ctx, d.term, begin)
	if res.Err != nil {
		return res.Err
	}
	d.under[op.Range] = res.Operation
	d.s.kick.Set()
	return nil
}

// task runs what leaves no record in a goroutine of its own; the range is busy until it
// has ended.
func (d *decider) task(ctx context.Context, id keyspace.RangeID, f func(context.Context, keyspace.RangeID) error) {
	d.wait.Go(func() {
		ctx, cancel := clock.WithTimeout(ctx, d.s.o.Clock, OperationStep)
		defer cancel()
		if err := f(ctx, id); err != nil {
			d.s.o.Logger.Info("task for a range", zap.Stringer("range", id), zap.Error(err))
		}
		d.mu.Lock()
		d.tasks[id] = false // not at once again
		d.mu.Unlock()
		d.kick.Set()
	})
}

// operationOf returns the record of a decision.
func operationOf(op *decide.Operation) (fsm.Operation, error) {
	o := fsm.Operation{Range: op.Range, From: op.From, To: op.To, Lead: op.Lead, Reason: op.Reason, Why: cutText(op.Why)}
	switch op.Kind {
	case decide.AddReplica:
		o.Kind = fsm.OperationAdd
	case decide.MoveReplica:
		o.Kind = fsm.OperationMove
	case decide.RemoveReplica:
		if o.Kind = fsm.OperationRemove; op.Reason == decide.Learner {
			o.Kind = fsm.OperationTidy
		}
	case decide.TransferLeader:
		o.Kind, o.To, o.Lead = fsm.OperationTransfer, op.Lead, 0
	case decide.Merge:
		o.Kind, o.Right = fsm.OperationMerge, op.Other
	default:
		return o, fmt.Errorf("placement: nobody executes %s", op)
	}
	return o, nil
}

// cutText keeps a text within what a record holds.
func cutText(s string) string { return cutTo(s, fsm.MaxNameBytes) }

// decisionOf returns the operation as decisions see it. Beside the record they need the sender
// of a copy: the leader.
func decisionOf(o *fsm.Operation, leader keyspace.NodeID) decide.Operation {
	op := decide.Operation{Range: o.Range, From: o.From, To: o.To, Lead: o.Lead, Source: leader, Reason: o.Reason, Why: o.Why}
	switch o.Kind {
	case fsm.OperationAdd:
		op.Kind = decide.AddReplica
	case fsm.OperationMove:
		op.Kind = decide.MoveReplica
	case fsm.OperationRemove, fsm.OperationTidy:
		op.Kind = decide.RemoveReplica
	case fsm.OperationTransfer:
		op.Kind, op.To, op.Lead = decide.TransferLeader, 0, o.To
	case fsm.OperationMerge:
		op.Kind, op.Other, op.From, op.To = decide.Merge, o.Right, 0, 0
		if o.Phase == fsm.MergeCommitted {
			op.Other = 0 // it is in the map no more
		}
	}
	return op
}

// isolated says whether the node is heard and hears fewer than half of the others, by what its
// liveness messages say. If so many nodes failed that every node is like that, it says nothing
// of a single one. Then none hands over what it leads, and lost replicas must be rebuilt.
func (d *decider) isolated(id keyspace.NodeID) bool {
	return d.central && d.s.o.Alive(id) && !d.s.o.Central(id)
}

// counts says whether decisions know the node: it has served, and is not gone for good.
func counts(n *fsm.Node) bool { return n.State.Started() }

// decidedNode returns the node as decisions see it, without what only a leader knows.
func decidedNode(n *fsm.Node) decide.Node {
	out := decide.Node{ID: n.ID, Zone: n.Attribute(attributeZone), Leaves: n.Leaves}
	switch n.State {
	case fsm.NodeDraining, fsm.NodeLearner: // neither gets replicas or leaders
		out.State = decide.Draining
	case fsm.NodeDecommissioned:
		out.State = decide.Decommissioning
	case fsm.NodeServing, fsm.NodeUnstarted, fsm.NodeUnstartedLearner, fsm.NodeRemoved:
	}
	return out
}
