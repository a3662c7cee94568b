package placement

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// driverOptions joins the driver to the node's options and the placement group.
func (s *Service) driverOptions() driver.Options {
	return driver.Options{
		Self: s.o.Self, Clock: s.o.Clock, Logger: s.o.Logger, Metrics: s.o.Metrics.Driver, Group: ownGroup{s},
		Mover: s.o.Mover, OwnMover: func(term uint64) driver.Mover { return ownMover{s, term} }, Merger: s.o.Merger,
		Alive: s.o.Alive, Central: s.o.Central, BootOf: s.o.BootOf, Asked: s.sequencer.Asked, Processors: s.o.Processors, NodeDeadAfter: s.o.NodeDeadAfter,
		RangeMaxBytes: s.o.RangeMaxBytes, RangeSplitLoad: s.o.RangeSplitLoad, RangeMergeAfter: s.o.RangeMergeAfter,
		OperationPatience: s.o.OperationPatience, CopyBytesPerSecond: s.o.CopyBytesPerSecond, UpgradeAfter: s.o.UpgradeAfter,
	}
}

// ownGroup is the placement group as the driver sees it.
type ownGroup struct{ *Service }

// Propose implements driver.Group.
func (g ownGroup) Propose(ctx context.Context, term uint64, op fsm.Effect) fsm.Result {
	return g.propose(ctx, term, op)
}

// CanTransfer implements driver.Group.
func (g ownGroup) CanTransfer(ctx context.Context, to keyspace.ReplicaID) error {
	if r := g.replica(); r != nil {
		return r.CanTransfer(ctx, to)
	}
	return g.refusal()
}

// Wall implements driver.Group.
func (g ownGroup) Wall() fsm.UnixMillis { return g.wall() }

// ownMover executes operations on the placement group itself: its leader is the node
// that executes operations.
type ownMover struct {
	s    *Service
	term uint64
}

// Look implements driver.Mover.
func (m ownMover) Look(context.Context, keyspace.NodeID, keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	return m.s.View().PlacementGroup(), m.s.o.Self, nil
}

// ChangeMembers implements driver.Mover. Nobody else changes this configuration in this term, and
// raft refuses a change on top of one that is not applied: what was decided by is there yet.
func (m ownMover) ChangeMembers(ctx context.Context, _ keyspace.NodeID, _ keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	g := m.s.replica()
	if g == nil {
		return m.s.refusal()
	}
	if now := m.s.View().PlacementGroup().ConfIndex; now != confIndex {
		return kverror.New(kverror.WrongRange, "the members of the placement group are those of index %d, not %d", now, confIndex)
	}
	if err := g.ChangeConf(ctx, m.term, changes, nil); err != nil {
		return fmt.Errorf("change the members of the placement group: %w", err)
	}
	return nil
}

// TransferTo implements driver.Mover: the allocations end first, and the ceiling is lowered, so
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
