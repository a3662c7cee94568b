package watch

import (
	"slices"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/router"
)

// A client goes on behind the last thing that it was told, be it an event or progress:
// progress below an event has the event told twice once the stream breaks. What is complete
// may become less, where a range of which some of a hand-out is known takes in a quieter one.
func TestProgressIsNotBehindWhatWasTold(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		watcher, _, err := s.Watch(t.Context(), 1, Request{Span: spanOf("a", "c")})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		asked, err := s.Current(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		w.write("aa")
		w.wg.Wait()
		time.Sleep(time.Second)
		h.mu.Lock()
		s.asked, s.askedLast = asked, asked // it was asked for before the event came
		told := watcher.queue[0].first()
		mergeLocked(t, h, watcher.req.Span, told)
		if f := h.frontierLocked(watcher.req.Span); f >= told || f < asked {
			t.Fatalf("complete up to %d, told up to %d, asked at %d", f, told, asked)
		}
		h.mu.Unlock()
		last := keyspace.Revision(0)
		for {
			d, ok, err := s.TryNext()
			if err != nil || !ok {
				break
			}
			if d.Revision < last && d.Watcher == nil {
				t.Errorf("progress %d behind revision %d", d.Revision, last)
			}
			last = max(last, d.Revision)
		}
		if last < told {
			t.Errorf("told up to %d of %d", last, told)
		}
	})
}

// mergeLocked has the first of the two ranges of a span, which has spoken up to rev of a
// hand-out, take in the second, which has not: what is complete is less than rev then.
func mergeLocked(t *testing.T, h *Hub, span keyspace.Span, rev keyspace.Revision) {
	t.Helper()
	lo, hi := h.window(span)
	old := slices.Clone(h.legs[lo:hi])
	if len(old) != 2 {
		t.Fatalf("%d legs", len(old))
	}
	h.speakLocked(old[0], rev)
	h.logEnd = max(h.logEnd, rev+5)
	h.oweLocked(&entry{first: rev, last: rev + 5}, old[0])
	d := keyspace.Descriptor{Range: old[0].id, Generation: old[0].generation + 1, Span: keyspace.Span{Start: old[0].span.Start, End: old[1].span.End}}
	for i, n := range old[0].replicas {
		d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: n})
	}
	h.looseLocked(old[0])
	h.looseLocked(old[1])
	if !h.installLocked(&router.Located{Descriptor: d}) {
		t.Fatal("the ranges are not merged")
	}
}

// Nor is it behind earlier progress: Kubernetes' watch cache takes its revision from it.
func TestProgressDoesNotGoBack(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		watcher, _, err := s.Watch(t.Context(), 1, Request{Span: spanOf("a", "c")})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.write("dd")
		w.wg.Wait()
		time.Sleep(time.Second)
		told, ok := watcher.Progress()
		if !ok {
			t.Fatal("no progress")
		}
		h.mu.Lock()
		mergeLocked(t, h, watcher.req.Span, told)
		if f := h.frontierLocked(watcher.req.Span); f >= told {
			t.Fatalf("complete up to %d, told up to %d", f, told)
		}
		h.mu.Unlock()
		if p, ok := watcher.Progress(); ok && p < told {
			t.Errorf("progress %d behind progress %d", p, told)
		}
	})
}
