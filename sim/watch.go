package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// Watcher is a client that watches a span from a revision on, over everything: when its
// node is lost it goes on at another one behind the last event, as clientv3 does.
type Watcher struct {
	Name string
	Span keyspace.Span

	mu sync.Mutex
	// Guarded by mu. told is what it was told, wrong what it saw to be wrong by itself;
	// from are the first revisions of what it was to be told: where the past was compacted
	// it goes on behind that, and what lies between is nobody's.
	told     []*mvccpb.Event
	progress []toldProgress
	holes    [][2]int64
	from     int64
	sessions int
	// starts are the revisions from which on it watched.
	starts map[int64]bool
	wrong  []string
}

// toldProgress is a revision that the watcher was told to be at after so many events.
type toldProgress struct {
	rev   int64
	after int
}

// watchedSpans are what the watchers of a run watch: everything, a part that lies in
// several ranges, and one key.
var watchedSpans = []keyspace.Span{{}, {Start: []byte("d"), End: []byte("p")}, {Start: []byte("u0"), End: []byte("u0\x00")}}

// watchersOfSpan is how many watchers each of them has.
const watchersOfSpan = 3

// watchAll runs watchers until stop is called, which returns them: some from the first
// revision on, and some that begin while the run is under way.
func watchAll(c *cluster) (stop func() []*Watcher) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var all []*Watcher
	for i, span := range watchedSpans {
		for late := range watchersOfSpan {
			w := &Watcher{Name: fmt.Sprintf("watcher %d.%d", i, late), Span: span, from: 2}
			rng := rand.New(rand.NewPCG(c.cfg.Seed, uint64(1000+watchersOfSpan*i+late)))
			all = append(all, w)
			wg.Go(func() {
				c.sleep(time.Duration(late) * 2 * time.Second)
				for ctx.Err() == nil {
					// Mostly its own node: each is to have watchers of everything most of the time.
					at := late % len(c.machines)
					if rng.IntN(3) == 0 {
						at = rng.IntN(len(c.machines))
					}
					w.session(ctx, c.machines[at])
					c.sleep(time.Duration(1+rng.IntN(50)) * time.Millisecond)
				}
			})
		}
	}
	return func() []*Watcher {
		cancel()
		wg.Wait()
		return all
	}
}

// session watches at one node until that ends.
func (w *Watcher) session(ctx context.Context, m *machine) {
	r := m.current()
	if r == nil {
		return
	}
	// Sometimes a client goes elsewhere by itself.
	sctx, cancel := context.WithTimeout(r.ctx, 10*time.Second)
	defer cancel()
	end := context.AfterFunc(ctx, cancel)
	defer end()
	s := r.core.Watches().NewStream()
	defer s.Close()
	start := w.next()
	if _, _, err := s.Watch(sctx, 1, watch.Request{Span: w.Span, Start: keyspace.Revision(start)}); err != nil {
		return
	}
	w.mu.Lock()
	w.sessions++
	if w.starts == nil {
		w.starts = map[int64]bool{}
	}
	w.starts[start] = true
	w.mu.Unlock()
	for n := 0; ; n++ {
		if n%16 == 8 {
			_ = s.RequestProgress(sctx) // without one it is told none
		}
		d, err := s.Next(sctx)
		if err != nil || r.ctx.Err() != nil {
			return
		}
		if !w.take(&d) {
			return
		}
	}
}

// next is the revision from which the watcher wants to go on.
func (w *Watcher) next() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.told); n > 0 {
		return max(w.from, w.told[n-1].GetKv().GetModRevision()+1)
	}
	return w.from
}

// take notes a delivery. It returns false where the watcher has to begin anew.
func (w *Watcher) take(d *watch.Delivery) bool {
	next := w.next()
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case d.Compacted != 0:
		w.holes = append(w.holes, [2]int64{next, int64(d.Compacted)})
		w.from = int64(d.Compacted)
		return false
	case d.Watcher == nil:
		w.progress = append(w.progress, toldProgress{int64(d.Revision), len(w.told)})
	case len(d.Events) > 0 && d.Events[0].GetKv().GetModRevision() < next:
		w.wrong = append(w.wrong, fmt.Sprintf("%s: revision %d where %d is next: twice, out of order or divided",
			w.Name, d.Events[0].GetKv().GetModRevision(), next))
	}
	for i := 1; i < len(d.Events); i++ {
		if a, b := d.Events[i-1].GetKv().GetModRevision(), d.Events[i].GetKv().GetModRevision(); b < a {
			w.wrong = append(w.wrong, fmt.Sprintf("%s: revision %d follows %d", w.Name, b, a))
		}
	}
	w.told = append(w.told, d.Events...)
	return true
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

// checkWatchers compares what watchers were told with all versions that there are: every
// one of its span in order, none else, and no progress ahead of one. Who began at just
// a compacted revision may miss there what a later write of the same transaction has replaced,
// as in etcd.
func checkWatchers(ws []*Watcher, vs []Version, compacted map[int64]bool) (bad []string) {
	for _, w := range ws {
		bad = append(bad, w.wrong...)
		if w.sessions == 0 {
			bad = append(bad, w.Name+": never served")
		}
		i := 0
		var due []int64 // the revisions of the events that the watcher was told
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
				bad = append(bad, fmt.Sprintf("%s: event %d is %s, want %+v", w.Name, i, got, *v))
				break
			}
			due = append(due, v.Mod)
			i++
		}
		if i == len(due) && i < len(w.told) && len(bad) == 0 {
			bad = append(bad, fmt.Sprintf("%s: told %s, which is not there", w.Name, w.told[i]))
		}
		for _, p := range w.progress {
			if p.after < len(due) && due[p.after] <= p.rev {
				bad = append(bad, fmt.Sprintf("%s: told progress %d before revision %d", w.Name, p.rev, due[p.after]))
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
