package watch

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// An idle watcher's position is where everything was delivered or void, not its last event. When it
// is cut off, it does not ask for what may be compacted.
func TestACutWatcherIsNotInThePast(t *testing.T) {
	quiet(t, func(c *Config) { c.PendingBytes, c.RecentBytes = 1, 1 }, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		c := watchAll(ctx, h, &wg, &observer{name: "c", req: Request{Span: keyspace.Span{Start: []byte("c"), End: []byte("d")}}})
		for range 20 {
			w.write("aa")
			w.wg.Wait()
		}
		time.Sleep(time.Second)
		h.mu.Lock()
		last := h.logEnd
		h.mu.Unlock()
		w.mu.Lock()
		w.compacted = last
		w.mu.Unlock()
		w.write("cc")
		time.Sleep(time.Second)
		if c.count() != 1 || c.ended != 0 {
			t.Errorf("%d events, ended at %d", c.count(), c.ended)
		}
		cancel()
		wg.Wait()
	})
}

// As in etcd, no progress is told beside a watcher that begins later, even if the request came
// before it began.
func TestProgressBesideAFutureStart(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		for i, start := range []keyspace.Revision{0, w.rev + 3} {
			if _, _, err := s.Watch(t.Context(), int64(i), Request{Start: start}); err != nil {
				t.Fatal(err)
			}
		}
		for range 3 {
			w.write("aa")
			w.wg.Wait()
			if err := s.RequestProgress(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		told := 0
		for {
			d, ok, err := s.TryNext()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if d.Watcher == nil {
				if told++; d.Revision != w.rev {
					t.Errorf("progress %d at revision %d", d.Revision, w.rev)
				}
			}
		}
		if told != 1 {
			t.Errorf("progress was told %d times", told)
		}
	})
}

// As in etcd, a progress request while a watcher of the stream reads the past gets no answer, not
// even when it has caught up. A request after that gets one.
func TestProgressBesideALaggingWatcher(t *testing.T) {
	quiet(t, func(c *Config) { c.RecentBytes = 1 }, func(t *testing.T, w *world, h *Hub) {
		for range 5 {
			w.write("aa")
			w.wg.Wait()
		}
		s := h.NewStream()
		defer s.Close()
		silence := func(node keyspace.NodeID) {
			w.mu.Lock()
			w.silent = node
			w.mu.Unlock()
		}
		silence(1)
		for i, start := range []keyspace.Revision{0, 2} {
			if _, _, err := s.Watch(t.Context(), int64(i), Request{Start: start}); err != nil {
				t.Fatal(err)
			}
		}
		for _, want := range []struct{ events, told int }{{5, 0}, {0, 1}} {
			if err := s.RequestProgress(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			silence(0)
			events, told := 0, 0
			for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
				d, ok, err := s.TryNext()
				if err != nil {
					t.Fatal(err)
				}
				if events += len(d.Events); ok && d.Watcher == nil {
					told++
				}
			}
			if events != want.events || told != want.told {
				t.Errorf("%d events, and progress %d times; want %+v", events, told, want)
			}
		}
	})
}

// Watchers whose clients take nothing hold no more history than the bound of all queues, however
// many they are.
func TestHistoryIsNotReadForTheQueue(t *testing.T) {
	const bound = 64 << 10
	change := func(c *Config) { c.RecentBytes, c.QueuedBytes, c.HistoryBytes = 1, bound, 16<<10 }
	quiet(t, change, func(t *testing.T, w *world, h *Hub) {
		for range 300 {
			w.write("aa")
		}
		w.wg.Wait()
		s := h.NewStream()
		defer s.Close()
		all := map[*Watcher]int{}
		for i := range 100 {
			x, _, err := s.Watch(t.Context(), int64(i), Request{Start: 2})
			if err != nil {
				t.Fatal(err)
			}
			all[x] = 0
		}
		time.Sleep(10 * time.Second)
		h.mu.Lock()
		if h.queuedBytes > bound+4*int64(h.cfg.Readers)*(64<<10) {
			t.Errorf("%d bytes are queued", h.queuedBytes)
		}
		h.mu.Unlock()
		for done := 0; done < len(all); {
			d, err := s.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if all[d.Watcher] += len(d.Events); all[d.Watcher] == 300 {
				done++
			}
		}
	})
}

// Watchers of one span that begin in the past, close to each other, read it together.
func TestWatchersReadThePastTogether(t *testing.T) {
	quiet(t, func(c *Config) { c.RecentBytes = 1 }, func(t *testing.T, w *world, h *Hub) {
		for range 100 {
			w.write("aa")
		}
		w.wg.Wait()
		w.pageRevs = 20
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var all []*observer
		for i := range keyspace.Revision(200) {
			o := &observer{name: "past", req: Request{Span: keyspace.Single([]byte("aa")), Start: 2 + i%40}}
			all = append(all, o)
			wg.Go(func() { observe(ctx, h, o) })
		}
		time.Sleep(5 * time.Second)
		w.mu.Lock()
		if w.reads > 60 {
			t.Errorf("%d pages were read for 200 watchers", w.reads)
		}
		w.mu.Unlock()
		cancel()
		wg.Wait()
		for _, o := range all {
			o.judge(t, 1, w)
		}
	})
}

// A silent node does not hold all readers: groups whose ranges are elsewhere go on.
func TestASilentNodeDoesNotKeepAllReaders(t *testing.T) {
	quiet(t, func(c *Config) { c.Self, c.RecentBytes = 9, 1 }, func(t *testing.T, w *world, h *Hub) {
		for range 10 {
			w.write("aa")
			w.write("cc")
		}
		w.wg.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		watchAll(ctx, h, &wg, &observer{name: "all"})
		h.mu.Lock()
		lo, _ := h.window(keyspace.Single([]byte("aa")))
		hi, _ := h.window(keyspace.Single([]byte("cc")))
		silent, l := h.subs[lo].node, h.subs[hi]
		h.closeFeedLocked(l)
		l.leader, l.tries = 1+silent%3, 0
		h.openFeedLocked(l)
		h.mu.Unlock()
		time.Sleep(time.Second)
		w.mu.Lock()
		w.silent = silent
		w.mu.Unlock()
		for i := range byte(20) {
			o := &observer{name: "silent", req: Request{Span: keyspace.Span{Start: []byte{'a'}, End: []byte{'a', 'b' + i}}, Start: 2}}
			wg.Go(func() { observe(ctx, h, o) })
		}
		time.Sleep(time.Second)
		o := &observer{name: "c", req: Request{Span: keyspace.Single([]byte("cc")), Start: 2}}
		wg.Go(func() { observe(ctx, h, o) })
		time.Sleep(time.Second)
		if o.count() != 10 {
			t.Errorf("%d events of a node that answers", o.count())
		}
		cancel()
		wg.Wait()
	})
}

// A delivery has a bound, and ends with a revision.
func TestDeliveriesHaveABound(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		const all = 3 * maxDeliveryRevisions
		for range all {
			w.write("aa", "ab")
		}
		w.wg.Wait()
		s := h.NewStream()
		defer s.Close()
		if _, _, err := s.Watch(t.Context(), 1, Request{Start: 2}); err != nil {
			t.Fatal(err)
		}
		last := keyspace.Revision(1)
		for got := 0; got < 2*all; {
			d, err := s.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			n := len(d.Events)
			first, end := keyspace.Revision(d.Events[0].Kv.ModRevision), keyspace.Revision(d.Events[n-1].Kv.ModRevision)
			if n > 2*maxDeliveryRevisions || first != last+1 || d.Revision < end {
				t.Fatalf("%d events from %d to %d after %d, revision %d", n, first, end, last, d.Revision)
			}
			last = end
			got += n
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.queuedBytes != 0 {
			t.Errorf("%d bytes are queued", h.queuedBytes)
		}
	})
}

func TestFitting(t *testing.T) {
	e := func(rev int64, n int) *mvccpb.Event {
		return &mvccpb.Event{Kv: &mvccpb.KeyValue{ModRevision: rev, Value: make([]byte, n)}}
	}
	const half = maxDeliveryBytes / 2
	for _, c := range []struct {
		want   int
		events []*mvccpb.Event
	}{
		{2, []*mvccpb.Event{e(1, 1), e(2, 1)}},
		{1, []*mvccpb.Event{e(1, half), e(2, half)}},
		{2, []*mvccpb.Event{e(1, half), e(1, half), e(2, 1)}}, // a revision is not divided
		{1, []*mvccpb.Event{e(1, 1), e(2, half), e(2, half)}},
	} {
		if n := fitting(c.events, keyspace.MaxRevision); n != c.want {
			t.Errorf("%d events fit, want %d", n, c.want)
		}
	}
}

// narrowHistory answers with a page that ends with its first revision.
type narrowHistory struct {
	*world
	most keyspace.Revision
}

func (n *narrowHistory) History(_ context.Context, _ keyspace.NodeID, q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.most += q.To - q.From + 1
	return &rangeapi.HistoryPage{Next: q.From + 1}, nil
}

// Pages of many ranges are read up to where all of them can be delivered. So the pages of a wide
// watcher do not add up to those of its ranges.
func TestHistoryOfManyRanges(t *testing.T) {
	f := &narrowHistory{world: newWorld(1)}
	h := New(Config{Self: 1, Clock: clock.Virtual(), Log: f, Ranges: f, Feeds: f})
	defer h.Stop()
	p := &plan{pos: 10, to: 1009}
	for range 200 {
		p.asks = append(p.asks, planAsk{1, rangeapi.HistoryRequest{From: 11, To: p.to}})
	}
	pages, err := h.readPlan(t.Context(), p)
	if err != nil || len(pages) != 200 || f.most > 20_000 {
		t.Errorf("%d pages of %d revisions, %v", len(pages), f.most, err)
	}
}

// compactedHistory refuses one range's pages as compacted, and another one's for another reason.
type compactedHistory struct {
	*world
	reads int
}

func (c *compactedHistory) History(ctx context.Context, node keyspace.NodeID, q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reads++
	if q.Range == 1 {
		return nil, kverror.New(kverror.Busy, "a snapshot comes in")
	}
	return nil, &kverror.Error{Kind: kverror.Compacted, CompactRevision: 40 + keyspace.Revision(q.Range)}
}

// What is compacted ends a plan, whatever other ranges answer.
func TestCompactedDecides(t *testing.T) {
	f := &compactedHistory{world: newWorld(1)}
	h := New(Config{Self: 1, Clock: clock.Virtual(), Log: f, Ranges: f, Feeds: f})
	defer h.Stop()
	p := &plan{pos: 10, to: 1009}
	for id := range keyspace.RangeID(3) {
		p.asks = append(p.asks, planAsk{1, rangeapi.HistoryRequest{Range: id + 1, From: 11, To: p.to}})
	}
	_, err := h.readPlan(t.Context(), p)
	if e := kverror.Of(err); e.Kind != kverror.Compacted || e.CompactRevision != 43 || f.reads != 3 {
		t.Errorf("%d reads, %v", f.reads, err)
	}
}

// A watcher misses nothing if events below its start are compacted.
func TestAFutureStartIsNotCompacted(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		past, current, err := s.Watch(t.Context(), 1, Request{})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err = s.Watch(t.Context(), 2, Request{Start: current + 50}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		h.mu.Lock()
		l := h.subs[0]
		h.closeFeedLocked(l)
		h.compactedLocked(l, current+20)
		h.mu.Unlock()
		d, ok, err := s.TryNext()
		if err != nil || !ok || d.Watcher != past || d.Compacted != current+20 {
			t.Errorf("who misses something: %+v, %t, %v", d, ok, err)
		}
		if d, ok, err = s.TryNext(); ok || err != nil {
			t.Errorf("who misses nothing: %+v, %v", d, err)
		}
	})
}

// A compacted version is not told as the version before, although the hub has it in memory.
func TestACompactedVersionIsNotTheOneBefore(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		if _, _, err := s.Watch(t.Context(), 1, Request{Prev: true}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.write("k")
		w.write("k")
		d, err := s.Next(t.Context())
		for err == nil && d.Revision < w.rev {
			d, err = s.Next(t.Context())
		}
		for i, kept := range []bool{true, false} {
			if !kept {
				w.compacted = w.rev
			}
			later := h.NewStream()
			if _, _, err = later.Watch(t.Context(), 1, Request{Start: w.rev, Prev: true}); err != nil {
				t.Fatal(err)
			}
			d, err = later.Next(t.Context())
			if err != nil || len(d.Events) != 1 || (d.Events[0].PrevKv != nil) != kept {
				t.Errorf("%d: %+v, %v", i, d, err)
			}
			later.Close()
		}
	})
}

// At the compacted revision itself a watcher is told what the compaction keeps: the last write of
// each key, without those that it replaced in the same transaction. It is the same from recent
// events and from history.
func TestCompactionKeepsTheLastWriteOfARevision(t *testing.T) {
	for _, recent := range []int64{1, 16 << 20} {
		quiet(t, func(c *Config) { c.RecentBytes = recent }, func(t *testing.T, w *world, h *Hub) {
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			w.puts = true
			first := watchAll(ctx, h, &wg, &observer{name: "first"})
			w.write("aa")
			w.wg.Wait()
			at := w.rev + 1
			w.write("aa", "ab", "aa")
			w.wg.Wait()
			w.write("aa", "aa")
			w.wg.Wait()
			time.Sleep(time.Second)
			w.mu.Lock()
			w.compacted = at
			w.mu.Unlock()
			second := watchAll(ctx, h, &wg, &observer{name: "second", req: Request{Start: at}})
			cancel()
			wg.Wait()
			if n := first.count(); n != 6 {
				t.Errorf("%d events were told before the compaction", n)
			}
			var got []string
			for _, e := range second.events {
				got = append(got, fmt.Sprintf("%d %s", e.Kv.ModRevision-int64(at), e.Kv.Key))
			}
			if want := []string{"0 ab", "0 aa", "1 aa", "1 aa"}; !slices.Equal(got, want) {
				t.Errorf("with %d bytes of events kept: %q, want %q", recent, got, want)
			}
		})
	}
}

// A watcher that began before a compaction and lags behind it gets all events of the compacted
// revision that its ranges have. Only a watcher that begins there gets what the compaction keeps.
// It is the same from history and from recent events, in a batch with lower revisions or alone.
func TestWhoLagsIsToldTheCompactedRevisionWhole(t *testing.T) {
	for _, recent := range []int64{1, 600, 800, 16 << 20} {
		for below := range keyspace.Revision(3) {
			quiet(t, func(c *Config) { c.RecentBytes = recent }, func(t *testing.T, w *world, h *Hub) {
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				w.puts = true
				first := watchAll(ctx, h, &wg, &observer{name: "first"})
				w.write("aa")
				w.write("ab")
				w.wg.Wait()
				at := w.rev + 1
				w.write("aa", "ab", "aa")
				w.wg.Wait()
				time.Sleep(time.Second)
				w.mu.Lock()
				w.slowest, w.pageRevs, w.unraised = time.Second, 2, true // history is slow
				w.mu.Unlock()
				lags := &observer{name: "lags", req: Request{Start: at - below}}
				wg.Go(func() { observe(ctx, h, lags) })
				synctest.Wait()
				w.mu.Lock()
				w.compacted = at
				w.mu.Unlock()
				just := watchAll(ctx, h, &wg, &observer{name: "just", req: Request{Start: at}})
				time.Sleep(10 * time.Second)
				cancel()
				wg.Wait()
				if n := first.count(); n != 5 {
					t.Errorf("%d events were told before the compaction", n)
				}
				if n := lags.count(); n != 3+int(below) || lags.ended != 0 {
					t.Errorf("with %d bytes kept, %d below: %d events were told to who lags, compacted %d", recent, below, n, lags.ended)
				}
				if n := just.count(); n != 2 {
					t.Errorf("with %d bytes kept: %d events were told to who begins at the compacted revision", recent, n)
				}
			})
		}
	}
}
