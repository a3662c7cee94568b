package simulate

import (
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
)

// start begins an operation, once it is found to be allowed.
func (w *World) start(op *decide.Operation) {
	g := w.rangeOf(op.Range)
	w.check(g, op)
	t := &task{op: *op, g: g, at: stageLast}
	g.task = t
	if op.Kind == decide.Merge {
		w.rangeOf(op.Other).task = t
	}
	w.trace(fmt.Sprintf("%s: %s", op.Reason, op.Why), "%s", op)
	if op.Kind == decide.AddReplica || op.Kind == decide.MoveReplica {
		t.at, t.left = stageCopy, op.Bytes
		w.node(op.To).receiving++
		w.node(op.Source).sending++
		if is, ok := g.d.ReplicaOn(op.To); !ok {
			w.reconfigure(g, append(slices.Clone(g.d.Replicas), w.replica(w.node(op.To), keyspace.RoleLearner)))
		} else if is.Role != keyspace.RoleLearner {
			w.violate(op, "the target has a voter already")
		}
	}
	w.tasks = append(w.tasks, t)
}

// reconfigure gives the range other replicas and reports that.
func (w *World) reconfigure(g *span, rs []keyspace.Replica) {
	g.d.Replicas = rs
	g.d.ConfIndex++
	w.put(g)
}

// work lets all operations go on for one step.
func (w *World) work() {
	// What ends in this step still shares the rates of the step.
	for _, t := range w.tasks {
		if t.gone {
			continue
		}
		w.advance(t)
	}
	w.tasks = slices.DeleteFunc(w.tasks, func(t *task) bool { return t.gone })
}

func (w *World) advance(t *task) {
	if !w.leads(t.g) || !w.hasQuorum(t.g) {
		return // nothing can be committed
	}
	if t.at == stageCopy {
		from, to := w.node(t.op.Source), w.node(t.op.To)
		if !from.up || !to.up || to.deaf {
			return
		}
		t.left -= w.copyRate / int64(max(from.sending, to.receiving, 1))
		if t.left > 0 {
			return
		}
		t.at = stageLast
		if t.op.Kind == decide.MoveReplica {
			w.join(t)
		}
		return
	}
	w.conclude(t)
}

// join brings the range into the joint configuration of a move.
func (w *World) join(t *task) {
	rs := slices.Clone(t.g.d.Replicas)
	for i := range rs {
		switch rs[i].Node {
		case t.op.To:
			rs[i].Role = keyspace.RoleVoterIncoming
		case t.op.From:
			rs[i].Role = keyspace.RoleVoterOutgoing
		}
	}
	if t.op.Lead != 0 {
		w.lead(t.g, t.op.Lead)
	}
	w.reconfigure(t.g, rs)
}

// lead makes another node the leader.
func (w *World) lead(g *span, to keyspace.NodeID) {
	if is, ok := g.d.ReplicaOn(to); ok && w.live(is) {
		w.Report.left(g, g.leader, w.now, true)
		w.Report.came(g, to, w.now, true)
		g.leader, g.hot = to, hotRange{}
	}
}

// conclude takes the last step of an operation.
func (w *World) conclude(t *task) {
	g := t.g
	switch t.op.Kind {
	case decide.AddReplica, decide.MoveReplica, decide.LeaveJoint:
		w.reconfigure(g, settled(g.d.Replicas, t.op.To))
		if t.op.Kind != decide.LeaveJoint {
			w.Report.came(g, t.op.To, w.now, false)
		}
		if t.op.Kind == decide.MoveReplica {
			w.Report.left(g, t.op.From, w.now, false)
		}
	case decide.RemoveReplica:
		if t.op.Lead != 0 {
			w.lead(g, t.op.Lead)
		}
		w.reconfigure(g, slices.DeleteFunc(slices.Clone(g.d.Replicas), func(r keyspace.Replica) bool { return r.Node == t.op.From }))
	case decide.TransferLeader:
		w.lead(g, t.op.Lead)
		w.put(g)
	case decide.Merge:
		w.merge(g, w.rangeOf(t.op.Other))
	}
	w.Report.count(&t.op)
	w.end(t, true)
}

// settled returns the replicas when a joint configuration is left, and the learner on a
// node is made a voter.
func settled(rs []keyspace.Replica, to keyspace.NodeID) []keyspace.Replica {
	out := make([]keyspace.Replica, 0, len(rs))
	for _, r := range rs {
		switch {
		case r.Role == keyspace.RoleVoterOutgoing:
			continue
		case r.Role == keyspace.RoleVoterIncoming || r.Node == to:
			r.Role = keyspace.RoleVoter
		case r.Role == keyspace.RoleVoterDemoting:
			r.Role = keyspace.RoleLearner
		}
		out = append(out, r)
	}
	return out
}

// end tells the decisions that the operation is over. An abandoned operation counts as one that
// has ended well, as with the real operator: the same way is not decided again, so the range
// need not be left alone for Patience.
func (w *World) end(t *task, done bool) {
	t.gone = true
	if t.op.Kind == decide.AddReplica || t.op.Kind == decide.MoveReplica {
		w.node(t.op.To).receiving--
		w.node(t.op.Source).sending--
	}
	t.g.task = nil
	if o := t.op.Other; o != 0 && w.rangeOf(o) != nil {
		w.rangeOf(o).task = nil
	}
	if !done {
		w.Report.Failed++
	}
	w.Report.lastEnd = w.now
	w.cluster.Finish(t.op.Range, w.now, true)
}

// merge lets the range absorb its right neighbour.
func (w *World) merge(g, o *span) {
	g.bytes, g.load, g.reported, g.to = g.bytes+o.bytes, g.load+o.load, g.reported+o.reported, o.to
	g.d.Generation = max(g.d.Generation, o.d.Generation) + 1
	g.d.Span = spanOf(g.from, g.to)
	g.born = w.now
	w.ranges[o.d.Range-1] = nil
	w.living--
	w.cluster.Finish(g.d.Range, w.now, true)
	w.cluster.RemoveRange(o.d.Range)
	w.put(g)
}

// facts are the world as requirements are checked against it.
type facts struct{ w *World }

func (f facts) Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	g := f.w.rangeOf(id)
	if g == nil {
		return keyspace.Descriptor{}, false
	}
	return g.d, true
}

func (f facts) Busy(id keyspace.RangeID) bool { return f.w.rangeOf(id).task != nil }

func (f facts) Node(id keyspace.NodeID) (decide.Node, bool) { return f.w.node(id).Node, true }

// check notes what is wrong with an operation, by rules of its own.
func (w *World) check(g *span, op *decide.Operation) {
	if err := op.Requires.Check(facts{w}); err != nil {
		w.violate(op, err.Error())
	}
	if !w.hasQuorum(g) {
		w.violate(op, "the range has no quorum")
	}
	handsOver := op.Reason == decide.Drain && op.Kind == decide.TransferLeader // needs nobody but the two
	if op.Reason >= decide.Drain && !handsOver && slices.ContainsFunc(g.d.Replicas, func(r keyspace.Replica) bool { return w.node(r.Node).Silent || w.closed[r.ID] }) {
		w.violate(op, "a replica is silent, and this is no repair")
	}
	if op.Kind != decide.AddReplica && op.Kind != decide.MoveReplica && op.Kind != decide.RemoveReplica {
		return
	}
	before, after := w.sharing(g.d.Replicas, 0, 0), w.sharing(g.d.Replicas, op.From, op.To)
	if after > before && w.betterPlace(g, op, after) {
		w.violate(op, "replicas share a zone without need")
	}
	if op.From != 0 && w.node(op.From).up {
		live := 0
		for _, n := range w.liveVoters(g) {
			if n != op.From {
				live++
			}
		}
		voters := len(w.voters(g))
		if op.Kind == decide.RemoveReplica {
			voters--
		} else {
			live++
		}
		if is, _ := g.d.ReplicaOn(op.From); votes(is.Role) && live <= voters/2 {
			w.violate(op, "no quorum is left")
		}
	}
}

func (w *World) voters(g *span) []keyspace.Replica {
	return slices.DeleteFunc(slices.Clone(g.d.Replicas), func(r keyspace.Replica) bool { return !votes(r.Role) })
}

// sharing counts the pairs of voters that share a zone, with one replica less and one more.
func (w *World) sharing(rs []keyspace.Replica, less, more keyspace.NodeID) int {
	var zones []string
	for _, r := range rs {
		if votes(r.Role) && r.Node != less && r.Node != more {
			zones = append(zones, w.node(r.Node).Zone)
		}
	}
	if more != 0 {
		zones = append(zones, w.node(more).Zone)
	}
	pairs := 0
	for i := range zones {
		for _, z := range zones[:i] {
			if z == zones[i] {
				pairs++
			}
		}
	}
	return pairs
}

// betterPlace says whether a node would have taken the replica with fewer pairs. It
// looks at all of them, so that large clusters are not asked.
func (w *World) betterPlace(g *span, op *decide.Operation, pairs int) bool {
	if len(w.nodes) > 200 || op.To == 0 {
		return false
	}
	for _, n := range w.nodes {
		_, has := g.d.ReplicaOn(n.ID)
		room := n.Capacity == 0 || w.bytesOn(n.ID)+g.bytes < n.Capacity*8/10
		if !has && n.up && !n.Isolated && n.State == decide.Serving && room && w.sharing(g.d.Replicas, op.From, n.ID) < pairs {
			return true
		}
	}
	return false
}

func (w *World) bytesOn(id keyspace.NodeID) int64 {
	var sum int64
	for _, g := range w.ranges {
		if g != nil {
			if _, ok := g.d.ReplicaOn(id); ok {
				sum += g.bytes
			}
		}
	}
	return sum
}

// maxViolations bounds what a report keeps of violations.
const maxViolations = 10

func (w *World) violate(op *decide.Operation, what string) {
	w.Report.Violated++
	if len(w.Report.Violations) < maxViolations {
		w.Report.Violations = append(w.Report.Violations, fmt.Sprintf("%s: %s", op.String(), what))
	}
}
