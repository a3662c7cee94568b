package operate

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// decider returns the view as package decide has it.
func (v *clusterView) decider(now clock.Time) *decide.Cluster {
	set := decide.Defaults()
	set.ReplicationFactor = placement.Replication(v.settings)
	c := decide.New(set, 1, now)
	for i := range v.nodes {
		n := &v.nodes[i]
		row, takesPart := decideNode(n, v.reports[n.ID])
		if !takesPart {
			continue
		}
		if row.Silent = !v.answered(n.ID); row.Silent {
			row.SilentSince = now
		}
		row.Isolated = !row.Silent && v.isolated[n.ID]
		c.PutNode(row)
	}
	for i := range v.ranges {
		d := v.ranges[i]
		r := decide.Range{Descriptor: d, Leader: v.led[i].by, Quarantined: closedOf(&d, v.reports)}
		if s := v.led[i].says; s != nil {
			r.Bytes = s.Bytes
		}
		c.PutRange(r)
	}
	return c
}

// decideNode returns the node as package decide has it, but for who hears it. It is none of decide's if it does not take part.
func decideNode(n *fsm.Node, r Report) (row decide.Node, takesPart bool) {
	states := map[fsm.NodeState]decide.NodeState{
		fsm.NodeServing: decide.Serving, fsm.NodeDraining: decide.Draining, fsm.NodeDecommissioned: decide.Decommissioning,
	}
	state, takesPart := states[n.State]
	return decide.Node{ID: n.ID, Zone: n.Attribute(zoneAttribute), State: state, Capacity: r.Capacity, Used: r.Used, Full: r.NoMemory}, takesPart
}

// declining lists the nodes that are given no replicas now, as their reports and those that hear them say. If all who have reported are
// isolated, it says nothing of a single one, as for placement.
func declining(nodes []fsm.Node, reports map[keyspace.NodeID]Report, reached func(keyspace.NodeID) bool) (all []*adminpb.Declining) {
	set := decide.Defaults()
	central := false
	for _, r := range reports {
		central = central || !r.Isolated
	}
	for i := range nodes {
		n := &nodes[i]
		r := reports[n.ID]
		row, takesPart := decideNode(n, r)
		row.Silent, row.Isolated = !reached(n.ID), r.Isolated && central
		why := ""
		switch d := row.Declines(&set); {
		case !takesPart:
			why = "its state is " + n.State.String()
		case d == decide.DeclinesDisk:
			why = fmt.Sprintf("its disk is %.1f %% full, and above %.0f %% it gets none", float64(r.Used)/float64(r.Capacity)*100, set.FullAt*100)
		case d == decide.DeclinesMemory:
			why = "it has no memory for more (--memory-budget-bytes)"
		case d == decide.DeclinesIsolated:
			why = "it " + d.String() + ", and gets some only where a range has no other way"
		case d != decide.Accepts:
			why = "it " + d.String()
		}
		if why != "" {
			all = append(all, &adminpb.Declining{Node: cmp.Or(n.Name, n.ID.String()), Why: why})
		}
	}
	return all
}

// zoneAttribute is the attribute by whose value replicas are kept apart.
const zoneAttribute = "zone"

// refusal puts the names of nodes into what decide says.
func (v *clusterView) refusal(n *fsm.Node, err error) error {
	var r *decide.Refusal
	if !errors.As(err, &r) {
		return err
	}
	words := v.words()
	return &adminapi.Refusal{Reason: fmt.Sprintf("node %s cannot be %s: %s", n.Name, r.What, words.Replace(r.Why)), NextStep: words.Replace(r.Do)}
}

// quarantined returns the node's replicas in quarantine, and what is done about them.
func (v *clusterView) quarantined(n keyspace.NodeID, now clock.Time) (rows []*adminpb.Quarantine) {
	all := v.reports[n].Quarantined
	if len(all) == 0 {
		return nil
	}
	c := v.decider(now)
	for _, q := range all {
		row := &adminpb.Quarantine{Range: uint64(q.Range), ReplicaId: uint64(q.Replica), Reason: q.Reason, SinceUnixMs: int64(q.Since)}
		i := slices.IndexFunc(v.ranges, func(d keyspace.Descriptor) bool { return d.Range == q.Range })
		o, busy := v.operations[q.Range]
		switch {
		case i < 0 || !slices.ContainsFunc(v.ranges[i].Replicas, func(m keyspace.Replica) bool { return m.ID == q.Replica }):
			row.Outlook = "it is no member of the range any more, and is about to be removed"
		case busy:
			row.Outlook = "under way: " + v.words().Replace(o.String())
		case placement.Paused(v.settings):
			row.Outlook = "placement is paused: skein placement resume has it rebuilt"
		default:
			row.Outlook = v.words().Replace(c.Explain(q.Range))
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b *adminpb.Quarantine) int { return cmp.Compare(a.GetRange(), b.GetRange()) })
	return rows
}
