package node

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/kverror"
)

// dense wants each revision from 2 to the current one to be borne by exactly one of
// the puts, whose revisions are given; a split takes none.
func (r *rig) dense(revisions []int64) {
	r.t.Helper()
	r.denseFrom(2, revisions)
}

// denseFrom is dense for the revisions from the first one on.
func (r *rig) denseFrom(first int64, revisions []int64) {
	r.t.Helper()
	seen := map[int64]bool{}
	for _, rev := range revisions {
		if seen[rev] {
			r.t.Errorf("revision %d was given twice", rev)
		}
		seen[rev] = true
	}
	for rev := first; rev < first+int64(len(revisions)); rev++ {
		if !seen[rev] {
			r.t.Errorf("revision %d of %d puts is missing", rev, len(revisions))
		}
	}
}

// putAll puts to each of the spans through each node at the same time, and returns
// the revisions.
func (r *rig) putAll(ranges int, value string, at ...*rigNode) (revisions []int64) {
	r.t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range at {
		wg.Go(func() {
			for i := range ranges {
				rev, err := n.put(r.t.Context(), fmt.Sprintf("%s/%d", keyOf(i), n.id), value)
				if err != nil {
					r.t.Errorf("put at node %s: %v", n.id, err)
					return
				}
				mu.Lock()
				revisions = append(revisions, rev)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return revisions
}

// wantKeys reads everything at each node.
func (r *rig) wantKeys(want int, value string, at ...*rigNode) {
	r.t.Helper()
	for _, n := range at {
		resp, err := n.core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
		if err != nil {
			r.t.Fatalf("read everything at node %s: %v", n.id, err)
		}
		if len(resp.GetKvs()) != want || resp.GetCount() != int64(want) {
			r.t.Errorf("node %s has %d keys and counts %d, want %d", n.id, len(resp.GetKvs()), resp.GetCount(), want)
		}
		for _, kv := range resp.GetKvs() {
			if string(kv.GetValue()) != value {
				r.t.Errorf("node %s: %s = %q, want %q", n.id, kv.GetKey(), kv.GetValue(), value)
			}
		}
	}
}

// Clusters of other sizes than three: writes and reads at every node, a split by
// command, and what was written over a clean stop of all.
func TestClusterSizes(t *testing.T) {
	const ranges = 4
	for _, size := range []int{1, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			bubble(t, size, borders(ranges), nil, func(r *rig) {
				revisions := r.putAll(ranges, "first", r.nodes...)
				r.wantKeys(size*ranges, "first", r.nodes...)

				asked := r.nodes[size-1]
				left, right, err := asked.core.Admin().SplitRange(r.t.Context(), []byte("k0002/m"))
				if err != nil {
					r.t.Fatalf("split: %v", err)
				}
				if string(left.GetEnd()) != "k0002/m" || string(right.GetStart()) != "k0002/m" || left.GetGeneration() != right.GetGeneration() {
					r.t.Errorf("split gave %v and %v", left, right)
				}
				if _, _, err := asked.core.Admin().SplitRange(r.t.Context(), []byte("k0002/m")); err == nil {
					r.t.Error("the same split was done twice")
				}
				r.wait(5*time.Second, "every node knows of the split", func() bool {
					for _, n := range r.nodes {
						if l, err := n.core.Admin().Ranges(r.t.Context(), &adminpb.RangeListRequest{}); err != nil || len(l.GetRanges()) != ranges+1 {
							return false
						}
					}
					return true
				})
				revisions = append(revisions, r.putAll(ranges, "second", r.nodes...)...)
				r.wantKeys(size*ranges, "second", r.nodes...)

				r.dense(revisions)
				r.stop(r.nodes...)
				r.start(r.nodes...)
				r.wantKeys(size*ranges, "second", r.nodes...)
				later := r.putAll(ranges, "third", r.nodes...)
				r.denseFrom(slices.Min(later), later)
				// A stop of all may skip revisions, except where one node is all.
				if skipped := slices.Min(later) - slices.Max(revisions) - 1; skipped < 0 || skipped > 10_000 || size == 1 && skipped > 0 {
					r.t.Errorf("%d revisions are skipped", skipped)
				}
				r.wantKeys(size*ranges, "third", r.nodes...)
				r.caughtUp(5 * time.Second)
			})
		})
	}
}

// Any one of five nodes may lose its power, and the ranges with three replicas each go
// on. Two may as well, but for the ranges that have both: these answer with an error in
// bounded time, and are whole again when one of the two comes back.
func TestCrashesOfFive(t *testing.T) {
	const ranges = 4
	bubble(t, 5, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "first")
		without := 0
		for _, dying := range [][2]int{{0, 1}, {4, 2}} {
			one, two, up := r.nodes[dying[0]], r.nodes[dying[1]], r.nodes[3]
			r.crash(one)
			r.eventuallyPut(up, ranges, "one is gone", func(int) bool { return true })
			r.crash(two)
			down := map[int]bool{}
			for i := range ranges {
				down[i] = r.replicasOf(up, i, one, two) == 2
			}
			r.eventuallyPut(up, ranges, "two are gone", func(i int) bool { return !down[i] })
			for i := range ranges {
				if down[i] {
					without++
					start := time.Now()
					if _, err := up.get(r.t.Context(), keyOf(i)); err == nil || time.Since(start) > rigTimeout+time.Second {
						r.t.Errorf("a read without a quorum ended after %v with %v", time.Since(start), err)
					}
				}
			}
			r.start(one)
			r.eventuallyPut(one, ranges, "one is back", func(int) bool { return true })
			for i := range ranges {
				r.mustGet(up, keyOf(i), "one is back")
			}
			r.start(two)
			r.eventuallyPut(two, ranges, "both are back", func(int) bool { return true })
			for i := range ranges {
				r.checkAll("both are back", i)
			}
		}
		if without == 0 {
			r.t.Error("no range was without a quorum")
		}
		r.caughtUp(20 * time.Second)
		r.stop(r.nodes...)
	})
}

// replicasOf counts how many of the nodes have a replica of the range of a span, as
// another node knows.
func (r *rig) replicasOf(asked *rigNode, span int, nodes ...*rigNode) (count int) {
	m, _ := asked.core.client.WatchMap()
	for _, d := range m.Descriptors() {
		if !d.Span.Contains([]byte(keyOf(span))) {
			continue
		}
		for _, n := range nodes {
			if _, has := d.ReplicaOn(n.id); has {
				count++
			}
		}
	}
	return count
}

// eventuallyPut puts to each wanted span until it succeeds. A request on its way to a
// node that dies has an unknown fate, so its client repeats it. It bounds how long that
// may take.
func (r *rig) eventuallyPut(at *rigNode, ranges int, value string, wanted func(span int) bool) {
	r.t.Helper()
	r.wait(10*rigElection, "puts succeed: "+value, func() bool {
		for i := range ranges {
			if !wanted(i) {
				continue
			}
			if _, err := at.put(r.t.Context(), keyOf(i), value); err != nil {
				if kverror.Of(err).Fate() == kverror.NotApplied {
					r.t.Errorf("%s: put %s: %v", value, keyOf(i), err)
				}
				return false
			}
		}
		return true
	})
}

// A node that is alone needs nobody's promise: it serves at once after a clean stop
// and after a crash.
func TestLoneNodeRestartsAtOnce(t *testing.T) {
	const ranges = 3
	bubble(t, 1, borders(ranges), nil, func(r *rig) {
		n := r.nodes[0]
		r.spread(n, ranges, "0")
		for round := range 4 {
			if round%2 == 0 {
				r.stop(n)
			} else {
				r.crash(n)
			}
			start := time.Now()
			r.start(n)
			for i := range ranges {
				r.mustGet(n, keyOf(i), fmt.Sprint(round))
				r.mustPut(n, keyOf(i), fmt.Sprint(round+1))
			}
			// Most often within two heartbeats; now and then a group waits for its first
			// election timeout, which lies below two of the configured ones.
			if took := time.Since(start); took > 3*rigElection {
				r.t.Errorf("round %d: serving after %v", round, took)
			} else {
				r.t.Logf("round %d: serving after %v", round, took)
			}
		}
	})
}
