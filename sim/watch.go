package sim

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// Watcher is a client that watches a span from a revision on, under all faults. If its
// node is lost, it resumes at another one after the last event, as clientv3 does.
type Watcher struct {
	Name string
	Span keyspace.Span

	mu sync.Mutex
	// Guarded by mu. told is what it received, wrong the violations that it saw itself.
	// from is the first revision that it must receive. After a compaction it resumes
	// behind the compacted revision, and nobody needs what lies between.
	told     []*mvccpb.Event
	tellings []telling
	progress []toldProgress
	holes    [][2]int64
	from     int64
	sessions int
	// starts are the revisions from which on it watched.
	starts map[int64]bool
	wrong  []string
}

// toldProgress is a progress revision that the watcher received after so many events.
type toldProgress struct {
	rev   int64
	after int
	telling
}

// telling is a sender and a time; of events, it counts for those from the place first
// on.
type telling struct {
	by    string
	at    time.Duration
	first int
}

func (t telling) String() string { return fmt.Sprintf("told by %s at %v", t.by, t.at) }

// watchedSpans are the spans of a run's watchers: everything, a part in several ranges,
// and one key.
var watchedSpans = []keyspace.Span{{}, {Start: []byte("d"), End: []byte("p")}, {Start: []byte("u0"), End: []byte("u0\x00")}}

const (
	// watchersOfSpan is how many watchers each span has that are alone on their streams.
	watchersOfSpan = 3
	// crowds is how many streams have a watcher of each span.
	crowds = 2
	// After how many responses a watcher asks for progress: alone on its stream, and in
	// a crowd.
	askEach, askEachOfCrowd = 16, 4
)

// watchAll runs watchers until stop is called, which returns them. Some watch from the
// first revision on and some begin during the run, alone or several on a stream.
func watchAll(c *cluster) (stop func() []*Watcher) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var all []*Watcher
	start := func(late int, askEach int, ws ...*Watcher) {
		rng := rand.New(rand.NewPCG(c.cfg.Seed, uint64(1000+len(all))))
		all = append(all, ws...)
		wg.Go(func() {
			c.sleep(time.Duration(late) * 2 * time.Second)
			for ctx.Err() == nil {
				// Mostly its own node, so that each node has watchers of everything most of
				// the time.
				at := late % len(c.machines)
				if rng.IntN(3) == 0 {
					at = rng.IntN(len(c.machines))
				}
				watchAt(ctx, c.machines[at], askEach, ws)
				c.sleep(time.Duration(1+rng.IntN(50)) * time.Millisecond)
			}
		})
	}
	for i, span := range watchedSpans {
		for late := range watchersOfSpan {
			start(late, askEach, &Watcher{Name: fmt.Sprintf("watcher %d.%d", i, late), Span: span, from: 2})
		}
	}
	for late := range crowds {
		var ws []*Watcher
		for i, span := range watchedSpans {
			ws = append(ws, &Watcher{Name: fmt.Sprintf("watcher %d of crowd %d", i, late), Span: span, from: 2})
		}
		start(late, askEachOfCrowd, ws...)
	}
	return func() []*Watcher {
		cancel()
		wg.Wait()
		return all
	}
}

// watchAt runs watchers at one node, on one stream, until that ends.
func watchAt(ctx context.Context, m *machine, askEach int, ws []*Watcher) {
	r := m.current()
	if r == nil {
		return
	}
	// Sometimes a client changes the node by itself.
	sctx, cancel := context.WithTimeout(r.ctx, 10*time.Second)
	defer cancel()
	end := context.AfterFunc(ctx, cancel)
	defer end()
	s, order := r.core.Watches().NewStream(), NewStream()
	defer s.Close()
	var there []*watch.Watcher
	for id, w := range ws {
		start := w.next()
		hw, _, err := s.Watch(sctx, int64(id), watch.Request{Span: w.Span, Start: keyspace.Revision(start)})
		if err != nil {
			return
		}
		there = append(there, hw)
		order.Created(int64(id), start)
		w.begins(start)
	}
	teller := fmt.Sprintf("%s on the stream of %v", m.name, m.c.elapsed())
	by := func() telling { return telling{by: teller, at: m.c.elapsed()} }
	for n := 0; ; n++ {
		switch n % askEach {
		case askEach / 2:
			_ = s.RequestProgress(sctx) // without it they receive none
		case askEach - 1:
			for id, hw := range there { // as watchers receive it that do not ask
				if rev, ok := hw.Progress(); ok {
					ws[id].judge(by(), order.Progress(int64(id), int64(rev)))
					ws[id].take(by(), &watch.Delivery{Revision: rev})
				}
			}
		}
		d, err := s.Next(sctx)
		if err != nil || r.ctx.Err() != nil {
			return
		}
		if d.Watcher == nil {
			ws[0].judge(by(), order.Progress(AllWatchers, int64(d.Revision)))
			for _, w := range ws {
				w.take(by(), &d)
			}
			continue
		}
		id := d.Watcher.ID
		if len(d.Events) > 0 {
			ws[id].judge(by(), order.Events(id, d.Events[0].GetKv().GetModRevision(), d.Events[len(d.Events)-1].GetKv().GetModRevision()))
		}
		if !ws[id].take(by(), &d) {
			return
		}
	}
}

// begins records that the watcher is served from a revision on.
func (w *Watcher) begins(start int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sessions++
	if w.starts == nil {
		w.starts = map[int64]bool{}
	}
	w.starts[start] = true
}

// judge records a violation of a stream's order, if there is one.
func (w *Watcher) judge(by telling, wrong string) {
	if wrong == "" {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrong = append(w.wrong, fmt.Sprintf("%s, %s", wrong, by))
}

// next is the revision from which the watcher goes on.
func (w *Watcher) next() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.told); n > 0 {
		return max(w.from, w.told[n-1].GetKv().GetModRevision()+1)
	}
	return w.from
}

// take records a delivery. It returns false if the watcher must start again.
func (w *Watcher) take(by telling, d *watch.Delivery) bool {
	next := w.next()
	w.mu.Lock()
	defer w.mu.Unlock()
	by.first = len(w.told)
	switch {
	case d.Compacted != 0:
		w.holes = append(w.holes, [2]int64{next, int64(d.Compacted)})
		w.from = int64(d.Compacted)
		return false
	case d.Watcher == nil:
		w.progress = append(w.progress, toldProgress{int64(d.Revision), len(w.told), by})
	case len(d.Events) > 0 && d.Events[0].GetKv().GetModRevision() < next:
		w.wrong = append(w.wrong, fmt.Sprintf("%s: revision %d where %d is next: twice, out of order or divided, %s",
			w.Name, d.Events[0].GetKv().GetModRevision(), next, by))
	}
	for i := 1; i < len(d.Events); i++ {
		if a, b := d.Events[i-1].GetKv().GetModRevision(), d.Events[i].GetKv().GetModRevision(); b < a {
			w.wrong = append(w.wrong, fmt.Sprintf("%s: revision %d follows %d, %s", w.Name, b, a, by))
		}
	}
	if len(d.Events) > 0 {
		w.told, w.tellings = append(w.told, d.Events...), append(w.tellings, by)
	}
	return true
}

// teller is the sender of the event at a place, or the last sender if there is no such
// event.
func (w *Watcher) teller(i int) telling {
	at, found := slices.BinarySearchFunc(w.tellings, i, func(t telling, i int) int { return cmp.Compare(t.first, i) })
	if !found {
		at--
	}
	if at < 0 {
		return telling{by: "nobody"}
	}
	return w.tellings[at]
}

// skipped says whether the revision was compacted before the watcher came to it.
func (w *Watcher) skipped(rev int64) bool {
	for _, h := range w.holes {
		if rev >= h[0] && rev < h[1] {
			return true
		}
	}
	return false
}

// checkWatchers compares the watchers' events with all versions: every one of the span
// in order, no other, and no progress ahead of an event. A watcher that began at a
// compacted revision may miss there a write that the same transaction replaced later,
// as in etcd.
func checkWatchers(ws []*Watcher, vs []Version, compacted map[int64]bool) (bad []string) {
	for _, w := range ws {
		bad = append(bad, w.wrong...)
		if w.sessions == 0 {
			bad = append(bad, w.Name+": never served")
		}
		i := 0
		var due []int64 // the revisions of the watcher's events
		for k := range vs {
			v := &vs[k]
			if !w.Span.Contains([]byte(v.Key)) || v.Mod < 2 || w.skipped(v.Mod) {
				continue
			}
			missing := i == len(w.told) || !same(v, w.told[i])
			if missing && compacted[v.Mod] && w.starts[v.Mod] && replaced(vs, k) {
				continue
			}
			if missing {
				got := "nothing"
				if i < len(w.told) {
					got = w.told[i].String()
				}
				bad = append(bad, fmt.Sprintf("%s: event %d is %s, want %+v, %s", w.Name, i, got, *v, w.teller(i)))
				break
			}
			due = append(due, v.Mod)
			i++
		}
		if i == len(due) && i < len(w.told) && len(bad) == 0 {
			bad = append(bad, fmt.Sprintf("%s: received %s, which does not exist, %s", w.Name, w.told[i], w.teller(i)))
		}
		for _, p := range w.progress {
			if p.after < len(due) && due[p.after] <= p.rev {
				bad = append(bad, fmt.Sprintf("%s: received progress %d before revision %d, %s", w.Name, p.rev, due[p.after], p.telling))
			}
		}
	}
	return bad
}

// replaced says whether a later write of the same transaction has the key of vs[k].
func replaced(vs []Version, k int) bool {
	for i := k + 1; i < len(vs) && vs[i].Mod == vs[k].Mod; i++ {
		if vs[i].Key == vs[k].Key {
			return true
		}
	}
	return false
}

// compactedAt returns the revisions of the compactions that may have happened.
func compactedAt(ops []*Op) map[int64]bool {
	at := map[int64]bool{}
	for _, o := range ops {
		if r, ok := o.Request.(*pb.CompactionRequest); ok && o.Outcome != Refused {
			at[r.GetRevision()] = true
		}
	}
	return at
}

func same(v *Version, e *mvccpb.Event) bool {
	kv := e.GetKv()
	if string(kv.GetKey()) != v.Key || kv.GetModRevision() != v.Mod || (e.GetType() == mvccpb.Event_DELETE) != v.Deleted {
		return false
	}
	return v.Deleted || string(kv.GetValue()) == v.Value && kv.GetCreateRevision() == v.Create && kv.GetVersion() == v.Version && kv.GetLease() == v.Lease
}
