package removal

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// heldNodes is a cluster of one node that says so when it is let. removed
// answers its questions.
type heldNodes struct {
	self    keyspace.NodeID
	let     chan struct{}
	asked   atomic.Int32
	mu      sync.Mutex
	marks   []Mark // guarded by mu
	removed func() (left []keyspace.RangeID, changed bool)
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

func (h *heldNodes) Raised(_ context.Context, _ keyspace.NodeID, _ keyspace.Revision, after keyspace.RangeID) ([]Mark, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	marks := slices.DeleteFunc(slices.Clone(h.marks), func(m Mark) bool { return m.Descriptor.Range <= after })
	return marks[:min(len(marks), PageSize)], nil
}

func (h *heldNodes) Removed(context.Context, keyspace.NodeID, []Mark) ([]keyspace.RangeID, bool, error) {
	left, changed := h.removed()
	return left, changed, nil
}

func markOf(id keyspace.RangeID, start, end string) Mark {
	d := keyspace.Descriptor{Range: id, Generation: 1, Span: keyspace.Span{Start: []byte(start)}, Replicas: []keyspace.Replica{{ID: 1, Node: 1}}}
	if end != "" {
		d.Span.End = []byte(end)
	}
	return Mark{Descriptor: d, Raised: true}
}

// However many wait for removal, one of them asks; when it gives up another does.
func TestOneAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &heldNodes{self: 1, let: make(chan struct{})}
		w := &Waiter{Clock: clock.Virtual(), Nodes: h}
		first, giveUp := context.WithCancel(t.Context())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 20)
		go func() { done <- w.Await(first, h, 5) }()
		synctest.Wait()
		for range 19 {
			go func() { done <- w.Await(ctx, h, 5) }()
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
		if w.turn.Load() != nil {
			t.Error("somebody has the turn in the end")
		}
		// The answer holds for all that wait for the same or a lower revision.
		other := &turn{upTo: 7, done: make(chan struct{}), came: true}
		w.turn.Store(other)
		close(other.done)
		if err := w.Await(t.Context(), h, 7); err != nil {
			t.Error(err)
		}
	})
}

// A replica that is never done, as one that was moved away, has the leaders asked again.
func TestNotAwaitedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &heldNodes{self: 1, removed: func() ([]keyspace.RangeID, bool) { return []keyspace.RangeID{99}, false }}
		w := &Waiter{Clock: clock.Virtual(), Nodes: h}
		if err := w.awaitRemoved(t.Context(), h, 1, []Mark{markOf(99, "", "")}); !errors.Is(err, errRangesChanged) {
			t.Error(err)
		}
	})
}

// Leaders and replicas are asked again until all is removed, also where ranges change meanwhile or
// one has no leader for a while.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &heldNodes{self: 1, let: make(chan struct{}), marks: []Mark{markOf(1, "", "k")}}
		close(h.let)
		asked := 0
		h.removed = func() ([]keyspace.RangeID, bool) {
			asked++
			return []keyspace.RangeID{2}[:min(1, max(0, 3-asked))], asked == 1
		}
		w := &Waiter{Clock: clock.Virtual(), Nodes: h}
		done := make(chan error, 1)
		go func() { done <- w.Await(t.Context(), h, 5) }()
		time.Sleep(time.Second)
		select {
		case err := <-done:
			t.Fatalf("nobody leads the second range: %v", err)
		default:
		}
		h.mu.Lock()
		h.marks = append(h.marks, markOf(2, "k", ""))
		h.mu.Unlock()
		if err := <-done; err != nil || asked != 3 {
			t.Errorf("asked %d times, %v", asked, err)
		}
	})
}
