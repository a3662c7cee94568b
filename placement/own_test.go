package placement

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/sim/simbus"
)

// members returns the nodes that hold the placement group by the node's map, ascending.
func (n *rigNode) members() []keyspace.NodeID {
	m, _ := n.client.WatchMap()
	if m == nil {
		return nil
	}
	own := m.PlacementGroup()
	var nodes []keyspace.NodeID
	for _, r := range own.Replicas {
		if r.Role != keyspace.RoleVoter {
			return nil // on its way
		}
		nodes = append(nodes, r.Node)
	}
	slices.Sort(nodes)
	return nodes
}

// moveOwn moves the placement group's replica from one node to another, asked for at the
// node by, and waits until that is over.
func (r *rig) moveOwn(by *rigNode, from, to keyspace.NodeID) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	o, err := by.client.BeginOperation(ctx, fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationMove, From: from, To: to, Why: "a test"})
	if err != nil {
		r.t.Fatalf("from node %s to node %s: %v", from, to, err)
	}
	r.awaitOwn(by, o.ID)
}

// awaitOwn waits until the operation is over.
func (r *rig) awaitOwn(by *rigNode, id uint64) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		ops, err := by.client.Operations(ctx)
		if err != nil {
			r.t.Fatal(err)
		}
		if !slices.ContainsFunc(ops, func(o fsm.Operation) bool { return o.ID == id }) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// settle waits until every node that is up has the members in its map, and holds a
// replica if it is one of them and nothing of the group otherwise.
func (r *rig) settle(want ...keyspace.NodeID) {
	r.t.Helper()
	slices.Sort(want)
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		wrong := r.unsettled(want)
		if wrong == "" {
			return
		}
		if time.Since(begin) > 30*time.Second {
			r.t.Fatal(wrong)
		}
	}
}

func (r *rig) unsettled(want []keyspace.NodeID) string {
	for _, n := range r.nodes {
		if !n.up() {
			continue
		}
		if got := n.members(); !slices.Equal(got, want) {
			return fmt.Sprintf("node %s: the placement group is held by %v, want %v", n.id, got, want)
		}
		holds := slices.Contains(want, n.id)
		if n.service.HasReplica() != holds {
			return fmt.Sprintf("node %s holds a replica: %t, want %t", n.id, !holds, holds)
		}
		_, stored, err := n.engine.Applied(keyspace.PlacementGroup)
		if err != nil || stored != holds {
			return fmt.Sprintf("node %s has an applied record: %t, %v", n.id, stored, err)
		}
		if holds {
			continue
		}
		span := engine.GroupLocalSpan(keyspace.PlacementGroup)
		it, err := n.engine.NewIter(engine.IterOptions{Lower: span.Lower, Upper: span.Upper})
		if err != nil {
			return err.Error()
		}
		left := it.First()
		_ = it.Close()
		if left {
			return fmt.Sprintf("node %s has records of the group", n.id)
		}
	}
	return ""
}

// TestPlacementGroupMoves moves the placement group from all of its founders to three other
// nodes, with leases and settings in it, under load. A leader that has to go hands over. No
// request fails, no revision is used twice, and the new members know what the group knows. A
// founder that comes back finds them.
func TestPlacementGroupMoves(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 41, 6, quiet)
		r.bootstrap.PlacementReplicas = 3
		r.startAll()
		ctx := t.Context()
		if err := r.nodes[5].client.PutSetting(ctx, "alarm", []byte("nospace")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := r.nodes[5].client.GrantLease(ctx, 77, 600, true); err != nil {
			t.Fatal(err)
		}
		if err := r.nodes[2].service.Shutdown(ctx); err != nil {
			t.Fatal(err)
		}
		r.nodes[2].stop()
		time.Sleep(2 * time.Second)
		var h history
		stop := make(chan struct{})
		var load sync.WaitGroup
		for i := range 4 {
			rng := rand.New(rand.NewPCG(41, uint64(i)))
			load.Go(func() { r.loadLoop(&h, rng, i, stop) })
		}
		r.moveOwn(r.nodes[5], 3, 6) // a dead one
		for i := range 2 {
			r.leadBy(r.nodes[i])
			r.moveOwn(r.nodes[3], keyspace.NodeID(i+1), keyspace.NodeID(i+4))
		}
		r.settle(4, 5, 6)
		r.nodes[2].start()
		r.settle(4, 5, 6)
		close(stop)
		load.Wait()
		used, last := h.check(t)
		if h.errors > 0 || int(last)-1 != used {
			t.Errorf("%d errors, %d revisions up to %d", h.errors, used, last)
		}
		if a := r.nodes[2].sequence(1); a.Err != nil || a.First != last+1 || a.Settings != 1 {
			t.Errorf("at a founder that came back: %+v, the last revision was %d", a, last)
		}
		if l, _, err := r.nodes[0].client.ListLeases(ctx); err != nil || len(l) != 1 {
			t.Errorf("leases: %+v, %v", l, err)
		}
		if s, err := r.nodes[0].client.PlacementGroup(ctx); err != nil || s.Leader < 4 || len(s.Replicas) != 3 {
			t.Errorf("%+v, %v", s, err)
		}
		// One that led, and has no replica any more, has no map either.
		former := r.nodes[1].service
		for range usualAfter {
			former.usual.registered(keyspace.Span{})
		}
		if _, err := former.serveLease(ctx, &leaseRequest{Op: leaseGrant, ID: 5, TTL: 60}); err == nil || former.View().Len() > 0 {
			t.Errorf("a node without a replica grants a lease: %v, and knows %d ranges", err, former.View().Len())
		}
		r.nodes[0].stop()
		r.nodes[0].start()
		r.settle(4, 5, 6)
		r.moveOwn(r.nodes[1], 4, 1) // with an id that it never had
		r.settle(1, 5, 6)
		r.stopAllAtOnce()
	})
}

// TestPlacementGroupGrowsAndShrinks adds members to a group of one and takes them away
// again, down to one that was not the first.
func TestPlacementGroupGrowsAndShrinks(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 42, 3, quiet)
		r.bootstrap.PlacementReplicas = 1
		r.startAll()
		want := keyspace.Revision(2)
		use := func() {
			t.Helper()
			for _, n := range r.nodes {
				if a := n.sequence(1); a.Err != nil || a.First != want {
					t.Fatalf("node %s: %+v, want %d", n.id, a, want)
				}
				want++
			}
		}
		use()
		for _, step := range []struct {
			o    fsm.Operation
			then []keyspace.NodeID
		}{
			{fsm.Operation{Kind: fsm.OperationMove, From: 1, To: 2}, []keyspace.NodeID{2}},
			{fsm.Operation{Kind: fsm.OperationAdd, To: 1}, []keyspace.NodeID{1, 2}},
			{fsm.Operation{Kind: fsm.OperationAdd, To: 3}, []keyspace.NodeID{1, 2, 3}},
			{fsm.Operation{Kind: fsm.OperationRemove, From: 2}, []keyspace.NodeID{1, 3}},
			{fsm.Operation{Kind: fsm.OperationRemove, From: 1}, []keyspace.NodeID{3}},
		} {
			o, err := r.nodes[0].client.BeginOperation(t.Context(), step.o)
			if err != nil {
				t.Fatalf("%s: %v", &step.o, err)
			}
			r.awaitOwn(r.nodes[1], o.ID)
			use()
			r.settle(step.then...)
		}
		for what, o := range map[string]fsm.Operation{
			"the last one":      {Kind: fsm.OperationRemove, From: 3},
			"nobody":            {Kind: fsm.OperationMove, From: 1, To: 2},
			"to who holds one":  {Kind: fsm.OperationAdd, To: 3},
			"to an unknown one": {Kind: fsm.OperationAdd, To: 9},
		} {
			_, err := r.nodes[0].client.BeginOperation(t.Context(), o)
			if e := kverror.Of(err); err == nil || e.Kind != kverror.BadRequest || !strings.Contains(e.Detail, "the placement group") {
				t.Errorf("%s: %v", what, err)
			}
		}
		r.stopAllAtOnce()
	})
}

// TestPlacementGroupMovesUnderFaults moves the group without end while its leader and the new
// member crash, pause and are cut off at any step. Operations end, no revision is allocated
// twice, and no node keeps a replica that is not its own.
func TestPlacementGroupMovesUnderFaults(t *testing.T) {
	seeds, moves := uint64(4), 20
	if testing.Short() {
		seeds, moves = 2, 10
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) { ownUnderFaults(t, seed, moves) })
		})
	}
}

func ownUnderFaults(t *testing.T, seed uint64, moves int) {
	t.Helper()
	r := newRig(t, 400+seed, 5, simbus.Faults{
		Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 2 * time.Millisecond, Tail: 0.01, TailMean: 20 * time.Millisecond},
		Loss:  0.02, Duplicate: 0.02, Reorder: 0.05, ReorderBy: 5 * time.Millisecond,
	})
	r.bootstrap.PlacementReplicas = 3
	if seed%2 == 1 {
		r.maxLag = 1 << 10 // whoever lags needs a snapshot
	}
	r.startAll()
	var h history
	var load sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		rng := rand.New(rand.NewPCG(seed, uint64(200+i)))
		load.Go(func() { r.loadLoop(&h, rng, i, stop) })
	}
	moved := 0
	for range moves {
		from, to := r.moveSome()
		if to != 0 {
			moved++
		}
		r.strike(from, to)
	}
	r.net.HealAll()
	r.net.SetStandard(quiet)
	for _, n := range r.nodes {
		n.clock.Resume()
		r.net.Resume(n.id)
		if !n.up() {
			n.start()
		}
	}
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		ops, err := r.nodes[0].client.Operations(t.Context())
		if err == nil && len(ops) == 0 {
			break
		}
		if time.Since(begin) > time.Minute {
			t.Fatalf("operations are under way: %v, %v", ops, err)
		}
	}
	want := r.leader().members()
	if len(want) != 3 {
		t.Errorf("the group is held by %v", want)
	}
	r.settle(want...)
	close(stop)
	load.Wait()
	used, last := h.check(t)
	t.Logf("%d moves, %d answers, %d errors, %d revisions up to %d", moved, len(h.answers), h.errors, used, last)
	if moved < moves/4 || len(h.answers) < 200 {
		t.Errorf("%d moves, %d answers: too few to show anything", moved, len(h.answers))
	}
	r.stopAllAtOnce()
}

// moveSome begins to move a replica of the group, every other time the leader's, and returns
// the two nodes. It returns 0 for the target if the move was refused.
func (r *rig) moveSome() (from, to keyspace.NodeID) {
	n := r.nodes[r.rng.IntN(len(r.nodes))]
	m, _ := n.client.WatchMap()
	if m == nil {
		return 0, 0
	}
	own := m.PlacementGroup()
	from = own.Replicas[r.rng.IntN(len(own.Replicas))].Node
	if l := n.client.Leader(); l != 0 && r.rng.IntN(2) == 0 {
		from = l
	}
	for _, i := range r.rng.Perm(len(r.nodes)) {
		if _, holds := own.ReplicaOn(r.nodes[i].id); !holds {
			to = r.nodes[i].id
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if _, err := n.client.BeginOperation(ctx, fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationMove, From: from, To: to}); err != nil {
		return from, 0
	}
	return from, to
}

// strike does something bad to one of the nodes that a move is about, or to another one,
// soon after the move has begun.
func (r *rig) strike(from, to keyspace.NodeID) {
	n := r.nodes[r.rng.IntN(len(r.nodes))]
	switch r.rng.IntN(3) {
	case 0:
		if from != 0 {
			n = r.nodes[from-1]
		}
	case 1:
		if to != 0 {
			n = r.nodes[to-1]
		}
	}
	time.Sleep(time.Duration(r.rng.IntN(400)) * time.Millisecond)
	wait := time.Duration(r.rng.IntN(2500)) * time.Millisecond
	switch r.rng.IntN(4) {
	case 0:
		r.net.Partition(n.id)
		time.Sleep(wait)
		r.net.HealAll()
	case 1:
		n.clock.Pause()
		r.net.Pause(n.id)
		time.Sleep(wait)
		n.clock.Resume()
		r.net.Resume(n.id)
	default:
		n.crash()
		time.Sleep(wait)
		n.start()
	}
	time.Sleep(time.Duration(r.rng.IntN(2000)) * time.Millisecond)
}

// A founder that comes for the first time after its replica was moved away deletes its
// bootstrap state: nobody whom the group has left behind finds a voter in it.
func TestLateFounderStaysOut(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 45, 4, quiet)
		r.bootstrap.PlacementReplicas = 3
		late := r.nodes[2]
		for _, n := range r.nodes {
			if n != late {
				n.start()
			}
		}
		r.moveOwn(r.nodes[0], 3, 4)
		late.undoBootstrap = true
		late.start()
		if late.service.HasReplica() {
			t.Error("it has opened a replica")
		}
		r.settle(1, 2, 4)
		late.service.Unknown(1, 3)
		time.Sleep(3 * time.Second)
		late.crash()
		late.start()
		r.settle(1, 2, 4)
		r.moveOwn(late, 1, 3)
		r.settle(2, 3, 4)
	})
}

// A node that has stopped and come back holds no move up, though nobody has told the
// leader that it stays.
func TestPlacementGroupMovesAfterRestart(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 44, 4, quiet)
		r.bootstrap.PlacementReplicas = 3
		r.startAll()
		r.leadBy(r.nodes[0])
		n := r.nodes[1]
		if err := n.service.Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.stop()
		n.start()
		time.Sleep(2 * time.Second)
		r.moveOwn(n, 3, 4)
		r.settle(1, 2, 4)
	})
}

// A replica that has left never comes back, whatever is said of it: not as the empty one
// that a leader of the configuration before speaks to.
func TestLeftReplicaStaysAway(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 43, 4, quiet)
		r.bootstrap.PlacementReplicas = 3
		r.startAll()
		r.moveOwn(r.nodes[0], 1, 4)
		r.settle(2, 3, 4)
		n := r.nodes[0]
		n.service.Unknown(2, 1)
		time.Sleep(5 * time.Second)
		if n.service.HasReplica() {
			t.Error("replica 1 is back")
		}
		n.crash()
		n.start()
		if left, err := tombstones(n.engine).Left(keyspace.PlacementGroup); err != nil || left != 1 {
			t.Errorf("after a crash replica %d has left, %v", left, err)
		}
		r.settle(2, 3, 4)
	})
}

var _ Group = (*raftgroup.Group)(nil)
