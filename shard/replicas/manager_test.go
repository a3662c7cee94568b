package replicas

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/shard/command"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const self, peer keyspace.NodeID = 1, 2

var members = []keyspace.Replica{{ID: 1, Node: self}, {ID: 2, Node: peer}}

// replica is an open replica: a state and what was done to it.
type replica struct {
	w         *world
	id        keyspace.RangeID
	state     State // guarded by w.mu
	behind    bool  // guarded by w.mu
	campaigns int   // guarded by w.mu
	expelled  bool  // guarded by w.mu
}

func (r *replica) Range() keyspace.RangeID { return r.id }
func (r *replica) State() State            { r.w.mu.Lock(); defer r.w.mu.Unlock(); return r.state }
func (r *replica) CaughtUp() bool          { r.w.mu.Lock(); defer r.w.mu.Unlock(); return !r.behind }
func (r *replica) Campaign()               { r.w.mu.Lock(); defer r.w.mu.Unlock(); r.campaigns++ }
func (r *replica) Expel()                  { r.w.mu.Lock(); defer r.w.mu.Unlock(); r.expelled = true }

// world is a node without raft and pipelines: the owner, the groups and the map.
type world struct {
	t testing.TB
	e *engine.Engine
	m *Manager

	mu sync.Mutex
	// Guarded by mu: open are the replicas, mapped is the range map, peers the answers of peers;
	// durable says whether a replica's record was durable when it was opened.
	open    map[keyspace.RangeID]*replica
	mapped  []keyspace.Descriptor
	peers   map[keyspace.RangeID]keyspace.Descriptor
	durable map[keyspace.RangeID]bool
	// removed are the groups with a tombstone in the wal. Guarded by mu.
	removed []keyspace.GroupID
	// asked is called before a peer answers, written between the deletions of a removal and their commit.
	asked, written func()
	// room is how many replicas the node may have, 0 for any number.
	room int
}

func in(t *testing.T, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		onEngine(t, engine.Options{FS: simdisk.New(), Dir: "data", Clock: clock.Virtual(), BallastBytes: -1, LowSpaceBytes: -1}, test)
	})
}

// onEngine runs a test on an engine.
func onEngine(t testing.TB, o engine.Options, test func(w *world)) {
	t.Helper()
	w := &world{
		t: t, open: map[keyspace.RangeID]*replica{}, peers: map[keyspace.RangeID]keyspace.Descriptor{}, durable: map[keyspace.RangeID]bool{},
		asked: func() {}, written: func() {},
	}
	e, err := engine.Open(o)
	w.must(err)
	w.e = e
	w.m = New(Config{
		Self: self, Clock: o.Clock, Engine: e, Groups: groups{w}, Owner: owner{w}, Placed: placed{w}, Logger: zap.NewNop(),
		Look: func(_ context.Context, _ keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, error) {
			w.asked()
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.peers[id], nil
		},
		After: func(d time.Duration, f func()) { time.AfterFunc(d, f) },
		Room: func(more int) error {
			if n := len(owner{w}.Replicas()); w.room > 0 && n+more > w.room {
				return fmt.Errorf("%d replicas and %d more", n, more)
			}
			return nil
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	w.m.Start(ctx, wg.Go)
	test(w)
	cancel()
	wg.Wait()
	w.must(e.Close())
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) locked(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// here compares the ranges that have an open replica.
func (w *world) here(want ...keyspace.RangeID) {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if got := slices.Sorted(maps.Keys(w.open)); !slices.Equal(got, want) {
		w.t.Fatalf("replicas of ranges %v, want %v", got, want)
	}
}

// claimed compares the ranges that claim a span.
func (w *world) claimed(want ...keyspace.RangeID) {
	w.t.Helper()
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if got := slices.Sorted(maps.Keys(w.m.claims)); !slices.Equal(got, want) {
		w.t.Fatalf("claims of ranges %v, want %v", got, want)
	}
}

func span(start, end string) keyspace.Span {
	s := keyspace.Span{Start: []byte(start)}
	if end != "" {
		s.End = []byte(end)
	}
	return s
}

func describe(id keyspace.RangeID, start, end string) keyspace.Descriptor {
	return keyspace.Descriptor{Range: id, Generation: 1, ConfIndex: raftgroup.InitIndex, Span: span(start, end), Replicas: members}
}

// split applies a split on the node: the parent shrinks, the child's first record is written.
func (w *world) split(parent, child keyspace.RangeID, key, end string) {
	w.t.Helper()
	b := w.e.NewBatch()
	rec := command.Record{RangeID: child, Generation: 2, Span: span(key, end)}
	w.must(w.m.BootstrapChild(b, &rec, members, &command.TxnState{}))
	w.must(b.Commit())
	w.locked(func() {
		p := w.open[parent]
		p.state.Descriptor.Span.End, p.state.Descriptor.Generation = []byte(key), 2
	})
}

type owner struct{ w *world }

func (o owner) Replica(id keyspace.RangeID) Replica {
	o.w.mu.Lock()
	defer o.w.mu.Unlock()
	if r := o.w.open[id]; r != nil {
		return r
	}
	return nil
}

func (o owner) Replicas() (rs []Replica) {
	o.w.mu.Lock()
	defer o.w.mu.Unlock()
	for _, r := range o.w.open {
		rs = append(rs, r)
	}
	return rs
}

func (o owner) Open(s *Start) error {
	_, durable, err := o.w.e.DurableApplied(s.Range.Group())
	o.w.mu.Lock()
	defer o.w.mu.Unlock()
	if o.w.open[s.Range] != nil {
		return fmt.Errorf("range %s: %w", s.Range, raftgroup.ErrExists)
	}
	r := &replica{w: o.w, id: s.Range, state: State{Replica: s.Replica, Introduced: s.Introduced}}
	if s.Applied != nil {
		r.state.Descriptor, r.state.Merge = s.Record.Descriptor(s.Applied.ConfIndex, s.Applied.Replicas), s.Record.Merge
	}
	o.w.open[s.Range], o.w.durable[s.Range] = r, durable
	return err
}

func (o owner) Drop(id keyspace.RangeID) {
	o.w.mu.Lock()
	defer o.w.mu.Unlock()
	delete(o.w.open, id)
}

func (o owner) DeleteNotes(*engine.Batch, keyspace.RangeID) error { return nil }

type groups struct{ w *world }

func (g groups) Bootstrap(b *engine.Batch, id keyspace.GroupID, replicas []keyspace.Replica, payload []byte) error {
	return b.SetApplied(id, engine.Applied{Index: raftgroup.InitIndex, ConfIndex: raftgroup.InitIndex, Term: raftgroup.InitTerm, Replicas: replicas, Payload: payload})
}

func (g groups) FinishRemovals(context.Context, raftgroup.Deleter) error { return nil }

func (g groups) Remove(ctx context.Context, ids []keyspace.GroupID, del raftgroup.Deleter) map[keyspace.GroupID]error {
	g.w.locked(func() { g.w.removed = ids })
	var batches []*engine.Batch
	for _, id := range ids {
		b := g.w.e.NewBatch()
		batches = append(batches, b)
		g.w.must(errors.Join(b.DeleteApplied(id), del(b, id)))
	}
	g.w.written()
	for _, b := range batches {
		g.w.must(b.Commit())
	}
	if err := g.w.e.Flush(ctx); err != nil {
		g.w.t.Error(err)
	}
	g.w.locked(func() { g.w.removed = nil })
	return nil
}

func (g groups) Removed() []keyspace.GroupID {
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	return g.w.removed
}

type placed struct{ w *world }

func (p placed) Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	for _, d := range p.w.mapped {
		if d.Range == id {
			return d, true
		}
	}
	return keyspace.Descriptor{}, false
}

func (p placed) Ranges() int { return 0 }

func (p placed) At(key []byte) (keyspace.Descriptor, bool) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	for _, d := range p.w.mapped {
		if d.Span.Contains(key) {
			return d, true
		}
	}
	return keyspace.Descriptor{}, false
}

// The second of two overlapping orders is skipped, and an order may be repeated. The first member of
// a range stands for election.
func TestCreate(t *testing.T) {
	in(t, func(w *world) {
		ds := []keyspace.Descriptor{describe(1, "", "t"), describe(3, "s", "")}
		for range 2 {
			w.must(w.m.Create(w.t.Context(), ds))
			w.here(1)
			w.claimed()
		}
		if r := w.open[1]; !w.durable[1] || r.campaigns == 0 {
			t.Errorf("durable %t, %d campaigns", w.durable[1], r.campaigns)
		}
	})
}

// A node without memory for another replica takes none that is new to it. An order is refused as a whole
// and may be repeated. A peer that speaks to a new replica is not heard. Children of splits and stored
// replicas are opened all the same.
func TestNoRoom(t *testing.T) {
	in(t, func(w *world) {
		w.room = 2
		ds := []keyspace.Descriptor{describe(1, "", "k"), describe(2, "k", "s"), describe(3, "s", "")}
		if err := w.m.Create(w.t.Context(), ds); err == nil {
			t.Error("three replicas are created where two fit")
		}
		w.here()
		w.claimed()
		w.must(w.m.Create(w.t.Context(), ds[:2]))
		w.must(w.m.Create(w.t.Context(), ds[:2])) // nothing new
		w.here(1, 2)
		w.peers[3] = ds[2]
		w.m.Unknown(peer, keyspace.RangeID(3).Group(), 1)
		w.here(1, 2)
		w.split(2, 4, "m", "s")
		w.m.OpenChild(4, false)
		w.here(1, 2, 4)
		w.room = 4
		w.m.Unknown(peer, keyspace.RangeID(3).Group(), 1)
		w.here(1, 2, 3, 4)
	})
	in(t, func(w *world) {
		if _, err := w.m.createRecords([]keyspace.Descriptor{describe(1, "", "k"), describe(2, "k", "")}); err != nil {
			t.Fatal(err)
		}
		w.room = 1
		w.must(w.m.Open(w.t.Context()))
		w.here(1, 2)
	})
}

// A new range campaigns a few times while it knows no leader.
func TestFirstCampaigns(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "k"), describe(2, "k", "")}))
		time.Sleep(3*firstCampaignPause + firstCampaignPause/2)
		w.locked(func() { w.open[1].state.KnowsLeader = true })
		time.Sleep(time.Minute)
		w.mu.Lock()
		defer w.mu.Unlock()
		if one, two := w.open[1].campaigns, w.open[2].campaigns; one != 4 || two != firstCampaigns {
			t.Errorf("%d campaigns until a leader was known, and %d without", one, two)
		}
	})
}

// A peer speaks to a replica while the order to create it is still being flushed: the replica does
// not come to life before its first record would survive a crash.
func TestUnknownBesideCreate(t *testing.T) {
	in(t, func(w *world) {
		if _, err := w.m.createRecords([]keyspace.Descriptor{describe(1, "", "")}); err != nil {
			t.Fatal(err)
		}
		w.m.Unknown(peer, keyspace.RangeID(1).Group(), 1)
		w.here(1)
		if !w.durable[1] {
			t.Error("opened from a record that a crash may take")
		}
	})
}

// The child of a split is opened from its record and claims its span until then.
func TestChild(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "")}))
		w.split(1, 2, "m", "")
		w.claimed(2)
		if why := w.m.Claim([]Claim{{Range: 3, Span: span("x", "")}}); why[3] == nil {
			t.Error("what the child is about to hold is claimed")
		}
		w.m.OpenChild(2, true)
		w.here(1, 2)
		w.claimed()
		if why := w.m.Claim([]Claim{{Range: 3, Span: span("x", "")}}); why[3] == nil {
			t.Error("what the child holds is claimed")
		}
		if w.open[2].campaigns == 0 {
			t.Error("it does not stand for election")
		}
	})
}

// A split that is applied while a peer is asked makes the child, and no empty replica.
func TestSplitDuringTheQuestion(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "")}))
		w.peers[2] = describe(2, "m", "")
		w.m.Unknown(peer, keyspace.RangeID(2).Group(), 1)
		w.here(1) // the parent still holds the span
		w.asked = func() { w.split(1, 2, "m", "") }
		w.m.Unknown(peer, keyspace.RangeID(2).Group(), 1)
		w.here(1, 2)
		if g := w.open[2].state.Descriptor.Generation; g != 2 {
			t.Errorf("opened with generation %d", g)
		}
	})
}

// A snapshot of the target of a merge may come over the frozen source, and over nothing else.
func TestFrozenReplicaYieldsToItsTarget(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "m"), describe(2, "m", "")}))
		w.locked(func() { w.open[2].state.Merge = command.MergeState{Role: command.MergeSource, ID: 7, Other: 1} })
		for _, c := range []struct {
			claim Claim
			taken bool
		}{
			{Claim{Range: 1, Span: span("", ""), Generation: 1}, false},
			{Claim{Range: 3, Span: span("x", ""), Generation: 5}, false},
			{Claim{Range: 1, Span: span("", ""), Generation: 5}, true},
		} {
			if why := w.m.Claim([]Claim{c.claim}); (why[c.claim.Range] == nil) != c.taken {
				t.Errorf("%+v: %v", c.claim, why)
			}
		}
	})
}

// A replica that the map is without waits until it has applied what is committed, then leaves with
// its keys, and never comes back.
func TestRemovedReplica(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "")}))
		key := engine.VersionedSpan(span("a", "")).Lower
		b := w.e.NewBatch()
		w.must(errors.Join(b.Set(key, nil), b.Commit()))
		moved := describe(1, "", "")
		moved.ConfIndex, moved.Replicas = raftgroup.InitIndex+2, members[1:]
		w.locked(func() { w.mapped, w.open[1].behind = []keyspace.Descriptor{moved}, true })
		w.m.Check(1)
		time.Sleep(10 * lifecycle.RetryAfter)
		w.here(1)
		r := w.open[1]
		w.locked(func() { r.behind = false })
		time.Sleep(2 * lifecycle.RetryAfter)
		w.here()
		if _, have, err := w.e.Get(key); have || err != nil || !r.expelled {
			t.Errorf("key left: %t, %v; expelled %t", have, err, r.expelled)
		}
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "")}))
		w.peers[1] = describe(1, "", "")
		w.m.Unknown(peer, keyspace.RangeID(1).Group(), 1)
		w.here()
	})
}

// Nobody comes to be in a bad table. It is dropped once the last range has left it, with all that it overlaps, and not
// again afterwards.
func TestBadTables(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "k")}))
		w.here(1)
		bad := func(path, start, end string) *engine.Corruption {
			c := &engine.Corruption{Path: path, Bounds: engine.VersionedSpan(span(start, end)), Err: errors.New("a bad block")}
			if !w.m.KeepOutOf(c) || w.m.KeepOutOf(c) {
				t.Errorf("%s is not met for the first time", path)
			}
			return c
		}
		one, other, apart := bad("1.sst", "a", "m"), bad("2.sst", "l", "q"), bad("3.sst", "r", "s")
		if in := w.m.In(one); len(in) != 1 || in[0] != keyspace.RangeID(1).Group() || len(w.m.In(other)) > 0 {
			t.Errorf("in the tables are %v and %v", in, w.m.In(other))
		}
		w.must(w.m.DropTable(w.t.Context(), apart))
		for _, c := range []*engine.Corruption{one, other} {
			if err := w.m.DropTable(w.t.Context(), c); err == nil || !strings.Contains(err.Error(), "range 1 has a record") {
				t.Errorf("%s beside range 1: %v", c.Path, err)
			}
		}

		// An order is refused, to come again, and leaves no claim. One whose record is stored is not in the way.
		orders := []keyspace.Descriptor{describe(1, "", "k"), describe(2, "k", "r"), describe(3, "r", "")}
		if err := w.m.Create(w.t.Context(), orders); !errors.Is(err, errBadTable) {
			t.Errorf("an order for a range in a bad table: %v", err)
		}
		w.claimed()
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{orders[0], orders[2]}))
		w.here(1, 3)

		// A split's child waits for the end of a drop.
		moved := describe(1, "", "k")
		moved.ConfIndex, moved.Replicas = raftgroup.InitIndex+2, members[1:]
		w.locked(func() { w.mapped = []keyspace.Descriptor{moved, orders[2]} })
		w.m.Check(1)
		time.Sleep(2 * lifecycle.RetryAfter)
		w.here(3)
		_, end, err := w.m.beginDrop(one)
		w.must(err)
		began, held := time.Now(), make(chan time.Duration)
		go func() {
			w.m.ClaimHeld(4, span("b", "c"))
			held <- time.Since(began)
		}()
		time.Sleep(time.Second)
		if err := w.m.DropTable(w.t.Context(), other); err == nil {
			t.Error("two drop the same tables at once")
		}
		end(false)
		if waited := <-held; waited != time.Second {
			t.Errorf("a child has waited for %v", waited)
		}
		if err := w.m.DropTable(w.t.Context(), other); err == nil || !strings.Contains(err.Error(), "range 4 is about to") {
			t.Errorf("beside a child: %v", err)
		}
		w.m.Unclaim(4)
		w.must(w.m.DropTable(w.t.Context(), other))
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{orders[1]}))
		w.here(2, 3)
		w.must(w.m.DropTable(w.t.Context(), one)) // it is gone with the other one
		if in := w.m.In(one); len(in) > 0 {
			t.Errorf("in a table that was dropped are %v", in)
		}
		if w.m.KeepOutOf(one) {
			t.Error("a table that was dropped is met anew")
		}
	})
}

// The keys of a removed replica stay where another replica holds a part of its span by now.
func TestRemovalLeavesWhatOthersHold(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "")}))
		w.split(1, 2, "m", "")
		w.m.OpenChild(2, false)
		w.here(1, 2)
		key := engine.VersionedSpan(span("x", "")).Lower
		b := w.e.NewBatch()
		w.must(errors.Join(b.Set(key, nil), b.Commit()))
		// The parent's record is of before the split: it ends behind the child's keys.
		w.locked(func() { w.open[1].state.Descriptor.Replicas = members[1:] })
		w.m.Check(1)
		w.here(2)
		if _, have, err := w.e.Get(key); !have || err != nil {
			t.Errorf("the child has its key: %t, %v", have, err)
		}
	})
}

// Two replicas that leave together hold nothing for each other: nothing of either is left.
func TestRemovedTogetherLeaveNothing(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(1, "", "")}))
		w.split(1, 2, "m", "")
		w.m.OpenChild(2, false)
		w.here(1, 2)
		b := w.e.NewBatch()
		keys := [][]byte{engine.VersionedSpan(span("b", "")).Lower, engine.VersionedSpan(span("x", "")).Lower}
		w.must(errors.Join(b.Set(keys[0], nil), b.Set(keys[1], nil), b.Commit(), w.e.Flush(w.t.Context())))
		// The parent's record is of before the split, and overlaps the child's.
		w.locked(func() {
			w.open[1].state.Descriptor.Replicas = members[1:]
			w.open[2].state.Descriptor.Replicas = members[1:]
		})
		time.Sleep(lifecycle.SweepEvery)
		w.here()
		for _, key := range keys {
			if _, have, err := w.e.Get(key); have || err != nil {
				t.Errorf("key %q is left: %t, %v", key, have, err)
			}
		}
	})
}

// The target of a merge may come by a snapshot while the frozen source is removed together with
// others, whose records were read before. The source's keys are the target's by then.
func TestMergeTargetComesDuringARemoval(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(3, "x", "")}))
		record := func(id keyspace.RangeID, rec command.Record) {
			rec.RangeID = id
			b := w.e.NewBatch()
			w.must(errors.Join(b.SetApplied(id.Group(), engine.Applied{
				Index: 40, Term: 6, ConfIndex: 30, Replicas: members, Payload: command.AppendRecord(nil, &rec),
			}), b.Commit()))
		}
		record(2, command.Record{Generation: 3, Span: span("m", "x"), Merge: command.MergeState{Role: command.MergeSource, ID: 7, Other: 1}})
		key := engine.VersionedSpan(span("n", "")).Lower
		b := w.e.NewBatch()
		w.must(errors.Join(b.Set(key, nil), b.Commit()))
		w.locked(func() { w.removed = []keyspace.GroupID{keyspace.RangeID(2).Group(), keyspace.RangeID(3).Group()} })
		del := w.m.deleter()
		remove := func(id keyspace.RangeID) {
			b := w.e.NewBatch()
			w.must(errors.Join(b.DeleteApplied(id.Group()), del(b, id.Group()), b.Commit()))
		}
		remove(3)
		record(1, command.Record{Generation: 4, Span: span("", "x")})
		remove(2)
		if _, have, err := w.e.Get(key); !have || err != nil {
			t.Errorf("the target has the key: %t, %v", have, err)
		}
	})
}

// A replica that was merged away leaves together with another one. The snapshot of a range that holds
// its span by now comes at any moment of the removal: before it, and between the deletions and their
// commit. None of the snapshot's keys is deleted, and both the snapshot and the removal succeed in the end.
func TestSnapshotDuringARemoval(t *testing.T) {
	for _, absorbed := range []bool{false, true} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprintf("absorbed %t, early %t", absorbed, early), func(t *testing.T) {
				in(t, func(w *world) { testSnapshotDuringARemoval(w, absorbed, early) })
			})
		}
	}
}

func testSnapshotDuringARemoval(w *world, absorbed, early bool) {
	w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(2, "m", "x"), describe(3, "x", "")}))
	record := func(id keyspace.RangeID, rec command.Record) {
		rec.RangeID = id
		b := w.e.NewBatch()
		w.must(errors.Join(b.SetApplied(id.Group(), engine.Applied{
			Index: 40, Term: 6, ConfIndex: 30, Replicas: members, Payload: command.AppendRecord(nil, &rec),
		}), b.Commit()))
	}
	merge := command.MergeState{Role: command.MergeSource, ID: 7, Other: 1}
	record(2, command.Record{Generation: 3, Span: span("m", "x"), Merge: merge})
	w.locked(func() {
		s := &w.open[2].state
		s.Merge, s.Descriptor.Generation, s.Absorbed = merge, 3, absorbed
	})
	snapshot := Claim{Range: 1, Span: span("", "x"), Generation: 4}
	if absorbed {
		// The target has left again, and the range that was split off it comes.
		snapshot = Claim{Range: 4, Span: span("m", "x"), Generation: 5}
	}
	claim := func() error { return w.m.Claim([]Claim{snapshot})[snapshot.Range] }
	key := engine.VersionedSpan(span("n", "")).Lower
	install := func() {
		b := w.e.NewBatch()
		w.must(errors.Join(b.Set(key, nil), b.Commit()))
		record(snapshot.Range, command.Record{Generation: snapshot.Generation, Span: snapshot.Span})
		w.m.Unclaim(snapshot.Range)
	}
	installed := false
	w.written = func() {
		if early || claim() == nil {
			install()
			installed = true
		}
	}
	if early {
		w.must(claim())
	}
	// remove is one attempt. It returns what has failed.
	remove := func(ids ...keyspace.RangeID) map[keyspace.GroupID]error {
		var gs []keyspace.GroupID
		for _, id := range ids {
			gs = append(gs, id.Group())
		}
		failed := w.m.End(w.t.Context(), gs)
		if len(failed) > 0 {
			w.t.Fatal(failed)
		}
		failed = w.m.Destroy(w.t.Context(), gs)
		for _, g := range gs {
			if failed[g] == nil {
				w.must(w.m.Gone(g))
			}
		}
		return failed
	}
	failed := remove(2, 3)
	w.written = func() {}
	if !installed {
		w.must(claim())
		install()
	}
	if len(failed) > 0 {
		if !early || failed[keyspace.RangeID(3).Group()] != nil {
			w.t.Errorf("the removal fails: %v", failed)
		}
		if failed = remove(2); len(failed) > 0 {
			w.t.Errorf("the removal fails after the snapshot: %v", failed)
		}
	}
	w.here()
	w.claimed()
	if _, have, err := w.e.Get(key); !have || err != nil {
		w.t.Errorf("the snapshot's key is there: %t, %v", have, err)
	}
}

// The index of spans finds what a scan finds, also if spans overlap.
func TestHolders(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	in(t, func(w *world) {
		for range 200 {
			all := map[keyspace.GroupID]keyspace.Span{}
			b := w.e.NewBatch()
			random := func() keyspace.Span {
				s := span(fmt.Sprintf("%02d", rng.IntN(30)), "")
				if s.Start[0] == '0' && rng.IntN(3) == 0 {
					s.Start = nil
				}
				if rng.IntN(10) > 0 {
					s.End = fmt.Appendf(nil, "%02d", 30+rng.IntN(30))
				}
				if rng.IntN(2) == 0 {
					s.End = append(bytes.Clone(s.Start), 'x')
				}
				return s
			}
			for id := range keyspace.RangeID(20) {
				w.must(b.DeleteApplied((id + 1).Group()))
				if rng.IntN(3) > 0 {
					rec := command.Record{RangeID: id + 1, Generation: 1, Span: random()}
					all[(id + 1).Group()] = rec.Span
					w.must(b.SetApplied((id + 1).Group(), engine.Applied{Index: 9, Term: 6, Payload: command.AppendRecord(nil, &rec)}))
				}
			}
			w.must(b.Commit())
			gone := keyspace.RangeID(7).Group()
			hs, err := w.m.holders([]keyspace.GroupID{gone})
			w.must(err)
			for range 20 {
				s := random()
				var want []keyspace.GroupID
				for g, o := range all {
					if g != gone && o.Overlaps(s) {
						want = append(want, g)
					}
				}
				slices.Sort(want)
				if got := slices.Sorted(hs.overlapping(s)); !slices.Equal(got, want) {
					t.Fatalf("%v overlap %s, want %v of %v", got, s, want, all)
				}
			}
		}
	})
}

// A stored replica that is no member is not opened at the start. Its span is nobody's until it is
// removed.
func TestStoredReplicaThatLeft(t *testing.T) {
	in(t, func(w *world) {
		rec := command.Record{RangeID: 1, Generation: 3, Span: span("", "")}
		b := w.e.NewBatch()
		w.must(errors.Join(b.SetApplied(keyspace.RangeID(1).Group(), engine.Applied{
			Index: 40, Term: 6, ConfIndex: 30, Replicas: members[1:], Payload: command.AppendRecord(nil, &rec),
		}), b.Commit()))
		w.must(w.m.Open(w.t.Context()))
		w.here()
		w.claimed()
		if _, have, err := w.e.Applied(keyspace.RangeID(1).Group()); have || err != nil {
			t.Errorf("its record is here: %t, %v", have, err)
		}
	})
}

// A frozen replica leaves when the map shows that its keys have gone to another range.
func TestMergedAway(t *testing.T) {
	in(t, func(w *world) {
		w.must(w.m.Create(w.t.Context(), []keyspace.Descriptor{describe(2, "m", "")}))
		w.locked(func() {
			w.open[2].state.Merge = command.MergeState{Role: command.MergeSource, ID: 7, Other: 1}
			w.mapped = []keyspace.Descriptor{describe(1, "", "m"), describe(2, "m", "")}
		})
		time.Sleep(2 * lifecycle.SweepEvery)
		w.here(2)
		merged := describe(1, "", "")
		merged.Generation = 2
		w.locked(func() { w.mapped = []keyspace.Descriptor{merged} })
		time.Sleep(lifecycle.SweepEvery)
		w.here()
	})
}
