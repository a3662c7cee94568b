package shard

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// resolvedClaim is what a feed or a leader has said: up to the resolved revision, the span has
// no event but those that had been sent by then.
type resolvedClaim struct {
	who      string
	span     keyspace.Span
	resolved keyspace.Revision
	seen     map[string]bool
}

// spanFeed follows a span over everything that happens to its ranges, from whichever
// node has a replica, and notes what it is told.
type spanFeed struct {
	r    *rig
	name string
	span keyspace.Span
	mu   sync.Mutex
	// Guarded by mu.
	rng    *rand.Rand
	seen   map[string]bool
	claims []resolvedClaim
}

func (f *spanFeed) draw(n int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rng.IntN(n)
}

func eventName(e *rangeapi.Event) string {
	return fmt.Sprintf("%s@%d.%d=%s", e.Key, e.Mod, e.Sub, e.Value)
}

// follow follows the span from revision from on until ctx ends. Where its range is
// split, it goes on with the heirs.
func (f *spanFeed) follow(ctx context.Context, wg *sync.WaitGroup, span keyspace.Span, from keyspace.Revision) {
	resolved := from - 1
	for ctx.Err() == nil {
		time.Sleep(time.Duration(1+f.draw(20)) * time.Millisecond)
		d, _ := f.r.route(span.Start)
		node := f.r.nodes[f.draw(len(f.r.nodes))]
		if node.node.Load() == nil || d.Generation == 0 {
			continue
		}
		part, ok := d.Span.Intersect(span)
		if !ok || !bytes.Equal(part.Start, span.Start) {
			continue
		}
		if !part.Covers(span) {
			rest := keyspace.Span{Start: part.End, End: span.End}
			at := resolved + 1
			wg.Go(func() { f.follow(ctx, wg, rest, at) })
			span = part
		}
		resolved = f.once(ctx, d, node, span, resolved)
	}
}

// once follows one feed until it ends.
func (f *spanFeed) once(ctx context.Context, d keyspace.Descriptor, node *rigNode, span keyspace.Span, resolved keyspace.Revision) keyspace.Revision {
	// Sometimes it leaves by itself.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(f.draw(2000))*time.Millisecond)
	defer cancel()
	from := f.r.nodes[f.draw(len(f.r.nodes))].node.Load()
	if from == nil {
		return resolved
	}
	st, err := from.Client().OpenFeeds(ctx, node.id)
	if err != nil {
		return resolved
	}
	defer st.Close()
	if err := st.Order(ctx, []rangeapi.FeedOrder{{ID: 1, Range: d.Range, Generation: d.Generation, From: resolved + 1}}); err != nil {
		return resolved
	}
	for {
		ps, err := st.Recv(ctx)
		if err != nil {
			return resolved
		}
		for i := range ps {
			if ps[i].Err != nil {
				if k := ps[i].Err.Kind; k == kverror.Compacted || k == kverror.Internal {
					f.r.t.Errorf("%s: %v", f.name, ps[i].Err)
				}
				return resolved
			}
			f.note(&ps[i], fmt.Sprintf("%s: range %s.%d on node %s", f.name, d.Range, d.Generation, node.id), span)
			resolved = max(resolved, ps[i].Resolved)
		}
	}
}

func (f *spanFeed) note(p *rangeapi.FeedPart, who string, span keyspace.Span) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range p.Events {
		f.seen[eventName(&p.Events[i])] = true
	}
	f.claims = append(f.claims, resolvedClaim{who: who, span: span, resolved: p.Resolved, seen: cloneSeen(f.seen)})
}

func cloneSeen(m map[string]bool) map[string]bool {
	c := make(map[string]bool, len(m))
	for k := range m {
		c[k] = true
	}
	return c
}

// judge compares what was told with what the ranges hold in the end.
func (f *spanFeed) judge(t *testing.T, from keyspace.Revision, all []mvcc.Version) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range all {
		e := rangeapi.Event{Version: all[i]}
		if f.name != "asked" && f.span.Contains(e.Key) && e.Mod >= from && !f.seen[eventName(&e)] {
			t.Errorf("%s: %s was never told", f.name, eventName(&e))
		}
		for k := range f.claims {
			c := &f.claims[k]
			if e.Mod >= from && e.Mod <= c.resolved && c.span.Contains(e.Key) && !c.seen[eventName(&e)] {
				t.Fatalf("%s said that %s is resolved up to %d before %s", c.who, c.span, c.resolved, eventName(&e))
			}
		}
	}
	if len(f.seen) > len(all) {
		t.Errorf("%s: %d events were told, %d there are", f.name, len(f.seen), len(all))
	}
}

// TestFeedsThroughFaults opens feeds from any replica, again and again, over crashes,
// partitions, splits, lost revisions and leader changes. Each tells every event and no
// other, and nothing comes below what it calls resolved. So it is with the leaders that
// are asked.
func TestFeedsThroughFaults(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) { feedsThroughFaults(t, seed) })
		})
	}
}

func feedsThroughFaults(t *testing.T, seed uint64) {
	t.Helper()
	faults := lan
	faults.Loss, faults.Duplicate, faults.Reorder, faults.ReorderBy = 0.005, 0.01, 0.01, 5*time.Millisecond
	r := newShardRig(t, seed, faults)
	r.seq.failures, r.seq.slow = 0.05, 0.01
	r.startAll()
	r.leader(1)
	ctx, cancel := context.WithCancel(context.Background())
	var wg, writers sync.WaitGroup
	var feeds []*spanFeed
	for i, span := range []keyspace.Span{{}, {Start: []byte("k1"), End: []byte("k3")}, {Start: []byte("k2")}} {
		f := &spanFeed{r: r, name: fmt.Sprintf("feed %d", i), span: span, seen: map[string]bool{}, rng: rand.New(rand.NewPCG(seed, uint64(i)))}
		feeds = append(feeds, f)
		wg.Go(func() { f.follow(ctx, &wg, span, 2) })
	}
	asker := &spanFeed{r: r, name: "asked", seen: map[string]bool{}, rng: rand.New(rand.NewPCG(seed, 99))}
	wg.Go(func() { r.askAround(ctx, asker) })
	stop := make(chan struct{})
	for i := range 4 {
		writers.Go(func() { r.feedWriter(seed, i, stop) })
	}
	for i, key := range []string{"k2", "k1", "k3"} {
		time.Sleep(500 * time.Millisecond)
		r.split(key)
		n := r.nodes[r.rng.IntN(3)]
		if i%2 == 0 {
			n.crash()
			time.Sleep(1500 * time.Millisecond)
			n.start()
		} else {
			r.net.Partition(n.id)
			time.Sleep(2 * time.Second)
			r.net.HealAll()
		}
	}
	time.Sleep(time.Second)
	close(stop)
	writers.Wait()
	r.agree()
	time.Sleep(5 * time.Second) // all feeds catch up
	cancel()
	wg.Wait()
	var all []mvcc.Version
	_, err := mvcc.History(r.nodes[0].engine, mvcc.HistoryOptions{From: 2, To: 1 << 30, MaxBytes: 1 << 30}, func(v *mvcc.Version) error {
		all = append(all, *v)
		return nil
	})
	if err != nil || len(all) < 100 {
		t.Fatalf("%d events, %v", len(all), err)
	}
	for _, f := range feeds {
		f.judge(t, 2, all)
	}
	if len(asker.claims) < 20 {
		t.Errorf("only %d questions were answered", len(asker.claims))
	}
	asker.judge(t, 2, all)
	r.stopAll()
}

// feedWriter puts and deletes until stop is closed.
func (r *rig) feedWriter(seed uint64, id int, stop <-chan struct{}) {
	rng := rand.New(rand.NewPCG(seed, uint64(100+id)))
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		default:
		}
		key := fmt.Sprintf("k%d%d", rng.IntN(5), rng.IntN(3))
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		if rng.IntN(5) == 0 {
			_, _ = r.do(ctx, key, &rangeapi.Request{Op: &pb.DeleteRangeRequest{Key: []byte(key)}}) // the store tells
		} else {
			_, _ = r.do(ctx, key, &rangeapi.Request{Op: &pb.PutRequest{Key: []byte(key), Value: fmt.Appendf(nil, "%d.%d", id, i)}})
		}
		cancel()
		time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
	}
}

// askAround asks replicas of all ranges for their resolved revisions, and reads what they
// show then.
func (r *rig) askAround(ctx context.Context, f *spanFeed) {
	for ctx.Err() == nil {
		time.Sleep(time.Duration(f.draw(30)) * time.Millisecond)
		d, _ := r.route(fmt.Appendf(nil, "k%d", f.draw(5)))
		node := r.nodes[f.draw(3)]
		s := node.node.Load()
		if s == nil {
			continue
		}
		r.seq.mu.Lock()
		rev := r.seq.last
		r.seq.mu.Unlock()
		actx, cancel := context.WithTimeout(ctx, time.Second)
		at, err := s.Client().AwaitResolved(actx, node.id, &rangeapi.ResolvedRequest{Range: d.Range, Generation: d.Generation, Revision: rev})
		if err == nil {
			// Whoever has reached the position has everything, the leader or not.
			other := r.nodes[f.draw(3)]
			page, herr := s.Client().History(actx, other.id, &rangeapi.HistoryRequest{
				Range: d.Range, Generation: d.Generation, Span: d.Span, From: 2, To: rev, Seen: at, MaxBytes: 16 << 20,
			})
			if herr == nil && page.Next == rev+1 {
				f.note(&rangeapi.FeedPart{Events: page.Events, Resolved: rev}, fmt.Sprintf("range %s.%d at %v", d.Range, d.Generation, at), d.Span)
			}
		}
		cancel()
	}
}
