package shard

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
)

// maxOpenerTasks bounds the unknown replicas that wait to be looked into. More are
// told of again, and children of splits always have room.
const maxOpenerTasks = 1024

// openTask is a replica to be opened: a child of a split, or a replica that other
// nodes speak to and that is not here.
type openTask struct {
	id keyspace.RangeID
	// split is set for a child; lead says that the parent is led here.
	split *appliedSplit
	lead  bool
	// from speaks to replica to, which is not here.
	from keyspace.NodeID
	to   keyspace.ReplicaID
}

// opener opens replicas in a goroutine of its own, since neither the host's apply
// pool nor its receivers may wait.
type opener struct {
	n    *Node
	kick chan struct{}

	mu sync.Mutex
	// Guarded by mu.
	tasks []openTask
}

func newOpener(n *Node) *opener { return &opener{n: n, kick: make(chan struct{}, 1)} }

func (o *opener) add(t openTask) {
	o.mu.Lock()
	if t.split != nil || len(o.tasks) < maxOpenerTasks {
		o.tasks = append(o.tasks, t)
	}
	o.mu.Unlock()
	select {
	case o.kick <- struct{}{}:
	default:
	}
}

// run is the opener's goroutine.
func (o *opener) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.kick:
		}
		for ctx.Err() == nil {
			o.mu.Lock()
			tasks := o.tasks
			o.tasks = nil
			o.mu.Unlock()
			if len(tasks) == 0 {
				break
			}
			for _, t := range tasks {
				if err := o.do(ctx, &t); err != nil && ctx.Err() == nil {
					o.n.log.Warn("open a replica", zap.Stringer("range", t.id), zap.Error(err))
				}
			}
		}
	}
}

func (o *opener) do(ctx context.Context, t *openTask) error {
	if t.split != nil {
		return o.n.openChild(t)
	}
	return o.n.openUnknown(ctx, t)
}

// bootstrapChild writes the first record of a split's child into the parent's
// batch. A child that is here already, or was once, stays as it is: after a crash
// the parent's log is replayed, and what the child has by then may be newer (traps
// 2, 4, 28). Its votes are in the wal and not touched.
func (n *Node) bootstrapChild(b *engine.Batch, rec *record, replicas []keyspace.Replica) error {
	member := false
	for _, m := range replicas {
		member = member || m.Node == n.cfg.Self
	}
	if !member || n.Replica(rec.rangeID) != nil {
		return nil
	}
	_, have, err := n.cfg.Engine.Applied(rec.rangeID.Group())
	if err != nil || have {
		return err
	}
	if err := n.cfg.Groups.bootstrap(b, rec.rangeID.Group(), replicas, appendRecord(nil, rec)); err != nil {
		return err
	}
	n.claimChild(rec.rangeID, rec.span)
	return nil
}

// splitApplied has the child opened: its first record is visible.
func (n *Node) splitApplied(r *Replica, sp *appliedSplit) {
	n.metrics.splits.Inc()
	lead := r.Leader().IsLeader
	d := r.Descriptor()
	r.log.Info("split", zap.Stringer("child", sp.child), zap.Stringer("span", d.Span), zap.Stringer("leaving", sp.rec.span))
	if lead {
		n.cfg.Reporter.ReportDescriptors(d, sp.descriptor())
	}
	n.opener.add(openTask{id: sp.child, split: sp, lead: lead})
}

// openChild opens a child and, beside the parent's leader, has it stand for
// election at once: nobody serves the span before.
func (n *Node) openChild(t *openTask) error {
	if r := n.Replica(t.id); r != nil {
		return nil
	}
	// Without a record this node is not a member, or no more.
	if opened, err := n.openMade(t.id); err != nil || !opened {
		return err
	}
	if r := n.Replica(t.id); r != nil && t.lead {
		r.group.Campaign()
	}
	return nil
}

// Unknown is raftgroup.Config's: a node speaks to a replica that is not open here.
// Either the parent has not applied the split yet that makes it, then it will; or
// a snapshot carried the parent past the split (trap 7), then nobody else makes it.
func (n *Node) Unknown(from keyspace.NodeID, g keyspace.GroupID, to keyspace.ReplicaID) {
	if g.IsSystem() {
		return
	}
	n.opener.add(openTask{id: g.Range(), from: from, to: to})
}

// openMade opens the range's replica if the engine has a record of it.
func (n *Node) openMade(id keyspace.RangeID) (opened bool, err error) {
	a, ok, err := n.cfg.Engine.Applied(id.Group())
	if err != nil || !ok {
		return false, err
	}
	if err = n.openStored(id, &a); errors.Is(err, raftgroup.ErrExists) {
		return true, nil // an order to create it was faster
	}
	if err == nil {
		n.unclaim(id)
	}
	return true, err
}

// openUnknown opens an empty replica of a range whose span nobody here holds. A
// snapshot of its leader fills it.
func (n *Node) openUnknown(ctx context.Context, t *openTask) error {
	if n.Replica(t.id) != nil {
		return nil
	}
	if opened, err := n.openMade(t.id); opened || err != nil {
		return err
	}
	st, err := n.client.Show(ctx, t.from, t.id)
	if err != nil {
		return fmt.Errorf("ask node %s for the descriptor: %w", t.from, err)
	}
	d := st.Descriptor
	m, member := d.ReplicaOn(n.cfg.Self)
	if !member || m.ID != t.to || d.Generation == 0 {
		return nil
	}
	for _, o := range n.Replicas() {
		have := o.Descriptor()
		if have.Generation != 0 && have.Span.Overlaps(d.Span) {
			// The split that makes it is still to be applied here.
			return nil
		}
	}
	// The question took its time. A split that was applied meanwhile has written the
	// first record before its parent's span shrank: looked at in this order, nothing
	// is missed.
	if opened, err := n.openMade(t.id); opened || err != nil {
		return err
	}
	r := n.newReplica(t.id)
	err = n.open(r, m.ID)
	if errors.Is(err, raftgroup.ErrExists) {
		return nil
	}
	n.log.Info("opened an empty replica", zap.Stringer("range", t.id), zap.Uint64("replica", uint64(m.ID)))
	return err
}
