package placement

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// pretendPair is two neighbours that are merged: each step is taken, or not, and said to be
// taken, or not.
type pretendPair struct {
	t    *testing.T
	left *pretend
	// right is that of the same seed of faults.
	right *pretend

	mu sync.Mutex
	// Guarded by mu: the merge that each is bound to, the last one that is over, and whether
	// the left one has absorbed the other.
	bound, over [2]uint64
	settled     map[keyspace.NodeID]bool
	absorbed    bool
	// deaf are nodes that never settle.
	deaf map[keyspace.NodeID]bool
	// holds is how often the left one was held, and held whether it is.
	holds int
	held  bool
	// stores counts how often a node has stored what it had. takes is how long each one takes,
	// 0 behind the end. late is how long the last one before the freeze has taken.
	stores map[keyspace.NodeID]int
	takes  []time.Duration
	late   time.Duration
}

// store takes the node as long as it should.
func (p *pretendPair) store(n keyspace.NodeID) {
	p.mu.Lock()
	var takes time.Duration
	if i := p.stores[n]; i < len(p.takes) {
		takes = p.takes[i]
	}
	if p.stores != nil {
		p.stores[n]++
	}
	p.late = takes
	p.mu.Unlock()
	time.Sleep(takes)
}

func (p *pretendPair) of(id keyspace.RangeID) *pretend {
	if id == p.left.d.Range {
		return p.left
	}
	return p.right
}

func (p *pretendPair) Look(ctx context.Context, n keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	return p.of(id).Look(ctx, n, id)
}

func (p *pretendPair) ChangeMembers(ctx context.Context, n keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	return p.of(id).ChangeMembers(ctx, n, id, confIndex, changes)
}

func (p *pretendPair) TransferTo(ctx context.Context, n keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error {
	return p.of(id).TransferTo(ctx, n, id, to)
}

// Merge implements driver.Merger.
func (p *pretendPair) Merge(ctx context.Context, n keyspace.NodeID, o keyspace.MergeOrder) error {
	switch o.Step { //nolint:exhaustive // the others do not take their time
	case keyspace.MergeStore:
		p.store(n)
	case keyspace.MergeSettle:
		for p.frozenFor() < o.ID && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
	case keyspace.MergeHold:
		return p.hold(ctx)
	}
	g := p.of(o.Range)
	g.mu.Lock()
	leads, d := g.leader == n, g.d
	done, said := g.fate()
	g.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	side := 0
	if g == p.right {
		side = 1
	}
	switch {
	case o.Step == keyspace.MergeStore || !done:
		return said
	case o.Step == keyspace.MergeSettle:
		if p.bound[1] != o.ID || p.deaf[n] {
			return kverror.New(kverror.Busy, "node %s has not applied it", n)
		}
		p.settled[n] = true
		return said
	case !leads:
		return kverror.NotLeader
	}
	switch o.Step {
	case keyspace.MergeBind, keyspace.MergeFreeze:
		if o.ID <= p.over[side] || d.Generation != o.Generation || d.ConfIndex != o.ConfIndex {
			return kverror.New(kverror.WrongRange, "%s", o.Step)
		}
		p.bound[side] = o.ID
	case keyspace.MergeAbsorb:
		if p.bound[0] != o.ID && !p.absorbed || p.over[1] >= o.ID {
			p.t.Errorf("merge %d absorbs: bound to %v, over are %v", o.ID, p.bound, p.over)
		}
		for _, m := range p.right.d.Replicas {
			if !p.settled[m.Node] {
				p.t.Errorf("merge %d absorbs, and node %s has not settled", o.ID, m.Node)
			}
		}
		p.absorbed, p.bound[0], p.over[0] = true, 0, o.ID
	case keyspace.MergeRelease:
		if p.absorbed {
			p.t.Errorf("merge %d is released and has absorbed", o.ID)
		}
		p.bound[side], p.over[side] = 0, o.ID
	case keyspace.MergeStore, keyspace.MergeSettle, keyspace.MergeHold:
	}
	return said
}

// frozenFor returns the merge for which the right one is frozen, 0 if it is not.
func (p *pretendPair) frozenFor() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bound[1]
}

func (p *pretendPair) hold(ctx context.Context) error {
	set := func(held bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.held = held; held {
			p.holds++
		}
	}
	set(true)
	<-ctx.Done()
	set(false)
	return ctx.Err()
}

// A merge is executed whatever step fails, or is only said to have failed, and whoever
// leads placement meanwhile, also where the right range's replicas are elsewhere at first.
// In the end it was committed and absorbed, or aborted and released, and the map says which;
// no other operation has begun on either range.
func TestMergeOutlivesItsLeader(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newRig(t, 60+seed, 5, quiet, "m")
				ds := r.bootstrap.Ranges()
				rng := rand.New(rand.NewPCG(seed, 17))
				p := &pretendPair{t: t, settled: map[keyspace.NodeID]bool{}, deaf: map[keyspace.NodeID]bool{}}
				p.left, p.right = newPretend(t, rng, ds[0]), newPretend(t, rng, ds[1])
				p.left.failures, p.right.failures = 0.1, 0.1
				p.left.report, p.right.report = r.report, r.report
				if seed%3 == 1 {
					p.deaf[ds[0].Replicas[1].Node] = true // at the end of every move there is a replica
				}
				r.mover = func() driver.Mover { return p }
				r.startAll()
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				defer cancel()
				op := r.beginMerge(ctx, ds[0].Range)
				for what, o := range map[string]fsm.Operation{
					"a move of the left one":  {Range: ds[0].Range, Kind: fsm.OperationAdd, To: 5},
					"a move of the right one": {Range: ds[1].Range, Kind: fsm.OperationAdd, To: 5},
				} {
					if got, err := r.nodes[2].client.BeginOperation(ctx, o); err == nil || kverror.Of(err).Kind != kverror.BadRequest {
						t.Errorf("%s: %+v, %v", what, got, err)
					}
				}
				for i := 0; r.busy(ctx); i++ {
					if i < 3 {
						n := r.leader()
						n.crash()
						time.Sleep(2 * time.Second)
						n.start()
					}
					time.Sleep(100 * time.Millisecond)
				}
				time.Sleep(10 * time.Second) // the node's copy of the map comes behind what placement says
				m, err := r.nodes[4].client.Map(ctx)
				if err != nil {
					t.Fatal(err)
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				if merged := m.Len() == 1; merged != p.absorbed || p.bound != [2]uint64{0, 0} && !merged || seed%3 == 1 && merged {
					t.Errorf("merge %d: absorbed %t, bound to %v, over are %v, the map is %v", op.ID, p.absorbed, p.bound, p.over, m.Descriptors())
				}
			})
		})
	}
}

// beginMerge begins a merge as soon as it may.
func (r *rig) beginMerge(ctx context.Context, left keyspace.RangeID) fsm.Operation {
	r.t.Helper()
	return r.beginMergeAt(ctx, 4, left)
}

func (r *rig) beginMergeAt(ctx context.Context, node int, left keyspace.RangeID) fsm.Operation {
	r.t.Helper()
	for {
		op, err := r.nodes[node].client.BeginOperation(ctx, fsm.Operation{Range: left, Kind: fsm.OperationMerge, Why: "asked for"})
		if err == nil {
			return op
		}
		if ctx.Err() != nil || kverror.Of(err).Kind != kverror.Busy {
			r.t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// busy says whether an operation is under way.
func (r *rig) busy(ctx context.Context) bool { return r.busyAt(ctx, 4) }

func (r *rig) busyAt(ctx context.Context, node int) bool {
	r.t.Helper()
	under, err := r.nodes[node].client.Operations(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return len(under) > 0
}

// farAway is a pair of which each order and each answer is on its way for so long. It knows how
// long the right one stood still.
type farAway struct {
	*pretendPair
	way              time.Duration
	frozen, absorbed time.Time
}

func (f *farAway) Merge(ctx context.Context, n keyspace.NodeID, o keyspace.MergeOrder) error {
	time.Sleep(f.way)
	err := f.pretendPair.Merge(ctx, n, o)
	f.mu.Lock()
	switch now := time.Now(); {
	case o.Step == keyspace.MergeFreeze && f.frozen.IsZero():
		f.frozen = now
	case o.Step == keyspace.MergeAbsorb && f.absorbed.IsZero():
		f.absorbed = now
		if !f.held {
			f.t.Error("the left range absorbs, and was not held for it")
		}
	}
	f.mu.Unlock()
	time.Sleep(f.way)
	return err
}

// While the right range stands still no order waits that could be on its way: between the freeze
// and the absorb lie an answer, the commit and an order. The left one is held until then, and no
// longer.
func TestMergeStandsStillForFewWays(t *testing.T) {
	virtually(t, func(t *testing.T) {
		f := &farAway{way: 50 * time.Millisecond}
		r, p := pairRig(t, 75, 3, func(_ *rig, p *pretendPair) driver.Mover {
			f.pretendPair = p
			return f
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r.beginMergeAt(ctx, 0, p.left.d.Range)
		for r.busyAt(ctx, 0) {
			time.Sleep(100 * time.Millisecond)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if still := f.absorbed.Sub(f.frozen); f.frozen.IsZero() || f.absorbed.IsZero() || still > 3*f.way {
			t.Errorf("the right range stood still for %v, and a way takes %v", still, f.way)
		}
		if p.held || p.holds != 1 {
			t.Errorf("the left range was held %d times; it is held: %t", p.holds, p.held)
		}
	})
}

// A merge whose steps fail at once does not keep the node busy: it pauses, and is aborted in
// the end.
func TestMergeThatFailsAtOncePauses(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 71, 3, quiet, "m")
		ds := r.bootstrap.Ranges()
		rng := rand.New(rand.NewPCG(71, 1))
		p := &pretendPair{t: t, settled: map[keyspace.NodeID]bool{}, deaf: map[keyspace.NodeID]bool{}}
		p.left, p.right = newPretend(t, rng, ds[0]), newPretend(t, rng, ds[1])
		p.left.report, p.right.report = r.report, r.report
		r.mover = func() driver.Mover { return unmoved{p} }
		r.startAll()
		for {
			op, err := r.nodes[0].client.BeginOperation(t.Context(), fsm.Operation{Range: ds[0].Range, Kind: fsm.OperationMerge, Why: "asked for"})
			if err == nil {
				t.Logf("merge %d begins", op.ID)
				break
			}
			if kverror.Of(err).Kind != kverror.Busy {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(2 * driver.MergePatience)
		if under, err := r.nodes[0].client.Operations(t.Context()); err != nil || len(under) != 0 {
			t.Errorf("under way: %v, %v", under, err)
		}
	})
}

// Writes that arrive while a node stores are stored while the right range stands still. If
// storing takes long, it is repeated once before.
func TestMergeStoresUntilLittleIsLeft(t *testing.T) {
	for _, c := range []struct {
		name   string
		takes  []time.Duration
		stores int
		late   time.Duration
	}{
		{"nothing to store", nil, 1, 0},
		{"little to store", []time.Duration{driver.StoreSmall / 4}, 1, driver.StoreSmall / 4},
		{"less the second time", []time.Duration{600 * time.Millisecond, 40 * time.Millisecond}, 2, 40 * time.Millisecond},
		{"as much each time", slices.Repeat([]time.Duration{time.Second}, 9), 2, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newRig(t, 73, 3, quiet, "m")
				ds := r.bootstrap.Ranges()
				rng := rand.New(rand.NewPCG(73, 1))
				p := &pretendPair{t: t, settled: map[keyspace.NodeID]bool{}, stores: map[keyspace.NodeID]int{}, takes: c.takes}
				p.left, p.right = newPretend(t, rng, ds[0]), newPretend(t, rng, ds[1])
				p.left.report, p.right.report = r.report, r.report
				r.mover = func() driver.Mover { return p }
				r.startAll()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				op := r.beginMergeAt(ctx, 0, ds[0].Range)
				for r.busyAt(ctx, 0) {
					time.Sleep(100 * time.Millisecond)
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				for _, m := range ds[1].Replicas {
					if p.stores[m.Node] != c.stores {
						t.Errorf("merge %d: node %s has stored %d times, want %d", op.ID, m.Node, p.stores[m.Node], c.stores)
					}
				}
				if !p.absorbed || p.late != c.late {
					t.Errorf("merge %d: absorbed %t, and what was stored last took %v, want %v", op.ID, p.absorbed, p.late, c.late)
				}
			})
		})
	}
}

// A merge whose step is over while its right range stands still, since storing has taken most
// of the step, is aborted then and does not begin to store again.
func TestMergeThatStoredLongStandsStillForShort(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 74, 3, quiet, "m")
		ds := r.bootstrap.Ranges()
		rng := rand.New(rand.NewPCG(74, 1))
		p := &pretendPair{t: t, settled: map[keyspace.NodeID]bool{}, stores: map[keyspace.NodeID]int{}}
		// One node after the other, and all once more.
		p.takes = []time.Duration{driver.OperationStep / 10 * 3, driver.OperationStep / 20}
		p.left, p.right = newPretend(t, rng, ds[0]), newPretend(t, rng, ds[1])
		p.left.report, p.right.report = r.report, r.report
		u := &unsettled{pretendPair: p}
		r.mover = func() driver.Mover { return u }
		r.startAll()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r.beginMergeAt(ctx, 0, ds[0].Range)
		for r.busyAt(ctx, 0) {
			time.Sleep(100 * time.Millisecond)
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		if still := u.released.Sub(u.frozen); u.frozen.IsZero() || u.released.IsZero() || still > driver.MergeStill {
			t.Errorf("the right range stood still for %v, at most %v", still, driver.MergeStill)
		}
	})
}

// unsettled is a pair of ranges whose nodes do not come to settle. It knows when the right
// one stood still first, and when it was released first.
type unsettled struct {
	*pretendPair
	frozen, released time.Time
	// lost is a node that does not answer any more, 0 if none.
	lost keyspace.NodeID
}

func (u *unsettled) lose(n keyspace.NodeID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.lost = n
}

func (u *unsettled) Merge(ctx context.Context, n keyspace.NodeID, o keyspace.MergeOrder) error {
	u.mu.Lock()
	lost := n == u.lost
	u.mu.Unlock()
	switch {
	case lost:
		return kverror.RangeNotHere
	case o.Step == keyspace.MergeSettle:
		<-ctx.Done()
		return ctx.Err()
	}
	err := u.pretendPair.Merge(ctx, n, o)
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case err == nil && o.Step == keyspace.MergeFreeze && u.frozen.IsZero():
		u.frozen = time.Now()
	case err == nil && o.Step == keyspace.MergeRelease && o.Range == u.right.d.Range && u.released.IsZero():
		u.released = time.Now()
	}
	return err
}

// The right range of a merge stands still when placement's leader is lost, together with a
// replica of both ranges. The next leader ends the merge at once. Neither range can be merged
// without that node, and the others are a quorum that could serve.
func TestMergeIsNotInheritedWhileItStandsStill(t *testing.T) {
	virtually(t, func(t *testing.T) {
		u := &unsettled{}
		r, p := pairRig(t, 77, 3, func(_ *rig, p *pretendPair) driver.Mover {
			u.pretendPair = p
			return u
		})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		l := r.leader()
		asking := int(l.id % 3)
		r.beginMergeAt(ctx, asking, p.left.d.Range)
		for frozen := false; !frozen; time.Sleep(10 * time.Millisecond) {
			u.mu.Lock()
			frozen = !u.frozen.IsZero()
			u.mu.Unlock()
		}
		l.crash()
		for _, g := range []*pretend{p.left, p.right} {
			g.mu.Lock()
			g.dead[l.id] = true
			if g.leader == l.id {
				g.leader, g.term = keyspace.NodeID(asking+1), g.term+1
			}
			g.mu.Unlock()
		}
		u.lose(l.id)
		for r.busyAt(ctx, asking) {
			time.Sleep(100 * time.Millisecond)
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		if still := u.released.Sub(u.frozen); u.released.IsZero() || still > driver.MergePatience/3 {
			t.Errorf("the right range stood still for %v", still)
		}
	})
}

// One that has not bound anything yet is taken over, and not ended.
func TestMergeIsInheritedWhileItPrepares(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r, p := pairRig(t, 78, 5, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		l := r.leader()
		asking := int(l.id % 5)
		op := r.beginMergeAt(ctx, asking, p.left.d.Range)
		for at, _ := r.operationAt(ctx, asking, op.ID); at.To == 0; at, _ = r.operationAt(ctx, asking, op.ID) {
			time.Sleep(time.Millisecond)
		}
		l.crash()
		time.Sleep(2 * time.Second)
		l.start() // it may be where the replica moves
		for r.busyAt(ctx, asking) {
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(10 * time.Second) // the copy of the map comes behind what placement says
		if m, err := r.nodes[asking].client.Map(ctx); err != nil || m.Len() != 1 {
			t.Errorf("it was not merged: %v, %v", m.Descriptors(), err)
		}
	})
}

// unmoved is a pair of ranges whose leaders stay where they are, and say so at once.
type unmoved struct{ *pretendPair }

func (unmoved) TransferTo(context.Context, keyspace.NodeID, keyspace.RangeID, keyspace.NodeID) error {
	return kverror.Busy
}

// ledBy has a range led by a node, or with 0 be without a quorum.
func (p *pretend) ledBy(n keyspace.NodeID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leader = n
}

// pairRig is a cluster that decides nothing by itself with two neighbours, as merger has them
// merged where it is not nil. Of five nodes one holds the left one alone.
func pairRig(t *testing.T, seed uint64, nodes int, merger func(*rig, *pretendPair) driver.Mover) (*rig, *pretendPair) {
	t.Helper()
	r := newRig(t, seed, nodes, quiet, "m")
	ds := r.bootstrap.Ranges()
	rng := rand.New(rand.NewPCG(seed, 1))
	p := &pretendPair{t: t, settled: map[keyspace.NodeID]bool{}}
	p.left, p.right = newPretend(t, rng, ds[0]), newPretend(t, rng, ds[1])
	p.left.report, p.right.report = r.report, r.report
	r.mover = func() driver.Mover {
		if merger == nil {
			return p
		}
		return merger(r, p)
	}
	r.startAll()
	if err := r.nodes[0].client.SetPaused(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	return r, p
}

// operation returns the operation under way with the id.
func (r *rig) operation(ctx context.Context, id uint64) (fsm.Operation, bool) {
	r.t.Helper()
	return r.operationAt(ctx, 0, id)
}

func (r *rig) operationAt(ctx context.Context, node int, id uint64) (fsm.Operation, bool) {
	r.t.Helper()
	under, err := r.nodes[node].client.Operations(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	i := slices.IndexFunc(under, func(o fsm.Operation) bool { return o.ID == id })
	if i < 0 {
		return fsm.Operation{}, false
	}
	return under[i], true
}

// A merge is aborted before an order of it may have bound a range. It is then over, though the
// right range has lost its quorum. There is nothing to release, and the left range does not
// wait for the right one.
func TestMergeAbortedBeforeItBindsIsOver(t *testing.T) {
	for _, moves := range []bool{false, true} {
		t.Run(fmt.Sprintf("moves %t", moves), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r, p := pairRig(t, 75, 5, nil)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				defer cancel()
				if moves {
					p.right.starved = map[keyspace.NodeID]bool{1: true}
				} else {
					p.right.ledBy(0)
				}
				left := p.left.d.Range
				op := r.beginMergeAt(ctx, 0, left)
				if moves {
					for at, _ := r.operation(ctx, op.ID); at.To != 1; at, _ = r.operation(ctx, op.ID) {
						time.Sleep(100 * time.Millisecond)
					}
					p.right.ledBy(0)
				}
				time.Sleep(max(driver.MergePatience, r.patience) + driver.OperationStep)
				if at, under := r.operation(ctx, op.ID); under {
					t.Fatalf("the right range has no quorum, and the left one is kept by %s", at.String())
				}
				if p.bound != [2]uint64{} || p.over != [2]uint64{} {
					t.Errorf("bound to %v, released from %v", p.bound, p.over)
				}
				move := fsm.Operation{Range: left, Kind: fsm.OperationMove, From: 3, To: 5, Why: "asked for"}
				if _, err := r.nodes[0].client.BeginOperation(ctx, move); err != nil {
					t.Fatal(err)
				}
				for r.busyAt(ctx, 0) {
					time.Sleep(100 * time.Millisecond)
				}
				if got := fmt.Sprint(p.left.voters()); got != "[1 2 5]" {
					t.Errorf("the left range's voters are %s", got)
				}
			})
		})
	}
}

// A merge whose right range is copied to a node that dies does not keep both ranges from being
// repaired for as long as a copy may take.
func TestMergeToANodeThatDiesIsOver(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r, p := pairRig(t, 77, 5, func(r *rig, p *pretendPair) driver.Mover {
			r.patience = time.Hour
			return p
		})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		p.right.starved = map[keyspace.NodeID]bool{1: true}
		op := r.beginMergeAt(ctx, 4, p.left.d.Range)
		for at, _ := r.operationAt(ctx, 4, op.ID); at.To != 1; at, _ = r.operationAt(ctx, 4, op.ID) {
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(3 * driver.MergePatience)
		if _, under := r.operationAt(ctx, 4, op.ID); !under {
			t.Fatal("a copy has an hour")
		}
		r.nodes[0].crash()
		time.Sleep(driver.MergePatience + driver.OperationStep)
		if at, under := r.operationAt(ctx, 4, op.ID); under {
			t.Errorf("node 1 is gone, and there is %s", at.String())
		}
	})
}

// A merge that finds a replica of its ranges in quarantine ends at once: it keeps both ranges from being
// repaired, and needs all replicas.
func TestMergeWithAQuarantinedReplicaIsOver(t *testing.T) {
	for _, right := range []bool{false, true} {
		virtually(t, func(t *testing.T) {
			r, p := pairRig(t, 78, 5, func(r *rig, p *pretendPair) driver.Mover {
				r.patience = time.Hour
				return p
			})
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			p.right.starved = map[keyspace.NodeID]bool{1: true}
			op := r.beginMergeAt(ctx, 4, p.left.d.Range)
			for at, _ := r.operationAt(ctx, 4, op.ID); at.To != 1; at, _ = r.operationAt(ctx, 4, op.ID) {
				time.Sleep(100 * time.Millisecond)
			}
			time.Sleep(3 * driver.MergePatience)
			if _, under := r.operationAt(ctx, 4, op.ID); !under {
				t.Fatal("a copy has an hour")
			}
			bad := p.left
			if right {
				bad = p.right // the copy
			}
			bad.mu.Lock()
			m, ok := bad.d.ReplicaOn(1)
			bad.mu.Unlock()
			if !ok {
				t.Fatalf("no replica on node 1 of %v", bad.d)
			}
			r.gaugeOf(1).quarantine([]driver.Quarantined{{Range: bad.d.Range, Replica: m.ID, Reason: "a bad table"}})
			time.Sleep(30 * time.Second)
			if at, under := r.operationAt(ctx, 4, op.ID); under {
				t.Errorf("replica %v of range %s is in quarantine, and there is %s", m, bad.d.Range, at.String())
			}
		})
	}
}

// losesAtFreeze is a pair of which the right one has no quorum from the moment on when it is
// to be frozen, until it is led again.
type losesAtFreeze struct {
	*pretendPair
	r *rig
}

func (l losesAtFreeze) Merge(ctx context.Context, n keyspace.NodeID, o keyspace.MergeOrder) error {
	for _, at := range l.r.leader().service.View().Operations() {
		if at.ID == o.ID && at.Phase == fsm.MergePreparing {
			l.t.Errorf("%s of range %s is ordered, and the merge is %s", o.Step, o.Range, at.Phase)
		}
	}
	if o.Step == keyspace.MergeFreeze {
		l.right.ledBy(0)
	}
	return l.pretendPair.Merge(ctx, n, o)
}

// A merge that is aborted when its orders may be on their way stays until both ranges are
// released, however long the right one has no quorum.
func TestMergeAbortedOnceItBindsAwaitsBoth(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r, p := pairRig(t, 76, 3, func(r *rig, p *pretendPair) driver.Mover { return losesAtFreeze{p, r} })
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		op := r.beginMergeAt(ctx, 0, p.left.d.Range)
		time.Sleep(2 * driver.MergePatience)
		if at, under := r.operation(ctx, op.ID); !under || at.Phase != fsm.MergeAborted || p.bound[0] != op.ID {
			t.Errorf("under way %t: %s, bound to %v", under, at.String(), p.bound)
		}
		p.right.ledBy(p.left.d.Replicas[0].Node)
		for r.busyAt(ctx, 0) {
			time.Sleep(100 * time.Millisecond)
		}
		if p.bound != [2]uint64{} || p.over != [2]uint64{op.ID, op.ID} {
			t.Errorf("bound to %v, released from %v", p.bound, p.over)
		}
	})
}
