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
)

// A sequencer's machine was paused, its clock stood still, and it believes in a lease that is
// over. It names a revision below what its successor has allocated. A range that knows of the
// successor refuses to read there: by what its node has heard, or by its log, as a leader on
// another node would.
func TestReadOfAnOldSequencer(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		w.seq.mu.Lock()
		w.seq.auto, w.seq.term = true, 8
		w.seq.mu.Unlock()
		w.write(t, 5, "k", "new")
		read := func(term uint64, rev keyspace.Revision) error {
			_, err := w.store.Do(t.Context(), &rangeapi.Request{
				Range: 1, Generation: w.store.Replica(1).Descriptor().Generation, ReadRevision: rev, ReadTerm: term,
				Op: &pb.RangeRequest{Key: []byte("k")},
			})
			return err
		}
		for _, c := range []struct {
			what string
			term uint64
			old  bool
		}{
			{"its predecessor's", 7, true}, {"its own", 8, false}, {"nobody knows whose", 0, false},
		} {
			if err := read(c.term, 1); errors.Is(err, kverror.ReadAgain) != c.old || !c.old && err != nil {
				t.Errorf("%s: %v", c.what, err)
			}
		}
		// A node that has heard of no sequencer begins to lead the range.
		w.store.sequencerTerm.Store(0)
		if err := read(7, 1); !errors.Is(err, kverror.ReadAgain) {
			t.Errorf("the log names the successor: %v", err)
		}
		// A read brings word of the next one. A term that cannot be is not believed.
		if err := read(9, 2); err != nil {
			t.Error(err)
		}
		if err := read(8, 2); !errors.Is(err, kverror.ReadAgain) {
			t.Errorf("a reader has named the successor: %v", err)
		}
		if err := read(1<<60, 2); err != nil {
			t.Error(err)
		}
		if err := read(9, 2); err != nil {
			t.Errorf("after a term that cannot be: %v", err)
		}
	})
}

// Such a sequencer also allocates revisions. A range takes none at or below a revision that its
// node knew of when it evaluated, and none of a term below the one in its log. The write was
// certainly not proposed.
func TestAllocationOfAnOldSequencer(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		w.seq.mu.Lock()
		w.seq.term, w.seq.last = 8, 20
		w.seq.mu.Unlock()
		answer := func(term uint64, last keyspace.Revision) {
			w.seq.mu.Lock()
			w.seq.term, w.seq.last = term, last
			w.seq.mu.Unlock()
			w.seq.answer(0, nil)
			synctest.Wait()
		}
		first := w.begin(t, "k", "1")
		answer(8, 20)
		w.applyNext(t, 5)
		if err := <-first; err != nil {
			t.Fatal(err)
		}
		refused := func(what string, done chan error) {
			t.Helper()
			select {
			case err := <-done:
				if kverror.Of(err).Fate() != kverror.NotApplied {
					t.Errorf("%s: %v", what, err)
				}
			default:
				t.Errorf("%s: it is proposed", what)
			}
		}
		below := w.begin(t, "k", "2")
		answer(7, 10)
		refused("below the range's last revision", below)
		w.store.heard(40) // a read elsewhere was served there
		heard := w.begin(t, "k", "3")
		answer(8, 30)
		refused("below what the node has heard of", heard)
		term := w.begin(t, "k", "4")
		answer(7, 50)
		refused("of a term below the log's", term)
		next := w.begin(t, "k", "5")
		answer(9, 60)
		w.applyNext(t, 5)
		if err := <-next; err != nil {
			t.Errorf("the successor's: %v", err)
		}
	})
}

// A read learns of the successor while it waits. Its leader applies the log of the last one, or a
// lock ends.
func TestReadOfAnOldSequencerThatWaits(t *testing.T) {
	read := func(t *testing.T, w *fakeWorld, rev keyspace.Revision) (done chan error) {
		done = make(chan error, 1)
		go func() {
			_, err := w.store.Do(t.Context(), &rangeapi.Request{
				Range: 1, Generation: 1, ReadRevision: rev, ReadTerm: 7, Op: &pb.RangeRequest{Key: []byte("k")},
			})
			done <- err
		}()
		synctest.Wait()
		if len(done) > 0 {
			t.Fatalf("it does not wait: %v", <-done)
		}
		return done
	}
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		w.seq.mu.Lock()
		w.seq.auto, w.seq.term = true, 7
		w.seq.mu.Unlock()
		w.write(t, 5, "k", "old")
		w.seq.mu.Lock()
		w.seq.term, w.seq.last = 8, 10000
		w.seq.mu.Unlock()
		begun := w.begin(t, "k", "new")
		g := w.groups.group(1)
		entry := g.take(0).data
		w.store.sequencerTerm.Store(7) // as a node that has not heard of the successor
		g.lead(raftgroup.LeaderState{Term: 5, Leader: 2, LeaderNode: 2})
		if err := <-begun; err == nil {
			t.Error("the write of a leader that lost its lead is answered")
		}
		g.lead(raftgroup.LeaderState{Term: 6, Leader: 1, LeaderNode: 1, IsLeader: true})
		done := read(t, w, 2)
		if err := g.apply(raftgroup.Entry{Term: 5, Data: entry}, raftgroup.Entry{Term: 6}); err != nil {
			t.Fatal(err)
		}
		g.lead(raftgroup.LeaderState{Term: 6, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true})
		if err := <-done; !errors.Is(err, kverror.ReadAgain) {
			t.Errorf("the inherited log names the successor: %v", err)
		}
	})
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		w.seq.mu.Lock()
		w.seq.auto, w.seq.term, w.seq.last = true, 7, 99
		w.seq.mu.Unlock()
		w.write(t, 5, "k", "old") // revision 100
		run := func(op rangeapi.TxnCommand) rangeapi.TxnAnswer {
			c := w.command(t.Context(), op)
			for !c.done {
				synctest.Wait()
				w.applyNext(t, 5)
			}
			return c.answer
		}
		name := nameAged(1)
		held := run(&rangeapi.Prepare{Name: name, Anchor: []byte("z"), Writes: writeAt("k")}).(*rangeapi.Prepared)
		done := read(t, w, 101)
		_ = run(&rangeapi.Resolve{Name: name, Lock: held.Lock, Revision: 10001, Term: 8})
		if err := <-done; !errors.Is(err, kverror.ReadAgain) {
			t.Errorf("the end of the lock names the successor: %v", err)
		}
	})
}
