package driver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// A large range at a low bound takes longer than the patience for a step.
func TestPatienceGrowsWithTheCopy(t *testing.T) {
	h := newTracker()
	h.put(claim{Measure: Measure{Range: 7, Bytes: 1 << 30}, leader: 1})
	o := &operator{s: &Driver{o: Options{OperationPatience: time.Minute, CopyBytesPerSecond: 1 << 20}}, tracker: h}
	for _, c := range []struct {
		op    fsm.Operation
		least time.Duration
		most  time.Duration
	}{
		{fsm.Operation{Kind: fsm.OperationMove, Range: 7}, time.Hour, 4 * time.Hour},
		{fsm.Operation{Kind: fsm.OperationAdd, Range: 7}, time.Hour, 4 * time.Hour},
		{fsm.Operation{Kind: fsm.OperationMove, Range: 8}, time.Minute, time.Minute},
		{fsm.Operation{Kind: fsm.OperationRemove, Range: 7}, time.Minute, time.Minute},
		{fsm.Operation{Kind: fsm.OperationTransfer, Range: 7}, TransferPatience, TransferPatience},
	} {
		if got := o.patience(&c.op); got < c.least || got > c.most {
			t.Errorf("%s is given up after %v, want %v to %v", &c.op, got, c.least, c.most)
		}
	}
}

// An operation that has ended between the look at all that are under way and its own turn is not
// executed once more.
func TestOperationThatHasEndedIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := fsm.Bootstrap{Cluster: 1, Nodes: []fsm.Node{{ID: 1}, {ID: 2}, {ID: 3}, {ID: 4}}}
		p := &idleMover{}
		s := stillDriver(b.FirstState(firstIndex).View(firstIndex, 1, nil), p)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		o := newOperator(s, 1, newTracker())
		o.carryOut(ctx, fsm.Operation{ID: 1, Range: 1, Kind: fsm.OperationAdd, To: 4, Replica: 99})
		if p.calls != 0 {
			t.Errorf("%d calls", p.calls)
		}
	})
}

// A merge under way makes both ranges busy for decisions, and one that is committed the one
// that is left: a new leader finds the other one in no map.
func TestMergeUnderWayIsDecided(t *testing.T) {
	for phase, other := range map[fsm.MergePhase]keyspace.RangeID{fsm.MergePreparing: 2, fsm.MergeBinding: 2, fsm.MergeCommitted: 0, fsm.MergeAborted: 2} {
		op := fsm.Operation{Range: 1, Kind: fsm.OperationMerge, Right: 2, Phase: phase}
		if got := decisionOf(&op, 3); got.Kind != decide.Merge || got.Range != 1 || got.Other != other {
			t.Errorf("%s: %s", phase, got.String())
		}
	}
}

// firstIndex is where the groups of these tests begin, as in raftgroup.
const firstIndex = 10

// idleMover counts what it is asked for, and does nothing.
type idleMover struct{ calls int }

func (m *idleMover) Look(context.Context, keyspace.NodeID, keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	m.calls++
	return keyspace.Descriptor{}, 0, errors.New("nobody leads")
}

func (m *idleMover) ChangeMembers(context.Context, keyspace.NodeID, keyspace.RangeID, uint64, []raftgroup.ConfChange) error {
	m.calls++
	return errors.New("nobody leads")
}

func (m *idleMover) TransferTo(context.Context, keyspace.NodeID, keyspace.RangeID, keyspace.NodeID) error {
	m.calls++
	return errors.New("nobody leads")
}

// stillGroup is a placement group that shows one state and takes no proposal.
type stillGroup struct {
	Group
	view *fsm.View
}

func (g stillGroup) View() *fsm.View { return g.view }

// stillDriver is a driver of a group that shows one state, where all nodes live.
func stillDriver(v *fsm.View, m Mover) *Driver {
	all := func(keyspace.NodeID) bool { return true }
	return New(Options{
		Self: 1, Clock: clock.Virtual(), Logger: zap.NewNop(), Metrics: NewMetrics(nil), Group: stillGroup{view: v},
		Mover: m, Alive: all, Central: all, BootOf: func(keyspace.NodeID) keyspace.BootID { return 1 },
	})
}
