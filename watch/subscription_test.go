package watch

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
)

// Watchers may begin at different revisions before the range of both is located. The later one does
// not take the events between from the earlier one.
func TestTwoSubscriptionsBecomeOne(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		set := func(down bool) {
			w.mu.Lock()
			w.mapDown = down
			w.mu.Unlock()
		}
		set(true)
		first := watchAll(ctx, h, &wg, &observer{name: "first", req: Request{Span: keyspace.Single([]byte("aa"))}})
		for range 5 {
			w.write("aa")
		}
		w.wg.Wait()
		second := watchAll(ctx, h, &wg, &observer{name: "second", req: Request{Span: keyspace.Single([]byte("ab"))}})
		set(false)
		time.Sleep(2 * time.Second)
		w.write("aa", "ab")
		time.Sleep(time.Second)
		first.judge(t, 1, w)
		second.judge(t, 1, w)
		if first.count() != 6 || second.count() != 1 {
			t.Errorf("%d and %d events", first.count(), second.count())
		}
		cancel()
		wg.Wait()
	})
}

// A watched range absorbs an unwatched one that holds a transaction's lock. A watcher that begins
// there in the past gets the transaction's event, although it is below the resolved revision of the
// watched half.
func TestASubscriptionGrowsOverALock(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		w.mu.Lock()
		w.refreshLocked() // the map has the ranges as they are: no others are followed
		w.mu.Unlock()
		left := watchAll(ctx, h, &wg, &observer{name: "left", req: Request{Span: keyspace.Single([]byte("ba"))}})
		w.write("ca")
		w.wg.Wait()
		const name = 1
		w.mu.Lock()
		rs := []*worldRange{w.of("ba"), w.of("ca")}
		rs[1].locks[name] = w.rev
		rev := w.allocateLocked(rs...)
		rs[0].applied = rev
		w.appendLocked(rs[0], worldEntry{events: []rangeapi.Event{w.eventLocked("ba", rev, 0)}})
		w.mu.Unlock()
		time.Sleep(time.Second)
		w.merge("ba")
		time.Sleep(time.Second)
		right := watchAll(ctx, h, &wg, &observer{name: "right", req: Request{Span: keyspace.Single([]byte("ca")), Start: 2}})
		w.mu.Lock()
		r := w.of("ca")
		delete(r.locks, name)
		w.appendLocked(r, worldEntry{events: []rangeapi.Event{w.eventLocked("ca", rev, 1)}})
		w.mu.Unlock()
		w.write("ca")
		time.Sleep(time.Second)
		w.wg.Wait()
		left.judge(t, 1, w)
		right.judge(t, 1, w)
		if left.count() != 1 || right.count() != 3 {
			t.Errorf("%d and %d events", left.count(), right.count())
		}
		cancel()
		wg.Wait()
	})
}

// A range that is located again unchanged has no feed position yet. History is read only after its
// leader says which position has all that was told.
func TestASubscriptionOfTheSameRangeProvesAnew(t *testing.T) {
	quiet(t, func(c *Config) { c.RecentBytes = 1 }, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		all := watchAll(ctx, h, &wg, &observer{name: "all"})
		w.mu.Lock()
		for _, r := range w.ranges {
			r.leader, w.stuck = 2, 1 // this node's replicas apply nothing more
			r.at[2] = len(r.log)
		}
		w.mu.Unlock()
		for range 3 {
			w.write("ba")
		}
		time.Sleep(5 * time.Second) // the leader feeds by now
		h.mu.Lock()
		for _, l := range slices.Clone(h.subs) {
			l.tries = 0
			h.movedLocked(l, kverror.New(kverror.WrongRange, "whatever"))
		}
		h.mu.Unlock()
		time.Sleep(10 * time.Millisecond)
		past := watchAll(ctx, h, &wg, &observer{name: "past", req: Request{Span: keyspace.Single([]byte("ba")), Start: 2}})
		time.Sleep(10 * time.Second)
		w.wg.Wait()
		all.judge(t, 1, w)
		past.judge(t, 1, w)
		if all.count() != 3 || past.count() != 3 {
			t.Errorf("%d and %d events", all.count(), past.count())
		}
		w.mu.Lock()
		w.stuck = 0
		w.mu.Unlock()
		cancel()
		wg.Wait()
	})
}

// An event that the parent of a split has applied, and that its feed has not brought, is in the
// child's past. No leader's answer passes it before the child's feed has brought it.
func TestAFreshChildIsHeardFirst(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		all := watchAll(ctx, h, &wg, &observer{name: "all"})
		w.write("ba")
		w.wg.Wait()
		time.Sleep(time.Second)
		// The feeds break, and come back after a second.
		w.mu.Lock()
		r := w.of("ba")
		for n := keyspace.NodeID(1); n <= 3; n++ {
			if n != r.leader {
				w.down[n] = true
			}
		}
		w.noFeeds = true
		for s := range w.streams {
			s.dead = true
		}
		w.changedLocked()
		w.mu.Unlock()
		w.write("bb") // applied, but not fed
		w.wg.Wait()
		w.split("ba5") // "bb" is the child's
		w.mu.Lock()
		c := w.of("bb")
		c.leader = r.leader
		c.at[c.leader] = len(c.log)
		w.refreshLocked()
		w.mu.Unlock()
		h.mu.Lock()
		for _, l := range slices.Clone(h.subs) {
			if l.span.Contains([]byte("bb")) {
				h.movedLocked(l, kverror.New(kverror.WrongRange, "it was split"))
			}
		}
		h.mu.Unlock()
		time.Sleep(time.Second) // overdue: the child's leader is asked meanwhile
		w.mu.Lock()
		w.noFeeds = false
		clear(w.down)
		w.changedLocked()
		w.mu.Unlock()
		w.write("aa")
		w.write("bz")
		time.Sleep(5 * time.Second)
		all.judge(t, 1, w)
		cancel()
		wg.Wait()
	})
}

// Two ranges were resolved up to different revisions when they merged. Events of the further one
// above fed have come and are resolved, but without the version before. A new watcher that wants
// the version before waits until they have come again.
func TestPrevIsWantedRightAfterAMerge(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		w.puts = true
		all := watchAll(ctx, h, &wg, &observer{name: "all"})
		w.write("ba")
		w.wg.Wait()
		time.Sleep(time.Second)
		w.mu.Lock()
		start := w.rev + 2
		w.mu.Unlock()
		for range 5 {
			w.write("ca")
			w.wg.Wait()
		}
		time.Sleep(time.Second)
		w.mu.Lock()
		w.slowest = 300 * time.Millisecond // the new range's feed is slow
		w.mu.Unlock()
		w.merge("ba")
		for merged := false; !merged; time.Sleep(time.Millisecond) {
			h.mu.Lock()
			for _, l := range h.subs {
				merged = merged || l.id != 0 && l.span.Contains([]byte("ba")) && l.span.Contains([]byte("ca")) && l.position == (rangeapi.FeedPosition{})
			}
			h.mu.Unlock()
		}
		prev := watchAll(ctx, h, &wg, &observer{name: "prev", req: Request{Span: keyspace.Single([]byte("ca")), Start: start, Prev: true}})
		time.Sleep(5 * time.Second)
		all.judge(t, 1, w)
		prev.judge(t, 1, w)
		cancel()
		wg.Wait()
	})
}

// Two ranges merge while one of them has a lock that has no revision yet. The other one's events
// above the lock's floor were released before: nothing holds them back any more. But the merged
// range is resolved only up to the floor, and so is its feed. The events came without the version
// before. A watcher that wants it must not get them from memory. That is so before the new feed has a
// position, and behind it. It is so after a further merge with a range whose feed has the versions.
func TestPrevIsWantedBesideALockAfterAMerge(t *testing.T) {
	for _, when := range []string{"before the feed", "behind the feed", "after a further merge"} {
		quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			w.puts = true
			all := watchAll(ctx, h, &wg, &observer{name: "all", req: Request{Span: keyspace.Span{Start: []byte("b")}}})
			watchAll(ctx, h, &wg, &observer{name: "neighbour", req: Request{Span: keyspace.Single([]byte("aa")), Prev: true}})
			w.write("ba")
			w.write("ca")
			w.wg.Wait()
			w.mu.Lock()
			floor := w.rev
			w.of("ba").locks[99] = floor
			w.mu.Unlock()
			for range 5 {
				w.write("ca")
				w.wg.Wait()
			}
			time.Sleep(time.Second)
			// merge lets a range absorb its right neighbour, and waits until the hub knows.
			merge := func(key string, fed bool) {
				w.merge(key)
				for merged := false; !merged; time.Sleep(time.Millisecond) {
					h.mu.Lock()
					for _, l := range h.subs {
						merged = merged || l.id != 0 && l.span.Contains([]byte(key)) && l.span.Contains([]byte("ca")) && fed == (l.position != rangeapi.FeedPosition{})
					}
					h.mu.Unlock()
				}
			}
			slow := func() {
				w.mu.Lock()
				w.slowest = 300 * time.Millisecond
				w.mu.Unlock()
			}
			switch when {
			case "before the feed":
				slow()
				merge("ba", false)
			case "behind the feed":
				merge("ba", true)
			default:
				merge("ba", true)
				slow()
				merge("aa", false)
			}
			h.mu.Lock()
			lo, _ := h.window(keyspace.Single([]byte("ca")))
			if l := h.subs[lo]; l.fed > floor || l.resolved > floor || h.frontierLocked(keyspace.Single([]byte("ca"))) < floor+5 {
				t.Errorf("%s: fed up to %d, resolved up to %d; the lock's floor is %d", when, l.fed, l.resolved, floor)
			}
			h.mu.Unlock()
			var observers []*observer
			for start := floor + 1; start <= floor+5; start++ {
				o := &observer{name: "prev " + when, req: Request{Span: keyspace.Single([]byte("ca")), Start: start, Prev: true}}
				observers = append(observers, o)
				wg.Go(func() { observe(ctx, h, o) })
				time.Sleep(time.Millisecond)
			}
			time.Sleep(2 * time.Second)
			w.mu.Lock()
			delete(w.of("ba").locks, 99)
			w.mu.Unlock()
			w.write("ba", "ca")
			w.wg.Wait()
			time.Sleep(5 * time.Second)
			all.judge(t, 1, w)
			for _, o := range observers {
				o.judge(t, 1, w)
			}
			cancel()
			wg.Wait()
		})
	}
}

// A feed is ahead of the allocation log. It has brought an event without the version before, and
// does not bring it again. A watcher that wants the version waits for the log, and reads history.
func TestPrevIsWantedWhileTheLogIsBehind(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		w.puts = true
		span := keyspace.Single([]byte("ca"))
		watchAll(ctx, h, &wg, &observer{name: "all"})
		w.write("ca")
		w.wg.Wait()
		time.Sleep(time.Second)
		w.mu.Lock()
		start := w.rev + 1
		w.logDown = true
		w.mu.Unlock()
		w.write("ca")
		w.wg.Wait()
		time.Sleep(time.Second)
		h.mu.Lock()
		if lo, _ := h.window(span); h.subs[lo].fed < start || h.logEnd >= start {
			t.Errorf("fed up to %d, the log tells up to %d, want the former at %d", h.subs[lo].fed, h.logEnd, start)
		}
		h.mu.Unlock()
		prev := watchAll(ctx, h, &wg, &observer{name: "prev", req: Request{Span: span, Start: start, Prev: true}})
		w.mu.Lock()
		w.logDown = false
		w.changedLocked()
		w.mu.Unlock()
		time.Sleep(5 * time.Second)
		prev.judge(t, 1, w)
		cancel()
		wg.Wait()
	})
}

// A part of a feed without a position lets nobody read history: the next node that feeds may not
// have applied as much.
func TestAFeedResolvesWithAPosition(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		watchAll(ctx, h, &wg, &observer{name: "all"})
		h.mu.Lock()
		l := h.subs[0]
		resolved, position := l.resolved, l.position
		h.takePartLocked(l, &rangeapi.FeedPart{ID: l.feed, Resolved: resolved + 10})
		if l.resolved != resolved || l.fed != resolved+10 || l.position != position {
			t.Errorf("a page: resolved up to %d, fed up to %d, position %v", l.resolved, l.fed, l.position)
		}
		h.takePartLocked(l, &rangeapi.FeedPart{ID: l.feed, Resolved: resolved + 5, Position: rangeapi.FeedPosition{Term: 1, Number: 9}})
		if l.resolved != resolved+5 || l.fed != resolved+10 {
			t.Errorf("another node: resolved up to %d, fed up to %d", l.resolved, l.fed)
		}
		h.mu.Unlock()
		cancel()
		wg.Wait()
	})
}

// A watcher from now on asks nobody. It is told of healthy ranges while another one has no leader,
// and ranges that sleep go on sleeping.
func TestAStartFromNowAsksNobody(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		w.write("cc")
		w.wg.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		w.mu.Lock()
		w.of("aa").leader = 0
		w.mu.Unlock()
		o := watchAll(ctx, h, &wg, &observer{name: "all"})
		w.write("cc")
		time.Sleep(time.Second)
		w.mu.Lock()
		if len(w.asked) != 0 || o.count() != 1 {
			t.Errorf("%d events; asked were %v", o.count(), w.asked)
		}
		w.mu.Unlock()
		w.heal()
		cancel()
		wg.Wait()
	})
}

// A range whose replicas have all moved is found again, even if nothing names another generation.
func TestReplicasThatMovedAreFound(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		w.mu.Lock()
		w.down[9] = true
		w.mu.Unlock()
		o := watchAll(ctx, h, &wg, &observer{name: "all"})
		h.mu.Lock()
		for _, l := range h.subs {
			l.replicas, l.leader = []keyspace.NodeID{9}, 9
			h.closeFeedLocked(l)
			h.openFeedLocked(l)
		}
		h.mu.Unlock()
		w.write("aa")
		time.Sleep(10 * time.Second)
		if o.count() != 1 {
			t.Errorf("%d events", o.count())
		}
		cancel()
		wg.Wait()
	})
}

// A range without known replicas counts as unknown.
func TestARangeWithoutReplicas(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		w.mu.Lock()
		for i := range w.cache {
			w.cache[i].Descriptor.Replicas = nil
			w.cache[i].Leader = 0
		}
		w.mu.Unlock()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		o := watchAll(ctx, h, &wg, &observer{name: "all"})
		w.write("aa")
		time.Sleep(time.Second)
		if o.count() != 1 {
			t.Errorf("%d events", o.count())
		}
		cancel()
		wg.Wait()
	})
}

// The pending allocations of a silent range have a bound, and are removed when they are resolved.
func TestPendingAllocationsHaveABound(t *testing.T) {
	h := New(Config{Self: 1, Clock: clock.Virtual()})
	l, o := &subscription{span: keyspace.Single([]byte("a")), resolved: 9}, &subscription{span: keyspace.Single([]byte("b")), resolved: 9}
	h.subs = []*subscription{l, o}
	const all = 3 * maxAllocations
	for i := range keyspace.Revision(all) {
		e := &allocation{first: 10 + i, last: 10 + i}
		h.assignLocked(e, l)
		if i%2 == 0 {
			h.assignLocked(e, o)
		}
	}
	h.logEnd = 9 + all
	if len(l.allocs) > 2*maxAllocations || len(o.allocs) > 2*maxAllocations {
		t.Errorf("%d and %d entries", len(l.allocs), len(o.allocs))
	}
	for _, resolved := range []keyspace.Revision{9, 500, 9 + maxAllocations, 20 + 2*maxAllocations, 9 + all} {
		h.resolveUpToLocked(l, resolved)
		if f := h.frontierLocked(l.span); f != resolved {
			t.Errorf("frontier %d, but the range has resolved up to %d", f, resolved)
		}
	}
	if f := h.frontierLocked(o.span); f != 9 {
		t.Errorf("the other range has not resolved, and its frontier is %d", f)
	}
	if h.resolveUpToLocked(o, 9+all); h.allocs.head != nil {
		t.Error("an allocation is still pending")
	}
}

// Unused subscriptions are removed even if watchers come and go all the time.
func TestSubscriptionsGoWhileWatchersChurn(t *testing.T) {
	quiet(t, nil, func(t *testing.T, _ *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		begin := func(key string) *Watcher {
			x, _, err := s.Watch(t.Context(), 1, Request{Span: keyspace.Single([]byte(key))})
			if err != nil {
				t.Fatal(err)
			}
			return x
		}
		s.Cancel(begin("aa"))
		for range 30 {
			x := begin("cc")
			time.Sleep(time.Second)
			s.Cancel(x)
		}
		h.mu.Lock()
		if len(h.subs) != 1 {
			t.Errorf("%d subscriptions", len(h.subs))
		}
		h.mu.Unlock()
	})
}

// A leader's answer names a position that the feed reached before anybody wanted the versions
// before events. It counts when the feed has reached it again, with them. Until then an event here
// lacks it.
func TestAProofWaitsForTheVersionsBefore(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		w.puts = true
		w.write("aa")
		w.wg.Wait()
		span := keyspace.Span{Start: []byte("a"), End: []byte("b")}
		watchAll(ctx, h, &wg, &observer{name: "a", req: Request{Span: span}})
		w.mu.Lock()
		r := w.of("aa")
		r.locks[99] = w.rev
		w.mu.Unlock()
		w.write("aa")
		w.wg.Wait()
		time.Sleep(20 * time.Millisecond)
		h.mu.Lock()
		l, rev := h.byRange[r.desc.Range], h.logEnd
		if l.resolved >= rev || len(slices.Collect(h.recent.between(rev-1, rev))) != 1 {
			t.Fatalf("resolved %d of %d beside a lock, recent %v", l.resolved, rev, h.recent.list.chunks)
		}
		h.wantPrevLocked(span)
		l.proof.position, l.proof.resolved, l.proof.at, l.proof.leader = l.position, rev, h.cfg.Clock.Now(), r.leader
		h.applyProofLocked(l)
		if l.resolved >= rev {
			t.Errorf("revision %d may leave without the version before", l.resolved)
		}
		h.mu.Unlock()
		time.Sleep(20 * time.Millisecond)
		h.mu.Lock()
		if e := slices.Collect(h.recent.between(rev-1, rev)); l.resolved < rev || e[0].whole == nil {
			t.Errorf("resolved %d of %d, %+v", l.resolved, rev, e[0])
		}
		h.mu.Unlock()
		w.mu.Lock()
		delete(r.locks, 99)
		w.mu.Unlock()
		cancel()
		wg.Wait()
	})
}

// slowMap is a range map that answers slowly.
type slowMap struct{ Ranges }

func (m slowMap) Locate(ctx context.Context, span keyspace.Span) ([]router.Located, error) {
	time.Sleep(10 * time.Millisecond)
	return m.Ranges.Locate(ctx, span)
}

// An allocation to a subscription for several ranges is pending at the range that got it, and at
// none of the others. So nobody waits until those are found to have nothing.
func TestAllocationsPendAtTheirRanges(t *testing.T) {
	quiet(t, func(c *Config) { c.Ranges = slowMap{c.Ranges} }, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		if _, _, err := s.Watch(t.Context(), 0, Request{}); err != nil {
			t.Fatal(err)
		}
		for _, k := range []string{"aa", "bb", "cc"} {
			w.write(k)
		}
		begin := time.Now()
		for told := 0; told < 3; {
			d, err := s.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			told += len(d.Events)
		}
		if took := time.Since(begin); took > 20*time.Millisecond {
			t.Errorf("the events were told after %v", took)
		}
	})
}

// busyFeeds refuse feeds for a while, as replicas do that have not applied a split of which others
// tell.
type busyFeeds struct {
	Feeds
	until time.Time
	self  keyspace.NodeID
	opens map[keyspace.NodeID]int
}

type busyStream struct {
	FeedStream
	f     *busyFeeds
	parts chan []rangeapi.FeedPart
}

func (f *busyFeeds) OpenFeeds(ctx context.Context, node keyspace.NodeID) (FeedStream, error) {
	f.opens[node]++
	if node != f.self || !time.Now().Before(f.until) {
		return f.Feeds.OpenFeeds(ctx, node)
	}
	s, err := f.Feeds.OpenFeeds(ctx, node)
	return &busyStream{s, f, make(chan []rangeapi.FeedPart, 64)}, err
}

func (s *busyStream) Order(ctx context.Context, orders []rangeapi.FeedOrder) error {
	var refused []rangeapi.FeedPart
	orders = slices.DeleteFunc(slices.Clone(orders), func(o rangeapi.FeedOrder) bool {
		busy := !o.Close && time.Now().Before(s.f.until)
		if busy {
			refused = append(refused, rangeapi.FeedPart{ID: o.ID, Err: kverror.New(kverror.Busy, "not yet")})
		}
		return busy
	})
	if len(refused) > 0 {
		s.parts <- refused
	}
	return s.FeedStream.Order(ctx, orders)
}

func (s *busyStream) Recv(ctx context.Context) ([]rangeapi.FeedPart, error) {
	select {
	case p := <-s.parts:
		return p, nil
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	p, err := s.FeedStream.Recv(ctx)
	if err != nil && ctx.Err() != nil {
		return nil, nil
	}
	return p, err
}

// If this node's replica has not applied what others tell of, it is asked again soon, and another
// one at once if that does not help. Nobody waits for a tick.
func TestAReplicaThatIsNotThereYetIsWaitedFor(t *testing.T) {
	for busy, within := range map[time.Duration]time.Duration{5 * time.Millisecond: 20 * time.Millisecond, time.Hour: 100 * time.Millisecond} {
		f := &busyFeeds{self: 1, opens: map[keyspace.NodeID]int{}}
		quiet(t, func(c *Config) { f.Feeds, c.Feeds = c.Feeds, f }, func(t *testing.T, w *world, h *Hub) {
			f.until = time.Now().Add(busy)
			s := h.NewStream()
			defer s.Close()
			if _, _, err := s.Watch(t.Context(), 0, Request{Span: keyspace.Single([]byte("aa"))}); err != nil {
				t.Fatal(err)
			}
			w.mu.Lock()
			w.of("aa").leader = 2
			w.mu.Unlock()
			w.write("aa")
			begin := time.Now()
			if _, err := s.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
			took := time.Since(begin)
			synctest.Wait() // a feed may still be opening
			if took > within || (len(f.opens) > 1) != (busy == time.Hour) {
				t.Errorf("busy for %v: told after %v, feeds of %v", busy, took, f.opens)
			}
		})
	}
}

// A later deadline is kept, even if something else was due before. If two feeds open again, the second one does not wait for a tick.
func TestTheSecondPauseEndsInTimeToo(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		if _, _, err := s.Watch(t.Context(), 0, Request{Span: keyspace.Span{}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		late := 0
		for range 3 { // in a third at most, a tick happens to help
			h.mu.Lock()
			if len(h.subs) < 2 {
				t.Fatalf("%d subscriptions", len(h.subs))
			}
			a, b := h.subs[0], h.subs[1]
			h.closeFeedLocked(a)
			h.closeFeedLocked(b)
			h.retryLocked(a, 2*time.Millisecond)
			h.retryLocked(b, 5*time.Millisecond)
			h.mu.Unlock()
			time.Sleep(6 * time.Millisecond)
			h.mu.Lock()
			if a.feed == 0 || b.feed == 0 {
				late++
			}
			h.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
		if late > 0 {
			t.Errorf("%d of 3 times a feed was not open a millisecond after its pause", late)
		}
	})
}
