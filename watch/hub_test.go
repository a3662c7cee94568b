package watch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newHub(w *world, change func(*Config)) *Hub {
	c := Config{Self: 1, Clock: clock.Virtual(), Log: w, Ranges: w, Feeds: w}
	if change != nil {
		change(&c)
	}
	return New(c)
}

// observer is a client's watcher. It notes what it is told and how fast.
type observer struct {
	name string
	req  Request
	slow time.Duration
	s    *Stream
	// brief is after how long it leaves, 0 for never. It is judged by what it was told until then.
	brief time.Duration

	mu sync.Mutex
	// Guarded by mu.
	from     keyspace.Revision
	next     keyspace.Revision // where its client resumes
	events   []*mvccpb.Event
	when     []time.Time
	bounds   []int // events before each delivery
	progress []progressNote
	// settled are the revisions at which it was settled while it was live.
	settled []progressNote
	err     error
	ended   keyspace.Revision
}

type progressNote struct {
	rev   keyspace.Revision
	count int
}

// observe runs the watchers of one stream until ctx ends. It requests progress also before later
// watchers begin.
func observe(ctx context.Context, h *Hub, os ...*observer) {
	if b := os[0].brief; b > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, b)
		defer cancel()
	}
	s := h.NewStream()
	defer s.Close()
	of, watchers := map[*Watcher]*observer{}, []*Watcher{}
	for i, o := range os {
		if i > 0 {
			_ = s.RequestProgress(ctx)
		}
		watcher, current, err := s.Watch(ctx, int64(i), o.req)
		o.s, of[watcher], watchers = s, o, append(watchers, watcher)
		o.mu.Lock()
		o.err = err
		if o.from = o.req.Start; o.from == 0 {
			o.from = current + 1
		}
		o.next = o.from
		o.mu.Unlock()
		if err != nil {
			return
		}
	}
	for n := 0; ; n++ {
		if n%7 == 3 {
			_ = s.RequestProgress(ctx)
		}
		if n%5 == 2 {
			w := watchers[n%len(watchers)]
			of[w].settle(ctx, w)
		}
		d, err := s.Next(ctx)
		if err != nil {
			return
		}
		if o := of[d.Watcher]; o != nil {
			o.take(&d)
		} else {
			for _, o := range os {
				o.takeProgress(d.Revision)
			}
		}
		time.Sleep(os[0].slow)
	}
}

// take notes a delivery.
func (o *observer) take(d *Delivery) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if d.Compacted != 0 {
		o.ended = d.Compacted
		return
	}
	o.bounds = append(o.bounds, len(o.events))
	o.events = append(o.events, d.Events...)
	for range d.Events {
		o.when = append(o.when, time.Now())
	}
	last := keyspace.Revision(d.Events[len(d.Events)-1].Kv.ModRevision)
	if d.Revision < last {
		o.err = fmt.Errorf("a delivery up to %d has revision %d", last, d.Revision)
	}
	o.next = last + 1
}

// takeProgress notes progress of the whole stream. A client of etcd resumes behind it, even if it
// was further.
func (o *observer) takeProgress(rev keyspace.Revision) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if rev+1 < o.next && o.ended == 0 {
		o.err = fmt.Errorf("progress %d to a client that goes on at %d", rev, o.next)
	}
	o.progress = append(o.progress, progressNote{rev, len(o.events)})
}

// settle notes whether the watcher is settled at the current revision, as a live one.
func (o *observer) settle(ctx context.Context, w *Watcher) {
	rev, err := o.s.Current(ctx)
	if err != nil {
		return
	}
	h := o.s.hub
	h.mu.Lock()
	live := !w.closed && w.group != nil && w.group.live
	settled := o.s.settledLocked(rev, slices.Values([]*Watcher{w}), false)
	h.mu.Unlock()
	if live && settled {
		o.mu.Lock()
		o.settled = append(o.settled, progressNote{rev, len(o.events)})
		o.mu.Unlock()
	}
}

func show(e *mvccpb.Event) string {
	s := fmt.Sprintf("%d %s", e.Kv.ModRevision, e.Kv.Key)
	if e.Type == mvccpb.Event_DELETE {
		s += "!"
	} else {
		s += "=" + string(e.Kv.Value)
	}
	if e.PrevKv != nil {
		s += " prev"
	}
	return s
}

// wanted returns all that an observer, whose lock is held, must be told, and the world's compacted
// revision. The world goes on meanwhile.
func (w *world) wanted(o *observer) ([]*event, keyspace.Revision) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var want []*event
	for _, r := range w.ranges {
		if r.ended {
			continue
		}
		for _, en := range r.log {
			for _, ev := range en.events {
				ev = w.looked(ev, o.req.Prev)
				e := newEvent(&ev)
				put := e.plain.Type == mvccpb.Event_PUT
				if o.req.Span.Contains(ev.Key) && ev.Mod >= o.from && !(put && o.req.NoPut) && !(!put && o.req.NoDelete) {
					want = append(want, e)
				}
			}
		}
	}
	slices.SortFunc(want, compare)
	return want, w.compacted
}

// judge compares what the observer was told with the world. It must have every event of the span
// from the first revision on, once and in order. No revision is divided, and neither progress nor
// settling is ahead of an event.
func (o *observer) judge(t *testing.T, seed uint64, w *world) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		t.Errorf("seed %d, %s: %v", seed, o.name, o.err)
		return
	}
	want, compacted := w.wanted(o)
	if o.ended != 0 {
		next := o.from
		if n := len(o.events); n > 0 {
			next = keyspace.Revision(o.events[n-1].Kv.ModRevision) + 1
		}
		if next >= o.ended || o.ended > compacted {
			t.Errorf("seed %d, %s %+v, told up to %d, is cancelled: %d is compacted", seed, o.name, o.req, next-1, o.ended)
		}
	}
	if o.brief > 0 || o.ended != 0 {
		want = want[:min(len(want), len(o.events))]
	}
	for i := range max(len(want), len(o.events)) {
		a, b := "nothing", "nothing"
		if i < len(want) {
			a = show(want[i].message(o.req.Prev))
		}
		if i < len(o.events) {
			b = show(o.events[i])
		}
		if i < len(want) && want[i].rev <= compacted { // the version before may have been compacted when it was told
			a, b = strings.TrimSuffix(a, " prev"), strings.TrimSuffix(b, " prev")
		}
		if a != b {
			t.Errorf("seed %d, %s %+v from %d: event %d of %d is %s, want %s (%d)", seed, o.name, o.req, o.from, i, len(o.events), b, a, len(want))
			return
		}
	}
	for _, at := range o.bounds {
		if at > 0 && o.events[at].Kv.ModRevision == o.events[at-1].Kv.ModRevision {
			t.Errorf("seed %d, %s: revision %d is divided", seed, o.name, o.events[at].Kv.ModRevision)
		}
	}
	for _, p := range o.progress {
		if p.count < len(want) && want[p.count].rev <= p.rev {
			t.Errorf("seed %d, %s: progress %d before %s", seed, o.name, p.rev, show(want[p.count].plain))
		}
	}
	for _, p := range o.settled {
		if p.count < len(want) && want[p.count].rev <= p.rev {
			t.Errorf("seed %d, %s: settled at %d before %s", seed, o.name, p.rev, show(want[p.count].plain))
		}
	}
}

// TestEveryEventOnceInOrder is the model. Many watchers of all kinds follow many ranges. Ranges
// split, merge, move, lag and lose revisions. Transactions come late, sequencers change, streams
// and nodes break. Some runs compact all but the last revisions now and then.
func TestEveryEventOnceInOrder(t *testing.T) {
	first := uint64(0)
	if v := os.Getenv("SKEIN_SIM_FIRST"); v != "" {
		if _, err := fmt.Sscan(v, &first); err != nil {
			panic(err)
		}
	}
	for i := range uint64(seeds()) {
		synctest.Test(t, func(t *testing.T) { everyEventOnce(t, first+i) })
	}
}

func everyEventOnce(t *testing.T, seed uint64) {
	t.Helper()
	w := newWorld(seed)
	rng := rand.New(rand.NewPCG(seed, 6))
	w.pageRevs = 1 + rng.IntN(8)
	w.compacts = seed%4 == 1
	// In half of the runs all watch single keys, mostly right after splits and merges, from a
	// little in the past, and for a short time. So nobody follows most of the keys.
	narrow := seed%8 > 3 || os.Getenv("SKEIN_SIM_NARROW") != ""
	if narrow {
		w.hold = 200 * time.Millisecond
	}
	if seed%4 > 1 { // and not everything is followed from the start
		for _, k := range []string{"b", "d", "f", "g"} {
			w.split(k)
		}
		w.mu.Lock()
		w.refreshLocked()
		w.mu.Unlock()
	}
	h := newHub(w, func(c *Config) {
		c.Linger = time.Duration(1+rng.IntN(3000)) * time.Millisecond
		if narrow {
			c.Linger /= 30
		}
		if seed%3 == 1 { // little memory
			c.RecentBytes, c.PendingBytes, c.WatcherBytes, c.QueuedBytes = 4<<10, 8<<10, 1<<10, 8<<10
		}
	})
	stop := make(chan struct{})
	var drivers, watchers sync.WaitGroup
	drivers.Go(func() { w.drive(stop) })
	ctx, cancel := context.WithCancel(t.Context())
	var all []*observer
	near := func() {
		if !narrow {
			return
		}
		if rng.IntN(2) == 0 {
			time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond)
		}
		for range 1 + rng.IntN(3) {
			o := randomObserver(rng, len(all), w)
			o.req.Span = keyspace.Single([]byte{byte('a' + rng.IntN(8)), byte('a' + rng.IntN(3))})
			w.mu.Lock()
			o.req.Start = max(1, w.rev-keyspace.Revision(rng.IntN(30)))
			w.mu.Unlock()
			if rng.IntN(2) == 0 {
				o.brief = time.Duration(1+rng.IntN(200)) * time.Millisecond
			}
			all = append(all, o)
			watchers.Go(func() { observe(ctx, h, o) })
		}
	}
	// scene lets all come to rest. Then two neighbours merge, or one range splits, beside a
	// transaction that one of them has a part of. Sometimes this node's replicas lag and the range
	// map is stale.
	scene := func(n int) {
		k := string([]byte{byte('a' + rng.IntN(7)), 'a'})
		w.mu.Lock()
		end := string(w.of(k).desc.Span.End)
		lags := rng.IntN(2) == 0
		if lags {
			w.stuck, w.deaf = 1, true
		}
		w.mu.Unlock()
		if end == "" {
			end = "ha"
		}
		o := &observer{name: fmt.Sprintf("watcher %d", len(all)), req: Request{Span: keyspace.Single([]byte([]string{k, end + "a"}[rng.IntN(2)]))}}
		all = append(all, o)
		watchers.Go(func() { observe(ctx, h, o) })
		time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
		w.write(k)
		time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
		w.txn(1000+n, k, end+"a")
		time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
		if rng.IntN(4) > 0 {
			w.merge(k)
		} else {
			w.split(k[:1])
		}
		time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
		near()
		time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
		w.mu.Lock()
		w.stuck, w.deaf = 0, false
		w.mu.Unlock()
	}
	key := func() string { return string([]byte{byte('a' + rng.IntN(8)), byte('a' + rng.IntN(3))}) }
	for i := range 400 {
		if w.compacts && rng.IntN(20) == 0 {
			w.compact(keyspace.Revision(50 + rng.IntN(60)))
		}
		switch n := rng.IntN(100); {
		case n < 70:
			w.write(key(), key()+"x")
		case n < 80:
			w.txn(i, key(), key(), key())
		case n < 84 && seed%2 == 0:
			w.trouble()
		case n < 87 && w.count() < 16:
			w.split(string(rune('a' + rng.IntN(8))))
			near()
		case n < 89:
			w.merge(key())
			near()
		case n < 92 && narrow:
			scene(i)
		case n < 94 && narrow:
			near()
		case n < 94:
			os := []*observer{randomObserver(rng, len(all), w)}
			for rng.IntN(2) == 0 { // more watchers on the stream
				os = append(os, randomObserver(rng, len(all)+len(os), w))
			}
			all = append(all, os...)
			watchers.Go(func() { observe(ctx, h, os...) })
		default:
			time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond)
		}
	}
	w.heal()
	w.wg.Wait()
	w.write("aa") // the last event is told as well
	w.wg.Wait()
	time.Sleep(20 * time.Second)
	for _, o := range all {
		o.judge(t, seed, w)
	}
	cancel()
	watchers.Wait()
	close(stop)
	drivers.Wait()
	h.Stop()
}

func randomObserver(rng *rand.Rand, n int, w *world) *observer {
	o := &observer{name: fmt.Sprintf("watcher %d", n)}
	switch rng.IntN(4) {
	case 0:
	case 1:
		o.req.Span = keyspace.Single([]byte{byte('a' + rng.IntN(8)), byte('a' + rng.IntN(3))})
	default:
		a := byte('a' + rng.IntN(7))
		o.req.Span = keyspace.Span{Start: []byte{a}, End: []byte{a + 1 + byte(rng.IntN(3))}}
	}
	w.mu.Lock()
	rev := w.rev
	w.mu.Unlock()
	switch rng.IntN(4) {
	case 0:
		o.req.Start = 1 + keyspace.Revision(rng.IntN(int(rev)))
	case 1:
		o.req.Start = rev + keyspace.Revision(rng.IntN(30))
	}
	o.req.Prev = rng.IntN(3) == 0
	o.req.NoPut, o.req.NoDelete = rng.IntN(8) == 0, rng.IntN(8) == 0
	if rng.IntN(3) == 0 {
		o.slow = time.Duration(rng.IntN(40)) * time.Millisecond
	}
	return o
}

// seeds is how many seeds the model tries: SKEIN_SIM_SEEDS, or few.
func seeds() int {
	n := 12
	if testing.Short() {
		n = 8 // the first with merges is 4
	}
	if v := os.Getenv("SKEIN_SIM_SEEDS"); v != "" {
		if _, err := fmt.Sscan(v, &n); err != nil {
			panic(err)
		}
	}
	return n
}

// quiet runs a test with a hub and a world without faults, whose ranges were split at b, c and d.
func quiet(t *testing.T, change func(*Config), test func(t *testing.T, w *world, h *Hub)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(1)
		w.lossless, w.slowest = true, time.Millisecond
		stop := make(chan struct{})
		var drivers sync.WaitGroup
		drivers.Go(func() { w.drive(stop) })
		for _, k := range []string{"b", "c", "d"} {
			w.split(k)
		}
		h := newHub(w, change)
		test(t, w, h)
		w.wg.Wait()
		h.Stop()
		close(stop)
		drivers.Wait()
	})
}

// watchAll starts an observer and returns when its watcher is live.
func watchAll(ctx context.Context, h *Hub, wg *sync.WaitGroup, o *observer) *observer {
	wg.Go(func() { observe(ctx, h, o) })
	time.Sleep(time.Second)
	return o
}

func (o *observer) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.events)
}

// Events are told within milliseconds, without a question to ranges that have none.
func TestIdleRangesAreNotAsked(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		o := watchAll(ctx, h, &wg, &observer{name: "all"})
		w.mu.Lock()
		clear(w.asked)
		w.mu.Unlock()
		began := map[int64]time.Time{}
		for i := range 100 {
			w.mu.Lock()
			began[int64(w.rev)+1] = time.Now()
			w.mu.Unlock()
			w.write([]string{"aa", "cc"}[i%2])
			time.Sleep(30 * time.Millisecond)
		}
		o.mu.Lock()
		for i, at := range o.when {
			if d := at.Sub(began[o.events[i].Kv.ModRevision]); d > 20*time.Millisecond {
				t.Errorf("event %d took %v", i, d)
			}
		}
		o.mu.Unlock()
		w.mu.Lock()
		if len(w.asked) != 0 || o.count() != 100 {
			t.Errorf("%d events; asked were %v", o.count(), w.asked)
		}
		w.mu.Unlock()
		cancel()
		wg.Wait()
	})
}

// A transaction over several ranges is told as soon as all of them have brought it, in one
// delivery, without a question. (TestALostRevisionIsAskedFor has the question after an aborted
// one.)
func TestTransactionsOverRangesAreToldAtOnce(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		all := watchAll(ctx, h, &wg, &observer{name: "all"})
		one := watchAll(ctx, h, &wg, &observer{name: "b", req: Request{Span: keyspace.Span{Start: []byte("b"), End: []byte("c")}}})
		w.mu.Lock()
		clear(w.asked)
		rev := int64(w.rev)
		w.mu.Unlock()
		began := map[int64]time.Time{}
		for i := range 60 {
			began[rev+1+int64(i)] = time.Now()
			w.txn(i, "aa", "ba", "ca", "da")
			time.Sleep(30 * time.Millisecond)
		}
		w.mu.Lock()
		if len(w.asked) != 0 {
			t.Errorf("asked were %v", w.asked)
		}
		w.mu.Unlock()
		for _, o := range []*observer{all, one} {
			o.mu.Lock()
			for i, e := range o.events {
				if d := o.when[i].Sub(began[e.Kv.ModRevision]); d > 30*time.Millisecond {
					t.Errorf("%s: revision %d took %v", o.name, e.Kv.ModRevision, d)
				}
			}
			o.mu.Unlock()
			o.judge(t, 1, w)
		}
		cancel()
		wg.Wait()
	})
}

// A revision that is lost with a silent range delays others only until its leader has answered. It
// does not delay watchers of other ranges at all.
func TestALostRevisionIsAskedFor(t *testing.T) {
	t.Run("batch", func(t *testing.T) { lostRevision(t, func(w *world) { w.write("aa") }) })
	t.Run("transaction", func(t *testing.T) { lostRevision(t, func(w *world) { w.txn(1, "aa", "ba") }) })
}

func lostRevision(t *testing.T, lose func(*world)) {
	t.Helper()
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		all := watchAll(ctx, h, &wg, &observer{name: "all"})
		c := watchAll(ctx, h, &wg, &observer{name: "c", req: Request{Span: keyspace.Span{Start: []byte("c"), End: []byte("d")}}})
		w.mu.Lock()
		w.lose = true
		w.mu.Unlock()
		lose(w)
		time.Sleep(2 * w.slowest) // a transaction locks first
		w.write("cc")
		time.Sleep(20 * time.Millisecond)
		if all.count() != 0 || c.count() != 1 {
			t.Errorf("%d and %d events beside a revision that may yet come", all.count(), c.count())
		}
		time.Sleep(h.cfg.Overdue + 4*tick)
		if all.count() != 1 {
			t.Error("the lost revision was not asked for")
		}
		cancel()
		wg.Wait()
	})
}

// A client that takes nothing costs bounded memory and delays nobody. When it goes on, it gets
// everything.
func TestASlowWatcherHarmsNobody(t *testing.T) {
	change := func(c *Config) { c.WatcherBytes, c.RecentBytes = 2<<10, 4<<10 }
	quiet(t, change, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		fast := watchAll(ctx, h, &wg, &observer{name: "fast"})
		s := h.NewStream()
		if _, _, err := s.Watch(ctx, 1, Request{}); err != nil {
			t.Fatal(err)
		}
		for range 200 {
			w.write("aa", "ab")
			time.Sleep(5 * time.Millisecond)
			h.mu.Lock()
			if h.queuedBytes > 8<<10 {
				t.Fatalf("%d bytes are queued", h.queuedBytes)
			}
			h.mu.Unlock()
		}
		time.Sleep(time.Second)
		if slow, waiting := testutil.ToFloat64(h.cfg.Metrics.Lagging), testutil.ToFloat64(h.cfg.Metrics.QueuedEvents); slow != 1 || waiting == 0 {
			t.Errorf("%v watchers are slow, and %v events wait", slow, waiting)
		}
		if n := fast.count(); n != 400 {
			t.Errorf("the other one got %d events", n)
		}
		got := 0
		for last := int64(0); got < 400; {
			d, err := s.Next(ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range d.Events {
				if e.Kv.ModRevision < last {
					t.Fatalf("revision %d follows %d", e.Kv.ModRevision, last)
				}
				last = e.Kv.ModRevision
			}
			got += len(d.Events)
		}
		if w.reads == 0 || testutil.ToFloat64(h.cfg.Metrics.Slow) == 0 {
			t.Error("the slow one was never cut")
		}
		s.Close()
		time.Sleep(2 * tick)
		if slow, waiting := testutil.ToFloat64(h.cfg.Metrics.Lagging), testutil.ToFloat64(h.cfg.Metrics.QueuedEvents); slow != 0 || waiting != 0 {
			t.Errorf("%v watchers are slow, and %v events wait, when all are taken", slow, waiting)
		}
		cancel()
		wg.Wait()
	})
}

// The version before an event at the compacted revision is compacted. Nobody is told it, even if it
// is in memory from when it was live.
func TestNoVersionBeforeTheCompactedRevision(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx := t.Context()
		w.puts = true // a new key has no version before
		s := h.NewStream()
		if _, _, err := s.Watch(ctx, 1, Request{Prev: true}); err != nil {
			t.Fatal(err)
		}
		w.wg.Wait()
		time.Sleep(time.Second)
		first := w.rev + 1
		for range 4 {
			w.write("aa")
			w.wg.Wait()
		}
		for last := first - 1; last < first+3; {
			d, err := s.Next(ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range d.Events {
				last = keyspace.Revision(e.Kv.ModRevision)
				if last > first && e.PrevKv == nil {
					t.Fatalf("%v without the version before", e)
				}
			}
		}
		reads := w.reads
		w.mu.Lock()
		w.compacted = first + 1
		w.mu.Unlock()
		late, _, err := s.Watch(ctx, 2, Request{Start: first + 1, Prev: true})
		if err != nil {
			t.Fatal(err)
		}
		for at := first + 1; at <= first+3; {
			d, err := s.Next(ctx)
			if err != nil || d.Watcher != late {
				t.Fatalf("%+v, %v", d, err)
			}
			for _, e := range d.Events {
				if got := e.PrevKv != nil; e.Kv.ModRevision != int64(at) || got != (at > first+1) {
					t.Errorf("%v, want revision %d, with the version before: %v", e, at, at > first+1)
				}
				at++
			}
		}
		if w.reads != reads {
			t.Error("history was read: nothing of this came from memory")
		}
	})
}

func TestStartsOfWatchers(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		for range 10 {
			w.write("aa")
			w.wg.Wait()
		}
		w.mu.Lock()
		w.compacted = 5
		rev := w.rev
		w.mu.Unlock()
		ctx := t.Context()
		s := h.NewStream()
		early, current, err := s.Watch(ctx, 1, Request{Start: 4})
		if err != nil || current != rev {
			t.Fatal(current, err)
		}
		d, err := s.Next(ctx)
		if err != nil || d.Watcher != early || d.Compacted != 5 {
			t.Fatalf("a compacted start: %+v, %v", d, err)
		}
		if s.Cancel(early) {
			t.Error("it was there still")
		}
		at, _, err := s.Watch(ctx, 2, Request{Start: 5})
		if err != nil {
			t.Fatal(err)
		}
		if d, err = s.Next(ctx); err != nil || d.Watcher != at || d.Events[0].Kv.ModRevision != 5 || d.Revision != rev {
			t.Fatalf("a start at the compacted revision: %+v, %v", d, err)
		}
		future, _, err := s.Watch(ctx, 3, Request{Start: rev + 3})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if _, ok := future.Progress(); ok {
			t.Error("progress before the start")
		}
		if !s.Cancel(at) {
			t.Error("it is not there")
		}
		for range 4 {
			w.write("cc")
			w.wg.Wait()
		}
		for want := rev + 3; want <= rev+4; {
			if d, err = s.Next(ctx); err != nil || d.Watcher != future {
				t.Fatalf("%+v, %v", d, err)
			}
			for _, e := range d.Events {
				if e.Kv.ModRevision != int64(want) {
					t.Errorf("revision %d, want %d", e.Kv.ModRevision, want)
				}
				want++
			}
		}
		if p, ok := future.Progress(); !ok || p != rev+4 {
			t.Errorf("progress %d, %t", p, ok)
		}
		s.Close()
		time.Sleep(h.cfg.Linger + time.Second)
		h.mu.Lock()
		if h.run != nil {
			t.Error("the hub runs on without watchers")
		}
		h.mu.Unlock()
	})
}

// BenchmarkDispatch measures an event beside many watchers of other keys: 10,000 prefixes and
// 10,000 keys.
func BenchmarkDispatch(b *testing.B) {
	x := newGroupIndex()
	for i := range 10_000 {
		k := fmt.Appendf(nil, "/registry/%05d/", i)
		x.add(&group{span: keyspace.Span{Start: k, End: append(k[:len(k)-1:len(k)-1], '0')}})
		x.add(&group{span: keyspace.Single(append(k, "one"...))})
	}
	b.ReportAllocs()
	key := []byte("/registry/04711/one")
	for b.Loop() {
		n := 0
		if x.each(key, func(*group) { n++ }); n != 2 {
			b.Fatal(n)
		}
	}
}

// TestGroupIndex compares the index with a look at every group.
func TestGroupIndex(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	x := newGroupIndex()
	var all, removed []*group
	for range 3000 {
		if len(all) > 0 && rng.IntN(3) == 0 {
			i := rng.IntN(len(all))
			x.remove(all[i])
			removed = append(removed, all[i])
			all = slices.Delete(all, i, i+1)
		} else if n := len(removed); n > 0 && rng.IntN(3) == 0 && x.bySpan[keyOf(removed[n-1])] == nil {
			x.add(removed[n-1]) // a group that lagged is live again
			all = append(all, removed[n-1])
			removed = removed[:n-1]
		} else if g := randomGroup(rng); x.bySpan[keyOf(g)] == nil {
			x.add(g)
			all = append(all, g)
		}
		key := []byte{byte(rng.IntN(60))}
		got, want := map[*group]int{}, 0
		x.each(key, func(g *group) { got[g]++ })
		for _, g := range all {
			if g.span.Contains(key) {
				want++
				if got[g] != 1 {
					t.Fatalf("%v was found %d times for %v", g.span, got[g], key)
				}
			}
		}
		if len(got) != want {
			t.Fatalf("%d groups for %v, want %d", len(got), key, want)
		}
	}
}

func randomGroup(rng *rand.Rand) *group {
	a, e := byte(rng.IntN(30)), byte(rng.IntN(30))
	switch rng.IntN(6) {
	case 0:
		return &group{span: keyspace.Span{Start: []byte{a}}}
	case 1:
		return &group{}
	case 2:
		return &group{span: keyspace.Single([]byte{a})}
	}
	return &group{span: keyspace.Span{Start: []byte{a}, End: []byte{a + 1 + e}}}
}

// Stopping the hub ends calls that wait.
func TestStopEndsStreams(t *testing.T) {
	quiet(t, nil, func(t *testing.T, _ *world, h *Hub) {
		s := h.NewStream()
		if _, _, err := s.Watch(t.Context(), 1, Request{}); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() {
			_, err := s.Next(t.Context())
			ended <- err
		}()
		synctest.Wait()
		h.Stop()
		if err := <-ended; !errors.Is(err, ErrStopped) {
			t.Errorf("ended with %v", err)
		}
		s.Close()
	})
}
