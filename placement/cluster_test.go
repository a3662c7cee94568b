package placement

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/sim/simbus"
)

var quiet = simbus.Faults{Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 400 * time.Microsecond}}

// TestClusterServes bootstraps a cluster of three and uses every call once, from every
// node.
func TestClusterServes(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 1, 3, quiet, "g", "p")
		r.nodes[1].refuse = 3
		r.startAll()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		want := keyspace.Revision(2)
		for _, n := range r.nodes {
			if a := n.sequence(3); a.Err != nil || a.First != want || a.Current != want+2 {
				t.Fatalf("node %s: %+v, want %d", n.id, a, want)
			}
			want += 3
			if a := n.sequence(0); a.Err != nil || a.First != 0 || a.Current != want-1 {
				t.Fatalf("node %s: read at %+v, want %d", n.id, a, want-1)
			}
			node := fsm.Node{Name: fmt.Sprintf("n%d", n.id), ClientURLs: []string{"http://c"}}
			if err := n.client.Publish(ctx, node); err != nil {
				t.Fatal(err)
			}
		}
		for created := 0; created < 3; time.Sleep(10 * time.Millisecond) {
			created = 0
			r.leader().service.View().All(func(g *fsm.Range) bool {
				if g.Created {
					created++
				}
				return true
			})
		}
		seen := map[keyspace.RangeID]bool{}
		for _, n := range r.nodes {
			checkCalls(ctx, t, n, seen)
		}
		checkCompact(ctx, t, r, want-1)
		if err := r.nodes[0].client.PutSetting(ctx, "alarm", []byte("nospace")); err != nil {
			t.Fatal(err)
		}
		for _, n := range r.nodes {
			if a := n.sequence(0); a.Settings != 1 || a.Compacted != want-1 {
				t.Fatalf("node %s: an answer after the change says %+v", n.id, a)
			}
			if s, rev, err := n.client.Settings(ctx); err != nil || rev != 1 || len(s) != 1 || string(s[0].Value) != "nospace" {
				t.Fatalf("node %s: settings %v at %d, %v", n.id, s, rev, err)
			}
		}
		r.stopAllAtOnce()
	})
}

func checkCalls(ctx context.Context, t *testing.T, n *rigNode, seen map[keyspace.RangeID]bool) {
	t.Helper()
	ids, err := n.client.RangeIDs(ctx, 5)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if seen[id] || id <= 3 {
			t.Fatalf("range id %s was given out twice", id)
		}
		seen[id] = true
	}
	members, err := n.client.Members(ctx, true)
	if err != nil || len(members) != 3 || len(members[2].ClientURLs) != 1 {
		t.Fatalf("members %+v, %v", members, err)
	}
	ds, err := n.client.RangeMap(ctx)
	if err != nil || len(ds) != 3 {
		t.Fatalf("range map %v, %v", ds, err)
	}
	for _, d := range ds {
		for _, c := range n.r.nodes {
			c.mu.Lock()
			if c.created[d.Range] == 0 {
				t.Errorf("range %s was not created on node %s", d.Range, c.id)
			}
			c.mu.Unlock()
		}
	}
	st, err := n.client.Status(ctx)
	if err != nil || st.Leader != n.r.leader().id || st.Term == 0 || st.Applied == 0 {
		t.Fatalf("status %+v, %v", st, err)
	}
}

// checkCompact walks etcd's rule on every node, and trap 65: after Compact has
// answered, every answer of the sequencer tells of it.
func checkCompact(ctx context.Context, t *testing.T, r *rig, current keyspace.Revision) {
	t.Helper()
	for i, n := range r.nodes {
		at := current - keyspace.Revision(2-i)
		if got, err := n.client.Compact(ctx, at); err != nil || got != current {
			t.Fatalf("node %s: compact at %d: current %d, %v", n.id, at, got, err)
		}
		for _, o := range r.nodes {
			if a := o.sequence(0); a.Compacted != at {
				t.Fatalf("node %s: answer says compacted %d after Compact(%d)", o.id, a.Compacted, at)
			}
			if _, err := o.client.Compact(ctx, at); !errors.Is(err, kverror.Compacted) {
				t.Fatalf("node %s: compact again: %v", o.id, err)
			}
			if _, err := o.client.Compact(ctx, current+1); !errors.Is(err, kverror.FutureRevision) {
				t.Fatalf("node %s: compact in the future: %v", o.id, err)
			}
		}
	}
}

// TestMapFeed reports splits from every node of a cluster of five, of which none
// but one know of the placement group's replicas, and waits until all have the map.
func TestMapFeed(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 2, 5, quiet)
		r.bootstrap.PlacementReplicas = 3
		r.startAll()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		ids, err := r.nodes[4].client.RangeIDs(ctx, 6)
		if err != nil {
			t.Fatal(err)
		}
		whole := r.bootstrap.Ranges()[0]
		for i, id := range ids {
			// The right-most range is split again and again; the reports of child and
			// parent come from different nodes, each half on its own.
			key := []byte{byte('b' + i)}
			parent, child := whole, whole
			child.Range = id
			parent.Generation++
			child.Generation = parent.Generation
			parent.Span.End, child.Span.Start = key, key
			r.nodes[i%5].client.ReportDescriptors(child)
			r.nodes[(i+1)%5].client.ReportDescriptors(parent)
			whole = child
		}
		for _, n := range r.nodes {
			for {
				m, changed := n.client.WatchMap()
				if m != nil && m.Len() == 7 {
					break
				}
				select {
				case <-changed:
				case <-ctx.Done():
					t.Fatalf("node %s has map %+v", n.id, m)
				}
			}
			if m, _ := n.client.WatchMap(); m.Lookup([]byte("zz")).Descriptor.Range != ids[5] {
				t.Fatalf("node %s: the last range is %+v", n.id, m.Lookup([]byte("zz")))
			}
		}
		r.stopAllAtOnce()
	})
}

// TestLeadGoesOnAtOnce: who has just taken the lead has not heard its followers yet, and hands it
// on all the same.
func TestLeadGoesOnAtOnce(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 5, 3, simbus.Faults{Delay: simbus.Delay{Min: time.Millisecond, Max: 40 * time.Millisecond}})
		r.startAll()
		at := r.nodes[0].client
		want := r.leader().id
		for i := range 30 {
			want = want%3 + 1
			if err := at.TransferLeader(t.Context(), want); err != nil {
				t.Fatalf("transfer %d, to node %s: %v", i, want, err)
			}
		}
		// The one before may not have been told yet that it does not lead any more.
		for began := time.Now(); r.leader().id != want; time.Sleep(10 * time.Millisecond) {
			if time.Since(began) > 10*time.Second {
				t.Fatalf("node %s leads, want %s", r.leader().id, want)
			}
		}
		r.stopAllAtOnce()
	})
}

// stamped is one answer with its place in real time: begin and end are taken from
// one counter before the call and in done.
type stamped struct {
	begin, end  int64
	first, last keyspace.Revision // first is 0 for a read
}

// history collects answers and checks them.
type history struct {
	tick atomic.Int64
	mu   sync.Mutex
	// answers and errors are guarded by mu.
	answers []stamped
	errors  int
}

func (h *history) ask(c *Client, rng *rand.Rand, done func()) {
	count := []int{0, 1, 1, 1, 2, 7}[rng.IntN(6)]
	s := stamped{begin: h.tick.Add(1)}
	c.Sequence(keyspace.SequenceRequest{Range: keyspace.RangeID(1 + rng.IntN(5)), Generation: 1, Count: count, Direct: rng.IntN(2) == 0}, func(a keyspace.SequenceAnswer) {
		s.end = h.tick.Add(1)
		s.first, s.last = a.First, a.Current
		h.mu.Lock()
		if a.Err != nil {
			h.errors++
		} else {
			h.answers = append(h.answers, s)
		}
		h.mu.Unlock()
		done()
	})
}

// check checks S1 and S2 of package sequencer, and returns the number of revisions used and the highest.
func (h *history) check(t *testing.T) (used int, last keyspace.Revision) {
	t.Helper()
	owner := map[keyspace.Revision]bool{}
	// high[i] is the highest revision in an answer that ended at tick i or before.
	high := make([]keyspace.Revision, h.tick.Load()+1)
	for _, s := range h.answers {
		if s.first != 0 {
			for rev := s.first; rev <= s.last; rev++ {
				if owner[rev] || rev <= 1 {
					t.Fatalf("revision %d was allocated twice", rev)
				}
				owner[rev] = true
			}
		}
		high[s.end] = max(high[s.end], s.last)
		last = max(last, s.last)
	}
	for i := 1; i < len(high); i++ {
		high[i] = max(high[i], high[i-1])
	}
	for _, s := range h.answers {
		before := high[s.begin]
		if s.first != 0 && s.first <= before || s.last < before {
			t.Fatalf("a request that began at %d got %d to %d, and revision %d was known before", s.begin, s.first, s.last, before)
		}
	}
	return len(owner), last
}

// TestRevisionsUnderFaults is the model test of S1 to S3 of package sequencer. Clients on all
// nodes ask without end, while leadership moves, nodes crash, pause and are cut off, and
// messages are lost, repeated and reordered. No revision is allocated twice and none steps back
// in real time, also over a stop of all nodes at the end.
func TestRevisionsUnderFaults(t *testing.T) {
	seeds, faults := uint64(3), 16
	if testing.Short() {
		seeds, faults = 2, 10 // the second one has no leases
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) { revisionsUnderFaults(t, seed, faults) })
		})
	}
}

func revisionsUnderFaults(t *testing.T, seed uint64, faults int) {
	t.Helper()
	r := newRig(t, seed, 3, simbus.Faults{
		Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 2 * time.Millisecond, Tail: 0.01, TailMean: 20 * time.Millisecond},
		Loss:  0.02, Duplicate: 0.02, Reorder: 0.05, ReorderBy: 5 * time.Millisecond, Break: 0.0002,
	})
	r.noLease = seed%2 == 1
	r.startAll()
	var h history
	var load sync.WaitGroup
	stop := make(chan struct{})
	for i := range 6 {
		rng := rand.New(rand.NewPCG(seed, uint64(100+i)))
		load.Go(func() { r.loadLoop(&h, rng, i, stop) })
	}
	failures := r.nemesis(faults)
	r.net.HealAll()
	r.net.SetStandard(quiet)
	for _, n := range r.nodes {
		n.clock.Resume()
		if !n.up() {
			n.start()
		}
	}
	time.Sleep(5 * time.Second)
	close(stop)
	load.Wait()
	r.stopAllAtOnce()
	used, last := h.check(t)
	t.Logf("%d answers, %d errors, %d revisions up to %d, %d failures, network %+v", len(h.answers), h.errors, used, last, failures, r.net.Stats())
	if lost := int(last) - 1 - used; lost > (failures+1)*sequencer.CeilingBlock {
		t.Errorf("%d revisions were lost in %d failures", lost, failures)
	}
	if len(h.answers) < 200 {
		t.Errorf("only %d requests were answered", len(h.answers))
	}
	r.startAll()
	if a := r.nodes[0].sequence(1); a.Err != nil || a.First <= last || a.First > last+(1+keyspace.Revision(h.errors))*sequencer.CeilingBlock {
		t.Errorf("after the stop: %+v, the last revision was %d", a, last)
	}
	r.stopAllAtOnce()
}

// loadLoop asks one node after the other.
func (r *rig) loadLoop(h *history, rng *rand.Rand, i int, stop <-chan struct{}) {
	slots := make(chan struct{}, 8)
	for {
		select {
		case <-stop:
			for range cap(slots) {
				slots <- struct{}{}
			}
			return
		case slots <- struct{}{}:
		}
		c := r.nodes[(i+rng.IntN(2))%len(r.nodes)].current.Load()
		if c == nil {
			<-slots
		} else {
			h.ask(c, rng, func() { <-slots })
		}
		time.Sleep(time.Duration(rng.IntN(40)) * time.Millisecond)
	}
}

// nemesis does so many bad things, one after the other, and returns how many of
// them may leave a gap.
func (r *rig) nemesis(steps int) (failures int) {
	for range steps {
		n := r.nodes[r.rng.IntN(len(r.nodes))]
		wait := time.Duration(r.rng.IntN(2500)) * time.Millisecond
		switch r.rng.IntN(5) {
		case 0:
			to := r.nodes[r.rng.IntN(len(r.nodes))].id
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			_ = n.client.TransferLeader(ctx, to)
			cancel()
		case 1:
			r.net.Partition(n.id)
			time.Sleep(wait)
			r.net.HealAll()
			failures++
		case 2:
			n.clock.Pause()
			r.net.Pause(n.id)
			time.Sleep(wait)
			n.clock.Resume()
			r.net.Resume(n.id)
			failures++
		case 3:
			n.crash()
			time.Sleep(wait)
			n.start()
			failures++
		case 4:
			o := r.nodes[r.rng.IntN(len(r.nodes))]
			r.net.Cut(n.id, o.id)
			time.Sleep(wait)
			r.net.HealAll()
			failures++
		}
		time.Sleep(time.Duration(r.rng.IntN(1500)) * time.Millisecond)
	}
	return failures
}
