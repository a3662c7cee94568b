package shard

import (
	"errors"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
)

// Trap 38: a pass keeps its iterator while nothing is applied and not beyond: what is
// applied leaves the overlay, and an older iterator does not show it.
func TestPassStoreShowsWhatIsApplied(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		w.serve(1, 5)
		g, r := w.groups.group(1), w.store.Replica(1)
		s := eval.NewPassStore(r.data, &r.appliedBatches)
		defer func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}()
		for want := int64(1); want <= 3; want++ {
			done := make(chan error)
			go func() {
				_, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k")}})
				done <- err
			}()
			synctest.Wait()
			if err := g.apply(raftgroup.Entry{Term: 5, Data: g.take(0).data}); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			v, ok, err := s.Get([]byte("k"), eval.Newest)
			if err != nil || !ok || v.Version != want {
				t.Fatalf("version %d after %d puts (%v, %v)", v.Version, want, ok, err)
			}
		}
	})
}

// Trap 38: a read was admitted before a split. It does not answer for a key that has left with
// the child: another node may have written the child by then, and the engine here still shows
// the key.
func TestReadAcrossASplit(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		w.serve(1, 5)
		r := w.store.Replica(1)
		req := &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.RangeRequest{Key: []byte("x")}}
		bounds := keyspace.Single([]byte("x"))
		lead, err := r.awaitOlder(t.Context(), req, bounds, 1, &waits{})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.checkRead(req, bounds, lead, 1, 0); err != nil {
			t.Fatalf("before the split: %v", err)
		}
		split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: 1})
		split = command.AppendSplit(split, &command.Split{Key: []byte("m"), Child: 2, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
		if err := w.groups.group(1).apply(raftgroup.Entry{Term: 5, Data: split}); err != nil {
			t.Fatal(err)
		}
		if err := r.stillLeads(req, bounds, lead); !errors.Is(err, kverror.WrongRange) {
			t.Errorf("before it reads: %v", err)
		}
		if err := r.checkRead(req, bounds, lead, 1, 0); !errors.Is(err, kverror.WrongRange) {
			t.Errorf("after it has read: %v", err)
		}
		if _, err := w.store.Do(t.Context(), req); !errors.Is(err, kverror.WrongRange) {
			t.Errorf("a reader with the old descriptor: %v", err)
		}
	})
}

// Trap 5: the parent applies the split while an empty replica of the child is open
// here. The replica stays what it is, without a record under its raft, and is filled by
// a snapshot.
func TestSplitBesideAnEmptyChild(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		child := w.store.newReplica(2)
		if err := w.store.open(child, 1); err != nil {
			t.Fatal(err)
		}
		split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: 1})
		split = command.AppendSplit(split, &command.Split{Key: []byte("m"), Child: 2, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
		if err := w.groups.group(1).apply(raftgroup.Entry{Term: 5, Data: split}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if w.store.Replica(2) != child {
			t.Fatal("the open replica was replaced")
		}
		if _, have, err := w.engine.Applied(keyspace.RangeID(2).Group()); err != nil || have {
			t.Fatalf("a record was written under an open replica: %v", err)
		}
		snap := snapshotOf(2, 2, "m")
		if err := child.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		child.SnapshotDone(snap, nil)
		if d := child.Descriptor(); d.Generation != 2 || string(d.Span.Start) != "m" {
			t.Fatalf("after the snapshot: %+v", d)
		}
	})
}
