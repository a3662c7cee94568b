package shard

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/shard/eval"
)

// mergeDriver drives one merge as placement does: phase is its record, which survives
// whatever happens to the nodes. Every step is taken anew from the beginning by whoever
// drives next.
type mergeDriver struct {
	r           *rig
	id          uint64
	left, right keyspace.RangeID
	phase       string // preparing, committed, aborted, over
	// before is called before each step, with its name; with an error the driver stops there,
	// as one that has lost its leadership.
	before func(step string) error
	// killer, if not nil, may end nodes meanwhile; the driver stops then.
	killer *killer
	// release ends that the left range is held, nil if it is not.
	release func()
}

// hold has the left range held until it absorbs, or the driver stops, and the right one's replicas
// wait for the freeze, as placement does.
func (d *mergeDriver) hold(l *rigNode) {
	d.let()
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	wait.Go(func() { _ = d.order(ctx, l, keyspace.MergeOrder{Step: keyspace.MergeHold, Range: d.left}) })
	for _, n := range d.r.nodes {
		wait.Go(func() { _ = d.order(ctx, n, keyspace.MergeOrder{Step: keyspace.MergeSettle, Range: d.right}) })
	}
	d.release = func() {
		cancel()
		wait.Wait()
	}
}

func (d *mergeDriver) let() {
	if d.release != nil {
		d.release()
		d.release = nil
	}
}

var errDriverLost = errors.New("the driver lost its leadership")

// drive goes on with the merge until it is over, stops, or a minute has passed.
func (d *mergeDriver) drive() error {
	ctx, cancel := clock.WithTimeout(context.Background(), clock.Virtual(), time.Minute)
	defer cancel()
	defer d.let()
	var last error
	for d.phase != "over" {
		if d.killer != nil && d.killer.dead() {
			return errDriverLost
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the merge is %s for a minute: %w", d.phase, last)
		}
		step, stop := clock.WithTimeout(ctx, clock.Virtual(), 10*time.Second)
		last = d.step(step)
		stop()
		if errors.Is(last, errDriverLost) {
			return last
		}
		if last != nil {
			d.let()
			time.Sleep(50 * time.Millisecond)
		}
	}
	return nil
}

func (d *mergeDriver) at(step string) error {
	if d.before == nil {
		return nil
	}
	return d.before(step)
}

// show returns the range as its leader has it, and the leader.
func (d *mergeDriver) show(id keyspace.RangeID) (*Status, *rigNode) {
	for _, n := range d.r.nodes {
		if s := n.node.Load(); s != nil {
			if p := s.Replica(id); p != nil {
				if st := p.Show(); st.Serving {
					return st, n
				}
			}
		}
	}
	return nil, nil
}

// order has a node take a step, through the bus of another one.
func (d *mergeDriver) order(ctx context.Context, n *rigNode, o keyspace.MergeOrder) error {
	o.ID = d.id
	from := d.r.nodes[int(n.id)%len(d.r.nodes)].node.Load()
	if s := n.node.Load(); from == nil || s == nil {
		if from = s; s == nil {
			return kverror.New(kverror.Unreachable, "node %s is down", n.id)
		}
	}
	return from.Admin().Merge(ctx, n.id, o)
}

func (d *mergeDriver) step(ctx context.Context) error {
	switch d.phase {
	case "committed":
		return d.last(ctx, "absorb", keyspace.MergeAbsorb, d.left)
	case "aborted":
		return d.last(ctx, "release", keyspace.MergeRelease, d.right, d.left)
	}
	left, l := d.show(d.left)
	right, rl := d.show(d.right)
	if left == nil || right == nil {
		return errors.New("no leader")
	}
	ld, rd := left.Descriptor, right.Descriptor
	if l != rl {
		if err := d.at("transfer"); err != nil {
			return err
		}
		return rl.node.Load().Admin().TransferTo(ctx, rl.id, d.right, l.id)
	}
	if err := d.at("bind"); err != nil {
		return err
	}
	if err := d.order(ctx, l, keyspace.MergeOrder{
		Step: keyspace.MergeBind, Range: d.left, Generation: ld.Generation, ConfIndex: ld.ConfIndex, Other: d.right,
		Hull: keyspace.Span{Start: ld.Span.Start, End: rd.Span.End},
	}); err != nil {
		return err
	}
	if err := d.all(ctx, "store", keyspace.MergeStore); err != nil {
		return err
	}
	still, cancel := clock.WithTimeout(ctx, clock.Virtual(), 2*time.Second)
	defer cancel()
	if err := d.at("freeze"); err != nil {
		return err
	}
	d.hold(l)
	err := d.order(still, l, keyspace.MergeOrder{
		Step: keyspace.MergeFreeze, Range: d.right, Generation: rd.Generation, ConfIndex: rd.ConfIndex, Other: d.left,
	})
	if err == nil {
		err = d.all(still, "settle", keyspace.MergeSettle)
	}
	if errors.Is(err, errDriverLost) {
		return err
	}
	if err != nil {
		d.become("aborted")
		return err
	}
	if err := d.at("commit"); err != nil {
		return err
	}
	if !d.become("committed") {
		return errDriverLost
	}
	merged := ld
	merged.Span.End, merged.Generation = rd.Span.End, max(ld.Generation, rd.Generation)+1
	d.r.seq.mu.Lock()
	delete(d.r.seq.reported, d.right)
	d.r.seq.reported[d.left] = merged
	d.r.seq.mu.Unlock()
	return nil
}

func (d *mergeDriver) all(ctx context.Context, name string, step keyspace.MergeStep) error {
	if err := d.at(name); err != nil {
		return err
	}
	for _, n := range d.r.nodes {
		if err := d.order(ctx, n, keyspace.MergeOrder{Step: step, Range: d.right}); err != nil {
			return err
		}
	}
	return nil
}

// last takes the step that is left of a merge that is decided.
func (d *mergeDriver) last(ctx context.Context, name string, step keyspace.MergeStep, ids ...keyspace.RangeID) error {
	if err := d.at(name); err != nil {
		return err
	}
	for _, id := range ids {
		_, l := d.show(id)
		if l == nil {
			return errors.New("no leader")
		}
		if err := d.order(ctx, l, keyspace.MergeOrder{Step: step, Range: id}); err != nil {
			return err
		}
	}
	d.become("over")
	return nil
}

// become changes the record, unless the end has come for who would have done it.
func (d *mergeDriver) become(phase string) (done bool) {
	if d.killer == nil {
		d.phase = phase
		return true
	}
	d.killer.unless(func() { d.phase, done = phase, true })
	return done
}

// merge merges a range with its right neighbour.
func (r *rig) merge(id uint64, left, right keyspace.RangeID) {
	r.t.Helper()
	d := &mergeDriver{r: r, id: id, left: left, right: right, phase: "preparing"}
	if err := d.drive(); err != nil {
		r.t.Fatalf("merge %d: %v", id, err)
	}
	r.gone(right)
}

// gone waits until no node has a replica of the range any more.
func (r *rig) gone(id keyspace.RangeID) {
	r.t.Helper()
	for range 600 {
		left := 0
		for _, n := range r.nodes {
			if s := n.node.Load(); s != nil && s.Replica(id) != nil {
				left++
			}
		}
		if left == 0 {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	r.t.Fatalf("range %s is here yet after a minute", id)
}

// outcome waits until all replicas say what has become of the merge, and says whether there
// is one range now.
func (d *mergeDriver) outcome() (merged bool) {
	r := d.r
	r.t.Helper()
	for range 600 {
		one, two := 0, 0
		for _, n := range r.nodes {
			s := n.node.Load()
			left, right := s.Replica(d.left), s.Replica(d.right)
			switch {
			case left == nil:
			case right == nil && len(left.Descriptor().Span.End) == 0:
				one++
			case right != nil && left.Show().Merge == 0 && right.Show().Merge == 0 && len(left.Descriptor().Span.End) > 0:
				two++
			}
		}
		if one == len(r.nodes) || two == len(r.nodes) {
			return one > 0
		}
		time.Sleep(100 * time.Millisecond)
	}
	for _, n := range r.nodes {
		for _, p := range n.node.Load().Replicas() {
			r.t.Logf("node %s: %+v", n.id, p.Show())
		}
	}
	r.t.Fatalf("merge %d is %s, and its ranges do not say what has become of them", d.id, d.phase)
	return false
}

// Before each step of a merge somebody is lost: the left range's leader (which then leads the
// right one too), a follower, all nodes, or the driver alone. The next driver continues from its
// record. Requests find their range or wait, and their answers are a history of one store. In
// the end all replicas agree about the merge (traps 29, 42, 43). A run takes a random half of
// the pairs, with -short a quarter; SKEIN_TEST_STRIDE=1 takes all.
func TestMergeSurvivesLosses(t *testing.T) {
	steps := []string{"transfer", "bind", "store", "freeze", "settle", "commit", "absorb"}
	victims := []string{"leader", "follower", "all", "driver"}
	stride := 2
	if testing.Short() {
		stride = 4
	}
	if os.Getenv("SKEIN_TEST_STRIDE") == "1" {
		stride = 1
	}
	some := rand.IntN(stride)
	for i, step := range steps {
		for j, victim := range victims {
			if (i+j)%stride != some {
				continue
			}
			t.Run(step+"/"+victim, func(t *testing.T) {
				virtually(t, func(t *testing.T) {
					r := newShardRig(t, uint64(100+10*i+j), lan)
					r.startAll()
					r.leader(1)
					child := r.split("k1")
					r.leader(child)
					r.run(uint64(i), 4, 3, func() { r.mergeLosing(child, step, victim) })
				})
			})
		}
	}
}

// mergeLosing merges range 1 with the other one, and loses somebody before the step.
func (r *rig) mergeLosing(right keyspace.RangeID, step, victim string) {
	var down []*rigNode
	d := &mergeDriver{r: r, id: 100, left: 1, right: right, phase: "preparing"}
	d.before = func(now string) error {
		if now != step {
			return nil
		}
		l := r.leader(1)
		switch victim {
		case "leader":
			down = []*rigNode{l}
		case "follower":
			down = []*rigNode{r.nodes[int(l.id)%3]}
		case "all":
			down = r.nodes
		}
		for _, n := range down {
			n.crash()
		}
		return errDriverLost
	}
	time.Sleep(300 * time.Millisecond)
	if step == "transfer" {
		r.apart(1, right)
	}
	if err := d.drive(); !errors.Is(err, errDriverLost) {
		r.t.Errorf("step %s was not taken: %v", step, err)
	}
	d.before = nil
	over := make(chan error, 1)
	if victim != "all" {
		// The others go on. Without a replica they end the merge, or wait for it.
		go func() { over <- d.drive() }()
		time.Sleep(1500 * time.Millisecond)
	}
	for _, n := range down {
		n.start()
	}
	if victim == "all" {
		over <- d.drive()
	}
	if err := <-over; err != nil {
		r.t.Fatal(err)
	}
	if merged := d.outcome(); !merged && (step == "absorb" || victim == "driver") {
		r.t.Errorf("nothing was merged")
	}
	time.Sleep(500 * time.Millisecond)
}

// apart has two ranges led by different nodes.
func (r *rig) apart(a, b keyspace.RangeID) {
	r.t.Helper()
	for range 100 {
		la, lb := r.leader(a), r.leader(b)
		if la != lb {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_ = lb.node.Load().Replica(b).TransferTo(ctx, keyspace.NodeID(int(la.id)%3+1))
		cancel()
	}
	r.t.Fatalf("ranges %s and %s are led by one node", a, b)
}

// A range absorbs its neighbour, is split at the same key, and absorbs it once more. All writes
// before, between and after are on all replicas, also after all nodes lost what they had not
// stored.
func TestMerge(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 21, lan)
		r.startAll()
		r.leader(1)
		want := map[string]string{}
		put := func(round string) {
			t.Helper()
			for _, k := range []string{"a", "l", "m", "z"} {
				r.put(k, k+round)
				want[k] = k + round
			}
		}
		check := func() {
			t.Helper()
			for k, v := range want {
				if got := r.get(k); got != v {
					t.Errorf("%s is %q, want %q", k, got, v)
				}
			}
			r.agree()
		}
		put("0")
		for round := range 3 {
			child := r.split("m")
			r.leader(child)
			put(fmt.Sprint(2*round + 1))
			r.merge(uint64(100+round), 1, child)
			put(fmt.Sprint(2*round + 2))
			check()
			if d := r.leader(1).node.Load().Replica(1).Descriptor(); d.Generation != keyspace.Generation(3+2*round) || len(d.Span.End) != 0 {
				t.Errorf("round %d: %+v", round, d)
			}
		}
		for _, n := range r.nodes {
			n.crash()
		}
		r.startAll()
		r.leader(1)
		check()
		r.stopAll()
	})
}

// A node is down while its replica is moved away, and the range is absorbed before it comes
// back: the map does not know the range any more. The replica goes all the same, since its
// first key is another range's, with a higher generation.
func TestReplicaOfAnAbsorbedRangeGoes(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 41, lan)
		r.startAll()
		r.leader(1)
		child := r.split("m")
		r.leader(child)
		r.put("x", "1")
		d := &mergeDriver{r: r, id: 100, left: 1, right: child, phase: "preparing"}
		away := r.nodes[int(r.leader(child).id)%3]
		away.crash()
		ld, _ := d.show(1)
		rd, _ := d.show(child)
		r.seq.mu.Lock()
		merged := ld.Descriptor
		merged.Span.End, merged.Generation = nil, max(ld.Descriptor.Generation, rd.Descriptor.Generation)+1
		delete(r.seq.reported, child)
		r.seq.reported[1] = merged
		r.seq.mu.Unlock()
		away.start()
		for range 300 {
			if away.node.Load().Replica(child) == nil {
				r.stopAll()
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
		t.Errorf("range %s is on node %s yet", child, away.id)
		r.stopAll()
	})
}

// A target that is held evaluates nothing, and what waits goes on once it is held no more: when
// the order ends, or by itself.
func TestHeldTargetWaits(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 45, lan)
		r.startAll()
		r.leader(1)
		child := r.split("m")
		r.leader(child)
		d := &mergeDriver{r: r, id: 100, left: 1, right: child, phase: "preparing"}
		var put chan struct{}
		d.before = func(step string) error {
			if step != "commit" {
				return nil
			}
			time.Sleep(20 * time.Millisecond) // it is held by now
			put = make(chan struct{})
			go func() {
				r.put("a", "1")
				close(put)
			}()
			time.Sleep(100 * time.Millisecond)
			select {
			case <-put:
				t.Error("a range that is held has answered a put")
			default:
			}
			return errDriverLost
		}
		if err := d.drive(); !errors.Is(err, errDriverLost) {
			t.Fatal(err)
		}
		// No order holds it any more, and the limit is not reached. What it is bound to it is yet.
		time.Sleep(50 * time.Millisecond)
		select {
		case <-put:
		default:
			t.Error("the put waits though nobody holds the range")
		}
		rep := r.leader(1).node.Load().Replica(1)
		began, limit := time.Now(), rep.store.cfg.Limits.MergeHold
		// The node's clock is not quite this one.
		if err := rep.hold(t.Context(), 100); err == nil || (time.Since(began)-limit).Abs() > limit/20 {
			t.Errorf("held for %v: %v", time.Since(began), err)
		}
		began = time.Now()
		if err := rep.hold(t.Context(), 99); err != nil || time.Since(began) != 0 {
			t.Errorf("held for another merge, for %v: %v", time.Since(began), err)
		}
		d.phase, d.before = "aborted", nil
		if err := d.drive(); err != nil {
			t.Fatal(err)
		}
		r.put("b", "1")
		r.stopAll()
	})
}

// A call that waits for a freeze ends its wait when the merge is aborted before the freeze.
func TestSettleEndsWithTheMerge(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 47, lan)
		r.startAll()
		r.leader(1)
		child := r.split("m")
		r.leader(child)
		d := &mergeDriver{r: r, id: 100, left: 1, right: child, phase: "aborted"}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began, settled := time.Now(), make(chan error, len(r.nodes))
		for _, n := range r.nodes {
			go func() { settled <- d.order(ctx, n, keyspace.MergeOrder{Step: keyspace.MergeSettle, Range: child}) }()
		}
		time.Sleep(100 * time.Millisecond)
		if err := d.drive(); err != nil {
			t.Fatal(err)
		}
		for range r.nodes {
			if err := <-settled; kverror.Of(err).Kind != kverror.BadRequest {
				t.Errorf("settled: %v", err)
			}
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("they waited for %v", took)
		}
		r.stopAll()
	})
}

// A leader of both ranges keeps its version caches through the merge. So it need not look up each
// key when the requests that waited for the merge come. A read that began at the right range
// before adds nothing to the cache. Beyond a number of neighbours the cache begins anew.
func TestAbsorbKnowsTheKeysOfBoth(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 46, lan)
		r.startAll()
		r.leader(1)
		const neighbours = eval.MaxKeyEpochs
		key := func(i int) string { return fmt.Sprintf("k%02d", i) }
		children := make([]keyspace.RangeID, neighbours+1)
		for i := neighbours; i > 0; i-- {
			children[i] = r.split(key(i))
			r.leader(children[i])
		}
		for i := 1; i <= neighbours; i++ {
			d := &mergeDriver{r: r, id: uint64(100 + i), left: 1, right: children[i], phase: "preparing"}
			var source *Replica
			d.before = func(step string) error {
				if step == "freeze" {
					_, l := d.show(1)
					source = l.node.Load().Replica(children[i])
					for at := range i + 1 {
						r.put(key(at), fmt.Sprint(i))
					}
				}
				return nil
			}
			if err := d.drive(); err != nil {
				t.Fatal(err)
			}
			target := r.leader(1).node.Load().Replica(1)
			for at := range i + 1 {
				k := []byte(key(at))
				target.mu.Lock()
				epoch := target.epochs.Of(k)
				h, ok := target.store.cache.Get(epoch, k)
				target.mu.Unlock()
				if known := i < eval.MaxKeyEpochs; ok != known || known && string(h.Value) != fmt.Sprint(i) {
					t.Errorf("merge %d: of %s is known %+v, %t", i, k, h, ok)
				}
				source.mu.Lock()
				if source.epochs.Of(k) == epoch {
					t.Errorf("merge %d: what is read at the absorbed range counts for %s", i, k)
				}
				source.mu.Unlock()
			}
			r.gone(children[i])
		}
		r.agree()
		r.stopAll()
	})
}

// TestAbsorbWithoutAnOrder: placement commits a merge and is lost. The left range absorbs by
// what the map says, also if its leader is another one than at the commit. As long as the map
// does not say so, it does not.
func TestAbsorbWithoutAnOrder(t *testing.T) {
	for _, moved := range []bool{false, true} {
		t.Run(fmt.Sprintf("leader moved=%t", moved), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, 7, lan)
				r.startAll()
				defer r.stopAll()
				r.leader(1)
				right := r.split("k1")
				r.leader(right)
				d := &mergeDriver{r: r, id: 100, left: 1, right: right, phase: "preparing"}
				until := "commit"
				d.before = func(step string) error {
					if step == until {
						return errDriverLost
					}
					return nil
				}
				lost := func(phase string) {
					t.Helper()
					if err := d.drive(); !errors.Is(err, errDriverLost) || d.phase != phase {
						t.Fatalf("%s: %v", d.phase, err)
					}
				}
				lost("preparing")
				time.Sleep(5 * mergeLook)
				if st, _ := d.show(1); st == nil || len(st.Descriptor.Span.End) == 0 || st.Merge != 100 {
					t.Fatalf("the map does not say that the merge is committed: %+v", st)
				}
				until = "absorb"
				lost("committed")
				if moved {
					l := r.leader(1)
					to := r.nodes[int(l.id)%len(r.nodes)]
					if err := l.node.Load().Admin().TransferTo(t.Context(), l.id, 1, to.id); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(2 * mergeLook)
				if !d.outcome() {
					t.Error("the merge was not executed")
				}
			})
		})
	}
}
