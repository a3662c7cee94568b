package operate

import (
	"errors"
	"fmt"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// decider returns the view as package decide has it.
func (v *clusterView) decider(now clock.Time) *decide.Cluster {
	set := decide.Defaults()
	set.ReplicationFactor = placement.Replication(v.settings)
	c := decide.New(set, 1, now)
	states := map[fsm.NodeState]decide.NodeState{
		fsm.NodeServing: decide.Serving, fsm.NodeDraining: decide.Draining, fsm.NodeDecommissioned: decide.Decommissioning,
	}
	for i := range v.nodes {
		n := &v.nodes[i]
		state, takesPart := states[n.State]
		if !takesPart {
			continue
		}
		row := decide.Node{ID: n.ID, Zone: n.Attribute(zoneAttribute), State: state, Capacity: v.reports[n.ID].Capacity, Used: v.reports[n.ID].Used}
		if row.Silent = !v.answered(n.ID); row.Silent {
			row.SilentSince = now
		}
		row.Isolated = !row.Silent && v.isolated[n.ID]
		c.PutNode(row)
	}
	for i := range v.ranges {
		d := v.ranges[i]
		c.PutRange(decide.Range{Descriptor: d, Leader: v.leaders[d.Range], Bytes: v.led[d.Range].Bytes})
	}
	return c
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
