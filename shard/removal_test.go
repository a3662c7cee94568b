package shard

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// A range that was at rest when its node heard of a compaction, and has changed since, does
// not keep those waiting who ask about removal.
func TestRemovalOfARangeThatWasAtRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 200
		w.serve(1, 5)
		defer w.stop()
		w.put(t.Context(), "a", "v")
		for _, c := range []keyspace.Revision{250, 280} {
			w.store.observe(keyspace.SequenceAnswer{Current: 300, Compacted: c})
			time.Sleep(maintenanceRetry)
			w.settle()
		}
		if c := w.store.Replica(1).Show().Compacted; c != 250 {
			t.Fatalf("compacted up to %d: it is at rest", c)
		}
		w.seq.last = 300
		w.put(t.Context(), "a", "v")
		w.store.removalMarks(280, 0)
		time.Sleep(maintenanceRetry)
		w.settle()
		if m := w.store.removalMarks(280, 0); len(m) != 1 || !m[0].Raised {
			t.Errorf("%+v", m)
		}
	})
}

// A compaction does not overtake what is being sequenced and may get revisions below.
func TestCompactionBehindWhatIsSequenced(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		r := w.store.Replica(1)
		check := func(when string, want keyspace.Revision) {
			t.Helper()
			r.mu.Lock()
			defer r.mu.Unlock()
			if got := r.keepLocked(10); got != want {
				t.Errorf("%s: compacted up to %d, want %d", when, got, want)
			}
			// Its replica says so, and is looked after again: nobody else might.
			if held := want < 10; r.heldBackLocked() != held {
				t.Errorf("%s: held back %t, want %t", when, !held, held)
			}
		}
		raise(&w.store.compacted, 10)
		check("nothing is sequenced", 10)
		w.store.heard(5)
		w.begin(t, "a", "1")
		check("a batch with floor 5", 5)
		w.seq.mu.Lock()
		w.seq.last = 20
		w.seq.mu.Unlock()
		w.seq.answer(0, nil)
		synctest.Wait()
		check("it has revision 21", 10)
	})
}
