package driver

import (
	"context"
	"slices"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// removeEmptied removes the nodes that leave and hold nothing any more: who has asked for it
// may have gone. Nothing of it is decided here, so that a pause of decisions does not stop it;
// what the node holds is compared once more when the entry is applied.
func (d *decider) removeEmptied(ctx context.Context, v *fsm.View) {
	for _, id := range d.emptied(v) {
		if err := d.s.o.Group.Propose(ctx, d.term, fsm.RemoveNode{Node: id, Now: d.s.o.Group.Wall()}).Err; err != nil {
			// The next round tries again.
			d.s.o.Logger.Warn("a node that leaves holds nothing any more, and cannot be removed yet", zap.Stringer("peer", id), zap.Error(err))
			continue
		}
		d.s.o.Logger.Info("a node that left held nothing any more, and is removed", zap.Stringer("peer", id))
	}
}

// emptied returns the nodes that leave and hold nothing. The model keeps for each node what it
// holds, so nobody has to look at each range. It may lack the latest operations, and it does
// not know the placement group.
func (d *decider) emptied(v *fsm.View) (ids []keyspace.NodeID) {
	group := v.PlacementGroup()
	for id, n := range v.NodeRows() {
		if !n.Leaves || d.c.Holds(id) {
			continue
		}
		_, own := group.ReplicaOn(id)
		if !own && !slices.ContainsFunc(v.Operations(), func(o fsm.Operation) bool { return o.To == id }) {
			ids = append(ids, id)
		}
	}
	return ids
}
