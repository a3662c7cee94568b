package node

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// asleep counts the replicas of a node that sleep.
func (n *rigNode) asleep() (count int) {
	for _, g := range n.core.host.Groups() {
		if !g.ID().IsSystem() && g.Status().Asleep {
			count++
		}
	}
	return count
}

// goroutinesAsleep starts a cluster with so many ranges, waits until they sleep, and
// returns how many goroutines there are.
func goroutinesAsleep(t *testing.T, nodes, ranges int) (count int) {
	t.Helper()
	bubble(t, nodes, borders(ranges), nil, func(r *rig) {
		r.mustPut(r.nodes[0], keyOf(0), "x")
		r.wait(30*time.Second, "all ranges sleep", func() bool { return r.allAsleep(ranges) })
		synctest.Wait()
		count = runtime.NumGoroutine()
		r.stop(r.nodes...)
	})
	return count
}

func (r *rig) allAsleep(ranges int) bool {
	for _, n := range r.nodes {
		if n.asleep() != ranges {
			return false
		}
	}
	return true
}

// A thousand ranges (300 with -short) fall asleep when nobody wants anything of them, one wakes for a
// request alone, and all come back after a clean restart, in bounded time.
func TestThousandRanges(t *testing.T) {
	ranges := fewer(1000, 300)
	few := goroutinesAsleep(t, 1, 10)
	bubble(t, 1, borders(ranges), nil, func(r *rig) {
		n := r.nodes[0]
		r.wait(30*time.Second, "all ranges are created", func() bool { return len(n.core.shards.Replicas()) == ranges })
		for round := range 2 {
			start := time.Now()
			r.wait(30*time.Second, "all ranges sleep", func() bool { return r.allAsleep(ranges) })
			time.Sleep(2 * rigHeartbeat) // until its next tick the node counts as one with many awake ranges
			r.t.Logf("round %d: %d ranges slept after %v", round, ranges, time.Since(start))
			synctest.Wait()
			if count := runtime.NumGoroutine(); count > few+10 {
				r.t.Errorf("%d goroutines with %d ranges, %d with 10", count, ranges, few)
			}
			// The wish of a client wakes one range, and no other.
			r.mustPut(n, keyOf(150), "x")
			if awake := ranges - n.asleep(); awake != 1 {
				r.t.Errorf("%d ranges are awake after a put to one", awake)
			}
			r.mustGet(n, keyOf(151), "")
			if awake := ranges - n.asleep(); awake > 2 {
				r.t.Errorf("%d ranges are awake after a put to one and a read of another", awake)
			}
			rev := r.mustPut(n, keyOf(277), "x")
			r.stop(n)
			start = time.Now()
			r.start(n)
			if next := r.mustPut(n, keyOf(277), "y"); next != rev+1 {
				r.t.Errorf("revision %d after %d", next, rev)
			}
			if took := time.Since(start); took > 2*rigElection {
				r.t.Errorf("served only after %v", took)
			}
			r.mustGet(n, keyOf(150), "x")
		}
		r.stop(n)
	})
}

// The same with three nodes, which have to agree on sleep. No range wakes by itself,
// and a request at any node wakes only what it needs. A node's restart wakes its ranges
// without a flood of elections.
func TestManyRangesOnThreeNodes(t *testing.T) {
	ranges := fewer(80, 60)
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "first")
		r.wait(30*time.Second, "all ranges sleep", func() bool { return r.allAsleep(ranges) })
		time.Sleep(time.Minute)
		if !r.allAsleep(ranges) {
			r.t.Error("ranges woke by themselves")
		}
		r.mustPut(r.nodes[1], keyOf(17), "second")
		r.mustGet(r.nodes[2], keyOf(59), "first")
		r.wait(30*time.Second, "all ranges sleep again", func() bool { return r.allAsleep(ranges) })
		r.crash(r.nodes[2])
		for i := range ranges {
			r.eventuallyPut(r.nodes[0], ranges, "third", func(span int) bool { return span == i })
		}
		r.start(r.nodes[2])
		r.caughtUp(30 * time.Second)
		r.wait(30*time.Second, "all ranges sleep at last", func() bool { return r.allAsleep(ranges) })
		r.stop(r.nodes...)
	})
}
