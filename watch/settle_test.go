package watch

import (
	"slices"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// settleRig is a stream with live watchers of spans.
type settleRig struct {
	t        *testing.T
	w        *world
	s        *Stream
	watchers []*Watcher
	// got counts the taken events.
	got int
}

func newSettleRig(t *testing.T, w *world, h *Hub, spans ...keyspace.Span) *settleRig {
	t.Helper()
	r := &settleRig{t: t, w: w, s: h.NewStream()}
	t.Cleanup(r.s.Close)
	for i, span := range spans {
		watcher, _, err := r.s.Watch(t.Context(), int64(i+1), Request{Span: span})
		if err != nil {
			t.Fatal(err)
		}
		r.watchers = append(r.watchers, watcher)
	}
	time.Sleep(time.Second)
	return r
}

// settled asks about all watchers.
func (r *settleRig) settled(rev keyspace.Revision, giveUp bool) bool {
	return r.s.Settled(rev, slices.Values(r.watchers), giveUp)
}

// current is the last revision that was allocated.
func (r *settleRig) current() keyspace.Revision {
	rev, err := r.s.Current(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return rev
}

// take takes all deliveries.
func (r *settleRig) take() {
	for {
		d, ok, err := r.s.TryNext()
		if err != nil {
			r.t.Fatal(err)
		}
		if !ok {
			return
		}
		r.got += len(d.Events)
	}
}

// wait waits until the stream is woken, for a bounded time.
func (r *settleRig) wait(d time.Duration) bool {
	select {
	case <-r.s.Ready():
		return true
	case <-time.After(d):
		return false
	}
}

func spanOf(start, end string) keyspace.Span {
	return keyspace.Span{Start: []byte(start), End: []byte(end)}
}

// A stream is settled at the revision of a write as soon as its event was taken and not before. Its
// owner is woken for that. Revisions of other spans are not waited for, once the log has told them.
func TestSettledBehindTheEvent(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newSettleRig(t, w, h, spanOf("a", "b"))
		for n := 1; n <= 20; n++ {
			w.write("aa")
			rev := r.current()
			for !r.settled(rev, false) {
				if !r.wait(10 * time.Second) {
					t.Fatalf("nobody is woken at revision %d", rev)
				}
				r.take()
			}
			if r.got != n {
				t.Fatalf("settled at %d with %d events of %d", rev, r.got, n)
			}
		}
		w.mu.Lock()
		w.stuck = 1 // no events come from the other range, and its leader is not asked
		w.mu.Unlock()
		w.write("ca")
		for rev, end := r.current(), time.Now().Add(100*time.Millisecond); !r.settled(rev, false); {
			if !r.wait(time.Until(end)) {
				t.Fatal("a write that nobody watches is waited for")
			}
		}
	})
}

// A queued event at or below the revision is not settled; one above it does not matter. A watcher
// that has ended has nothing to wait for.
func TestSettledByWhatIsTaken(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newSettleRig(t, w, h, spanOf("a", "b"), spanOf("c", "d"))
		before := r.current()
		w.write("aa")
		time.Sleep(time.Second)
		after := r.current()
		if !r.settled(before, false) || r.settled(after, false) {
			t.Error("an event waits for its client")
		}
		r.s.Cancel(r.watchers[0])
		if !r.settled(after, false) {
			t.Error("a watcher that was cancelled is waited for")
		}
	})
}

// A watcher of a silent range is waited for once, and again when it has come so far. A watcher that
// begins above that is not waited for; all others always are.
func TestSettledWithoutASilentRange(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newSettleRig(t, w, h, spanOf("a", "b"), spanOf("c", "d"))
		hold := func(held bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, o := range w.ranges {
				if !o.ended && o.desc.Span.Contains([]byte("aa")) {
					o.locks[1] = w.rev - 1
					if !held {
						delete(o.locks, 1)
					}
				}
			}
		}
		hold(true)
		w.write("aa")
		time.Sleep(time.Second)
		if r.settled(r.current(), false) {
			t.Fatal("settled although a lock holds the event back")
		}
		late, _, err := r.s.Watch(t.Context(), 9, Request{Span: spanOf("a", "b")})
		if err != nil || !r.s.Settled(r.current(), slices.Values([]*Watcher{late, r.watchers[1]}), false) {
			t.Errorf("a watcher that begins behind the lock is waited for: %v", err)
		}
		r.s.Cancel(late)
		if !r.settled(r.current(), true) || !r.settled(r.current(), false) {
			t.Error("who was given up is waited for")
		}
		w.write("ca")
		if rev := r.current(); r.settled(rev, false) {
			t.Error("another watcher is not waited for")
		}
		time.Sleep(time.Second)
		r.take()
		if !r.settled(r.current(), false) || r.got != 1 {
			t.Errorf("not settled with %d events", r.got)
		}
		hold(false)
		w.write("aa")
		time.Sleep(time.Second)
		r.take()
		w.write("aa")
		if r.settled(r.current(), false) {
			t.Error("who speaks again is not waited for")
		}
		time.Sleep(time.Second)
		if r.take(); r.got != 4 || !r.settled(r.current(), false) {
			t.Errorf("not settled with %d events", r.got)
		}
	})
}

// A new watcher of a silent range makes no answer wait again. No watcher of the stream is waited
// for below the revision of the last giveUp, new ones included.
func TestSettledWithNewWatchersOfASilentRange(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newSettleRig(t, w, h, spanOf("a", "b"), spanOf("c", "d"))
		w.mu.Lock()
		for _, o := range w.ranges {
			if !o.ended && o.desc.Span.Contains([]byte("aa")) {
				o.locks[1] = w.rev
			}
		}
		w.mu.Unlock()
		w.write("aa")
		time.Sleep(time.Second)
		if r.settled(r.current(), false) || !r.settled(r.current(), true) {
			t.Fatal("the range speaks, or is not given up")
		}
		for i := range 3 {
			late, _, err := r.s.Watch(t.Context(), int64(10+i), Request{Span: spanOf("a", "b")})
			if err != nil {
				t.Fatal(err)
			}
			r.watchers = append(r.watchers, late)
			w.write("ca")
			time.Sleep(time.Second)
			r.take()
			if !r.settled(r.current(), false) {
				t.Errorf("new watcher %d is waited for", i)
			}
		}
	})
}

// Until Announced is called, a watcher's events wait within its bounds.
func TestHeldUntilTold(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newSettleRig(t, w, h)
		for range 5 {
			w.write("aa")
		}
		held, _, err := r.s.Watch(t.Context(), 1, Request{Span: spanOf("a", "b"), Start: r.current() - 4, Hold: true})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.write("aa")
		time.Sleep(time.Second)
		if r.take(); r.got != 0 {
			t.Errorf("%d events were given out before", r.got)
		}
		held.Announced()
		time.Sleep(time.Second)
		if r.take(); r.got != 6 {
			t.Errorf("%d events came behind", r.got)
		}
	})
}
