package recovery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup/offline"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/replicas"
)

// Applied says what Apply has done.
type Applied struct {
	// Already says that the plan was applied before: nothing was done.
	Already bool
	// Sole are the replicas that go on as their groups' only voters, Dropped those that go. Placement says that
	// placement goes on here.
	Sole, Dropped int
	Placement     bool
	// Awaits are the other survivors. The node goes on only once all of them have applied the plan too.
	Awaits []offline.Survivor
}

// Apply does what the plan says of the node whose directories these are. All of it is durable when it
// returns. It may be repeated: after a crash it goes on, and until it is done the node does not start.
func Apply(ctx context.Context, d Dir, p *Plan, now time.Time) (_ *Applied, err error) {
	s, err := d.open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.abort()) }()
	o, err := p.ordersOf(s.id)
	if err != nil {
		return nil, err
	}
	note, ok, err := offline.ReadNote(s.engine)
	if err != nil {
		return nil, err
	}
	switch {
	case ok && note.Plan == p.ID && note.Done:
		return &Applied{Already: true, Awaits: note.Awaits(s.id.Node)}, nil
	case ok && note.Plan != p.ID && !note.Done:
		return nil, fmt.Errorf("recovery: plan %s was only half applied here: run skein recover apply with it again", note.Plan)
	}
	v, err := s.view()
	if err != nil {
		return nil, err
	}
	a := &applier{ctx: ctx, s: s, plan: p, orders: o, view: v, now: now}
	if !ok || note.Done {
		if err := a.check(); err != nil {
			return nil, err
		}
		if err := offline.WriteNote(ctx, s.engine, offline.Note{Plan: p.ID}); err != nil {
			return nil, err
		}
	}
	for _, step := range []func() error{a.bar, a.forget, a.leave, a.sole, a.placement} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	note = offline.Note{Plan: p.ID, Done: true, Together: len(p.Survivors) == 1}
	for _, n := range p.Survivors {
		note.Survivors = append(note.Survivors, offline.Survivor{Node: n.Node.node(), Name: n.Name})
	}
	if err := offline.WriteNote(ctx, s.engine, note); err != nil {
		return nil, err
	}
	return &Applied{Sole: len(o.Sole), Dropped: len(o.Drop) + len(o.Leave), Placement: o.Placement, Awaits: note.Awaits(s.id.Node)}, nil
}

// ordersOf returns what the plan says of a node.
func (p *Plan) ordersOf(who engine.Identity) (*Orders, error) {
	if p.Cluster != id(who.Cluster) {
		return nil, fmt.Errorf("recovery: the plan is for cluster %s, the directory of cluster %s", keyspace.ClusterID(p.Cluster), who.Cluster)
	}
	for i := range p.Nodes {
		if p.Nodes[i].Node == id(who.Node) {
			return &p.Nodes[i], nil
		}
	}
	for _, n := range p.Dead {
		if n.Node == id(who.Node) {
			return nil, fmt.Errorf("recovery: by the plan node %s (%s) never comes back: leave its directory alone, or make a plan in which it survives", who.Node, n.Name)
		}
	}
	return nil, fmt.Errorf("recovery: the plan does not know node %s: collect from it and make the plan anew", who.Node)
}

// applier applies a plan on one node.
type applier struct {
	ctx    context.Context //nolint:containedctx // lives as long as one call
	s      *store
	plan   *Plan
	orders *Orders
	view   *view
	now    time.Time
}

// check refuses a plan for another state than the node's: it has run since, or another plan was
// applied.
func (a *applier) check() error {
	have := map[keyspace.RangeID]Expect{}
	for _, c := range a.view.collected.Copies {
		if c.Unusable == "" {
			have[c.Range] = Expect{c.Range, c.Last, c.Term}
		}
	}
	for _, want := range a.orders.Expect {
		if got, ok := have[want.Range]; !ok || got != want {
			return fmt.Errorf("recovery: the plan is stale: %s ends at entry %d of term %d here, and the plan knows entry %d of term %d; collect and plan again",
				groupName(want.Range), got.Last.Index, got.Last.Term, want.Last.Index, want.Last.Term)
		}
		delete(have, want.Range)
	}
	for r := range have {
		return fmt.Errorf("recovery: the plan is stale: %s has come here since; collect and plan again", groupName(r))
	}
	return nil
}

// bar makes it durable that the replicas that go have left. At its next start the node deletes their
// data, as that of any replica that is no member any more; with this note none of them ever votes again.
func (a *applier) bar() error {
	left := map[keyspace.GroupID]keyspace.ReplicaID{}
	for _, d := range a.orders.Drop {
		if d.Range == 0 {
			if err := placement.StoreLeft(a.ctx, a.s.engine, d.Replica); err != nil {
				return err
			}
			continue
		}
		g := d.Range.Group()
		left[g] = max(left[g], d.Replica)
	}
	if len(left) == 0 {
		return nil
	}
	return replicas.TombstonesOf(a.s.engine).Store(a.ctx, left)
}

// forget deletes what no start would: logs without a record, and the replica of placement.
func (a *applier) forget() error {
	for _, d := range a.orders.Drop {
		switch {
		case d.Range == 0:
			b := a.s.engine.NewBatch()
			err := placement.DeleteStored(b)
			if err == nil {
				err = b.Commit()
			}
			if err == nil {
				err = a.s.engine.Flush(a.ctx)
			}
			if err = errors.Join(err, b.Close()); err != nil {
				return fmt.Errorf("recovery: delete this node's replica of placement: %w", err)
			}
			if err := offline.Forget(a.ctx, a.s.wal, keyspace.PlacementGroup); err != nil {
				return err
			}
		case d.Log:
			if err := offline.Forget(a.ctx, a.s.wal, d.Range.Group()); err != nil {
				return err
			}
		}
	}
	return nil
}

// leave has replicas go behind a part of their tails. The state machine itself then bars them.
func (a *applier) leave() error {
	for _, o := range a.orders.Leave {
		l, err := offline.Read(a.s.wal, o.Range.Group())
		if err != nil {
			return err
		}
		if l.LastTerm == a.plan.Term {
			continue // done before a crash
		}
		r := a.view.replicas[o.Range]
		if r == nil || r.Self != o.Replica {
			return fmt.Errorf("recovery: range %s has no replica %d here that can be used: collect and plan again", o.Range, o.Replica)
		}
		if err := r.Leave(a.ctx, a.s.wal, a.plan.Term, o.Through); err != nil {
			return err
		}
	}
	return nil
}

// sole makes replicas the only voters of their groups.
func (a *applier) sole() error {
	for i := range a.orders.Sole {
		o := &a.orders.Sole[i]
		l, err := offline.Read(a.s.wal, o.Range.Group())
		if err != nil {
			return err
		}
		if l.LastTerm == a.plan.Term {
			continue // done before a crash
		}
		r := a.view.replicas[o.Range]
		if r == nil || r.Self != o.Replica {
			return fmt.Errorf("recovery: range %s has no replica %d here that can be used: collect and plan again", o.Range, o.Replica)
		}
		if err := r.SoleVoter(a.ctx, a.s.wal, a.plan.Term, a.commands(o)); err != nil {
			return err
		}
	}
	return nil
}

// commands are the entries that end the range's merge and cut its span.
func (a *applier) commands(o *Sole) (cs [][]byte) {
	h := command.Header{Kind: command.KindRelease, Term: a.plan.Term, Generation: o.Generation}
	if o.Release != 0 {
		cs = append(cs, command.AppendMergeCommand(command.AppendHeader(nil, h), command.KindRelease, &command.MergeCommand{ID: o.Release}))
	}
	h.Kind = command.KindSplit
	for _, c := range o.Splits {
		cs = append(cs, command.AppendSplit(command.AppendHeader(nil, h), &command.Split{
			Key: c.Key, Child: c.Child, ConfIndex: o.ConfIndex,
			Replicas: []keyspace.Replica{{ID: o.Replica, Node: a.s.id.Node}},
		}))
		h.Generation++
	}
	return cs
}

// placement writes the new map. The group's own tail is applied here, which is pure: so nothing in it
// undoes what is written.
func (a *applier) placement() error {
	if !a.orders.Placement {
		return nil
	}
	was, ok, err := a.s.engine.Applied(keyspace.PlacementGroup)
	if err != nil || !ok {
		return errors.Join(err, errors.New("recovery: this node has no replica of placement: collect and plan again"))
	}
	if was.Term != a.plan.Term {
		if was, err = a.writeMap(); err != nil {
			return err
		}
	}
	return offline.Reset(a.ctx, a.s.wal, keyspace.PlacementGroup, was.Index, was.Term)
}

func (a *applier) writeMap() (now engine.Applied, err error) {
	v := a.view
	if v.state == nil {
		return now, errors.New("recovery: this node's replica of placement cannot be used: collect and plan again")
	}
	l, err := offline.Read(a.s.wal, keyspace.PlacementGroup)
	if err != nil {
		return now, err
	}
	// Above everything in the log, so that the log never seems to continue the record.
	now = engine.Applied{Index: max(l.Last, v.placement.Applied.Index) + 1, Term: a.plan.Term}
	now.ConfIndex = now.Index
	now.Replicas = []keyspace.Replica{{ID: v.placement.Self, Node: a.s.id.Node}}
	r := fsm.Recovery{
		Ceiling: a.plan.Ceiling, Compacted: a.plan.Compacted, NextRange: a.plan.NextRange, NextReplica: a.plan.NextReplica,
		Now: fsm.UnixMillis(min(max(a.now.UnixMilli(), 0), fsm.MaxMillis)),
	}
	for _, n := range a.plan.Dead {
		r.Gone = append(r.Gone, n.Node.node())
	}
	for i := range a.plan.Map {
		row := &a.plan.Map[i]
		d, err := row.descriptor()
		if err != nil || len(d.Replicas) == 0 {
			return now, fmt.Errorf("recovery: row of range %s with %d replicas: %w", row.Range, len(row.Members), err)
		}
		r.Ranges = append(r.Ranges, fsm.Range{Descriptor: d, Preferred: d.Replicas[0].Node, Created: !row.New})
	}
	v.state.ApplyMembers(now.Index, now.Replicas)
	if err := v.state.Recover(now.Index, &r); err != nil {
		return now, err
	}
	b := a.s.engine.NewBatch()
	if err = placement.WriteStored(b, v.state, &now); err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = a.s.engine.Flush(a.ctx)
	}
	return now, errors.Join(err, b.Close())
}
