package shard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/command"
)

// maxOpenerTasks bounds the unknown replicas that wait to be looked into. More are
// told of again, and children of splits always have room.
const maxOpenerTasks = 1024

// showTimeout is how long a peer may take to say what range it speaks for.
const showTimeout = time.Second

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

// opener opens replicas in goroutines of its own, since neither the host's apply
// pool nor its receivers may wait: one for children of splits, which asks nobody,
// and one for replicas of which only others know, which asks those.
type opener struct {
	n                       *Node
	kickChildren, kickOther chan struct{}

	mu sync.Mutex
	// Guarded by mu.
	children, others []openTask

	// making is held by whoever of the two opens a replica from its record, so that
	// the child's campaign does not miss what the other is about to open.
	making sync.Mutex
}

func newOpener(n *Node) *opener {
	return &opener{n: n, kickChildren: make(chan struct{}, 1), kickOther: make(chan struct{}, 1)}
}

func (o *opener) add(t openTask) {
	kick := o.kickOther
	o.mu.Lock()
	switch {
	case t.split != nil:
		o.children = append(o.children, t)
		kick = o.kickChildren
	case len(o.others) < maxOpenerTasks:
		o.others = append(o.others, t)
	}
	o.mu.Unlock()
	select {
	case kick <- struct{}{}:
	default:
	}
}

// openChildren is the goroutine that opens children of splits.
func (o *opener) openChildren(ctx context.Context) {
	o.run(ctx, o.kickChildren, &o.children, func(t *openTask) error { return o.n.openChild(t) })
}

// openOthers is the goroutine that opens replicas that others speak to.
func (o *opener) openOthers(ctx context.Context) {
	o.run(ctx, o.kickOther, &o.others, func(t *openTask) error { return o.n.openUnknown(ctx, t) })
}

func (o *opener) run(ctx context.Context, kick <-chan struct{}, queue *[]openTask, open func(*openTask) error) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-kick:
		}
		for ctx.Err() == nil {
			o.mu.Lock()
			if len(*queue) == 0 {
				o.mu.Unlock()
				break
			}
			t := (*queue)[0]
			*queue = slices.Delete(*queue, 0, 1)
			o.mu.Unlock()
			if err := open(&t); err != nil && ctx.Err() == nil {
				o.n.log.Warn("open a replica", zap.Stringer("range", t.id), zap.Error(err))
			}
		}
	}
}

// forget drops what waits for an answer of a peer that gives none: it is told of
// again, and other peers' replicas must not wait for each of them.
func (o *opener) forget(from keyspace.NodeID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.others = slices.DeleteFunc(o.others, func(t openTask) bool { return t.from == from })
}

// bootstrapChild writes the first record of a split's child into the parent's
// batch. A child that is here already, or was once, stays as it is: after a crash
// the parent's log is replayed, and what the child has by then may be newer (traps
// 2, 4, 28). Its votes are in the wal and not touched.
func (n *Node) bootstrapChild(b *engine.Batch, rec *command.Record, replicas []keyspace.Replica, txns *command.TxnState) error {
	var self keyspace.ReplicaID
	for _, m := range replicas {
		if m.Node == n.cfg.Self {
			self = m.ID
		}
	}
	if self == 0 || n.Replica(rec.RangeID) != nil {
		return nil
	}
	left, err := n.left(rec.RangeID)
	if err != nil {
		return err
	}
	if self <= left {
		// The child was moved away before the parent came here to its split (trap 3).
		return deleteSpan(b, rec.Span, txns)
	}
	_, have, err := n.cfg.Engine.Applied(rec.RangeID.Group())
	if err != nil || have {
		return err
	}
	if err := n.cfg.Groups.bootstrap(b, rec.RangeID.Group(), replicas, command.AppendRecord(nil, rec)); err != nil {
		return err
	}
	if err := txns.Write(b, rec.RangeID); err != nil {
		return err
	}
	n.claimChild(rec.RangeID, rec.Span)
	return nil
}

// splitApplied has the child opened: its first record is visible.
func (n *Node) splitApplied(r *Replica, sp *appliedSplit) {
	n.metrics.splits.Inc()
	lead := r.Leader().IsLeader
	d := r.Descriptor()
	r.log.Info("split", zap.Stringer("child", sp.child), zap.Stringer("span", d.Span), zap.Stringer("leaving", sp.rec.Span))
	if lead {
		n.cfg.Reporter.ReportDescriptors(d, sp.descriptor())
	}
	n.opener.add(openTask{id: sp.child, split: sp, lead: lead})
}

// openChild opens a child and, beside the parent's leader, has it stand for
// election at once: nobody serves the span before.
func (n *Node) openChild(t *openTask) error {
	// Without a record this node is not a member, or no more.
	if opened, err := n.openMade(t.id); err != nil || !opened {
		return err
	}
	if r := n.Replica(t.id); r != nil && t.lead {
		n.campaign(r, firstCampaigns)
	}
	return nil
}

// The first campaign of a new range may meet followers that do not have it yet, have not
// applied the split that makes it, or are not connected, or be lost with a message. Instead
// of an election timeout its span waits for the next of a few more.
const (
	firstCampaigns     = 10
	firstCampaignPause = 100 * time.Millisecond
)

// campaign has the replica stand for election, and again after a pause while it
// knows no leader.
func (n *Node) campaign(r *Replica, times int) {
	r.group.Campaign()
	if times--; times == 0 {
		return
	}
	n.after(firstCampaignPause, func() {
		if r.Leader().Leader == 0 {
			n.campaign(r, times)
		}
	})
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
	n.opener.making.Lock()
	defer n.opener.making.Unlock()
	if n.Replica(id) != nil {
		return true, nil
	}
	a, ok, err := n.cfg.Engine.Applied(id.Group())
	if err != nil || !ok {
		return false, err
	}
	txns, err := command.LoadTxns(n.cfg.Engine, id)
	if err != nil {
		return false, err
	}
	if err = n.openStored(id, &a, txns); errors.Is(err, raftgroup.ErrExists) {
		return true, nil // an order to create it was faster
	}
	if err == nil && n.Replica(id) != nil { // else its span waits for its removal
		n.unclaim(id)
	}
	return true, err
}

// openDurable is openMade for who does not know where the record comes from. One of
// an order to create, unlike a split's, no log makes again after a crash: it is
// durable first, or the replica that has voted and stored entries would be another
// one afterwards.
func (n *Node) openDurable(ctx context.Context, id keyspace.RangeID) (opened bool, err error) {
	_, have, err := n.cfg.Engine.Applied(id.Group())
	if err != nil || !have {
		return false, err
	}
	_, durable, err := n.cfg.Engine.DurableApplied(id.Group())
	if err == nil && !durable {
		err = n.cfg.Engine.Flush(ctx)
	}
	if err != nil {
		return false, err
	}
	return n.openMade(id)
}

// openUnknown opens an empty replica of a range whose span nobody here holds. A
// snapshot of its leader fills it.
func (n *Node) openUnknown(ctx context.Context, t *openTask) error {
	if n.Replica(t.id) != nil {
		return nil
	}
	if left, err := n.left(t.id); err != nil || t.to <= left {
		return err
	}
	if opened, err := n.openDurable(ctx, t.id); opened || err != nil {
		return err
	}
	asking, cancel := clock.WithTimeout(ctx, n.cfg.Clock, showTimeout)
	d, _, err := n.admins.Look(asking, t.from, t.id)
	late := asking.Err() != nil
	cancel()
	if late {
		n.opener.forget(t.from)
	}
	if err != nil {
		return fmt.Errorf("ask node %s for the descriptor: %w", t.from, err)
	}
	m, member := d.ReplicaOn(n.cfg.Self)
	if !member || m.ID != t.to || d.Generation == 0 {
		return nil
	}
	for _, o := range n.Replicas() {
		if o.holds(d.Span) {
			// The split that makes it is still to be applied here.
			return nil
		}
	}
	// The question took its time. A split that was applied meanwhile has written the
	// first record before its parent's span shrank: looked at in this order, nothing
	// is missed.
	if opened, err := n.openDurable(ctx, t.id); opened || err != nil {
		return err
	}
	r := n.newReplica(t.id)
	r.introduced = d
	err = n.open(r, m.ID)
	if errors.Is(err, raftgroup.ErrExists) {
		return nil
	}
	n.log.Info("opened an empty replica", zap.Stringer("range", t.id), zap.Uint64("replica", uint64(m.ID)))
	return err
}
