package shard

import (
	"errors"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// A replica answers alone, without a leader, up to what it has applied: no higher, not
// what compaction has taken, not while or across a snapshot.
func TestReadHere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		g := w.filled(l.batch(5, 1, "a", "b"), l.batch(5, 1, "-a", "c"))
		g.lead(raftgroup.LeaderState{Term: 6}) // nobody leads
		read := func(at keyspace.Revision, op proto.Message) (proto.Message, error) {
			resp, err := w.store.ReadHere(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: at, Op: op})
			if err != nil {
				return nil, err
			}
			return resp.Op, nil
		}
		all := &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}
		if _, c, ok := w.store.ResolvedHere(1, 1); !ok || c != 5 {
			t.Fatalf("resolved up to %d, %v", c, ok)
		}
		for at, keys := range map[keyspace.Revision]string{1: "", 2: "a", 3: "ab", 4: "b", 5: "bc"} {
			got, err := read(at, all)
			if err != nil {
				t.Fatal(err)
			}
			var found string
			for _, kv := range got.(*pb.RangeResponse).Kvs {
				found += string(kv.Key)
			}
			if h := got.(*pb.RangeResponse).Header.Revision; found != keys || h != int64(at) {
				t.Errorf("at %d: %q, header %d", at, found, h)
			}
			page, err := read(5, &rangeapi.Page{RangeRequest: &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: int64(at)}, MaxBytes: 1 << 10, WithCount: true})
			if err != nil || page.(*rangeapi.PageAnswer).N != int64(len(keys)) || page.(*rangeapi.PageAnswer).Header.Revision != 5 {
				t.Errorf("a page at %d: %v, %v", at, page, err)
			}
		}
		for name, c := range map[string]struct {
			req  *rangeapi.Request
			want error
		}{
			"too high":      {&rangeapi.Request{Range: 1, Generation: 1, ReadRevision: 6, Op: all}, kverror.ReadAgain},
			"no revision":   {&rangeapi.Request{Range: 1, Generation: 1, Op: all}, kverror.BadRequest},
			"a generation":  {&rangeapi.Request{Range: 1, Generation: 2, ReadRevision: 5, Op: all}, kverror.WrongRange},
			"not here":      {&rangeapi.Request{Range: 9, Generation: 1, ReadRevision: 5, Op: all}, kverror.RangeNotHere},
			"no read":       {&rangeapi.Request{Range: 1, Generation: 1, ReadRevision: 5, Op: &pb.PutRequest{Key: []byte("k")}}, kverror.BadRequest},
			"not a request": {&rangeapi.Request{Range: 1, Generation: 1, ReadRevision: 5, Op: &pb.RangeRequest{}}, kverror.EmptyKey},
		} {
			if _, err := w.store.ReadHere(t.Context(), c.req); !errors.Is(err, c.want) {
				t.Errorf("%s: %v, want %v", name, err, c.want)
			}
		}
		if err := g.apply(numbered(command.KindCompact, 5, 1, 4)); err != nil {
			t.Fatal(err)
		}
		if _, err := read(3, all); !errors.Is(err, kverror.Compacted) {
			t.Errorf("below the compacted revision: %v", err)
		}
		if err := g.apply(numbered(command.KindCompact, 5, 1, 40)); err != nil {
			t.Fatal(err)
		}
		// The range has not changed up to 40: nothing that is seen at 5 is taken away.
		if _, err := read(5, all); err != nil {
			t.Error(err)
		}
	})
}

// A revision that a request names is refused as soon as the node has heard that it is
// compacted, though the range has all of it.
func TestReadHereOfWhatIsCompacted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		w.filled(l.batch(5, 1, "a", "b"), l.batch(5, 1, "-a", "c")).lead(raftgroup.LeaderState{Term: 6})
		w.store.heardCompacted(4)
		for rev, compacted := range map[int64]bool{0: false, 2: true, 3: true, 4: false} {
			all := &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Revision: rev}
			for _, op := range []proto.Message{all, &rangeapi.Page{RangeRequest: all, MaxBytes: 1 << 10}} {
				_, err := w.store.ReadHere(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: 5, Op: op})
				if got := kverror.Of(err); compacted != errors.Is(err, kverror.Compacted) || compacted && got.CompactRevision != 4 {
					t.Errorf("%T at %d: %v", op, rev, err)
				}
			}
		}
	})
}

// From where a replica can be read: from what its range has compacted, unless nothing has
// changed since. Beside others' compactions an idle range is resolved only up to below.
func TestResolvedHereFrom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		w.filled(l.batch(5, 1, "a", "b"), l.batch(5, 1, "-a", "c")).lead(raftgroup.LeaderState{Term: 6}) // up to 5
		r := w.store.Replica(1)
		for compacted, want := range map[keyspace.Revision]keyspace.Revision{-1: -1, 3: 3, 5: 5, 9: 5} {
			r.mu.Lock()
			r.rec.Compacted = compacted
			r.mu.Unlock()
			if from, to, ok := w.store.ResolvedHere(1, 1); !ok || from != want || to != 5 {
				t.Errorf("compacted up to %d: from %d to %d, %t, want %d to 5", compacted, from, to, ok, want)
			}
		}
	})
}

// What a snapshot replaces is not read from, nor across it.
func TestReadHereBesideASnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		g := w.filled(l.batch(5, 1, "a", "b"))
		g.lead(raftgroup.LeaderState{Term: 6})
		r := w.store.Replica(1)
		a, _, err := w.engine.Applied(1)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.AcceptSnapshot(a); err != nil {
			t.Fatal(err)
		}
		req := &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: 2, Op: &pb.RangeRequest{Key: []byte("a")}}
		if _, err := w.store.ReadHere(t.Context(), req); !errors.Is(err, kverror.Busy) {
			t.Errorf("while it comes in: %v", err)
		}
		if _, _, ok := w.store.ResolvedHere(1, 1); ok {
			t.Error("it can be read while a snapshot comes in")
		}
		before := r.installs
		r.SnapshotDone(engine.Applied{Index: a.Index, Term: a.Term, ConfIndex: a.ConfIndex, Replicas: a.Replicas, Payload: a.Payload}, nil)
		if r.installs != before+1 {
			t.Error("the install was not counted")
		}
		if _, err := w.store.ReadHere(t.Context(), req); err != nil {
			t.Error(err)
		}
	})
}

// A snapshot brings a replica past a merge. The replica's resolved revision was that of its own
// keys alone, and the range that it has absorbed has a lock from before.
func TestResolvedBehindASnapshotPastAMerge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: 1})
		split = command.AppendSplit(split, &command.Split{Key: []byte("m"), Child: 2, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
		w.filled(l.batch(5, 1, "a", "b"), l.batch(5, 1, "-a", "c"), raftgroup.Entry{Term: 5, Data: split}).lead(raftgroup.LeaderState{Term: 6}) // up to 5
		synctest.Wait()
		freeze := command.AppendHeader(nil, command.Header{Kind: command.KindFreeze, Term: 5, Generation: 2})
		freeze = command.AppendMergeCommand(freeze, command.KindFreeze, &command.MergeCommand{ID: 9, ConfIndex: raftgroup.InitIndex, Other: 1})
		if err := w.groups.group(2).apply(raftgroup.Entry{Term: 5, Data: freeze}); err != nil {
			t.Fatal(err)
		}
		if _, to, ok := w.store.ResolvedHere(1, 2); !ok || to != 5 {
			t.Fatalf("resolved up to %d, %t: the test shows nothing", to, ok)
		}
		r := w.store.Replica(1)
		rec := command.Record{RangeID: 1, Generation: 3, LastRevision: 9, Merged: 9, Absorbed: 3}
		snap := engine.Applied{Index: 40, Term: 6, Replicas: testDescriptor.Replicas, Payload: command.AppendRecord(nil, &rec)}
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		lock := &command.Lock{
			ID: rangeapi.LockID{Range: 2, Term: 5, Number: 1}, Name: nameAged(1), Anchor: []byte("x"), Floor: 3,
			Spans:  []command.LockSpan{{Span: keyspace.Single([]byte("x")), Mode: command.Exclusive}},
			Writes: []command.Intent{{V: mvcc.Version{Key: []byte("x"), Version: 1}}},
		}
		b := w.engine.NewBatch()
		if err := errors.Join(command.PutLock(b, 1, lock), b.Commit()); err != nil {
			t.Fatal(err)
		}
		r.SnapshotDone(snap, nil)
		if _, to, ok := w.store.ResolvedHere(1, 3); !ok || to != 3 {
			t.Errorf("resolved up to %d, %t: a lock may leave a version behind from revision 4 on", to, ok)
		}
	})
}

// A range that never changed is resolved up to the revision of the empty store.
func TestResolvedFromTheBeginning(t *testing.T) {
	if c := (&Replica{}).resolvedLocked(); c != 1 {
		t.Errorf("resolved up to %d", c)
	}
	if c := (&Replica{resolved: 9}).resolvedLocked(); c != 9 {
		t.Errorf("resolved up to %d, not 9", c)
	}
}
