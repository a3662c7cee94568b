package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// firstEvents is one watcher at a gateway, and the puts that it is told of.
type firstEvents struct {
	r      *rig
	rng    *rand.Rand
	ranges int

	mu sync.Mutex
	// Guarded by mu: by revision when a put was answered and which span it was of, and when
	// it was told.
	answered, told map[keyspace.Revision]time.Time
	of             map[keyspace.Revision]int
}

// writes puts a few times to each of the spans, at different gateways, when it is called.
func (f *firstEvents) writes(ctx context.Context, wg *sync.WaitGroup) func() {
	puts := 1 + f.rng.IntN(4)
	var all []func()
	for w := range f.ranges {
		pace, at := time.Duration(1+f.rng.IntN(30))*time.Millisecond, f.r.nodes[f.rng.IntN(3)]
		all = append(all, func() {
			for i := 0; i < puts && ctx.Err() == nil; i++ {
				rev, err := at.put(ctx, fmt.Sprintf("k%04d/%d", w, i), "v")
				if err == nil {
					f.mu.Lock()
					f.answered[keyspace.Revision(rev)], f.of[keyspace.Revision(rev)] = time.Now(), w
					f.mu.Unlock()
				}
				time.Sleep(pace)
			}
		})
	}
	return func() {
		for _, one := range all {
			wg.Go(one)
		}
	}
}

// request is a watcher from now on or from a little back, of everything or of a part.
func (f *firstEvents) request(ctx context.Context) (req watch.Request) {
	req.Prev = f.rng.IntN(2) == 0
	if f.rng.IntN(2) == 0 {
		a, err := f.r.nodes[0].core.KV().Current(ctx)
		if err != nil {
			f.r.t.Fatal(err)
		}
		req.Start = max(1, a.Current-keyspace.Revision(f.rng.IntN(5))+1)
	}
	if f.rng.IntN(2) == 0 {
		req.Span = keyspace.Span{Start: []byte("k0001"), End: []byte("k0003")}
	}
	return req
}

// run makes a watcher and puts, and returns by how much the latest event came after its
// put was answered and the watcher was made.
func (f *firstEvents) run(n *rigNode) (worst time.Duration) {
	f.answered, f.told, f.of = map[keyspace.Revision]time.Time{}, map[keyspace.Revision]time.Time{}, map[keyspace.Revision]int{}
	ctx, cancel := context.WithCancel(f.r.t.Context())
	defer cancel()
	var wg sync.WaitGroup
	delay := time.Duration(f.rng.IntN(20)) * time.Millisecond
	write := f.writes(ctx, &wg)
	if before := f.rng.IntN(2) == 0; before {
		write()
		time.Sleep(delay)
	} else {
		wg.Go(func() { time.Sleep(delay); write() })
	}
	s := n.core.Watches().NewStream()
	defer s.Close()
	req := f.request(ctx)
	_, current, err := s.Watch(ctx, 1, req)
	if err != nil {
		f.r.t.Fatal(err)
	}
	made := time.Now()
	wg.Go(func() {
		for {
			d, err := s.Next(ctx)
			if err != nil {
				return
			}
			f.mu.Lock()
			for _, e := range d.Events {
				f.told[keyspace.Revision(e.Kv.ModRevision)] = time.Now()
			}
			f.mu.Unlock()
		}
	})
	time.Sleep(300 * time.Millisecond)
	end := time.Now()
	cancel()
	wg.Wait()
	for rev, from := range f.answered {
		if rev <= current || !req.Span.Contains(fmt.Appendf(nil, "k%04d/", f.of[rev])) {
			continue
		}
		told, ok := f.told[rev]
		if !ok {
			told = end
		}
		if from.Before(made) {
			from = made
		}
		worst = max(worst, told.Sub(from))
	}
	return worst
}

// The first events at a gateway without watchers come as soon as later ones. That holds
// right after splits, when some replicas do not know of them yet, and after a change of
// placement's leader.
func TestFirstEventsAreNotLate(t *testing.T) {
	seeds := []uint64{8, 15, 16, 20, 21, 23, 24, 25, 27}
	for _, seed := range seeds[:fewer(len(seeds), 3)] {
		rng := rand.New(rand.NewPCG(seed, 3))
		ranges := 1 + rng.IntN(8)
		bubble(t, 3, borders(ranges), shortLog, func(r *rig) {
			f := &firstEvents{r: r, rng: rng, ranges: ranges}
			if rng.IntN(2) == 0 {
				r.spread(r.nodes[rng.IntN(3)], ranges, "x")
			}
			for round := range 8 {
				if rng.IntN(2) == 0 {
					time.Sleep(time.Duration(rng.IntN(20)) * time.Second)
				}
				f.split(rng.IntN(3))
				if rng.IntN(5) == 0 {
					// It stays where it is, if not.
					_ = r.placementLeader().core.Placement().TransferLeader(bounded(r.t.Context()), keyspace.NodeID(1+rng.IntN(3)))
				}
				n := r.nodes[rng.IntN(3)]
				if worst := f.run(n); worst > 10*time.Millisecond {
					r.t.Errorf("seed %d, round %d, node %s: an event came %v after its put", seed, round, n.id, worst)
				}
			}
		})
	}
}

// split splits so many ranges, where one leads that does not begin there.
func (f *firstEvents) split(n int) {
	for range n {
		key := fmt.Sprintf("k%04d/%d", f.rng.IntN(f.ranges), f.rng.IntN(10))
		for _, node := range f.r.nodes {
			for _, s := range node.summaries() {
				if s.IsLeader && s.Descriptor.Span.Contains([]byte(key)) && string(s.Descriptor.Span.Start) != key {
					if _, err := node.core.Ranges().Split(f.r.t.Context(), node.id, s.Descriptor.Range, s.Descriptor.Generation, []byte(key)); err != nil {
						f.r.t.Logf("split at %s: %v", key, err)
					}
				}
			}
		}
	}
}
