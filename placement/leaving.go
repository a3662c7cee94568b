package placement

import (
	"context"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// removeEmptied removes the nodes that leave and hold nothing any more: who has asked for it
// may have gone. Nothing of it is decided here, so that a pause of decisions does not stop it;
// what the node holds is compared once more when the entry is applied.
func (d *decider) removeEmptied(ctx context.Context, v *View) {
	if d.looked.version == v.Version && d.looked.operations == v.operationsChanged {
		return
	}
	done := true
	for _, id := range v.emptied() {
		if err := d.s.propose(ctx, d.term, removeNode{Node: id, Now: d.s.wall()}).Err; err != nil {
			done = false // the next round tries again
			d.s.o.Logger.Warn("a node that leaves holds nothing any more, and cannot be removed yet", zap.Stringer("peer", id), zap.Error(err))
			continue
		}
		d.s.o.Logger.Info("a node that left held nothing any more, and is removed", zap.Stringer("peer", id))
	}
	if done {
		d.looked.version, d.looked.operations = v.Version, v.operationsChanged
	}
}

// emptied returns the nodes that leave and hold nothing.
func (v *View) emptied() (ids []keyspace.NodeID) {
	holds := map[keyspace.NodeID]bool{} // of the nodes that leave
	for id := range v.nodes {
		if v.nodes[id].Leaves {
			holds[id] = false
		}
	}
	if len(holds) == 0 {
		return nil
	}
	note := func(replicas []keyspace.Replica) {
		for i := range replicas {
			if _, leaves := holds[replicas[i].Node]; leaves {
				holds[replicas[i].Node] = true
			}
		}
	}
	note(v.own.Replicas)
	v.All(func(g *Range) bool {
		note(g.Descriptor.Replicas)
		return true
	})
	for i := range v.operations {
		note([]keyspace.Replica{{Node: v.operations[i].To}})
	}
	for id, held := range holds {
		if !held {
			ids = append(ids, id)
		}
	}
	return ids
}
