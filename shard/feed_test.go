package shard

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/datadriven"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/rangefeed/feedtest"
	"github.com/skeindb/skein/transport"
)

func (w *fakeWorld) gateway(t *testing.T) *feedtest.Gateway {
	t.Helper()
	return feedtest.New(t, func(ctx context.Context, first []byte, st transport.Stream) error {
		return w.store.handleFeeds(ctx, 9, first, st)
	})
}

// begin lets a put be evaluated, sequenced and proposed.
func (w *fakeWorld) begin(t *testing.T, key, value string) (done chan error) {
	t.Helper()
	done = make(chan error, 1)
	go func() {
		_, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: w.store.Replica(1).Descriptor().Generation, Op: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}})
		done <- err
	}()
	synctest.Wait()
	return done
}

// write writes through the pipeline.
func (w *fakeWorld) write(t *testing.T, term uint64, key, value string) {
	t.Helper()
	done := w.begin(t, key, value)
	g := w.groups.group(1)
	if err := g.apply(raftgroup.Entry{Term: term, Data: g.take(0).data}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func splitAt(term uint64, generation keyspace.Generation, key string, child keyspace.RangeID) raftgroup.Entry {
	b := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: term, Generation: generation})
	b = command.AppendSplit(b, &command.Split{Key: []byte(key), Child: child, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
	return raftgroup.Entry{Term: term, Data: b}
}

// fed runs a test with a range that serves in term 5 and whose next revision is 2.
func fed(t *testing.T, test func(t *testing.T, w *fakeWorld)) {
	t.Helper()
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		w.serve(1, 5)
		test(t, w)
	})
}

// Trap 51: at a split a feed ends behind the last event before it, and both heirs
// begin there.
func TestFeedEndsAtASplit(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		g := w.gateway(t)
		defer g.Close()
		g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2}, rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 2, From: 2}, rangeapi.FeedOrder{ID: 3, Range: 8, Generation: 1})
		g.Want("openings", "1: |0; 2 ends: busy 1.1; 3 ends: range not here")
		done := w.begin(t, "x", "1")
		group := w.groups.group(1)
		// One call of Applied brings the event and the split.
		if err := group.apply(raftgroup.Entry{Term: 5, Data: group.take(0).data}, splitAt(5, 1, "m", 2)); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		g.Want("a put and a split", "1: x@2=1 |2; 1 ends: wrong range 1.2 2.2")
		g.Order(rangeapi.FeedOrder{ID: 4, Range: 1, Generation: 1, From: 3}, rangeapi.FeedOrder{ID: 5, Range: 1, Generation: 2, From: 3}, rangeapi.FeedOrder{ID: 6, Range: 2, Generation: 2, From: 2})
		g.Want("the heirs", "4 ends: wrong range 1.2 2.2; 5: |2; 6: x@2=1 |2; 6: |2")
	})
}

// A feed that begins between the writing of a batch and its publication gets it all
// the same.
func TestFeedBeginsBesideAnApply(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		g := w.gateway(t)
		defer g.Close()
		done := w.begin(t, "k", "1")
		group, r := w.groups.group(1), w.store.Replica(1)
		b := w.engine.NewBatch()
		if err := r.Apply(b, []raftgroup.Entry{{Index: 100, Term: 5, Data: group.take(0).data}}); err != nil {
			t.Fatal(err)
		}
		g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
		g.Want("an opening", "1: |0")
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		r.Applied(raftgroup.Position{Index: 100, Term: 5})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		g.Want("the batch", "1: k@2=1 |2; 1: |2")
	})
}

// A feed does not pass over in silence events that compaction may have removed. Where nothing
// was written since, nothing is missing.
func TestFeedBelowTheCompactedRevision(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		for range 3 {
			w.write(t, 5, "k", "v")
		}
		r := w.store.Replica(1)
		r.mu.Lock()
		r.rec.Compacted = 4
		r.mu.Unlock()
		g := w.gateway(t)
		defer g.Close()
		g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 3}, rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 1, From: 4})
		g.Want("openings", "1 ends: compacted; 2: k@4=v |4; 2: |4")
		r.mu.Lock()
		r.rec.Compacted = 40
		r.mu.Unlock()
		g.Order(rangeapi.FeedOrder{ID: 3, Range: 1, Generation: 1, From: 5})
		g.Want("a quiet range", "3: |4")
		if _, err := r.feeds.History(&rangeapi.HistoryRequest{Range: 1, Generation: 1, From: 4, To: 4}); !errors.Is(err, kverror.Compacted) || kverror.Of(err).CompactRevision != 40 {
			t.Errorf("history: %v", err)
		}
	})
}

// A snapshot that leaps makes a feed go on from the store; one that brings another
// generation ends it.
func TestFeedAcrossASnapshot(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.write(t, 5, "k", "v")
		g, r := w.gateway(t), w.store.Replica(1)
		defer g.Close()
		g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 3})
		g.Want("an opening", "1: |2")
		w.groups.group(1).lead(raftgroup.LeaderState{Term: 6})
		snap := snapshotOf(1, 1, "")
		rec := command.Record{RangeID: 1, Generation: 1, LastRevision: 9, Counted: true}
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		r.SnapshotDone(snap, nil)
		g.Want("a snapshot", "1: |9; 1: |9")
		rec.Generation = 2
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		r.SnapshotDone(snap, nil)
		g.Want("another generation", "1 ends: wrong range 1.2")
	})
}

// The tables of a snapshot are in the store a flush before the replica says so. What it lets go
// is not passed over in silence meanwhile.
func TestHistoryBesideASnapshot(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		for range 3 {
			w.write(t, 5, "k", "v")
		}
		g, r := w.gateway(t), w.store.Replica(1)
		defer g.Close()
		w.groups.group(1).lead(raftgroup.LeaderState{Term: 6})
		snap := snapshotOf(1, 1, "")
		rec := command.Record{RangeID: 1, Generation: 1, LastRevision: 9, Compacted: 8, Counted: true}
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		b, data := w.engine.NewBatch(), engine.VersionedSpan(keyspace.Span{})
		if err := errors.Join(b.DeleteRange(data.Lower, data.Upper), mvcc.Put(b, keyVersion("k", 9, false)), b.SetApplied(r.id.Group(), snap), b.Commit()); err != nil {
			t.Fatal(err)
		}
		if p, err := r.feeds.History(&rangeapi.HistoryRequest{Range: 1, Generation: 1, From: 2, To: 4, MaxBytes: 1 << 20}); !errors.Is(err, kverror.Compacted) {
			t.Errorf("history: %+v, %v", p, err)
		}
		g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
		g.Want("beside a snapshot", "1 ends: compacted")
		r.SnapshotDone(snap, nil)
		g.Order(rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 1, From: 2}, rangeapi.FeedOrder{ID: 3, Range: 1, Generation: 1, From: 9})
		g.Want("behind it", "2 ends: compacted; 3: k@9= |9; 3: |9")
	})
}

// Events that a slow gateway has not taken before a split lose their versions before with the
// child's replica. The feed ends in front of them, and the heirs bring them.
func TestVersionBeforeIsNotLostAtASplit(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.write(t, 5, "x", "1")
		g := w.gateway(t)
		defer g.Close()
		g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 3, Prev: true}, rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 2, From: 3})
		g.Want("openings", "1: |2; 2 ends: busy 1.1")
		w.write(t, 5, "x", "2")
		synctest.Wait()         // it is being sent
		w.write(t, 5, "x", "3") // waits for that
		if err := w.groups.group(1).apply(splitAt(5, 1, "m", 2)); err != nil {
			t.Fatal(err)
		}
		b, right := w.engine.NewBatch(), engine.VersionedSpan(keyspace.Span{Start: []byte("m")})
		if err := errors.Join(b.DeleteRange(right.Lower, right.Upper), b.Commit()); err != nil {
			t.Fatal(err) // as when the child's replica is removed
		}
		g.Want("two puts and a split", "1: x@3=2(1@2) |3; 1 ends: wrong range 1.2 2.2")
		g.Order(rangeapi.FeedOrder{ID: 3, Range: 1, Generation: 2, From: 5, Prev: true})
		g.Want("the same stream", "3: |4")
	})
}

// The tables of a snapshot may lack the version before an event, and have an older one: its
// sender was removing what is compacted. The older one is not told as the version before.
func TestVersionBeforeBesideASnapshot(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.write(t, 5, "k", "1")
		g, r := w.gateway(t), w.store.Replica(1)
		defer g.Close()
		g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 3, Prev: true})
		g.Want("an opening", "1: |2")
		w.write(t, 5, "k", "2")
		synctest.Wait()         // it is being sent
		w.write(t, 5, "k", "3") // waits for that
		w.groups.group(1).lead(raftgroup.LeaderState{Term: 6})
		snap := snapshotOf(1, 1, "")
		rec := command.Record{RangeID: 1, Generation: 1, LastRevision: 9, Compacted: 4, Counted: true}
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		b := w.engine.NewBatch()
		if err := errors.Join(b.Delete(engine.AppendVersionedKey(nil, []byte("k"), 3)), b.SetApplied(r.id.Group(), snap), b.Commit()); err != nil {
			t.Fatal(err)
		}
		g.Want("beside a snapshot", "1: k@3=2(1@2) |3; 1: k@4=3 |4")
		p, err := r.feeds.History(&rangeapi.HistoryRequest{Range: 1, Generation: 1, From: 4, To: 4, MaxBytes: 1 << 20, Prev: true})
		if err != nil || len(p.Events) != 1 || p.Events[0].Prev != nil {
			t.Errorf("history: %+v, %v", p, err)
		}
		r.SnapshotDone(snap, nil)
	})
}

func TestHistoryWaitsForNobodyButWhoHasSeen(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		for i := range 4 {
			w.write(t, 5, fmt.Sprintf("k%d", i), "v")
		}
		c := w.store.Client()
		ask := func(q rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
			q.Range, q.MaxBytes = 1, 1<<20
			return c.History(t.Context(), 1, &q)
		}
		p, err := ask(rangeapi.HistoryRequest{Generation: 1, Span: keyspace.Span{Start: []byte("k1"), End: []byte("k3")}, From: 2, To: 9, Seen: rangeapi.FeedPosition{Term: 5, Number: 4}})
		if err != nil || len(p.Events) != 2 || p.Next != 10 || string(p.Events[0].Key) != "k1" {
			t.Errorf("%+v, %v", p, err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 1, From: 2, To: 9, Seen: rangeapi.FeedPosition{Term: 5, Number: 5}}); !errors.Is(err, kverror.Busy) {
			t.Errorf("a replica that lags: %v", err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 2, From: 2, To: 9}); !errors.Is(err, kverror.Busy) {
			t.Errorf("a later generation: %v", err)
		}
		if err := w.groups.group(1).apply(splitAt(5, 1, "m", 2)); err != nil {
			t.Fatal(err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 1, From: 2, To: 9}); !errors.Is(err, kverror.WrongRange) {
			t.Errorf("an earlier generation: %v", err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 2, From: 2, To: 9}); !errors.Is(err, kverror.WrongRange) {
			t.Errorf("more than the range has: %v", err)
		}
		if _, err := c.AwaitResolved(t.Context(), 1, &rangeapi.ResolvedRequest{Range: 77}); !errors.Is(err, kverror.RangeNotHere) {
			t.Errorf("no such range: %v", err)
		}
	})
}

// watch are the commands of what gateways ask.
func (s *story) watch(t *testing.T, d *datadriven.TestData, id keyspace.RangeID) string {
	t.Helper()
	if s.gateway == nil {
		s.gateway = s.w.gateway(t)
	}
	gen := arg(d, "gen", keyspace.Generation(1))
	switch d.Cmd {
	case "feed":
		s.gateway.Order(rangeapi.FeedOrder{
			ID: rangeapi.FeedID(arg(d, "id", 0)), Range: id, Generation: gen, From: arg(d, "from", keyspace.Revision(0)), Prev: d.HasArg("prev"),
		})
	case "resolved":
		q := &rangeapi.ResolvedRequest{Range: id, Generation: gen, Revision: arg(d, "rev", keyspace.Revision(0))}
		s.begin(func(ctx context.Context) string {
			at, err := s.w.store.Client().AwaitResolved(ctx, 1, q)
			if err != nil {
				return formatAnswer(nil, err)
			}
			return fmt.Sprintf("resolved up to %d behind batch %d of term %d", q.Revision, at.Number, at.Term)
		})
	case "history":
		q := &rangeapi.HistoryRequest{Range: id, Generation: gen, From: arg(d, "from", keyspace.Revision(0)), To: arg(d, "to", keyspace.Revision(0)), MaxBytes: 1 << 20}
		q.Span = s.w.store.Replica(id).Descriptor().Span
		p, err := s.w.store.Client().History(t.Context(), 1, q)
		if err != nil {
			return formatAnswer(nil, err) + "\n"
		}
		part := rangeapi.FeedPart{Events: p.Events, Resolved: p.Next - 1}
		return feedtest.Describe(&part)[2:] + "\n"
	}
	if out := s.gateway.Take(); out != "" {
		return strings.ReplaceAll(out, "; ", "\n") + "\n"
	}
	return ""
}

// A feed does not miss a transaction's version that lands below what it has read from the
// store, whenever it lands. Nothing is resolved up to it before it has come (traps 51 and 64).
func TestFeedThatIsBehindMissesNoLateVersion(t *testing.T) {
	for messages := range 12 { // that the gateway takes before it lands
		fed(t, func(t *testing.T, w *fakeWorld) {
			w.write(t, 5, "a", "1")
			w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")})
			w.seq.mu.Lock()
			w.seq.last++ // revision 3 is the transaction's
			w.seq.mu.Unlock()
			for range 14 {
				w.write(t, 5, "v", strings.Repeat("v", 100<<10))
			}
			g := w.gateway(t)
			defer g.Close()
			g.Order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
			seen := map[keyspace.Revision]bool{}
			take := func() bool {
				ps := g.Message(1 << 30)
				for _, p := range ps {
					for _, e := range p.Events {
						seen[e.Mod] = true
					}
					if !seen[3] && (p.Resolved >= 3 || p.Position.Number >= 17) {
						t.Fatalf("resolved up to %d behind batch %d, and revision 3 has not come", p.Resolved, p.Position.Number)
					}
				}
				return ps != nil
			}
			for range messages {
				take()
			}
			if a := w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(1), Revision: 3}); !a.done || a.err != nil {
				t.Fatalf("%+v", a)
			}
			for more := true; more; {
				more = take()
			}
			for rev := keyspace.Revision(2); rev <= 17; rev++ {
				if !seen[rev] {
					t.Errorf("with %d messages before it: revision %d has not come", messages, rev)
				}
			}
		})
	}
}

// The child of a split has events in its past before it has taken a batch, and a feed has to
// bring them. A leader's answer does not name the position of whoever has none of them.
func TestAFreshChildHasAPosition(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.write(t, 5, "z", "1")
		split := make(chan error, 1)
		go func() {
			_, err := w.store.Replica(1).Split(t.Context(), 1, []byte("m"))
			split <- err
		}()
		synctest.Wait()
		w.applyNext(t, 5)
		if err := <-split; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.serve(2, 5)
		synctest.Wait()
		var last keyspace.Revision = 2
		at, err := w.store.Client().AwaitResolved(t.Context(), 1, &rangeapi.ResolvedRequest{Range: 2, Generation: 2, Revision: last})
		if err != nil {
			t.Fatal(err)
		}
		if (rangeapi.FeedPosition{}).Reaches(at) {
			t.Errorf("who has nothing of the child reaches %v", at)
		}
	})
}
