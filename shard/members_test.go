package shard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/sim/simclock"
)

// newWideRig is a rig of more nodes than its range has replicas: those are on the first
// three.
func newWideRig(t *testing.T, seed uint64, faults simbus.Faults, nodes int) *rig {
	t.Helper()
	r := newShardRig(t, seed, faults)
	for i := len(r.nodes); i < nodes; i++ {
		r.nodes = append(r.nodes, &rigNode{
			r: r, id: keyspace.NodeID(i + 1), fs: simdisk.New(),
			clock: simclock.New(time.Duration(i)*time.Hour, 1),
		})
	}
	return r
}

// walker moves ranges as placement will: step by step, each decided by what the leader
// says of the range.
type walker struct {
	r *rig
	// last is the last replica's id.
	last keyspace.ReplicaID
	// steps counts what was done, refused what was not.
	steps, refused int
	// havoc has nodes killed; down is since then.
	havoc bool
	down  *rigNode
	since time.Time
}

// replace brings a voter of the key's range to the node, in the place of one of another
// node.
func (m *walker) replace(key string, to keyspace.NodeID) {
	m.r.t.Helper()
	m.until(key, func(d keyspace.Descriptor, lead *rigNode) (done bool, err error) {
		have, ok := d.ReplicaOn(to)
		switch {
		case !ok:
			m.last++
			return false, m.change(lead, &d, raftgroup.ConfChange{Type: raftgroup.AddLearner, Replica: m.last, Node: to})
		case have.Role == keyspace.RoleVoter && len(d.Replicas) == 3:
			return true, nil
		case have.Role != keyspace.RoleLearner:
			return false, nil
		}
		i := slices.IndexFunc(d.Replicas, func(v keyspace.Replica) bool { return v.Role == keyspace.RoleVoter && v.Node != lead.id })
		return false, m.change(lead, &d,
			raftgroup.ConfChange{Type: raftgroup.Promote, Replica: have.ID},
			raftgroup.ConfChange{Type: raftgroup.RemoveReplica, Replica: d.Replicas[i].ID})
	})
}

// until repeats a step until it says that all is done.
func (m *walker) until(key string, step func(d keyspace.Descriptor, lead *rigNode) (done bool, err error)) {
	m.r.t.Helper()
	var last error
	for range 2000 {
		m.kill()
		if d, leaders := m.r.route([]byte(key)); len(leaders) > 0 {
			if s := leaders[0].node.Load(); s != nil {
				p := s.Replica(d.Range)
				if p == nil {
					continue
				}
				var done bool
				if done, last = step(p.Descriptor(), leaders[0]); done {
					return
				}
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	d, leaders := m.r.route([]byte(key))
	m.r.t.Fatalf("the move did not end: %v; %v, %d leaders", last, d, len(leaders))
}

func (m *walker) change(lead *rigNode, d *keyspace.Descriptor, changes ...raftgroup.ConfChange) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	after, err := lead.node.Load().Admin().ChangeMembers(ctx, lead.id, d.Range, d.ConfIndex, changes)
	if err != nil {
		m.refused++
		return err
	}
	m.steps++
	for _, c := range changes {
		if have := slices.ContainsFunc(after.Replicas, func(r keyspace.Replica) bool { return r.ID == c.Replica }); have == (c.Type == raftgroup.RemoveReplica) {
			m.r.t.Errorf("after %v: %v", c, after.Replicas)
		}
	}
	return nil
}

// lead has the node lead the key's range.
func (m *walker) lead(key string, to keyspace.NodeID) {
	m.r.t.Helper()
	m.until(key, func(d keyspace.Descriptor, lead *rigNode) (bool, error) {
		if lead.id == to {
			return true, nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		return false, lead.node.Load().Admin().TransferTo(ctx, lead.id, d.Range, to)
	})
}

// settle waits until each range is held by exactly those who are in its descriptor, and
// nobody holds data of another one.
func (r *rig) settle() {
	r.t.Helper()
	var wrong error
	for range 600 {
		if wrong = r.unsettled(); wrong == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	for _, n := range r.nodes {
		for _, s := range n.node.Load().List() {
			d, ok := r.seq.Descriptor(s.Descriptor.Range)
			r.t.Logf("node %s: %v leader %s; reported %t %v", n.id, s.Descriptor, s.LeaderNode, ok, d)
		}
	}
	r.t.Fatal(wrong)
}

func (r *rig) unsettled() error {
	newest := map[keyspace.RangeID]keyspace.Descriptor{}
	for _, n := range r.nodes {
		for _, p := range n.node.Load().Replicas() {
			d := p.Descriptor()
			if old := newest[d.Range]; d.Newer(&old) {
				newest[d.Range] = d
			}
		}
	}
	for _, n := range r.nodes {
		for id, d := range newest {
			_, member := d.ReplicaOn(n.id)
			_, stored, err := n.engine.Applied(id.Group())
			if here := n.node.Load().Replica(id) != nil; here != member || stored != member || err != nil {
				return fmt.Errorf("node %s: range %s is here %t, stored %t, the members are %v: %w", n.id, id, here, stored, d.Replicas, err)
			}
		}
	}
	for id, d := range newest {
		var states []*Status
		for _, m := range d.Replicas {
			states = append(states, r.nodes[m.Node-1].node.Load().Replica(id).Show())
		}
		for i, st := range states {
			h, err := r.nodes[d.Replicas[i].Node-1].node.Load().Replica(id).HashAt(st.LastRevision, st.Compacted)
			if err != nil {
				return err
			}
			h0, err := r.nodes[d.Replicas[0].Node-1].node.Load().Replica(id).HashAt(states[0].LastRevision, states[0].Compacted)
			if err != nil {
				return err
			}
			if st.Applied != states[0].Applied || st.Hash != states[0].Hash || st.Keys != states[0].Keys || h != h0 {
				return fmt.Errorf("range %s: node %s has %v %s %d %x, the first %v %s %d %x", id, d.Replicas[i].Node,
					st.Applied, st.Hash, st.Keys, h, states[0].Applied, states[0].Hash, states[0].Keys, h0)
			}
		}
	}
	return nil
}

// A range walks over five nodes under load, while it is split and any node is killed.
// The history stays linearizable, replicas agree, and of those that have left nothing
// stays.
func TestLinearizableThroughMoves(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newWideRig(t, seed, lan, 5)
				r.startAll()
				r.leader(1)
				m := &walker{r: r, last: 100}
				r.runWith(seed, 6, 4, r.settle, func() { m.walk() })
				t.Logf("%d steps, %d refused", m.steps, m.refused)
				if m.steps < 6 {
					t.Error("the ranges hardly moved")
				}
			})
		})
	}
}

// walk moves the ranges of random keys to random nodes. Before a step any node may be
// killed; it comes back a second later.
func (m *walker) walk() {
	r := m.r
	moves := 6
	if testing.Short() {
		moves = 4
	}
	for i := range moves {
		time.Sleep(200 * time.Millisecond)
		key := fmt.Sprintf("k%d", r.rng.IntN(4))
		m.havoc = i > 0
		d, _ := r.route([]byte(key))
		to := keyspace.NodeID(r.rng.IntN(len(r.nodes)) + 1)
		for _, member := d.ReplicaOn(to); member; _, member = d.ReplicaOn(to) {
			to = to%keyspace.NodeID(len(r.nodes)) + 1
		}
		m.replace(key, to)
		m.havoc = false
		m.revive()
		if i%3 == 0 {
			m.lead(key, to)
		}
		if i == 2 {
			r.split("k2")
		}
	}
}

// kill has a node die where havoc is wanted, and revive brings it back.
func (m *walker) kill() {
	if m.down != nil && time.Since(m.since) > time.Second {
		m.revive()
	}
	if m.havoc && m.down == nil && m.r.rng.IntN(4) == 0 {
		m.down, m.since = m.r.nodes[m.r.rng.IntN(len(m.r.nodes))], time.Now()
		m.down.crash()
	}
}

func (m *walker) revive() {
	if m.down != nil {
		m.down.start()
		m.down = nil
	}
}

// A change that was decided by an older configuration is refused, and so is what would
// leave the range without its leader.
func TestMembersAreChangedByTheirConfigurationOnly(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newWideRig(t, 3, lan, 4)
		r.startAll()
		lead := r.leader(1)
		s := lead.node.Load()
		d := s.Replica(1).Descriptor()
		ask := func(confIndex uint64, c raftgroup.ConfChange) kverror.Kind {
			_, err := s.Admin().ChangeMembers(t.Context(), lead.id, 1, confIndex, []raftgroup.ConfChange{c})
			if err == nil {
				return 255
			}
			return kverror.Of(err).Kind
		}
		add := raftgroup.ConfChange{Type: raftgroup.AddLearner, Replica: 9, Node: 4}
		own, _ := d.ReplicaOn(lead.id)
		if k := ask(d.ConfIndex-1, add); k != kverror.WrongRange {
			t.Errorf("by an older configuration: %v", k)
		}
		if k := ask(d.ConfIndex, raftgroup.ConfChange{Type: raftgroup.RemoveReplica, Replica: own.ID}); k != kverror.BadRequest {
			t.Errorf("removes the leader: %v", k)
		}
		if k := ask(d.ConfIndex, add); k != 255 {
			t.Errorf("the right one: %v", k)
		}
		if k := ask(d.ConfIndex, add); k != kverror.WrongRange {
			t.Errorf("the same again: %v", k)
		}
		if err := s.Admin().TransferTo(t.Context(), lead.id, 1, 4); kverror.Of(err).Kind != kverror.BadRequest {
			t.Errorf("handed over to a learner: %v", err)
		}
		r.settle()
		r.stopAll()
	})
}

// A transfer to a node that cannot lead is refused before the pipeline closes, so no request waits.
func TestNothingStandsStillForWhoCannotLead(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 10, lan)
		r.startAll()
		lead := r.leader(1)
		others := slices.DeleteFunc(slices.Clone(r.nodes), func(n *rigNode) bool { return n == lead })
		others[0].crash()
		time.Sleep(10 * time.Second)
		r.net.Cut(lead.id, others[1].id)
		ctx, cancel := context.WithCancel(t.Context())
		var put sync.WaitGroup
		put.Go(func() {
			s := lead.node.Load()
			_, _ = s.Do(ctx, &rangeapi.Request{Range: 1, Generation: s.Replica(1).Descriptor().Generation, Op: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}}) // nobody acknowledges it
		})
		time.Sleep(10 * time.Millisecond)
		began := time.Now()
		err := lead.node.Load().Replica(1).TransferTo(t.Context(), others[0].id)
		if took := time.Since(began); kverror.Of(err).Kind != kverror.Busy || took > 0 {
			t.Errorf("after %v: %v", took, err)
		}
		cancel()
		put.Wait()
		r.net.HealAll()
		others[0].start()
		r.stopAll()
	})
}

// The caller of a change of members may give up, as placement's leader does when its term ends. The
// range learns the outcome all the same, and a merge may begin afterwards.
func TestChangeOfMembersThatNobodyWaitsFor(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newWideRig(t, 9, lan, 4)
		r.startAll()
		lead := r.leader(1)
		child := r.split("m")
		(&walker{r: r}).lead("x", lead.id)
		s := lead.node.Load()
		p := s.Replica(1)
		given, up := context.WithCancel(t.Context())
		up()
		d := p.Descriptor()
		_, err := p.ChangeMembers(given, d.ConfIndex, []raftgroup.ConfChange{{Type: raftgroup.AddLearner, Replica: 9, Node: 4}})
		if kverror.Of(err).Kind != kverror.LeaderChanged {
			t.Fatalf("given up: %v", err)
		}
		for range 100 {
			if d = p.Descriptor(); len(d.Replicas) == 4 {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if _, err := p.ChangeMembers(t.Context(), d.ConfIndex, []raftgroup.ConfChange{{Type: raftgroup.RemoveReplica, Replica: 9}}); err != nil {
			t.Fatal(err)
		}
		d = p.Descriptor()
		bind := keyspace.MergeOrder{
			Step: keyspace.MergeBind, ID: 100, Range: 1, Generation: d.Generation, ConfIndex: d.ConfIndex, Other: child, Hull: keyspace.Span{Start: d.Span.Start},
		}
		for i := 0; ; i++ {
			if err = s.Admin().Merge(t.Context(), lead.id, bind); err == nil {
				break
			}
			if i == 100 {
				t.Errorf("nothing is under way, and the range is not bound: %v", err)
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		r.stopAll()
	})
}

// A replica that has left never comes back, though a replica that has not heard of the change asks
// for its vote. Its log is gone, and the old quorum could elect a leader without acknowledged
// entries.
func TestReplicaThatHasLeftStaysAway(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newWideRig(t, 5, lan, 4)
		r.startAll()
		m := &walker{r: r, last: 100}
		m.lead("k", 1)
		r.net.Partition(3)
		m.until("k", func(d keyspace.Descriptor, lead *rigNode) (bool, error) {
			if _, ok := d.ReplicaOn(4); !ok {
				return false, m.change(lead, &d, raftgroup.ConfChange{Type: raftgroup.AddLearner, Replica: 101, Node: 4})
			}
			old, ok := d.ReplicaOn(2)
			if !ok {
				return true, nil
			}
			return false, m.change(lead, &d,
				raftgroup.ConfChange{Type: raftgroup.Promote, Replica: 101}, raftgroup.ConfChange{Type: raftgroup.RemoveReplica, Replica: old.ID})
		})
		r.put("k", "acknowledged by the new quorum")
		two, three := r.nodes[1], r.nodes[2]
		for range 200 {
			if two.node.Load().Replica(1) == nil {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		two.crash()
		two.start()
		// Now the one that was cut off and the one that has left hear each other, and nobody
		// else.
		r.net.HealAll()
		r.net.Partition(2, 3)
		for range 400 {
			time.Sleep(50 * time.Millisecond)
			if two.node.Load().Replica(1) != nil {
				t.Fatal("the replica that has left is here again")
			}
			if three.node.Load().Replica(1).Leader().IsLeader {
				t.Fatal("a replica leads that lacks what was acknowledged")
			}
		}
		r.net.HealAll()
		r.settle()
		r.stopAll()
	})
}

// Locks count in their node's budget until their transactions end or the replica is gone. After a
// merge or a move they count at another replica.
func TestLocksOfAReplicaThatIsGoneDoNotCount(t *testing.T) {
	for what, goes := range map[string]func(r *rig, child keyspace.RangeID){
		"absorbed": func(r *rig, child keyspace.RangeID) { r.merge(100, 1, child) },
		"moved":    func(r *rig, _ keyspace.RangeID) { (&walker{r: r, last: 100}).replace("x", 4) },
	} {
		t.Run(what, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				nodes := 3
				if what == "moved" {
					nodes = 4
				}
				r := newWideRig(t, 5, lan, nodes)
				r.startAll()
				r.leader(1)
				child := r.split("m")
				r.leader(child)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if _, _, err := r.command(ctx, "x", &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("x"), Writes: writeAt("x")}); err != nil {
					t.Fatal(err)
				}
				goes(r, child)
				r.settle()
				if _, _, err := r.command(ctx, "x", &rangeapi.Resolve{Name: nameAged(1)}); err != nil {
					t.Fatal(err)
				}
				r.settle()
				for _, n := range r.nodes {
					if b := n.node.Load().locks.Bytes(); b != 0 {
						t.Errorf("node %s counts %d bytes of locks, and there is none", n.id, b)
					}
				}
				r.stopAll()
			})
		})
	}
}

// A child whose first record no flush has reached is removed, and its node dies when the
// tombstone is in the log and nothing else. The parent's log makes the split again, and not
// the child: what that had promised is gone.
func TestChildThatHasLeftIsNotMadeAgain(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 6, lan)
		r.startAll()
		r.leader(1)
		child := r.split("k")
		r.leader(child)
		n := r.nodes[2]
		for range 200 {
			if n.node.Load().Replica(child) != nil {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if n.node.Load().Replica(child) == nil {
			t.Fatal("the child did not come")
		}
		if _, durable, err := n.engine.DurableApplied(child.Group()); durable || err != nil {
			t.Fatalf("the child is durable, which proves nothing: %v", err)
		}
		cutOff(t, n, child)
		n.crash()
		n.start()
		for range 100 {
			time.Sleep(50 * time.Millisecond)
			if n.node.Load().Replica(child) != nil {
				t.Fatal("the child is here again")
			}
		}
		if d := n.node.Load().Replica(1).Descriptor(); string(d.Span.End) != "k" {
			t.Errorf("the parent is %v: the split was not made again", d)
		}
		r.stopAll()
	})
}

// cutOff begins to remove the node's replica of a range. The tombstone is in the log, and nothing else.
func cutOff(t *testing.T, n *rigNode, id keyspace.RangeID) {
	t.Helper()
	cut, gs := errors.New("cut off"), []keyspace.GroupID{id.Group()}
	if failed := n.node.Load().lifecycle.End(t.Context(), gs); len(failed) > 0 {
		t.Fatal(failed)
	}
	failed := n.host.Remove(t.Context(), gs, func(*engine.Batch, keyspace.GroupID) error { return cut })
	if !errors.Is(failed[id.Group()], cut) {
		t.Fatal(failed)
	}
}

// A parent whose split no flush has reached is removed, and its node dies when the tombstone
// is in the log and nothing else: no log makes the split again. The child, which has stored
// what was acknowledged, is there all the same.
func TestChildOutlivesTheRemovalOfItsParent(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 7, lan)
		r.startAll()
		r.leader(1)
		child := r.split("k")
		r.leader(child)
		r.put("x", "acknowledged")
		n := r.nodes[2]
		if _, durable, err := n.engine.DurableApplied(child.Group()); durable || err != nil {
			t.Fatalf("the child is durable, which proves nothing: %v", err)
		}
		cutOff(t, n, 1)
		n.crash()
		n.start()
		if n.node.Load().Replica(1) != nil {
			t.Error("the parent is here again")
		}
		for range 200 {
			if c := n.node.Load().Replica(child); c != nil && c.Show().Applied == r.leader(child).node.Load().Replica(child).Show().Applied {
				r.stopAll()
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Error("the child is gone, and with it what it has stored")
		r.stopAll()
	})
}

// A replica that the map does not know any more has a committed split to apply yet, as one
// has that a crash has taken back to before it. It goes when the child is made.
func TestReplicaLeavesWhenAllIsApplied(t *testing.T) {
	virtually(t, func(t *testing.T) {
		placed := &rigSequencer{}
		w := &fakeWorld{t: t, fs: simdisk.New(), seq: &fakeSequencer{last: 1, compacted: -1}, placed: placed}
		w.start()
		defer w.stop()
		if err := w.store.Create(t.Context(), []keyspace.Descriptor{testDescriptor}); err != nil {
			t.Fatal(err)
		}
		moved := testDescriptor
		moved.Generation, moved.Span.End = 2, []byte("m")
		moved.ConfIndex, moved.Replicas = raftgroup.InitIndex+2, testDescriptor.Replicas[1:]
		placed.ReportDescriptors(moved)
		g := w.groups.group(1)
		g.mu.Lock()
		g.commit = g.index + 1
		g.mu.Unlock()
		w.store.lifecycle.Check(1)
		time.Sleep(10 * lifecycle.RetryAfter)
		if w.store.Replica(1) == nil {
			t.Fatal("the replica has left, and with it the split")
		}
		split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: 1})
		split = command.AppendSplit(split, &command.Split{Key: []byte("m"), Child: 2, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
		if err := g.apply(raftgroup.Entry{Term: 5, Data: split}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * lifecycle.RetryAfter)
		if w.store.Replica(1) != nil || w.store.Replica(2) == nil {
			t.Errorf("here are %v", w.store.List())
		}
		// A group whose removal failed applies nothing any more.
		child := testDescriptor
		child.Range, child.Generation, child.Span.Start = 2, 2, []byte("m")
		child.ConfIndex, child.Replicas = moved.ConfIndex, moved.Replicas
		placed.ReportDescriptors(child)
		g = w.groups.group(2)
		g.mu.Lock()
		g.commit = g.index + 1
		g.mu.Unlock()
		w.store.Replica(2).expel()
		w.store.lifecycle.Check(2)
		time.Sleep(2 * lifecycle.RetryAfter)
		if w.store.Replica(2) != nil {
			t.Error("a removal that had begun does not go on")
		}
	})
}
