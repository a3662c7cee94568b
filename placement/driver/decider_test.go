package driver

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// still is a decider of a cluster of five with ranges of three voters that are to have five,
// which runs nothing: the test does, a round at a time.
type still struct {
	t *testing.T
	*decider
	v   fsm.View
	ids []keyspace.RangeID
}

// fiveNodes is the state of a cluster of five nodes and as many ranges.
func fiveNodes() *fsm.View {
	b := fsm.Bootstrap{Cluster: 1, Nodes: []fsm.Node{{ID: 1}, {ID: 2}, {ID: 3}, {ID: 4}, {ID: 5}}}
	for _, k := range []string{"e", "j", "o", "t"} {
		b.SplitKeys = append(b.SplitKeys, []byte(k))
	}
	s := b.FirstState(firstIndex)
	for _, d := range b.Ranges() {
		s.Apply(firstIndex+1, fsm.MarkCreated{Ranges: []keyspace.RangeID{d.Range}})
	}
	return s.View(firstIndex+1, 1, nil)
}

func stillDecider(t *testing.T) *still {
	t.Helper()
	v := fiveNodes()
	st := &still{t: t, decider: newPair(stillDriver(v, &idleMover{}), 99, newTracker()), v: *v}
	for _, r := range st.v.Descriptors() {
		st.ids = append(st.ids, r.Range)
	}
	now := st.s.o.Clock.Now()
	st.feedNodes(&st.v, now)
	st.feedRanges(&st.v, now)
	for _, id := range st.ids { // as if all were led by a voter
		d, _ := st.v.Of(id)
		st.c.PutRange(decide.Range{Descriptor: d, Leader: d.Replicas[0].Node, Bytes: 1 << 20})
	}
	st.settings.ReplicationFactor = 5
	st.c.Set(st.settings)
	st.feed()
	return st
}

// feed is what a round does about operations, with the view as it is.
func (st *still) feed() {
	v := st.v
	st.feedOperations(&v, st.s.o.Clock.Now())
	st.view = &v
}

// viewHas says what the view has under way from now on.
func (st *still) viewHas(ops ...fsm.Operation) {
	st.v = *st.v.WithOperations(ops)
}

// decides says whether something is decided for the range now.
func (st *still) decides(id keyspace.RangeID) bool {
	decided := false
	for _, o := range st.c.Decide(st.s.o.Clock.Now()).Operations {
		decided = decided || o.Range == id
		st.c.Finish(o.Range, st.s.o.Clock.Now(), true)
	}
	return decided
}

// freeNode is a node without a replica of the range.
func (st *still) freeNode(id keyspace.RangeID) keyspace.NodeID {
	d, _ := st.v.Of(id)
	for n := keyspace.NodeID(1); ; n++ {
		if _, has := d.ReplicaOn(n); !has {
			return n
		}
	}
}

// The outcome of an operation counts, whether the decider is told of it before or after the
// view has it. An operation that was given up is not tried again at once. One that is done is
// followed by the next.
func TestOutcomesAreNotLost(t *testing.T) {
	for _, order := range []string{"told, then seen", "seen, then told", "told and seen at once"} {
		for _, done := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				st := stillDecider(t)
				id := st.ids[0]
				op := fsm.Operation{ID: 900, Range: id, Kind: fsm.OperationAdd, To: st.freeNode(id)}
				st.viewHas(op)
				st.operator.begin(id, op.ID)
				st.feed()
				if _, busy := st.c.UnderWay(id); !busy || st.decides(id) {
					t.Fatal("the operation is not counted")
				}
				switch order {
				case "told, then seen": // the view of this round was taken before
					st.over(&op, done)
					st.operator.end(id)
					st.feed()
					st.viewHas()
				case "seen, then told":
					st.viewHas()
					st.feed()
					if _, busy := st.c.UnderWay(id); !busy {
						t.Error("how it has ended was not waited for")
					}
					st.over(&op, done)
					st.operator.end(id)
				default:
					st.over(&op, done)
					st.viewHas()
					st.feed()
					st.operator.end(id)
				}
				st.feed()
				if _, busy := st.c.UnderWay(id); busy {
					t.Error("it is over, and counted yet")
				}
				if st.decides(id) != done {
					t.Errorf("%s, done %v: decided again %v", order, done, !done)
				}
				if len(st.ended) > 0 {
					t.Errorf("kept: %v", st.ended)
				}
			})
		}
	}
}

// An operation cannot be counted while a decision for its range is about to be refused. It is
// counted as soon as that is possible, though no other operation begins or ends.
func TestAnOperationIsCountedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := stillDecider(t)
		id := st.ids[1]
		st.c.Decide(st.s.o.Clock.Now())
		if _, busy := st.c.UnderWay(id); !busy {
			t.Fatal("nothing is decided")
		}
		op := fsm.Operation{ID: 901, Range: id, Kind: fsm.OperationMove, From: st.v.Lookup(nil).Descriptor.Replicas[0].Node, To: st.freeNode(id)}
		st.viewHas(op)
		st.feed()
		st.c.Finish(id, st.s.o.Clock.Now(), false)
		st.feed()
		if have := st.under[id]; have.ID != op.ID {
			t.Errorf("under way is %+v", have)
		}
		if is, busy := st.c.UnderWay(id); !busy || is.Kind != decide.MoveReplica {
			t.Errorf("counted is %v", is)
		}
	})
}

// A task without a record is given up like an operation if a node that it needs is silent. That
// ends with it: else the next operation on the range would be given up for it.
func TestGivenUpTaskIsForgotten(t *testing.T) {
	const leader = 1
	d := &decider{
		c: decide.New(decide.Defaults(), 1, 0), tasks: map[keyspace.RangeID]bool{7: false},
		giveUp: map[keyspace.RangeID]string{7: "node 1 is silent", 8: "node 2 is silent"}, under: map[keyspace.RangeID]fsm.Operation{},
	}
	d.c.PutNode(decide.Node{ID: leader})
	d.c.PutRange(decide.Range{Descriptor: keyspace.Descriptor{Range: 7, Generation: 1, ConfIndex: 1, Replicas: []keyspace.Replica{{ID: 1, Node: leader}}}, Leader: leader})
	if err := d.c.Begin(decide.Operation{Kind: decide.LeaveJoint, Range: 7, Source: leader}); err != nil {
		t.Fatal(err)
	}
	d.feedOperations(&fsm.View{}, 0)
	if _, busy := d.c.UnderWay(7); busy || len(d.giveUp) != 1 {
		t.Errorf("under way: %t, to be given up: %v", busy, d.giveUp)
	}
}

// TestAbandonMeansOneOperation: an operation may end while it is decided to give it up. Its
// range may have another one by then, which somebody has asked for since.
func TestAbandonMeansOneOperation(t *testing.T) {
	o := &operator{running: map[keyspace.RangeID]*work{}}
	o.begin(7, 12)
	if o.abandon(7, 11, "node 1 is silent"); o.abandoned(7) != "" {
		t.Errorf("operation 12 is given up for what was said of operation 11: %s", o.abandoned(7))
	}
	if o.abandon(7, 12, "node 2 is silent"); o.abandoned(7) == "" {
		t.Error("operation 12 is not given up")
	}
}

// For how long it is such a node counts from when this leader has seen it, also where that is
// before anything is decided.
func TestIsolatedFromWhenItIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		deaf := false
		s := stillDriver(fiveNodes(), &idleMover{})
		s.o.Central = func(id keyspace.NodeID) bool { return id != 4 || !deaf }
		d := newDecider(s, 1, newTracker(), nil)
		stranded := func() bool {
			now := s.o.Clock.Now()
			d.feedNodes(s.o.Group.View(), now)
			d.c.Decide(now)
			return d.c.Stranded(4)
		}
		time.Sleep(hearWithin - 5*time.Second)
		deaf = true
		d.feedNodes(s.o.Group.View(), s.o.Clock.Now())
		time.Sleep(d.settings.AbandonAfter - time.Second)
		if stranded() {
			t.Error("it counts as isolated since the term began")
		}
		if time.Sleep(time.Second); !stranded() {
			t.Error("it does not count as isolated for long")
		}
	})
}

// The numbers of reasons that are gone make no series without a name.
func TestMeasureNamesEachNeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := stillDecider(t)
		st.measure()
		m := st.s.o.Metrics.Pending
		if n := testutil.CollectAndCount(m); n != 8 {
			t.Errorf("%d needs are counted", n)
		}
		if m.DeleteLabelValues("") {
			t.Error("a need without a name is counted")
		}
	})
}
