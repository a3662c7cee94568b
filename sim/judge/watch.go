package judge

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
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

// NewWatcher makes a watcher that must receive everything of a span from the first
// revision on. Told, ToldProgress and Compacted deliver.
func NewWatcher(name string, span keyspace.Span) *Watcher {
	return &Watcher{Name: name, Span: span, from: 2}
}

// Begin records that the watcher is served, and returns the revision from which it goes
// on.
func (w *Watcher) Begin() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sessions++
	return w.next()
}

// Begins records that the watcher is served from a revision on.
func (w *Watcher) Begins(start int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sessions++
	if w.starts == nil {
		w.starts = map[int64]bool{}
	}
	w.starts[start] = true
}

// Next is the revision from which the watcher goes on.
func (w *Watcher) Next() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.next()
}

// next needs mu.
func (w *Watcher) next() int64 {
	if n := len(w.told); n > 0 {
		return max(w.from, w.told[n-1].GetKv().GetModRevision()+1)
	}
	return w.from
}

// Judge records a violation of a stream's order, if there is one, with its sender and time.
func (w *Watcher) Judge(by string, at time.Duration, wrong string) {
	if wrong == "" {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrong = append(w.wrong, fmt.Sprintf("%s, %s", wrong, telling{by: by, at: at}))
}

// Compacted records that the watcher was told that a revision was compacted, and goes on behind it.
func (w *Watcher) Compacted(rev int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.holes = append(w.holes, [2]int64{w.next(), rev})
	w.from = rev
}

// ToldProgress records a revision up to which the watcher must have everything, with
// sender and time.
func (w *Watcher) ToldProgress(by string, at time.Duration, rev int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.progress = append(w.progress, toldProgress{rev, len(w.told), telling{by: by, at: at}})
}

// Told records the events of one response, with their sender and time.
func (w *Watcher) Told(by string, at time.Duration, events []*mvccpb.Event) {
	if len(events) == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	t := telling{by: by, at: at, first: len(w.told)}
	if first, next := events[0].GetKv().GetModRevision(), w.next(); first < next {
		w.wrong = append(w.wrong, fmt.Sprintf("%s: revision %d where %d is next: twice, out of order or divided, %s", w.Name, first, next, t))
	}
	for i := 1; i < len(events); i++ {
		if a, b := events[i-1].GetKv().GetModRevision(), events[i].GetKv().GetModRevision(); b < a {
			w.wrong = append(w.wrong, fmt.Sprintf("%s: revision %d follows %d, %s", w.Name, b, a, t))
		}
	}
	w.told, w.tellings = append(w.told, events...), append(w.tellings, t)
}

// Versions returns the versions that the watcher received, for a Report. For a watcher
// of the whole keyspace these are all. The checkers compare them with every answer and
// with the other watchers.
func (w *Watcher) Versions() []Version {
	w.mu.Lock()
	defer w.mu.Unlock()
	vs := make([]Version, len(w.told))
	for i, e := range w.told {
		vs[i] = versionOf(e.GetKv())
		if vs[i].Deleted = e.GetType() == mvccpb.Event_DELETE; vs[i].Deleted {
			vs[i] = Version{Key: vs[i].Key, Mod: vs[i].Mod, Deleted: true}
		}
		if i > 0 && vs[i-1].Mod == vs[i].Mod {
			vs[i].Sub = vs[i-1].Sub + 1
		}
	}
	return vs
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

func same(v *Version, e *mvccpb.Event) bool {
	kv := e.GetKv()
	if string(kv.GetKey()) != v.Key || kv.GetModRevision() != v.Mod || (e.GetType() == mvccpb.Event_DELETE) != v.Deleted {
		return false
	}
	return v.Deleted || string(kv.GetValue()) == v.Value && kv.GetCreateRevision() == v.Create && kv.GetVersion() == v.Version && kv.GetLease() == v.Lease
}
