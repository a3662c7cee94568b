package recovery

import (
	"errors"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup/offline"
	"github.com/skeindb/skein/raftgroup/quarantine"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/replicas"
)

// Collect says what a node that does not run has. It changes nothing.
func Collect(d Dir) (_ *Collected, err error) {
	s, err := d.open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.abort()) }()
	v, err := s.view()
	if err != nil {
		return nil, err
	}
	return v.collected, nil
}

// view is what a directory holds.
type view struct {
	s         *store
	collected *Collected
	// replicas are the ranges' usable copies, by range, as raft has them.
	replicas map[keyspace.RangeID]*offline.Replica
	// state is that of placement behind its tail; nil where the node has no usable replica of it.
	state     *fsm.State
	placement *offline.Replica
	closed    *quarantine.List
	removed   map[keyspace.GroupID]bool
}

// view looks at all groups of the node.
func (s *store) view() (*view, error) {
	v := &view{s: s, replicas: map[keyspace.RangeID]*offline.Replica{}, removed: map[keyspace.GroupID]bool{}, collected: &Collected{
		Cluster: id(s.id.Cluster), Node: id(s.id.Node), Version: s.id.Version,
	}}
	n, ok, err := offline.ReadNote(s.engine)
	if err != nil {
		return nil, err
	}
	switch {
	case ok && !n.Done:
		v.collected.Interrupted = n.Plan
	case ok:
		v.collected.Plan = n.Plan
		for _, s := range n.Awaits(s.id.Node) {
			v.collected.Awaits = append(v.collected.Awaits, id(s.Node))
		}
	}
	for _, g := range s.wal.Removed() {
		v.removed[g] = true
	}
	if v.closed, err = quarantine.Load(s.engine, prometheus.NewGauge(prometheus.GaugeOpts{Name: "quarantine"})); err != nil {
		return nil, err
	}
	v.collected.Name = v.ownName()
	if err := v.addPlacement(); err != nil {
		return nil, err
	}
	err = s.engine.VisitApplied(func(g keyspace.GroupID, a engine.Applied) error {
		if g.IsSystem() {
			return nil
		}
		return v.addRange(nil, on(a.Replicas, s.id.Node), a)
	})
	if err != nil {
		return nil, err
	}
	for _, g := range s.wal.Groups() {
		if err := v.addLost(g); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(v.collected.Copies, func(a, b Copy) int { return int(min(max(int64(a.Range)-int64(b.Range), -1), 1)) })
	return v, nil
}

// ownName returns the node's name, empty where the directory does not say: it is for people alone.
func (v *view) ownName() string {
	nodes, _, err := placement.StoredNodeTable(v.s.engine)
	if i := slices.IndexFunc(nodes, func(n fsm.Node) bool { return n.ID == v.s.id.Node }); err == nil && i >= 0 {
		return nodes[i].Name
	}
	return ""
}

// addLost adds a group of which there is nothing but entries, and which has not left the node.
func (v *view) addLost(g keyspace.GroupID) error {
	if g.IsSystem() || slices.ContainsFunc(v.collected.Copies, func(c Copy) bool { return c.Range.Group() == g }) {
		return nil
	}
	_, have, err := v.s.engine.Applied(g)
	if err != nil || have {
		return err
	}
	left, err := replicas.TombstonesOf(v.s.engine).Left(g)
	if err != nil || left > 0 {
		return err
	}
	l, err := offline.Read(v.s.wal, g)
	if err == nil && l.Last > 0 {
		v.collected.Copies = append(v.collected.Copies, Copy{Range: g.Range(), Unusable: "its applied record is lost", Last: Position{l.Last, l.LastTerm}, Term: l.Term})
	}
	return err
}

// addPlacement adds the replica of the placement group.
func (v *view) addPlacement() error {
	st, a, ok, err := placement.LoadStored(v.s.engine)
	if err != nil || !ok {
		return err
	}
	left, err := placement.LeftStored(v.s.engine)
	if err != nil {
		return err
	}
	self := on(a.Replicas, v.s.id.Node)
	c, r, err := v.begin(0, keyspace.PlacementGroup, self, left, &a)
	if err != nil || c == nil {
		return err
	}
	if c.Unusable == "" {
		err = r.Visit(v.s.wal, func(e *offline.Entry) error {
			c.follow(e)
			return applyPlacement(st, e)
		})
		if err == nil {
			err = st.Check()
		}
		c.refuse(err)
	}
	if c.Unusable == "" {
		members := st.Members()
		view := st.View(c.Last.Index, c.Last.Term, nil)
		c.End = End{Members: membersOf(members), ConfIndex: view.PlacementGroup().ConfIndex}
		c.Revision = view.Ceiling
		v.state, v.placement, v.collected.Placement = st, r, placementOf(view)
	}
	v.collected.Copies = append(v.collected.Copies, *c)
	return nil
}

// applyPlacement applies an entry as package placement does.
func applyPlacement(st *fsm.State, e *offline.Entry) error {
	if e.Members != nil {
		st.ApplyMembers(e.Index, e.Members)
		return nil
	}
	if len(e.Data) == 0 {
		return nil
	}
	c, err := fsm.DecodeCommand(e.Data)
	if keyspace.IsVersionError(err) {
		return fmt.Errorf("entry %d: %w", e.Index, err)
	}
	if err == nil && c.Term == e.Term {
		st.Apply(e.Index, c.Op)
	}
	return nil
}

func placementOf(v *fsm.View) *Placement {
	p := &Placement{Ceiling: v.Ceiling, Compacted: v.Compacted, NextRange: v.NextRange, NextReplica: v.NextReplica}
	for _, n := range v.NodeTable() {
		p.Nodes = append(p.Nodes, NodeRow{Node: id(n.ID), Name: n.Name, State: n.State.String()})
	}
	v.All(func(g *fsm.Range) bool {
		p.Ranges = append(p.Ranges, rowOf(&g.Descriptor))
		return true
	})
	return p
}

func rowOf(d *keyspace.Descriptor) RangeRow {
	return RangeRow{
		Range: d.Range, Generation: d.Generation, Start: key(d.Span.Start), End: key(d.Span.End), ConfIndex: d.ConfIndex, Members: membersOf(d.Replicas),
	}
}

// begin begins a copy of a group; nil says that the node has left it.
func (v *view) begin(rng keyspace.RangeID, g keyspace.GroupID, self, left keyspace.ReplicaID, a *engine.Applied) (*Copy, *offline.Replica, error) {
	if self == 0 || self <= left || v.removed[g] {
		return nil, nil, nil
	}
	l, err := offline.Read(v.s.wal, g)
	if err != nil {
		return nil, nil, err
	}
	c := &Copy{
		Range: rng, Replica: self, Term: l.Term, Commit: max(l.Commit, a.Index),
		Applied: Position{a.Index, a.Term}, Last: Position{a.Index, a.Term}, InForce: [][]Member{membersOf(a.Replicas)},
	}
	if q, ok := v.closed.Has(g, self); ok {
		c.Unusable = "in quarantine: " + q.Reason
	}
	return c, &offline.Replica{Group: g, Self: self, Applied: *a}, nil
}

// follow takes note of an entry of the tail.
func (c *Copy) follow(e *offline.Entry) {
	c.Last = Position{e.Index, e.Term}
	if e.Members == nil {
		return
	}
	if e.Index <= c.Commit {
		c.InForce = nil // the change is known to be committed: what was before it is over
	} else {
		c.Unsettled = true
	}
	c.InForce = append(c.InForce, membersOf(e.Members))
}

// refuse says why the copy cannot be used, if err says so.
func (c *Copy) refuse(err error) {
	if err != nil && c.Unusable == "" {
		c.Unusable = err.Error()
	}
}

// addRange adds a replica of a range, and those that its tail makes.
func (v *view) addRange(made *Made, self keyspace.ReplicaID, a engine.Applied) error {
	rec, err := command.DecodeRecord(a.Payload)
	if err != nil {
		return fmt.Errorf("recovery: applied record at index %d: %w", a.Index, err)
	}
	g := rec.RangeID.Group()
	left, err := replicas.TombstonesOf(v.s.engine).Left(g)
	if err != nil {
		return err
	}
	c, r, err := v.begin(rec.RangeID, g, self, left, &a)
	if err != nil || c == nil {
		return err
	}
	if c.Made = made; made != nil {
		made.Generation, made.Certain = rec.Generation, made.Certain || v.s.wal.Group(g).Exists()
	}
	w := &walk{node: v.s.id.Node, record: v.record, rec: rec, confIndex: a.ConfIndex, members: a.Replicas, revision: rec.LastRevision, sequencer: rec.SequencerTerm}
	if c.Unusable == "" {
		c.refuse(r.Visit(v.s.wal, func(e *offline.Entry) error {
			c.follow(e)
			c.Unsettled = c.Unsettled || e.Index > c.Commit && changes(e)
			was := Settled{Generation: w.rec.Generation, End: key(w.rec.Span.End)}
			err := w.entry(e)
			if e.Index > c.Commit && w.rec.Generation != was.Generation {
				// A leader proposes a change once it has applied the one before: only the last one is in doubt.
				c.Tentative, c.Settled = true, &was
			}
			return err
		}))
	}
	if txns, err := command.LoadTxns(v.s.engine, rec.RangeID); err != nil {
		c.refuse(err)
	} else {
		for _, t := range txns.Records {
			w.revision = max(w.revision, t.Revision)
		}
	}
	c.End = End{
		Generation: w.rec.Generation, Start: key(w.rec.Span.Start), End: key(w.rec.Span.End),
		ConfIndex: w.confIndex, Members: membersOf(w.members), Merge: w.rec.Merge.ID,
	}
	c.Revision, c.SequencerTerm, c.Absorbs = w.revision, w.sequencer, w.absorbs
	v.collected.Copies = append(v.collected.Copies, *c)
	if c.Unusable != "" {
		return nil
	}
	v.replicas[rec.RangeID] = r
	for _, ch := range w.children {
		rec, err := command.DecodeRecord(ch.applied.Payload)
		if err != nil {
			return err
		}
		if _, have, err := v.s.engine.Applied(rec.RangeID.Group()); err != nil || have {
			if err != nil {
				return err
			}
			continue // it is here already, and may be newer
		}
		made := &Made{Parent: c.Range, Index: ch.index, Certain: ch.index <= c.Commit && (c.Made == nil || c.Made.Certain)}
		if err := v.addRange(made, ch.self, ch.applied); err != nil {
			return err
		}
	}
	return nil
}

// record returns the durable record of another range here.
func (v *view) record(r keyspace.RangeID) (rec command.Record, ok bool, err error) {
	a, ok, err := v.s.engine.Applied(r.Group())
	if err != nil || !ok {
		return rec, false, err
	}
	rec, err = command.DecodeRecord(a.Payload)
	return rec, err == nil, err
}
