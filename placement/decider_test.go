package placement

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// pretended is a rig whose ranges are all pretended: they are led, change their members and
// report as real ones do. A node that is down is down for them too.
type pretended struct {
	*rig
	mu sync.Mutex
	// all is guarded by mu, as are bytes and load.
	all         map[keyspace.RangeID]*pretend
	bytes, load map[keyspace.RangeID]int64
	// quarantined are the replicas in quarantine, guarded by mu.
	quarantined []driver.Quarantined
}

// newPretended bootstraps a cluster of so many nodes, with a range more than borders.
func newPretended(t *testing.T, seed uint64, nodes int, borders ...string) *pretended {
	t.Helper()
	w := pretendedRig(t, seed, nodes, borders...)
	w.mover = func() driver.Mover { return w }
	w.startAll()
	return w
}

// pretendedRig is newPretended where nothing runs yet.
func pretendedRig(t *testing.T, seed uint64, nodes int, borders ...string) *pretended {
	t.Helper()
	w := &pretended{rig: newRig(t, seed, nodes, quiet, borders...), all: map[keyspace.RangeID]*pretend{}}
	w.bytes, w.load = map[keyspace.RangeID]int64{}, map[keyspace.RangeID]int64{}
	w.deadAfter = 2 * time.Minute
	// These tests wait for minutes of virtual time, in which a healthy cluster does little but
	// tick.
	w.tick = 500 * time.Millisecond
	for i, d := range w.bootstrap.Ranges() {
		p := newPretend(t, rand.New(rand.NewPCG(seed, uint64(i))), d)
		p.report = w.report
		w.all[d.Range], w.bytes[d.Range] = p, 64<<20
	}
	w.measurer = func(n keyspace.NodeID) driver.Measurer { return seat{w, n} }
	return w
}

func (w *pretended) of(id keyspace.RangeID) (*pretend, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.all[id]; p != nil {
		return p, nil
	}
	return nil, kverror.RangeNotHere
}

// Look implements driver.Mover.
func (w *pretended) Look(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	p, err := w.of(id)
	if err != nil {
		return keyspace.Descriptor{}, 0, err
	}
	return p.Look(ctx, node, id)
}

// ChangeMembers implements driver.Mover.
func (w *pretended) ChangeMembers(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	p, err := w.of(id)
	if err != nil {
		return err
	}
	return p.ChangeMembers(ctx, node, id, confIndex, changes)
}

// TransferTo implements driver.Mover.
func (w *pretended) TransferTo(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error {
	p, err := w.of(id)
	if err != nil {
		return err
	}
	return p.TransferTo(ctx, node, id, to)
}

// seat is one node of them.
type seat struct {
	w    *pretended
	node keyspace.NodeID
}

// Led implements driver.Measurer.
func (s seat) Led() (l []driver.Measure) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	for id, p := range s.w.all {
		p.mu.Lock()
		if p.leader == s.node {
			l = append(l, driver.Measure{Range: id, Term: p.term, Bytes: s.w.bytes[id], Load: s.w.load[id]})
		}
		p.mu.Unlock()
	}
	return l
}

// Disk implements driver.Measurer.
func (s seat) Disk() (capacity, used int64) { return 1 << 40, 0 }

// Full implements driver.Measurer.
func (s seat) Full() bool { return false }

// Alarms implements driver.Measurer.
func (s seat) Alarms() (noSpace, corrupt bool) { return false, false }

// Quarantined implements driver.Measurer: what is in quarantine and no member any more is removed.
func (s seat) Quarantined() (qs []driver.Quarantined) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	for _, q := range s.w.quarantined {
		p := s.w.all[q.Range]
		p.mu.Lock()
		if m, ok := p.d.ReplicaOn(s.node); ok && m.ID == q.Replica {
			qs = append(qs, q)
		}
		p.mu.Unlock()
	}
	return qs
}

// kill takes a node from the rig and from the ranges, whose other voters lead then.
func (w *pretended) kill(id keyspace.NodeID) {
	w.nodes[id-1].crash()
	w.each(func(p *pretend) {
		p.dead[id] = true
		if p.leader != id {
			return
		}
		p.leader = 0
		p.term++
		for _, m := range p.d.Replicas {
			if m.Role == keyspace.RoleVoter && !p.dead[m.Node] {
				p.leader = m.Node
			}
		}
	})
}

// revive starts it again.
func (w *pretended) revive(id keyspace.NodeID) {
	w.each(func(p *pretend) { delete(p.dead, id) })
	w.nodes[id-1].start()
}

func (w *pretended) each(f func(*pretend)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.all {
		p.mu.Lock()
		f(p)
		p.mu.Unlock()
	}
}

// steps counts the steps that operations have taken.
func (w *pretended) steps() (n int) {
	w.each(func(p *pretend) { n += p.steps })
	return n
}

// on counts the replicas and the leaders on a node.
func (w *pretended) on(id keyspace.NodeID) (replicas, leaders int) {
	w.each(func(p *pretend) {
		if _, ok := p.d.ReplicaOn(id); ok {
			replicas++
		}
		if p.leader == id {
			leaders++
		}
	})
	return replicas, leaders
}

// whole says whether each range has so many voters, all on nodes that live, and nothing
// else.
func (w *pretended) whole(voters int) error {
	var err error
	w.each(func(p *pretend) {
		bad := len(p.d.Replicas) != voters
		for _, m := range p.d.Replicas {
			bad = bad || m.Role != keyspace.RoleVoter || p.dead[m.Node]
		}
		if bad {
			err = fmt.Errorf("range %s has %v", p.d.Range, p.d.Replicas)
		}
	})
	return err
}

// await waits until something holds, and nothing is under way.
func (w *pretended) await(limit time.Duration, what string, holds func() error) {
	w.t.Helper()
	began := time.Now()
	for {
		err := holds()
		ops, operr := w.leader().client.Operations(w.t.Context())
		if err == nil && operr == nil && len(ops) == 0 {
			return
		}
		if time.Since(began) > limit {
			w.t.Fatalf("%s: not within %v: %v; under way: %v, %v", what, limit, err, ops, operr)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

var fourBorders = []string{"d", "h", "n", "t"}

// While all is well nothing is decided, whoever leads.
func TestNothingIsDecidedWhileAllIsWell(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 51, 3, "h", "p")
		for range 3 {
			time.Sleep(3 * time.Minute)
			n := w.leader()
			n.crash()
			time.Sleep(2 * time.Second)
			n.start()
		}
		time.Sleep(time.Minute)
		if n := w.steps(); n != 0 {
			t.Errorf("%d steps of operations were taken", n)
		}
	})
}

// A forgotten leader of a range is found again, though the leader does not report it twice.
func TestLeadersAreSought(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 53, 3, "h", "p")
		time.Sleep(time.Minute)
		l := w.leader()
		h := l.service.tracker
		h.Forget()
		time.Sleep((driver.BareSurveys + 3) * driver.SurveyEvery)
		w.each(func(p *pretend) {
			if leader, got := h.Leader(p.d.Range); leader != p.leader || got.Bytes != 64<<20 {
				t.Errorf("range %s is led by node %s, and placement has heard of %s, and of %d bytes", p.d.Range, p.leader, leader, got.Bytes)
			}
		})
	})
}

// The replicas of a node that is silent for long are rebuilt elsewhere, also if placement's
// leader is lost on the way. A node that comes back in time keeps them.
func TestRepair(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 52, 5, fourBorders...)
		time.Sleep(20 * time.Second)
		w.kill(4)
		time.Sleep(w.deadAfter - 20*time.Second)
		w.revive(4)
		time.Sleep(time.Minute)
		if n := w.steps(); n != 0 {
			t.Fatalf("%d steps were taken for a node that came back in time", n)
		}
		w.kill(4)
		time.Sleep(w.deadAfter - 10*time.Second)
		if n := w.steps(); n != 0 {
			t.Fatalf("%d steps were taken before the node counted as lost", n)
		}
		if err := w.whole(3); err == nil {
			t.Fatal("the lost node had no replica")
		}
		w.await(30*time.Second, "repair", func() error { return w.whole(3) })
		lost := w.leader().id
		w.kill(lost)
		w.await(w.deadAfter+90*time.Second, "repair after the loss of a leader", func() error { return w.whole(3) })
		w.revive(4)
		w.revive(lost)
		// Replicas that the repair has copied stay where they are for ten minutes.
		w.await(15*time.Minute, "balance", func() error {
			for _, id := range []keyspace.NodeID{4, lost} {
				if replicas, leaders := w.on(id); replicas < 2 || leaders > 2 {
					return fmt.Errorf("node %s has %d replicas and leads %d", id, replicas, leaders)
				}
			}
			return w.whole(3)
		})
	})
}

// Steps fail, or seem to fail, and leaders of placement come and go in the midst of repairs. In
// the end every range is whole, and no replica was added twice.
func TestRepairThroughFailures(t *testing.T) {
	seeds := uint64(3)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		virtually(t, func(t *testing.T) {
			w := newPretended(t, 60+seed, 5, fourBorders...)
			w.each(func(p *pretend) { p.failures = 0.5 })
			time.Sleep(10 * time.Second)
			lost := keyspace.NodeID(1 + seed)
			w.kill(lost)
			time.Sleep(w.deadAfter - time.Second)
			for range 6 {
				time.Sleep(time.Duration(w.rng.IntN(4000)) * time.Millisecond)
				n := w.leader()
				to := keyspace.NodeID(1 + w.rng.IntN(5))
				if to != lost {
					_ = n.client.TransferLeader(t.Context(), to)
				}
			}
			w.await(5*time.Minute, "repair", func() error { return w.whole(3) })
		})
	}
}

// The replication factor goes up and down; what is impossible is refused with a reason.
// While decisions are paused none is made.
func TestReplicationFactor(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 53, 5, fourBorders...)
		ctx, set := t.Context(), func(name, value string) error {
			return w.nodes[3].client.PutSetting(t.Context(), name, []byte(value))
		}
		for _, v := range []string{"4", "0", "-1", "x", "7", "9"} {
			if err := set(fsm.SettingReplication, v); err == nil || kverror.Of(err).Kind != kverror.BadRequest {
				t.Errorf("%s voters: %v", v, err)
			}
		}
		if err := set(fsm.SettingPaused, "true"); err != nil {
			t.Fatal(err)
		}
		if err := set(fsm.SettingReplication, "5"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if n := w.steps(); n != 0 {
			t.Fatalf("%d steps while decisions are paused", n)
		}
		if err := set(fsm.SettingPaused, ""); err != nil {
			t.Fatal(err)
		}
		w.await(time.Minute, "five voters", func() error { return w.whole(5) })
		if err := set(fsm.SettingReplication, "3"); err != nil {
			t.Fatal(err)
		}
		w.await(time.Minute, "three voters", func() error { return w.whole(3) })
		if ops, err := w.nodes[0].client.Operations(ctx); err != nil || len(ops) != 0 {
			t.Errorf("under way: %v, %v", ops, err)
		}
	})
}

// A node that was empty takes its share, in bytes and in leaders, with few moves.
func TestEmptyNodeTakesItsShare(t *testing.T) {
	virtually(t, func(t *testing.T) {
		var borders []string
		for c := 'b'; c <= 'q'; c++ {
			borders = append(borders, string(c))
		}
		w := newPretended(t, 54, 4, borders[:15]...)
		// As if the fourth node had come after all others were full.
		w.each(func(p *pretend) {
			p.d.Replicas = slices.Clone(p.d.Replicas)
			for i := range p.d.Replicas {
				p.d.Replicas[i].Node = keyspace.NodeID(i + 1)
			}
			p.d.ConfIndex++
			p.leader, p.term = keyspace.NodeID(1+uint64(p.d.Range)%3), p.term+1
			p.report(p.d)
		})
		// What was moved for balance is left alone for ten minutes.
		w.await(30*time.Minute, "balance", func() error {
			for id := keyspace.NodeID(1); id <= 4; id++ {
				replicas, leaders := w.on(id)
				if replicas < 11 || replicas > 13 || leaders < 3 || leaders > 5 {
					return fmt.Errorf("node %s has %d replicas and leads %d", id, replicas, leaders)
				}
			}
			return w.whole(3)
		})
		added := 0
		w.each(func(p *pretend) { added += len(p.added) })
		if added > 13 {
			t.Errorf("%d replicas were copied, 12 are the share of an empty node", added)
		}
	})
}

// TestLeadsGatherAtTheSequencer: leads of ranges in use go to the sequencer's node while that has little to do, and
// once it has much they are spread.
func TestLeadsGatherAtTheSequencer(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 71, 3, fourBorders...)
		var part atomic.Int64 // of the processors, in percent
		began := time.Now()
		w.processors = func() (time.Duration, float64) { return time.Since(began) * time.Duration(part.Load()) / 100, 1 }
		w.mover = func() driver.Mover { return w }
		for id := range w.all {
			w.load[id] = 200
		}
		w.startAll()
		w.await(5*time.Minute, "all leads are at the sequencer", func() error {
			if _, leads := w.on(w.leader().id); leads != len(w.all) {
				return fmt.Errorf("node %s has %d leads of %d", w.leader().id, leads, len(w.all))
			}
			return nil
		})
		part.Store(90)
		w.await(20*time.Minute, "leads are spread", func() error {
			for id := keyspace.NodeID(1); id <= 3; id++ {
				if _, leads := w.on(id); leads < 1 || leads > 2 {
					return fmt.Errorf("node %s has %d leads", id, leads)
				}
			}
			return nil
		})
	})
}

// A node that is drained leads nothing soon and keeps its replicas; one that is
// decommissioned holds nothing soon, and can be removed. Both can be taken back.
func TestDrainAndDecommission(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 55, 5, fourBorders...)
		ctx, c := t.Context(), w.nodes[0].client
		time.Sleep(20 * time.Second)
		held, led := w.on(2)
		if held == 0 || led == 0 {
			t.Fatalf("node 2 has %d replicas and leads %d", held, led)
		}
		if err := c.SetNodeState(ctx, 2, fsm.NodeServing, fsm.NodeDraining); err != nil {
			t.Fatal(err)
		}
		w.await(20*time.Second, "drain", func() error {
			if is, leads := w.on(2); is != held || leads != 0 {
				return fmt.Errorf("node 2 has %d replicas of %d and leads %d", is, held, leads)
			}
			return nil
		})
		if err := c.SetNodeState(ctx, 2, fsm.NodeDraining, fsm.NodeDecommissioned); err != nil {
			t.Fatal(err)
		}
		if err := c.RemoveNode(ctx, 2); err == nil {
			t.Error("a node that holds replicas was removed")
		}
		w.await(time.Minute, "decommission", func() error {
			if is, leads := w.on(2); is != 0 || leads != 0 {
				return fmt.Errorf("node 2 has %d replicas and leads %d", is, leads)
			}
			return w.whole(3)
		})
		w.await(time.Minute, "the placement group leaves it too", func() error {
			own := w.leader().service.View().PlacementGroup()
			if _, has := own.ReplicaOn(2); has || len(own.Replicas) != 4 {
				return fmt.Errorf("the placement group is on %v", own.Replicas)
			}
			return nil
		})
		if err := c.SetNodeState(ctx, 2, fsm.NodeDecommissioned, fsm.NodeServing); err != nil {
			t.Fatal(err)
		}
		w.await(30*time.Minute, "the share of a node that was taken back", func() error {
			if is, _ := w.on(2); is < 2 {
				return fmt.Errorf("node 2 has %d replicas", is)
			}
			return w.whole(3)
		})
	})
}

// Whom a leader does not reach cannot take the lead of its ranges over: another one does, and the
// drain comes to its end.
func TestDrainBesideWhoCannotLead(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 63, 3, fourBorders...)
		time.Sleep(20 * time.Second)
		w.each(func(p *pretend) { p.lagging = map[keyspace.NodeID]bool{2: true} })
		w.setState(1, fsm.NodeServing, fsm.NodeDraining)
		w.await(time.Minute, "drain", func() error {
			if _, leads := w.on(1); leads != 0 {
				return fmt.Errorf("node 1 leads %d", leads)
			}
			return nil
		})
	})
}

// Two nodes are drained, and the third does not follow yet. The lead does not go to and fro
// between the two. It waits, and goes to the third once that can have it.
func TestDrainOfTwoIsNotToAndFro(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 66, 3, fourBorders...)
		time.Sleep(20 * time.Second)
		w.each(func(p *pretend) { p.lagging = map[keyspace.NodeID]bool{3: true} })
		w.setState(1, fsm.NodeServing, fsm.NodeDraining)
		w.setState(2, fsm.NodeServing, fsm.NodeDraining, 1)
		terms := func() (sum uint64) {
			w.each(func(p *pretend) { sum += p.term })
			return sum
		}
		time.Sleep(5 * time.Second)
		before := terms()
		time.Sleep(time.Minute)
		if n := terms() - before; n > 0 {
			t.Errorf("the lead has changed %d times within a minute", n)
		}
		w.each(func(p *pretend) { p.lagging = nil })
		w.await(time.Minute, "drain", func() error {
			if _, leads := w.on(3); leads != len(fourBorders)+1 {
				return fmt.Errorf("node 3 leads %d", leads)
			}
			return nil
		})
	})
}

// A transfer for balance to a node that cannot lead is given up sooner than a copy. Each
// attempt stops the range for a moment, and nothing else is done for it meanwhile.
func TestTransferForBalanceIsGivenUpSoon(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 68, 3, fourBorders...)
		time.Sleep(20 * time.Second)
		var id keyspace.RangeID
		var from keyspace.NodeID
		w.each(func(p *pretend) {
			p.lagging = map[keyspace.NodeID]bool{2: true}
			if p.leader != 2 {
				id, from = p.d.Range, p.leader
			}
		})
		if _, err := w.leader().client.BeginOperation(t.Context(), fsm.Operation{Range: id, Kind: fsm.OperationTransfer, From: from, To: 2}); err != nil {
			t.Fatal(err)
		}
		w.await(driver.TransferPatience+5*time.Second, "it is given up", func() error { return nil })
		if n := testutil.ToFloat64(w.leader().service.o.Metrics.Driver.OperationsEnded.WithLabelValues("transfer", "given-up")); n != 1 {
			t.Errorf("%.0f transfers were given up", n)
		}
	})
}

// An operation on the placement group that does not get on keeps nobody who is drained leading it:
// whoever leads next goes on with it.
func TestPlacementLeaderIsDrainedBesideAnOperation(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 67, 4)
		w.mover = func() driver.Mover { return w }
		w.bootstrap.PlacementReplicas = 3
		w.patience = time.Hour
		w.startAll()
		w.nodes[3].closed.Store(true)
		w.leadBy(w.nodes[0])
		ctx := t.Context()
		o, err := w.nodes[1].client.BeginOperation(ctx, fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationMove, From: 3, To: 4})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		w.setState(1, fsm.NodeServing, fsm.NodeDraining)
		time.Sleep(10 * time.Second)
		if l := w.leader(); l == nil || l.id == 1 {
			t.Error("who is drained leads placement on")
		}
		if ops, err := w.nodes[1].client.Operations(ctx); err != nil || len(ops) != 1 || ops[0].ID != o.ID {
			t.Fatalf("under way: %v, %v; want %s", ops, err, &o)
		}
		w.nodes[3].closed.Store(false)
		w.awaitOwn(w.nodes[1], o.ID)
		if err := w.group(1, 2, 4); err != nil {
			t.Error(err)
		}
	})
}

// A drained node does not hand placement to a node whose replica of it is being moved. That
// node would hand the lead on at once, perhaps back, and so to and fro for as long as the copy
// does not come.
func TestPlacementIsNotHandedToWhoLeavesIt(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 70, 4)
		w.mover = func() driver.Mover { return w }
		w.bootstrap.PlacementReplicas = 3
		w.patience = time.Hour
		w.startAll()
		w.nodes[3].closed.Store(true)
		w.leadBy(w.nodes[0])
		o, err := w.nodes[1].client.BeginOperation(t.Context(), fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationMove, From: 2, To: 4})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		w.setState(1, fsm.NodeServing, fsm.NodeDraining)
		time.Sleep(10 * time.Second)
		before := w.leader().service.machine.leaderState().Term
		time.Sleep(time.Minute)
		if l := w.leader(); l == nil || l.id != 3 {
			t.Errorf("%v leads placement, want node 3", l)
		} else if n := l.service.machine.leaderState().Term - before; n > 0 {
			t.Errorf("the lead has changed %d times within a minute", n)
		}
		w.nodes[3].closed.Store(false)
		w.awaitOwn(w.nodes[2], o.ID)
		if err := w.group(1, 3, 4); err != nil {
			t.Error(err)
		}
	})
}

// If nobody can take the lead of placement from a drained node, that node does the work
// meanwhile: the next loss would stop the group.
func TestPlacementIsRepairedByADrainedLeader(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 71, 4)
		w.mover = func() driver.Mover { return w }
		w.bootstrap.PlacementReplicas = 3
		w.startAll()
		time.Sleep(10 * time.Second)
		w.leadBy(w.nodes[0])
		w.setState(2, fsm.NodeServing, fsm.NodeDraining)
		w.kill(3)
		w.setState(1, fsm.NodeServing, fsm.NodeDraining, 2)
		w.await(w.deadAfter+time.Minute, "repair", func() error { return w.group(1, 2, 4) })
		w.await(time.Minute, "hand-over", func() error {
			if l := w.leader(); l.id != 4 {
				return fmt.Errorf("node %s leads placement", l.id)
			}
			return nil
		})
	})
}

// The placement group's copy to a node that is silent is given up as soon as those of ranges are,
// long before the patience with operations ends.
func TestPlacementGroupIsNotKeptFromRepair(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 64, 5)
		w.mover = func() driver.Mover { return w }
		w.bootstrap.PlacementReplicas = 3
		w.patience = time.Hour
		w.startAll()
		w.nodes[3].closed.Store(true)
		time.Sleep(10 * time.Second)
		w.kill(3)
		time.Sleep(w.deadAfter + 30*time.Second)
		ops, err := w.leader().client.Operations(t.Context())
		if err != nil || !slices.ContainsFunc(ops, func(o fsm.Operation) bool { return o.Range == fsm.OwnGroup && o.To == 4 }) {
			t.Fatalf("under way: %v, %v; want the placement group on its way to node 4", ops, err)
		}
		w.kill(4)
		w.await(90*time.Second, "repair", func() error { return w.group(1, 2, 5) })
	})
}

// So it is with nodes that are heard and never get their copy: another one has its turn, and
// where two such nodes come first, the third.
func TestPlacementGroupGoesElsewhere(t *testing.T) {
	for _, vain := range []int{1, 2} {
		t.Run(fmt.Sprint(vain), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				w := pretendedRig(t, uint64(64+vain), 4+vain)
				w.mover = func() driver.Mover { return w }
				w.bootstrap.PlacementReplicas = 3
				w.startAll()
				for i := range vain {
					w.nodes[3+i].closed.Store(true)
				}
				time.Sleep(10 * time.Second)
				w.kill(3)
				w.await(w.deadAfter+time.Duration(vain)*2*time.Minute, "repair", func() error { return w.group(1, 2, keyspace.NodeID(4+vain)) })
			})
		})
	}
}

// group says whether the placement group is held by the nodes.
func (w *pretended) group(want ...keyspace.NodeID) error {
	if is := w.leader().members(); !slices.Equal(is, want) {
		return fmt.Errorf("the placement group has %v", is)
	}
	return nil
}

// Replicas of a range, and of the placement group, go to different zones as soon as there are some.
func TestZones(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 56, 6, fourBorders...)
		zone := map[keyspace.NodeID]string{1: "a", 2: "a", 3: "a", 4: "b", 5: "b", 6: "c"}
		for _, n := range w.nodes {
			row := w.bootstrap.Nodes[n.id-1]
			row.Attributes = []fsm.Attribute{{Key: "zone", Value: zone[n.id]}}
			if err := n.client.Publish(t.Context(), row); err != nil {
				t.Fatal(err)
			}
		}
		w.await(5*time.Minute, "spread over zones", func() error {
			var err error
			w.each(func(p *pretend) {
				zones := map[string]bool{}
				for _, m := range p.d.Replicas {
					zones[zone[m.Node]] = true
				}
				if len(zones) < 3 {
					err = fmt.Errorf("range %s has %v", p.d.Range, p.d.Replicas)
				}
			})
			voters := map[string]int{}
			for _, id := range w.leader().members() {
				if voters[zone[id]]++; voters[zone[id]] > 2 {
					err = fmt.Errorf("the placement group has %v", w.leader().members())
				}
			}
			return errors.Join(err, w.whole(3))
		})
	})
}

// The placement group's copy to a node in another zone never comes, and is given up soon: once, and
// a voter that is lost then is repaired with another node at once.
func TestSpreadOfThePlacementGroupIsGivenUp(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 69, 7)
		w.mover = func() driver.Mover { return w }
		for i, zone := range []string{"a", "a", "a", "b", "b", "c", "a"} {
			w.bootstrap.Nodes[i].Attributes = []fsm.Attribute{{Key: "zone", Value: zone}}
		}
		w.startAll()
		w.nodes[5].closed.Store(true)
		w.leadBy(w.nodes[0])
		time.Sleep(5 * time.Minute)
		if n := testutil.ToFloat64(w.leader().service.o.Metrics.Driver.OperationsEnded.WithLabelValues("move", "given-up")); n != 1 {
			t.Errorf("%.0f moves were given up, want 1", n)
		}
		w.kill(4)
		w.await(w.deadAfter+20*time.Second, "repair", func() error { return w.group(1, 2, 3, 5, 7) })
	})
}

// A placement group of three in a cluster of six gets five voters. A copy that never comes is given
// up soon, since it would hold up a repair, and another node gets the voter.
func TestPlacementGroupGrows(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 70, 6)
		w.mover, w.patience = func() driver.Mover { return w }, 10*time.Minute
		w.bootstrap.PlacementReplicas = 3
		w.startAll()
		w.nodes[4].closed.Store(true)
		w.leadBy(w.nodes[0])
		w.await(3*time.Minute, "five voters", func() error { return w.group(1, 2, 3, 4, 6) })
		w.kill(1)
		w.kill(2)
		w.await(time.Minute, "the group goes on without two", func() error {
			_, err := w.leader().client.PlacementGroup(t.Context())
			return err
		})
	})
}

// A node that hears hardly any other hands over what it leads by itself. It is given no
// leaders, which it would hand back at once, and no replicas, until it hears the others again.
// If so many nodes are lost that every node is isolated, isolation means nothing.
func TestIsolatedNodeIsGivenNothing(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 57, 4, fourBorders...)
		w.deafen(4)
		w.each(func(p *pretend) {
			if p.leader != 4 {
				return
			}
			p.term++
			for _, m := range p.d.Replicas {
				if m.Node != 4 {
					p.leader = m.Node
				}
			}
		})
		time.Sleep(2 * time.Minute)
		if held, led := w.on(4); held == 0 || led != 0 {
			t.Errorf("a node that hears hardly any other has %d replicas and leads %d", held, led)
		}
		w.deafen()
		w.await(15*time.Minute, "leaders of a node that hears the others again", func() error {
			if _, led := w.on(4); led == 0 {
				return errors.New("it leads nothing")
			}
			return w.whole(3)
		})
	})
}

// A range or the placement group that the next loss would stop goes to an isolated node if
// there is no other one.
func TestIsolatedNodeTakesWhatIsAtRisk(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 58, 4, fourBorders...)
		w.mover = func() driver.Mover { return w }
		w.bootstrap.PlacementReplicas = 3
		w.deafen(4)
		w.startAll()
		time.Sleep(10 * time.Second)
		w.kill(3)
		w.await(w.deadAfter+time.Minute, "repair", func() error {
			if is, want := w.leader().members(), []keyspace.NodeID{1, 2, 4}; !slices.Equal(is, want) {
				return fmt.Errorf("the placement group has %v", is)
			}
			return w.whole(3)
		})
	})
}

// towardsIsolated is a cluster of five with node 3 lost and node 5 drained. Its placement
// group, of three, and one of its ranges wait for copies to node 4, which is isolated and gets
// none.
func towardsIsolated(t *testing.T, seed uint64) *pretended {
	t.Helper()
	w := pretendedRig(t, seed, 5, fourBorders...)
	w.mover = func() driver.Mover { return w }
	w.bootstrap.PlacementReplicas = 3
	w.patience = time.Hour
	w.tick = 0 // a replica is promoted within the moment in which a better node comes
	w.deafen(4)
	w.each(func(p *pretend) { p.starved = map[keyspace.NodeID]bool{4: true} })
	w.startAll()
	w.nodes[3].closed.Store(true)
	w.setState(5, fsm.NodeServing, fsm.NodeDraining)
	time.Sleep(10 * time.Second)
	w.kill(3)
	time.Sleep(w.deadAfter + 2*time.Minute)
	ops, err := w.leader().client.Operations(t.Context())
	to := func(o fsm.Operation) bool { return o.Reason <= decide.Repair && o.To == 4 }
	if err != nil || len(ops) != 2 || !to(ops[0]) || !to(ops[1]) {
		t.Fatalf("under way: %v, %v; want a range and the placement group on their way to node 4", ops, err)
	}
	return w
}

func (w *pretended) setState(id keyspace.NodeID, from, to fsm.NodeState, beside ...keyspace.NodeID) {
	w.t.Helper()
	if err := w.leader().client.SetNodeState(w.t.Context(), id, from, to, beside...); err != nil {
		w.t.Error(err)
	}
}

// The copy to such a node may never come. Once a better one is there it is given up for that,
// of a range and of the placement group, long before the patience with operations ends.
func TestIsolatedNodeIsGivenUpForABetterOne(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := towardsIsolated(t, 59)
		w.setState(5, fsm.NodeDraining, fsm.NodeServing)
		w.await(time.Minute, "repair", func() error {
			if is, want := w.leader().members(), []keyspace.NodeID{1, 2, 5}; !slices.Equal(is, want) {
				return fmt.Errorf("the placement group has %v", is)
			}
			return w.whole(3)
		})
	})
}

// A replica that has its copy is promoted and not given up, even if a better node comes in that
// moment.
func TestWhoHasItsCopyIsNotGivenUp(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := towardsIsolated(t, 60)
		w.nodes[3].closed.Store(false)
		w.each(func(p *pretend) {
			p.fed = func() {
				w.setState(5, fsm.NodeDraining, fsm.NodeServing)
				time.Sleep(5 * time.Second)
			}
		})
		w.await(time.Minute, "repair", func() error { return w.whole(3) })
		ended := w.leader().service.o.Metrics.Driver.OperationsEnded
		if n := testutil.ToFloat64(ended.WithLabelValues("move", "given-up")); n > 0 {
			t.Errorf("%.0f moves were given up", n)
		}
	})
}

// If one of several isolated nodes never gets the copy of the placement group, another one has
// its turn when the operation's time is over.
func TestIsolatedNodesTakeTurns(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := pretendedRig(t, 61, 5, fourBorders...)
		w.mover = func() driver.Mover { return w }
		w.bootstrap.PlacementReplicas = 3
		w.startAll()
		w.deafen(4, 5)
		w.nodes[3].closed.Store(true)
		time.Sleep(10 * time.Second)
		w.kill(3)
		w.await(w.deadAfter+2*time.Minute, "repair", func() error {
			if is, want := w.leader().members(), []keyspace.NodeID{1, 2, 5}; !slices.Equal(is, want) {
				return fmt.Errorf("the placement group has %v", is)
			}
			return w.whole(3)
		})
	})
}

// Replicas in quarantine are replaced while their nodes live: on a node that has none of the range, or
// in their place. The range never has fewer voters than a quorum outside of quarantine. One with two of
// three in quarantine is left as it is.
func TestQuarantinedReplicasAreReplaced(t *testing.T) {
	for _, nodes := range []int{3, 4} {
		virtually(t, func(t *testing.T) {
			w := newPretended(t, 77, nodes, "h", "p")
			lost := map[keyspace.RangeID]keyspace.Replica{}
			ranges := w.ranges()
			w.mu.Lock()
			for i, d := range ranges {
				bad := d.Replicas[i : i+1]
				if i == 2 {
					bad = d.Replicas[1:]
				}
				lost[d.Range] = bad[0]
				for _, m := range bad {
					w.quarantined = append(w.quarantined, driver.Quarantined{Range: d.Range, Replica: m.ID, Reason: "a bad table"})
				}
				if p := w.all[d.Range]; p.leader == bad[0].Node {
					p.leader, p.term = d.Replicas[2].Node, p.term+1
				}
			}
			w.mu.Unlock()
			time.Sleep(40 * time.Second)
			for i, was := range ranges {
				now := w.rangeNow(was.Range)
				_, still := now.ReplicaOn(lost[was.Range].Node)
				switch voters := votersOf(&now); {
				case i == 2 && !slices.Equal(now.Replicas, was.Replicas):
					t.Errorf("%d nodes: a range without a quorum has changed: %v", nodes, now.Replicas)
				case i == 2:
				case len(voters) != 3 || slices.Contains(voters, lost[was.Range].ID):
					t.Errorf("%d nodes: range %s has the voters %v, and was to lose %d", nodes, was.Range, voters, lost[was.Range].ID)
				case still != (nodes == 3):
					t.Errorf("%d nodes: range %s is on %v, and was on %v", nodes, was.Range, now.Replicas, was.Replicas)
				}
			}
		})
	}
}

func votersOf(d *keyspace.Descriptor) (ids []keyspace.ReplicaID) {
	for _, m := range d.Replicas {
		if m.Role == keyspace.RoleVoter {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

// rangeNow returns a range as it is.
func (w *pretended) rangeNow(id keyspace.RangeID) keyspace.Descriptor {
	p, err := w.of(id)
	if err != nil {
		w.t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.d
}

// ranges returns the ranges of the bootstrap.
func (w *pretended) ranges() []keyspace.Descriptor { return w.bootstrap.Ranges() }

// A node that crashes again and again, and is back each time long before NodeDeadAfter, loses its
// replicas all the same. One that has been restarted twice keeps them.
func TestCrashLoopIsReplaced(t *testing.T) {
	for _, tc := range []struct {
		crashes int
		kept    bool
	}{{2, true}, {16, false}} {
		virtually(t, func(t *testing.T) {
			w := newPretended(t, 78, 5, "h", "p")
			time.Sleep(30 * time.Second)
			id := keyspace.NodeID(5)
			before, _ := w.on(id)
			for range tc.crashes {
				w.kill(id)
				time.Sleep(4 * time.Second)
				w.revive(id)
				time.Sleep(6 * time.Second)
			}
			if now, _ := w.on(id); before == 0 || (now == before) != tc.kept || !tc.kept && now != 0 {
				t.Errorf("after %d crashes the node has %d replicas, and had %d", tc.crashes, now, before)
			}
			// Once a boot has lasted, the node is given replicas again.
			w.await(4*time.Minute, "the node has replicas", func() error {
				if now, _ := w.on(id); now == 0 {
					return fmt.Errorf("it has none")
				}
				return nil
			})
		})
	}
}

// A copy whose replica goes into quarantine is given up at once: nobody waits for it. The next one gets
// another id.
func TestQuarantinedCopyIsGivenUp(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 79, 3)
		was := w.ranges()[0]
		p, err := w.of(was.Range)
		if err != nil {
			t.Fatal(err)
		}
		quarantine := func(m keyspace.Replica) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.quarantined = append(w.quarantined, driver.Quarantined{Range: was.Range, Replica: m.ID, Reason: "a bad table"})
		}
		last := was.Replicas[2]
		p.mu.Lock()
		p.leader, p.starved = was.Replicas[0].Node, map[keyspace.NodeID]bool{last.Node: true}
		p.mu.Unlock()
		for range 3 {
			quarantine(last)
			before := last
			for end := time.Now().Add(40 * time.Second); last == before; time.Sleep(time.Second) {
				now := w.rangeNow(was.Range)
				if m, ok := now.ReplicaOn(before.Node); ok && m.Role == keyspace.RoleLearner {
					last = m
				}
				if last == before && time.Now().After(end) {
					t.Fatalf("no new learner after %v: %v", before, now.Replicas)
				}
			}
		}
		p.mu.Lock()
		p.starved = nil
		p.mu.Unlock()
		w.await(40*time.Second, "the range has three voters", func() error { return w.whole(3) })
		if now := w.rangeNow(was.Range); !slices.Contains(votersOf(&now), last.ID) {
			t.Errorf("the voters are %v, and not %v", now.Replicas, last)
		}
	})
}

// A drained node's range goes to nobody whose replica is in quarantine. A transfer to one that has just
// gone there is given up, so that the replica is rebuilt.
func TestTransferToAQuarantinedReplicaIsGivenUp(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 80, 4)
		was := w.ranges()[0]
		p, err := w.of(was.Range)
		if err != nil {
			t.Fatal(err)
		}
		from := was.Replicas[0].Node
		p.mu.Lock()
		p.leader, p.lagging = from, map[keyspace.NodeID]bool{}
		for _, m := range was.Replicas[1:] {
			p.lagging[m.Node] = true
		}
		p.mu.Unlock()
		time.Sleep(20 * time.Second)
		w.setState(from, fsm.NodeServing, fsm.NodeDraining)
		var to keyspace.NodeID
		for end := time.Now().Add(20 * time.Second); to == 0 && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			for _, op := range w.leader().service.View().Operations() {
				if op.Kind == fsm.OperationTransfer && op.Range == was.Range {
					to = op.To
				}
			}
		}
		bad, _ := was.ReplicaOn(to)
		w.mu.Lock()
		w.quarantined = append(w.quarantined, driver.Quarantined{Range: was.Range, Replica: bad.ID, Reason: "a bad table"})
		w.mu.Unlock()
		w.await(40*time.Second, "the replica is replaced", func() error {
			if now := w.rangeNow(was.Range); slices.Contains(votersOf(&now), bad.ID) {
				return fmt.Errorf("the voters are %v", now.Replicas)
			}
			return nil
		})
	})
}
