package shard

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// question asks for the resolved revision of range 1; the answer comes later.
type question struct {
	done    chan struct{}
	applied rangeapi.FeedPosition
	err     error
}

func (w *fakeWorld) ask(t *testing.T, generation keyspace.Generation, rev keyspace.Revision) *question {
	t.Helper()
	q := &question{done: make(chan struct{})}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	go func() {
		defer cancel()
		q.applied, q.err = w.store.Client().AwaitResolved(ctx, 1, &rangeapi.ResolvedRequest{Range: 1, Generation: generation, Revision: rev})
		close(q.done)
	}()
	synctest.Wait()
	return q
}

func (q *question) open(t *testing.T, when string) {
	t.Helper()
	select {
	case <-q.done:
		t.Fatalf("%s: answered with %v, %v", when, q.applied, q.err)
	default:
	}
}

func (q *question) want(t *testing.T, when string, batches uint64, err error) {
	t.Helper()
	synctest.Wait()
	select {
	case <-q.done:
	default:
		t.Fatalf("%s: no answer", when)
	}
	// A range without a batch of its own has a number too, and no term.
	if err == nil && (q.err != nil || q.applied.Number != max(batches, 1) || q.applied.Term > 0 != (batches > 0)) || err != nil && !errors.Is(q.err, err) {
		t.Fatalf("%s: %v, %v, want batch %d, %v", when, q.applied, q.err, batches, err)
	}
}

func (w *fakeWorld) applyNext(t *testing.T, term uint64) {
	t.Helper()
	g := w.groups.group(1)
	if err := g.apply(raftgroup.Entry{Term: term, Data: g.take(0).data}); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

// Invariant 4: nothing is called void that may yet be applied. A proposed batch may be, and
// so may one that waits for revisions, which it may have got already.
func TestResolvedWaitsForWhatMayAppear(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.write(t, 5, "k", "1") // revision 2
		w.ask(t, 1, 2).want(t, "an idle range", 1, nil)
		w.begin(t, "k", "2") // revision 3
		w.begin(t, "k", "3") // revision 4
		three, two := w.ask(t, 1, 3), w.ask(t, 1, 2)
		two.want(t, "nothing below it is under way", 1, nil)
		three.open(t, "revision 3 is proposed")
		w.applyNext(t, 5)
		three.want(t, "revision 3 is applied", 2, nil)
		w.ask(t, 1, 3).want(t, "revision 4 is proposed", 2, nil)
	})
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		w.begin(t, "a", "1") // asks for revisions
		nine := w.ask(t, 1, 9)
		nine.open(t, "the batch may have revision 9")
		w.begin(t, "b", "2") // fills meanwhile: its revision will be above 9
		w.seq.mu.Lock()
		w.seq.last = 20
		w.seq.mu.Unlock()
		w.seq.answer(0, nil)
		synctest.Wait()
		// Revision 21 is none of those at or below 9, but that is known only now.
		nine.open(t, "what was waited for has not ended")
		w.applyNext(t, 5)
		nine.want(t, "what is being sequenced now knew of revision 9", 1, nil)
	})
}

// A discarded batch is void: the answer is there at once, without a timer.
func TestResolvedSaysVoid(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		w.begin(t, "a", "1")
		q := w.ask(t, 1, 2)
		q.open(t, "the batch may have revision 2")
		w.seq.answer(0, kverror.New(kverror.Timeout, "numbers that nobody uses"))
		q.want(t, "the batch is discarded", 0, nil)
	})
}

// Traps 64 and 74: only a leader answers that has applied an entry of its term, and
// only as long as it leads.
func TestResolvedIsTheLeadersToSay(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		g := w.groups.group(1)
		w.begin(t, "k", "1")
		q := w.ask(t, 1, 2)
		q.open(t, "revision 2 is proposed")
		g.lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		q.want(t, "another one leads", 0, kverror.NotLeader)
		if g.wakes == 0 {
			t.Error("the group was not woken")
		}
		g.lead(raftgroup.LeaderState{Term: 7, Leader: 1, LeaderNode: 1, IsLeader: true})
		q = w.ask(t, 1, 2)
		q.open(t, "no entry of the term is applied")
		// The entry of term 5 is in the log, before the first one of term 7.
		w.applyNext(t, 5)
		q.open(t, "still none")
		if err := g.apply(raftgroup.Entry{Term: 7}); err != nil {
			t.Fatal(err)
		}
		g.lead(raftgroup.LeaderState{Term: 7, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true})
		q.want(t, "one is applied, and with it revision 2", 1, nil)
		w.ask(t, 2, 2).want(t, "another generation", 0, kverror.WrongRange)
	})
}

// Without a lease a ReadIndex that began after the question confirms it, in the same
// term.
func TestResolvedIsConfirmed(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		g := w.groups.group(1)
		setLease := func(held bool) {
			g.mu.Lock()
			g.lease = held
			g.mu.Unlock()
		}
		setLease(false)
		q := w.ask(t, 1, 2)
		q.open(t, "no lease")
		g.mu.Lock()
		done := g.reads[0]
		g.reads = g.reads[1:]
		g.mu.Unlock()
		done(0, nil)
		q.want(t, "confirmed", 0, nil)
		q = w.ask(t, 1, 2)
		g.mu.Lock()
		done = g.reads[0]
		g.mu.Unlock()
		// It loses its term and leads again before the answer: what it knew may be old.
		g.lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		w.serve(1, 7)
		setLease(true)
		done(0, nil)
		q.want(t, "asked again in the new term", 0, nil)
	})
}

// Trap 72: from proposing a split until its fate is known the leader says nothing:
// the child may have a leader of its own already.
func TestResolvedBesideASplit(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		split := make(chan error, 1)
		go func() {
			_, err := w.store.Replica(1).Split(t.Context(), 1, []byte("m"))
			split <- err
		}()
		synctest.Wait()
		q := w.ask(t, 1, 9)
		q.open(t, "a split is proposed")
		w.applyNext(t, 5)
		if err := <-split; err != nil {
			t.Fatal(err)
		}
		q.want(t, "the split is applied", 0, kverror.WrongRange)
		if ds := kverror.Of(q.err).Descriptors; len(ds) != 2 || ds[0].Generation != 2 || string(ds[1].Span.Start) != "m" {
			t.Errorf("the heirs are %v", ds)
		}
		w.ask(t, 2, 9).want(t, "the parent as it is now", 0, nil)
	})
}
