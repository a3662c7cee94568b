package shard

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// heldNodes is a cluster of one node that says so when it is let.
type heldNodes struct {
	self  keyspace.NodeID
	let   chan struct{}
	asked atomic.Int32
}

func (h *heldNodes) Nodes(ctx context.Context) ([]keyspace.NodeID, error) {
	h.asked.Add(1)
	select {
	case <-h.let:
		return []keyspace.NodeID{h.self}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (h *heldNodes) Alive(keyspace.NodeID) bool { return true }

// However many wait for removal, one of them asks; when it gives up another does.
func TestOneAsksAboutRemoval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		c := &AdminClient{self: w.node.cfg.Self, local: w.node}
		h := &heldNodes{self: c.self, let: make(chan struct{})}
		first, giveUp := context.WithCancel(t.Context())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 20)
		go func() { done <- c.AwaitRemoval(first, h, 5) }()
		synctest.Wait()
		for range 19 {
			go func() { done <- c.AwaitRemoval(ctx, h, 5) }()
		}
		synctest.Wait()
		if n := h.asked.Load(); n != 1 {
			t.Errorf("%d ask at a time", n)
		}
		giveUp()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		synctest.Wait()
		if n := h.asked.Load(); n != 2 {
			t.Errorf("%d have asked after one gave up", n)
		}
		cancel()
		for range 19 {
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		if w.node.removalTurn.Load() != nil {
			t.Error("somebody has the turn in the end")
		}
		// Who waits for as much or less has it when the one that asked has it.
		other := &removalTurn{upTo: 7, done: make(chan struct{}), came: true}
		w.node.removalTurn.Store(other)
		close(other.done)
		if err := c.AwaitRemoval(t.Context(), h, 7); err != nil {
			t.Error(err)
		}
		w.node.removalTurn.Store(nil)
	})
}

// A replica that is never done, as one that was moved away, has the leaders asked again.
func TestRemovalIsNotAwaitedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		c := &AdminClient{self: w.node.cfg.Self, local: w.node}
		gone := []removalMark{{Descriptor: keyspace.Descriptor{Range: 99, Generation: 1}}}
		if err := c.awaitRemoved(t.Context(), &heldNodes{self: c.self}, c.self, gone); !errors.Is(err, errRangesChanged) {
			t.Error(err)
		}
	})
}

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
			w.node.observe(keyspace.SequenceAnswer{Current: 300, Compacted: c})
			time.Sleep(keeperRetry)
			w.settle()
		}
		if c := w.node.Replica(1).Show().Compacted; c != 250 {
			t.Fatalf("compacted up to %d: it is at rest", c)
		}
		w.seq.last = 300
		w.put(t.Context(), "a", "v")
		w.node.removalMarks(280, 0)
		time.Sleep(keeperRetry)
		w.settle()
		if m := w.node.removalMarks(280, 0); len(m) != 1 || !m[0].Raised {
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
		r := w.node.Replica(1)
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
		raise(&w.node.compacted, 10)
		check("nothing is sequenced", 10)
		w.node.heard(5)
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
