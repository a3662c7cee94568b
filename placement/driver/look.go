package driver

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// look returns the range as its leader has it.
func (o *operator) look(ctx context.Context, id keyspace.RangeID) (d keyspace.Descriptor, leader keyspace.NodeID, err error) {
	if id == fsm.OwnGroup {
		return o.mover(id).Look(ctx, o.s.o.Self, id)
	}
	row, ok := o.s.o.Group.View().ByID(id)
	if !ok {
		return d, 0, fmt.Errorf("placement: there is no range %s", id)
	}
	ask := []keyspace.NodeID{row.Preferred}
	for _, m := range row.Descriptor.Replicas {
		ask = append(ask, m.Node)
	}
	err = kverror.NoLeader
	asked := map[keyspace.NodeID]bool{}
	for len(ask) > 0 && ctx.Err() == nil {
		node := ask[0]
		ask = ask[1:]
		if asked[node] || !o.s.o.Alive(node) {
			continue
		}
		asked[node] = true
		var says keyspace.NodeID
		var lerr error
		if d, says, lerr = o.s.o.Mover.Look(ctx, node, id); lerr != nil {
			err = lerr
			continue
		}
		if says == node {
			o.tracker.saw(id, node)
			return d, node, nil
		}
		if says != 0 {
			ask = slices.Insert(ask, 0, says)
		}
	}
	return d, 0, err
}

// copyTime returns how long a copy of the range may take beyond the patience for a step. For
// large ranges and a low bound these are hours. A copy that is given up begins anew.
func (o *operator) copyTime(id keyspace.RangeID) time.Duration {
	return time.Duration(copySlack * float64(o.tracker.of(id).Bytes) / float64(o.s.o.CopyBytesPerSecond) * float64(time.Second))
}

// howEnded names for the metrics how an operation has ended.
func howEnded(over bool) string {
	if over {
		return "done"
	}
	return "given-up"
}

// refresh has the map told how a range is by its leader's word.
func (o *operator) refresh(ctx context.Context, id keyspace.RangeID) error {
	d, _, err := o.look(ctx, id)
	if err != nil {
		return err
	}
	return o.s.o.Group.Propose(ctx, o.term, fsm.Report{Descriptors: []keyspace.Descriptor{d}}).Err
}

// serves says whether the node is in its ordinary state.
func serves(v *fsm.View, id keyspace.NodeID) bool {
	n, ok := v.Node(id)
	return ok && n.State == fsm.NodeServing
}

// mover returns who executes operations on a range, nil for nobody.
func (o *operator) mover(id keyspace.RangeID) Mover {
	if id == fsm.OwnGroup {
		return o.s.o.OwnMover(o.term)
	}
	return o.s.o.Mover
}
