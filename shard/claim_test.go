package shard

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/removal"
	"github.com/skeindb/skein/shard/replicas"
)

func keyVersion(key string, rev keyspace.Revision, dead bool) *mvcc.Version {
	if dead {
		return &mvcc.Version{Key: []byte(key), Mod: rev, Tombstone: true}
	}
	return &mvcc.Version{Key: []byte(key), Mod: rev, Create: rev, Version: 1}
}

// claimedByNobody fails where a span is claimed: then it is refused as such.
func (w *fakeWorld) claimedByNobody() {
	w.t.Helper()
	why := w.store.lifecycle.Claim([]replicas.Claim{{Range: 99}})[99]
	if why == nil || strings.Contains(why.Error(), "about to hold") {
		w.t.Fatalf("left over: %v", why)
	}
}

// snapshotOf is the applied record of a snapshot of a range.
func snapshotOf(id keyspace.RangeID, generation keyspace.Generation, start string) engine.Applied {
	rec := command.Record{RangeID: id, Generation: generation, Span: keyspace.Span{Start: []byte(start)}, LastRevision: 9}
	return engine.Applied{Index: 40, Term: 6, Replicas: testDescriptor.Replicas, Payload: command.AppendRecord(nil, &rec)}
}

// A founder that was down while range 1 was split hears of the child first, whose
// snapshot comes. The order to create range 1 as it was at bootstrap, over everything,
// comes last: its log from the beginning would write into the child's span.
func TestCreateOverASnapshot(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := &fakeWorld{t: t, fs: simdisk.New(), seq: &fakeSequencer{last: 1}}
		w.start()
		defer w.stop()
		child := w.store.newReplica(2)
		if err := w.store.open(child, 1); err != nil {
			t.Fatal(err)
		}
		create := func() bool {
			t.Helper()
			if err := w.store.Create(t.Context(), []keyspace.Descriptor{testDescriptor}); err != nil {
				t.Fatal(err)
			}
			_, have, err := w.engine.Applied(keyspace.RangeID(1).Group())
			if err != nil {
				t.Fatal(err)
			}
			if have != (w.store.Replica(1) != nil) {
				t.Fatalf("record %t, replica %v", have, w.store.Replica(1))
			}
			return have
		}
		snap := snapshotOf(2, 2, "m")
		if err := child.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		if create() {
			t.Fatal("created over a snapshot that comes in")
		}
		child.SnapshotDone(snap, nil)
		if create() {
			t.Fatal("created over another replica")
		}
	})
}

// A snapshot that failed leaves room; what is created leaves none.
func TestCreateBesideASnapshotThatFailed(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := &fakeWorld{t: t, fs: simdisk.New(), seq: &fakeSequencer{last: 1}}
		w.start()
		defer w.stop()
		child := w.store.newReplica(2)
		if err := w.store.open(child, 1); err != nil {
			t.Fatal(err)
		}
		snap := snapshotOf(2, 2, "m")
		if err := child.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		child.SnapshotDone(snap, errors.New("the sender died"))
		left, right := testDescriptor, testDescriptor
		left.Span.End, right.Range, right.Span.Start = []byte("t"), 3, []byte("s")
		if err := w.store.Create(t.Context(), []keyspace.Descriptor{left, right}); err != nil {
			t.Fatal(err)
		}
		if w.store.Replica(1) == nil || w.store.Replica(3) != nil {
			t.Fatalf("of two orders that overlap the second is skipped: %v, %v", w.store.Replica(1), w.store.Replica(3))
		}
		if err := child.AcceptSnapshot(snap); err == nil {
			t.Fatal("a snapshot over what was created")
		}
		w.claimedByNobody()
	})
}

// Between a split and the opening of its child nobody else may take the child's
// span: the child's log would write over it.
func TestChildKeepsItsSpanBeforeItIsOpen(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		w.store.cancel() // the opener stands still
		split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: 1})
		split = command.AppendSplit(split, &command.Split{Key: []byte("m"), Child: 2, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
		if err := w.groups.group(1).apply(raftgroup.Entry{Term: 5, Data: split}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if d := w.store.Replica(1).Descriptor(); string(d.Span.End) != "m" || w.store.Replica(2) != nil {
			t.Fatalf("parent %+v, child %v", d, w.store.Replica(2))
		}
		other := w.store.newReplica(3)
		if err := other.AcceptSnapshot(snapshotOf(3, 3, "t")); err == nil {
			t.Fatal("a snapshot over a child that is not open yet")
		}
		if done, err := w.store.lifecycle.OpenStored(t.Context(), lifecycle.Unknown{Group: keyspace.RangeID(2).Group()}); err != nil || !done {
			t.Fatal(done, err)
		}
		if err := other.AcceptSnapshot(snapshotOf(3, 3, "t")); err == nil {
			t.Fatal("a snapshot over an open child")
		}
		w.claimedByNobody()
	})
}

// A step of removal read before a snapshot came in must not commit after it: it
// would take the tombstone of an older put that the snapshot brought back.
func TestRemovalStandsStillForASnapshot(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		r := w.store.Replica(1)
		b := w.engine.NewBatch()
		for rev, dead := range []bool{2: false, 3: true} {
			if rev >= 2 {
				if err := mvcc.Put(b, keyVersion("k", keyspace.Revision(rev), dead)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		versions := func() (n int) {
			t.Helper()
			_, err := mvcc.History(w.engine, mvcc.HistoryOptions{From: 1, To: 9}, func(*mvcc.Version) error { n++; return nil })
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		time.Sleep(time.Second) // maintenance has nothing more to do
		running := make(chan struct{})
		r.mu.Lock()
		r.rec.Compacted, r.upkeep.removing = 5, running
		r.mu.Unlock()
		snap, accepted := snapshotOf(1, 1, ""), make(chan error, 1)
		go func() { accepted <- r.AcceptSnapshot(snap) }()
		synctest.Wait()
		select {
		case err := <-accepted:
			t.Fatalf("accepted beside a step of removal: %v", err)
		default:
		}
		r.removed()
		if err := <-accepted; err != nil {
			t.Fatal(err)
		}
		w.store.maintenance.note(r)
		time.Sleep(time.Second)
		if n := versions(); n != 2 {
			t.Fatalf("%d versions while a snapshot comes in, want 2", n)
		}
		r.SnapshotDone(snap, errors.New("the sender died"))
		time.Sleep(time.Second)
		if n := versions(); n != 0 {
			t.Fatalf("%d versions after it, want 0", n)
		}
	})
}

// A snapshot that carries a replica past a split deletes the child's keys, since the child may never
// come here. Nobody else claims them before they are deleted. What another replica here holds stays.
func TestSnapshotPastASplitLeavesNothing(t *testing.T) {
	for _, child := range []bool{false, true} {
		virtually(t, func(t *testing.T) {
			w := newFakeWorld(t)
			defer w.stop()
			r := w.store.Replica(1)
			snap := snapshotOf(1, 2, "")
			rec := command.Record{RangeID: 1, Generation: 2, Span: keyspace.Span{End: []byte("m")}, LastRevision: 9}
			snap.Payload = command.AppendRecord(nil, &rec)
			b := w.engine.NewBatch()
			err := errors.Join(mvcc.Put(b, keyVersion("a", 2, false)), mvcc.Put(b, keyVersion("x", 3, false)), b.SetApplied(r.id.Group(), snap))
			if child {
				err = errors.Join(err, b.SetApplied(keyspace.RangeID(2).Group(), snapshotOf(2, 2, "m")))
			}
			if err = errors.Join(err, b.Commit(), r.AcceptSnapshot(snap)); err != nil {
				t.Fatal(err)
			}
			if why := w.store.lifecycle.Claim([]replicas.Claim{{Range: 3, Span: keyspace.Span{Start: []byte("x")}}}); why[3] == nil {
				t.Error("what is to be deleted is claimed")
			}
			r.SnapshotDone(snap, nil)
			got := ""
			if _, err := mvcc.History(w.engine, mvcc.HistoryOptions{From: 1, To: 9}, func(v *mvcc.Version) error { got += string(v.Key); return nil }); err != nil {
				t.Fatal(err)
			}
			if want := map[bool]string{false: "a", true: "ax"}[child]; got != want {
				t.Errorf("with a child %t: %q is left, want %q", child, got, want)
			}
			if why := w.store.lifecycle.Claim([]replicas.Claim{{Range: 3, Span: keyspace.Span{Start: []byte("x")}}}); why[3] != nil {
				t.Error(why[3])
			}
		})
	}
}

// A range may claim what a snapshot leaves behind before the snapshot is installed, and look at the
// replica afterwards. It finds nothing in the way, and its own snapshot may be in the store by now.
func TestSnapshotPastASplitLeavesWhatIsClaimed(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		r := w.store.Replica(1)
		snap := snapshotOf(1, 2, "")
		rec := command.Record{RangeID: 1, Generation: 2, Span: keyspace.Span{End: []byte("m")}, LastRevision: 9}
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		child := keyspace.Span{Start: []byte("m")}
		w.store.lifecycle.ClaimHeld(2, child) // claim has done as much when it comes to the replicas
		b := w.engine.NewBatch()
		if err := errors.Join(mvcc.Put(b, keyVersion("x", 3, false)), b.SetApplied(r.id.Group(), snap), b.Commit()); err != nil {
			t.Fatal(err)
		}
		r.SnapshotDone(snap, nil)
		if n, err := mvcc.Count(w.engine, child, eval.Newest); err != nil || n != 1 {
			t.Errorf("%d keys are left of one in a span that another range has claimed: %v", n, err)
		}
	})
}

// The note of how far old versions are gone must not come back with a crash once a
// snapshot may have brought others: an ingest can be durable before what was committed.
func TestRemovalNoteDoesNotOutliveASnapshot(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		r := w.store.Replica(1)
		r.mu.Lock()
		r.rec.Compacted = 5
		r.mu.Unlock()
		w.store.maintenance.note(r)
		time.Sleep(time.Second)
		if err := w.engine.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		noted := func() bool {
			t.Helper()
			it, err := w.engine.NewIter(engine.IterOptions{OnlyDurable: true})
			if err != nil {
				t.Fatal(err)
			}
			key := removal.NoteKey(1)
			found := it.SeekGE(key) && bytes.Equal(it.Key(), key)
			if err := errors.Join(it.Error(), it.Close()); err != nil {
				t.Fatal(err)
			}
			return found
		}
		if !noted() {
			t.Fatal("no note: the test proves nothing")
		}
		snap := snapshotOf(1, 1, "")
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		if noted() {
			t.Fatal("the note would come back")
		}
		r.SnapshotDone(snap, errors.New("the sender died"))
	})
}
