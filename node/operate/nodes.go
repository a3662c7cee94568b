package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// find returns the node of a name or id.
func (v *clusterView) find(name string) (fsm.Node, error) {
	id, err := nodeNamed(v.nodes, name)
	if err == nil {
		i := slices.IndexFunc(v.nodes, func(n fsm.Node) bool { return n.ID == id })
		return v.nodes[i], nil
	}
	if id, gerr := nodeNamed(v.gone, name); gerr == nil {
		i := slices.IndexFunc(v.gone, func(n fsm.Node) bool { return n.ID == id })
		return fsm.Node{}, &adminapi.Refusal{
			Reason: fmt.Sprintf("node %s was removed from the cluster%s, and its id %s is never admitted again",
				name, at(v.gone[i].Since), id),
			NextStep: "add a new node in its place, with an empty data directory (--join, or etcdctl member add)",
			Removed:  true,
		}
	}
	return fsm.Node{}, err
}

// at says when something was, where that is known.
func at(when fsm.UnixMillis) string {
	if when == 0 {
		return ""
	}
	return " at " + when.Time().UTC().Format("2006-01-02 15:04:05 UTC")
}

// ShowNode implements adminapi.Backend.
func (a *Admin) ShowNode(ctx context.Context, name string) (*adminpb.NodeShowResponse, error) {
	v, err := a.completeView(ctx)
	if err != nil {
		return nil, err
	}
	n, err := v.find(name)
	if err != nil {
		return nil, err
	}
	out := &adminpb.NodeShowResponse{Node: v.row(&n), Stale: v.stale}
	bytes, leads := map[keyspace.RangeID]int64{}, v.ledBy(n.ID)
	for _, s := range v.lists[n.ID] {
		bytes[s.Descriptor.Range] = s.Bytes
	}
	for _, d := range v.held(n.ID) {
		m, _ := d.ReplicaOn(n.ID)
		out.Ranges = append(out.Ranges, &adminpb.NodeRange{
			Id: uint64(d.Range), Start: d.Span.Start, End: d.Span.End, Role: roleName(m.Role),
			Leads: leads[d.Range], Bytes: bytes[d.Range],
		})
	}
	for _, o := range v.operations { // also of the placement group, and of what it does not hold yet
		if o.From == n.ID || o.To == n.ID {
			out.Operations = append(out.Operations, operationRow(&o, v.byName))
		}
	}
	slices.SortFunc(out.Operations, func(a, b *adminpb.Operation) int { return cmp.Compare(a.GetId(), b.GetId()) })
	out.Quarantined = v.quarantined(n.ID, a.o.Clock.Now())
	row := out.GetNode()
	// A drain under way may be blocked by later events. The client takes a drained node for done if
	// it leads nothing and there is no refusal, so an unknown state must give one.
	unknown := v.unsure(n.ID) || v.leaderless(n.ID) != 0 || len(v.placement.Replicas) == 0
	if n.State == fsm.NodeServing || n.State == fsm.NodeDraining && (unknown || row.GetLeaders() > 0 || row.GetPlacementLeader()) {
		out.Drain = refusalRow(a.mayBecome(v, &n, fsm.NodeDraining))
	}
	if v.dead(&n) && out.GetDrain() == nil {
		out.Drain = refusalRow(v.whatOfDead(&n))
	}
	if n.State == fsm.NodeServing || n.State == fsm.NodeDraining ||
		n.State == fsm.NodeDecommissioned && (row.GetRanges() > 0 || row.GetPlacement()) {
		out.Decommission = refusalRow(a.mayBecome(v, &n, fsm.NodeDecommissioned))
	}
	if n.State == fsm.NodeDecommissioned && out.GetDecommission() == nil && len(out.GetOperations()) == 0 {
		out.Decommission = refusalRow(v.waits(n.ID))
	}
	return out, nil
}

func refusalRow(err error) *adminpb.Refusal {
	var r *adminapi.Refusal
	if !errors.As(err, &r) {
		return nil
	}
	return &adminpb.Refusal{Reason: r.Reason, NextStep: r.NextStep}
}

// changeAttempts bounds how often a change of a node is looked at anew because others began to
// leave meanwhile.
const changeAttempts = 16

// ChangeNode implements adminapi.Backend.
func (a *Admin) ChangeNode(ctx context.Context, change adminapi.NodeChange, name string) (row *adminpb.Node, err error) {
	defer a.explain(ctx, &err)
	for range changeAttempts {
		if row, err = a.changeNode(ctx, change, name); !errors.Is(err, kverror.BadRequest) {
			return row, err
		}
	}
	return nil, &adminapi.Refusal{Reason: kverror.Of(err).Detail, NextStep: "look with skein node show " + name + " how it is now, and try again"}
}

// changeNode is one attempt. BadRequest says that the nodes are not as they were looked at.
func (a *Admin) changeNode(ctx context.Context, change adminapi.NodeChange, name string) (*adminpb.Node, error) {
	v, err := a.completeView(ctx)
	if err != nil {
		return nil, err
	}
	n, err := v.find(name)
	if err != nil {
		return nil, err
	}
	if v.stale { // neither what the node is now nor what it may become is known
		return nil, kverror.NoLeader
	}
	to, err := plan(change, &n)
	if err != nil {
		return nil, err
	}
	if to == n.State {
		return v.row(&n), nil // it was asked for before
	}
	if err := a.mayBecome(v, &n, to); err != nil {
		return nil, err
	}
	if to == fsm.NodeRemoved {
		err = a.o.Placement.RemoveNode(ctx, n.ID)
	} else {
		err = a.o.Placement.SetNodeState(ctx, n.ID, n.State, to, leaving(v.nodes)...)
	}
	if err != nil {
		return nil, err
	}
	n.State, n.Leaves, n.Since = to, false, fsm.UnixMillis(a.o.Clock.Wall().UnixMilli())
	return v.row(&n), nil
}

// leaving returns the nodes that are on their way out.
func leaving(nodes []fsm.Node) []keyspace.NodeID {
	var ids []keyspace.NodeID
	for i := range nodes {
		if nodes[i].State.Leaving() {
			ids = append(ids, nodes[i].ID)
		}
	}
	return ids
}

// plan returns the state to which a change leads.
func plan(change adminapi.NodeChange, n *fsm.Node) (fsm.NodeState, error) {
	targets := map[adminapi.NodeChange]fsm.NodeState{
		adminapi.Drain: fsm.NodeDraining, adminapi.Undrain: fsm.NodeServing,
		adminapi.Decommission: fsm.NodeDecommissioned, adminapi.Recommission: fsm.NodeServing,
		adminapi.Remove: fsm.NodeRemoved,
	}
	to, ok := targets[change]
	if !ok {
		return 0, kverror.New(kverror.BadRequest, "there is no change %q of a node", change)
	}
	is, next := n.State, ""
	switch {
	case (is == fsm.NodeUnstarted || is == fsm.NodeUnstartedLearner) && change != adminapi.Remove:
		next = fmt.Sprintf("start it, or have it removed: etcdctl member remove %s", n.ID)
	case is == fsm.NodeDecommissioned && (change == adminapi.Drain || change == adminapi.Undrain):
		next = fmt.Sprintf("skein node recommission %s takes it back", n.Name)
	case is == fsm.NodeDraining && change == adminapi.Recommission:
		next = fmt.Sprintf("skein node undrain %s takes it back", n.Name)
	case is == fsm.NodeLearner && change == adminapi.Drain:
		next = "it leads nothing: stop it as it is"
	case is == fsm.NodeLearner && to == fsm.NodeServing:
		next = fmt.Sprintf("etcdctl member promote %s has it serve", n.ID)
	case is.Started() && is != fsm.NodeDecommissioned && change == adminapi.Remove:
		next = fmt.Sprintf("skein node decommission %s empties it first", n.Name)
	}
	if next == "" {
		return to, nil
	}
	return 0, &adminapi.Refusal{Reason: fmt.Sprintf("node %s is %s", cmp.Or(n.Name, n.ID.String()), is), NextStep: next}
}

// mayBecome says before a change why it would not come to its end.
func (a *Admin) mayBecome(v *clusterView, n *fsm.Node, to fsm.NodeState) error {
	switch to {
	case fsm.NodeDraining, fsm.NodeDecommissioned:
		if placement.Paused(v.settings) {
			return &adminapi.Refusal{Reason: "placement is paused, so that nothing would leave the node", NextStep: "have it go on with skein placement resume"}
		}
		if to == fsm.NodeDraining {
			return v.mayDrain(n, a.o.Clock.Now())
		}
		return v.mayDecommission(n, a.o.Clock.Now())
	case fsm.NodeRemoved:
		if held := len(v.held(n.ID)); held > 0 {
			return &adminapi.Refusal{
				Reason:   fmt.Sprintf("node %s still holds %d replicas", n.Name, held),
				NextStep: fmt.Sprintf("wait until it holds none: skein node decommission %s shows how far it is", n.Name),
			}
		}
	case fsm.NodeUnstarted, fsm.NodeServing, fsm.NodeUnstartedLearner, fsm.NodeLearner:
	}
	return nil
}
