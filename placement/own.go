package placement

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
)

// ownMover carries out operations on the placement group itself: its leader is the node
// that carries out operations.
type ownMover struct {
	s    *Service
	term uint64
}

// Look implements Mover.
func (m ownMover) Look(context.Context, keyspace.NodeID, keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	return m.s.View().PlacementGroup(), m.s.o.Self, nil
}

// ChangeMembers implements Mover. Nobody else changes this configuration in this term, and
// raft refuses a change on top of one that is not applied: what was decided by is there yet.
func (m ownMover) ChangeMembers(ctx context.Context, _ keyspace.NodeID, _ keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	g := m.s.replica()
	if g == nil {
		return m.s.refusal()
	}
	if now := m.s.View().PlacementGroup().ConfIndex; now != confIndex {
		return kverror.New(kverror.WrongRange, "the members of the placement group are those of index %d, not %d", now, confIndex)
	}
	if who := m.s.shutdown.AnyStopping(ctx, m.s.o.Alive); who != 0 {
		// Whoever was told to go counts on those that stay.
		return kverror.New(kverror.Busy, "node %s is stopping", who)
	}
	if err := g.ChangeConf(ctx, m.term, changes, nil); err != nil {
		return fmt.Errorf("change the members of the placement group: %w", err)
	}
	return nil
}

// TransferTo implements Mover: the hand-outs end first, and the ceiling is lowered, so
// that no revision is left out.
func (m ownMover) TransferTo(ctx context.Context, _ keyspace.NodeID, _ keyspace.RangeID, to keyspace.NodeID) error {
	g := m.s.replica()
	if g == nil {
		return m.s.refusal()
	}
	var target keyspace.Replica // raft chooses
	if to != 0 {
		own, ok := m.s.View().PlacementGroup(), false
		if target, ok = own.ReplicaOn(to); !ok {
			return kverror.New(kverror.BadRequest, "node %s has no replica of the placement group", to)
		}
	}
	return m.s.transfer(ctx, g, target)
}
