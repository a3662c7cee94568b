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
		c := &Client{self: w.node.cfg.Self, local: w.node}
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
		c := &Client{self: w.node.cfg.Self, local: w.node}
		gone := []removalMark{{Descriptor: keyspace.Descriptor{Range: 99, Generation: 1}}}
		if err := c.awaitRemoved(t.Context(), &heldNodes{self: c.self}, c.self, gone); !errors.Is(err, errRangesChanged) {
			t.Error(err)
		}
	})
}

// A range without changes sleeps through a compaction. If it changes afterwards, whoever
// waits for what the compaction lets go still comes to an end.
func TestRemovalOfARangeThatSlept(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		raised := func(c keyspace.Revision) bool {
			w.node.removalMarks(c, 0)
			time.Sleep(time.Second)
			w.settle()
			marks := w.node.removalMarks(c, 0)
			return len(marks) == 1 && marks[0].Raised
		}
		w.write(t, 5, "a", "1")
		w.seq.mu.Lock()
		w.seq.last = 10 // what other ranges have written
		w.seq.mu.Unlock()
		if !raised(5) {
			t.Fatal("not raised to 5")
		}
		if r := w.node.Replica(1); !raised(8) || r.rec.compacted != 5 {
			t.Fatalf("a range without changes is raised to %d, or is waited for", r.rec.compacted)
		}
		w.write(t, 5, "a", "2")
		if !raised(8) {
			t.Error("it is waited for for ever")
		}
	})
}

// A compaction does not overtake what is being sequenced and may get revisions below.
func TestCompactionBehindWhatIsSequenced(t *testing.T) {
	for _, s := range []struct {
		b    *batch
		want keyspace.Revision
	}{{nil, 10}, {&batch{floor: 5, txns: 1}, 5}, {&batch{floor: 12, txns: 1}, 10}, {&batch{}, 10}} {
		if got := (&Replica{sequencing: s.b}).keepLocked(10); got != s.want {
			t.Errorf("%v with floor %d: compacted up to %d, want %d", s.b != nil, s.want, got, s.want)
		}
	}
}
