package watch

import (
	"slices"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/router"
)

// A client resumes behind the last event or progress. Progress below an event makes the client get
// the event twice after a broken stream. The frontier may go back: a range that has resolved part
// of an allocation absorbs a quieter one.
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
		s.asked, s.askedLast = asked, asked // the request came before the event
		told := watcher.queue[0].first()
		mergeLocked(t, h, watcher.req.Span, told)
		if f := h.frontierLocked(watcher.req.Span); f >= told || f < asked {
			t.Fatalf("frontier %d, told up to %d, asked at %d", f, told, asked)
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

// mergeLocked merges the two ranges of a span. The first one has resolved up to rev of an
// allocation, and the second one has not. So the frontier is below rev afterwards.
func mergeLocked(t *testing.T, h *Hub, span keyspace.Span, rev keyspace.Revision) {
	t.Helper()
	lo, hi := h.window(span)
	old := slices.Clone(h.subs[lo:hi])
	if len(old) != 2 {
		t.Fatalf("%d subscriptions", len(old))
	}
	h.resolveUpToLocked(old[0], rev)
	h.logEnd = max(h.logEnd, rev+5)
	h.assignLocked(&allocation{first: rev, last: rev + 5}, old[0])
	d := keyspace.Descriptor{Range: old[0].id, Generation: old[0].generation + 1, Span: keyspace.Span{Start: old[0].span.Start, End: old[1].span.End}}
	for i, n := range old[0].replicas {
		d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: n})
	}
	h.detachLocked(old[0])
	h.detachLocked(old[1])
	if !h.installLocked(&router.Located{Descriptor: d}) {
		t.Fatal("the ranges are not merged")
	}
}

// Progress is not below earlier progress either: Kubernetes' watch cache takes its revision from
// it.
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
			t.Fatalf("frontier %d, told up to %d", f, told)
		}
		h.mu.Unlock()
		if p, ok := watcher.Progress(); !ok || p < told {
			t.Errorf("progress %d (%v) behind progress %d", p, ok, told)
		}
	})
}

// progressRig is a stream with watchers a and c of two ranges, and what they were told.
type progressRig struct {
	*settleRig
	a, c *Watcher
	// told are the last events of each watcher, and most the last of all. answers are the progress
	// that was told, and before is most before each of them.
	told            map[*Watcher]keyspace.Revision
	most            keyspace.Revision
	answers, before []keyspace.Revision
}

func newProgressRig(t *testing.T, w *world, h *Hub) *progressRig {
	t.Helper()
	s := newSettleRig(t, w, h, spanOf("a", "b"), spanOf("c", "d"))
	return &progressRig{settleRig: s, a: s.watchers[0], c: s.watchers[1], told: map[*Watcher]keyspace.Revision{}}
}

// ask requests progress.
func (r *progressRig) ask() {
	r.t.Helper()
	if err := r.s.RequestProgress(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

// take takes all deliveries, and judges progress.
func (r *progressRig) take() {
	r.t.Helper()
	for {
		d, ok, err := r.s.TryNext()
		if err != nil {
			r.t.Fatal(err)
		}
		if !ok {
			return
		}
		if d.Watcher == nil {
			if d.Revision < r.most {
				r.t.Errorf("progress %d behind revision %d", d.Revision, r.most)
			}
			r.answers, r.before = append(r.answers, d.Revision), append(r.before, r.most)
			continue
		}
		r.got += len(d.Events)
		first, last := keyspace.Revision(d.Events[0].Kv.ModRevision), keyspace.Revision(d.Events[len(d.Events)-1].Kv.ModRevision)
		if n := len(r.answers); n > 0 && first <= r.answers[n-1] {
			r.t.Errorf("revision %d behind progress %d", first, r.answers[n-1])
		}
		r.told[d.Watcher], r.most = last, max(r.most, last)
	}
}

// takeFor takes deliveries when the stream wakes it, and nothing otherwise.
func (r *progressRig) takeFor(d time.Duration) {
	r.t.Helper()
	for end := time.Now().Add(d); ; {
		r.take()
		if !r.wait(time.Until(end)) {
			return
		}
	}
}

// write writes the key, waits until that is applied, and returns the revision.
func (r *progressRig) write(key string) keyspace.Revision {
	r.w.write(key)
	r.w.wg.Wait()
	return r.current()
}

// lock keeps the range of the key resolved only up to the current revision, until undo.
func (r *progressRig) lock(key string) (undo func()) {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	o := r.w.of(key)
	o.locks[1] = r.w.rev
	return func() {
		r.w.mu.Lock()
		defer r.w.mu.Unlock()
		delete(o.locks, 1)
		r.w.appendLocked(o, worldEntry{}) // tells its resolved revision now
	}
}

// If a watcher was told an event above another one's position, events above that event wait until
// the other one has come there. Then progress is told.
func TestProgressWaitsForWhatOthersWereTold(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newProgressRig(t, w, h)
		unlock := r.lock("ca")
		r.ask()
		c, a := r.write("ca"), r.write("aa")
		time.Sleep(10 * time.Millisecond)
		r.take()
		r.write("aa")
		r.takeFor(10 * time.Millisecond)
		if r.told[r.a] != a || len(r.answers) != 0 {
			t.Fatalf("told %d of %d, and progress %v", r.told[r.a], a, r.answers)
		}
		unlock()
		last := r.write("aa")
		r.takeFor(10 * time.Millisecond)
		if r.told[r.a] != last || r.told[r.c] != c || r.got != 4 {
			t.Errorf("told %d and %d in %d events", r.told[r.a], r.told[r.c], r.got)
		}
		if len(r.answers) != 1 || r.answers[0] < a {
			t.Errorf("progress %v behind revision %d", r.answers, a)
		}
	})
}

// Events across the ceiling are divided there, whether they are one queued batch or several.
func TestProgressDividesABatch(t *testing.T) {
	for name, together := range map[string]bool{"one": true, "several": false} {
		t.Run(name, func(t *testing.T) {
			quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
				r := newProgressRig(t, w, h)
				unlock := r.lock("ca")
				r.ask()
				r.write("ca")
				a := r.write("aa")
				time.Sleep(10 * time.Millisecond)
				r.take()
				if !together {
					unlock()
					time.Sleep(10 * time.Millisecond)
				}
				r.write("ca")
				r.write("aa")
				time.Sleep(10 * time.Millisecond)
				if together {
					unlock()
				}
				r.takeFor(10 * time.Millisecond)
				if len(r.answers) != 1 || r.before[0] != a || r.got != 4 {
					t.Errorf("progress %v behind revisions %v, want %d; %d events", r.answers, r.before, a, r.got)
				}
			})
		})
	}
}

// Progress is told soon after the request, under load of all ranges, when never all watchers have
// reached what one was told.
func TestProgressUnderLoad(t *testing.T) {
	const each, writes = 50, 3000
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newProgressRig(t, w, h)
		var asked time.Time
		worst, answers := time.Duration(0), 0
		for i := range writes {
			w.write([]string{"aa", "ca"}[i%2])
			for range 20 {
				time.Sleep(50 * time.Microsecond)
				r.take()
			}
			if n := len(r.answers); n > answers {
				worst, answers = max(worst, time.Since(asked)), n
			}
			if i%each == 0 {
				asked = time.Now()
				r.ask()
			}
		}
		if answers != writes/each {
			t.Errorf("progress was told %d times, asked for %d times", answers, writes/each)
		}
		if most := 10 * time.Millisecond; worst > most {
			t.Errorf("progress was told %v after it was asked for", worst)
		}
		w.wg.Wait()
		r.takeFor(time.Second)
		if r.got != writes {
			t.Errorf("%d events of %d", r.got, writes)
		}
	})
}

// A silent range holds other events back for a moment, once in a while. Progress is told when the
// range speaks.
func TestProgressOfASilentRangeHoldsNobodyForLong(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newProgressRig(t, w, h)
		unlock := r.lock("ca")
		r.ask()
		c := r.write("ca")
		r.write("aa")
		time.Sleep(10 * time.Millisecond)
		late, worst, first := 0, time.Duration(0), time.Now()
		const events = 100
		for range events {
			rev, at := r.write("aa"), time.Now()
			for r.told[r.a] < rev {
				if !r.wait(time.Second) {
					t.Fatal("nobody is woken")
				}
				r.take()
			}
			took := time.Since(at)
			if worst = max(worst, took); took > 10*time.Millisecond {
				late++
			}
			time.Sleep(20 * time.Millisecond)
		}
		if worst < holdMost/2 || worst > holdMost+tick+10*time.Millisecond {
			t.Errorf("an event was held for %v", worst)
		}
		if most := 1 + int(time.Since(first)/(holdRest*holdMost)); late > most {
			t.Errorf("%d of %d events were held, in %v", late, events, time.Since(first))
		}
		if len(r.answers) != 0 {
			t.Fatalf("progress %v beside a range that does not speak", r.answers)
		}
		unlock()
		r.takeFor(100 * time.Millisecond)
		if len(r.answers) != 1 || r.answers[0] < r.told[r.a] || r.told[r.c] != c {
			t.Errorf("progress %v, told %d and %d", r.answers, r.told[r.a], r.told[r.c])
		}
	})
}

// Events flow at once when the watcher that was waited for is cancelled, and when a watcher begins
// that has to catch up.
func TestProgressHoldsNothingInVain(t *testing.T) {
	change := func(c *Config) { c.RecentBytes = 1 }
	for name, end := range map[string]func(r *progressRig){
		"cancelled": func(r *progressRig) { r.s.Cancel(r.c) },
		"lagging": func(r *progressRig) {
			if _, _, err := r.s.Watch(r.t.Context(), 9, Request{Span: spanOf("b", "d"), Start: 2}); err != nil {
				r.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			quiet(t, change, func(t *testing.T, w *world, h *Hub) {
				r := newProgressRig(t, w, h)
				defer r.lock("ca")()
				r.ask()
				r.write("ca")
				r.write("aa")
				time.Sleep(10 * time.Millisecond)
				r.take()
				last := r.write("aa")
				time.Sleep(10 * time.Millisecond)
				if r.take(); r.told[r.a] == last {
					t.Fatal("nothing is held")
				}
				end(r)
				for r.wait(time.Microsecond) {
				}
				if r.take(); r.told[r.a] != last && !r.wait(time.Microsecond) {
					t.Fatal("nobody is woken")
				}
				if r.take(); r.told[r.a] != last {
					t.Errorf("told %d of %d", r.told[r.a], last)
				}
			})
		})
	}
}

// An event that is held back is not settled, although no range is pending for it.
func TestNothingIsSettledThatIsHeld(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		w.puts = true
		r := newProgressRig(t, w, h)
		r.s.Cancel(r.c)
		if _, _, err := r.s.Watch(t.Context(), 9, Request{Span: spanOf("c", "d"), NoPut: true}); err != nil {
			t.Fatal(err)
		}
		unlock := r.lock("ca")
		r.ask()
		r.write("ca")
		r.write("aa")
		time.Sleep(10 * time.Millisecond)
		r.take()
		last := r.write("aa")
		time.Sleep(10 * time.Millisecond)
		r.take()
		unlock()
		time.Sleep(10 * time.Millisecond)
		if r.told[r.a] == last || r.settled(last, false) {
			t.Errorf("settled at %d, told %d", last, r.told[r.a])
		}
		if rev, ok := r.a.Progress(); ok {
			t.Errorf("progress %d of one whose events wait", rev)
		}
		if r.take(); r.told[r.a] != last || !r.settled(last, false) || len(r.answers) != 1 {
			t.Errorf("not settled at %d, told %d, progress %v", last, r.told[r.a], r.answers)
		}
	})
}

// Progress that was requested before a watcher began is not told below its start, because its
// client would resume there.
func TestProgressIsNotBelowAStart(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		r := newProgressRig(t, w, h)
		defer r.lock("ca")()
		r.ask()
		r.write("ca")
		_, current, err := r.s.Watch(t.Context(), 9, Request{Span: spanOf("d", "e")})
		if err != nil {
			t.Fatal(err)
		}
		r.most = current
		r.takeFor(time.Second)
		if len(r.answers) != 0 {
			t.Errorf("progress %v before all have come to %d", r.answers, current)
		}
	})
}
