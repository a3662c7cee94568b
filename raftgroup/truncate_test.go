package raftgroup

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// liveMax is the size of a wal that has nothing left to keep: its head.
const liveMax = 64 << 10

// idleRig is a rig with some groups whose logs fill many segments. Its memtables are so
// large that only a flush by age empties them.
func idleRig(t *testing.T, groups int, config func(*Config)) *rig {
	t.Helper()
	r := newRig(t, 3, config)
	r.memtab = 64 << 20
	r.walopt = func(o *wal.Options) { o.SegmentBytes = liveMax }
	r.startAll()
	r.bootstrap(1, groups, voters(3))
	r.fill("fill", groups)
	for _, n := range r.nodes {
		if live := n.wal.LiveBytes(); live < 8*liveMax {
			t.Fatalf("node %d: a wal of %d bytes proves nothing", n.id, live)
		}
	}
	return r
}

// fill writes many segments' worth to the groups.
func (r *rig) fill(what string, groups int) {
	r.t.Helper()
	pad := strings.Repeat("p", 8<<10)
	for i := range 100 {
		r.write(keyspace.GroupID(1+i%groups), fmt.Sprint(what, i, pad))
	}
}

// shortWALs checks that every node's wal is as short as possible and that the groups
// still sleep.
func (r *rig) shortWALs(groups int) {
	r.t.Helper()
	for _, n := range r.nodes {
		if live := n.wal.LiveBytes(); live > liveMax {
			r.t.Errorf("node %d: a wal of %d bytes, the head has at most %d", n.id, live, liveMax)
		}
		for g := range groups {
			if s := n.host.Group(keyspace.GroupID(1 + g)).Status(); !s.Asleep {
				r.t.Errorf("node %d: group %s is awake", n.id, s.Group)
			}
		}
	}
}

// TestIdleWALShrinks: the live wal shrinks when the traffic stops, without waking any
// group.
func TestIdleWALShrinks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 3
		r := idleRig(t, groups, nil)
		defer r.close()
		time.Sleep(10 * time.Second)
		var woken [4]float64
		for id, n := range r.nodes {
			woken[id] = testutil.ToFloat64(n.host.m.wakes)
		}
		time.Sleep(50 * time.Second)
		synctest.Wait()
		r.shortWALs(groups)
		for id, n := range r.nodes {
			if w := testutil.ToFloat64(n.host.m.wakes); w != woken[id] {
				t.Errorf("node %d: %v groups woken by a flush", id, w-woken[id])
			}
		}
	})
}

// TestCrowdedWALShrinks: the same where groups fall asleep before a heartbeat could tell the followers that nobody needs the
// entries any more. They wake once for it.
func TestCrowdedWALShrinks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 3
		r := idleRig(t, groups, crowd)
		defer r.close()
		wakes := func() (n float64) {
			for _, o := range r.nodes {
				n += testutil.ToFloat64(o.host.m.wakes)
			}
			return n
		}
		time.Sleep(10 * time.Second)
		pad := strings.Repeat("p", 8<<10)
		for i := range 30 * groups { // the last entries of the first groups lie in old segments
			r.write(keyspace.GroupID(1+i/30), fmt.Sprint("last", i, pad))
		}
		time.Sleep(time.Second)
		before := wakes()
		time.Sleep(time.Minute)
		synctest.Wait()
		r.shortWALs(groups)
		if n := wakes() - before; n > 3*groups {
			t.Errorf("%v replicas woken by a flush for %d groups", n, groups)
		}
	})
}

// TestFlushWakesNoSoleReplica: a group without followers has nobody to tell.
func TestFlushWakesNoSoleReplica(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(1))
		r.write(1, "x")
		r.asleep(1)
		n := r.nodes[1]
		woken := testutil.ToFloat64(n.host.m.wakes)
		r.must(n.eng.Flush(t.Context()))
		time.Sleep(time.Second / 2)
		synctest.Wait()
		if w := testutil.ToFloat64(n.host.m.wakes); w != woken {
			t.Errorf("a flush woke the group %v times", w-woken)
		}
	})
}

// TestIdleWALShrinksAfterRestart: the same after a clean stop, which makes everything
// durable and truncates nothing. It happens as soon as the followers have reported their
// positions, without another flush.
func TestIdleWALShrinksAfterRestart(t *testing.T) {
	long(t, "lasts virtual minutes")
	inBubble(t, func(t *testing.T) {
		const groups = 3
		r := idleRig(t, groups, nil)
		defer r.close()
		for _, n := range r.nodes {
			n.stop()
		}
		r.startAll()
		time.Sleep(flushAge / 2)
		synctest.Wait()
		r.shortWALs(groups)
	})
}

// TestIdleWALShrinksBehindSlowFollower: entries that a follower stops needing only after
// the flush are truncated then, not at the next flush.
func TestIdleWALShrinksBehindSlowFollower(t *testing.T) {
	long(t, "lasts virtual minutes")
	inBubble(t, func(t *testing.T) {
		const groups = 2
		r := idleRig(t, groups, nil)
		defer r.close()
		f := r.nodes[1+r.leader(1).id%3]
		r.bus.isolate(f.id, true)
		r.fill("late", groups)
		for _, n := range r.nodes {
			r.must(n.eng.Flush(context.Background()))
		}
		time.Sleep(time.Second)
		r.bus.isolate(f.id, false)
		time.Sleep(flushAge / 2)
		synctest.Wait()
		for _, n := range r.nodes {
			if live := n.wal.LiveBytes(); n != f && live > liveMax {
				t.Errorf("node %d: a wal of %d bytes, the head has at most %d", n.id, live, liveMax)
			}
		}
		time.Sleep(2 * flushAge)
		synctest.Wait()
		r.equal(1)
		r.shortWALs(groups)
	})
}

// TestFullDiskFlushesAtOnce: when a disk becomes full, the memtables are flushed while
// they still can be.
func TestFullDiskFlushesAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		n := r.nodes[1]
		var full atomic.Bool
		r.memtab = 64 << 20
		r.walopt = func(o *wal.Options) {
			o.SegmentBytes, o.MayAllocate = liveMax, func(int64) bool { return !full.Load() }
		}
		r.startAll()
		defer r.close()
		defer full.Store(false)
		r.bootstrap(1, 1, voters(1))
		r.write(1, "first")
		full.Store(true)
		pad := strings.Repeat("p", 8<<10)
		for i := 0; n.wal.Space() == wal.SpaceOK && i < 100; i++ {
			r.write(1, fmt.Sprint(i, pad))
		}
		r.eventually("flushed", 2*time.Second, func() bool {
			s := n.host.Group(1).Status()
			return s.DurableApplied == s.Applied
		})
		time.Sleep(5 * time.Second)
		if f := testutil.ToFloat64(n.host.m.forcedFlushes); f != 1 {
			t.Errorf("%v flushes of a disk that is full all the time", f)
		}
	})
}

// TestFlushBeforeEachCutOff: a wal that has become short and is too long again is first
// flushed again. Followers are not cut off at once.
func TestFlushBeforeEachCutOff(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		h := r.nodes[1].host
		h.trunc.flushed.Store(true)
		time.Sleep(2 * time.Second)
		if h.trunc.flushed.Load() {
			t.Fatal("the flush of the last time is taken for one of the next")
		}
	})
}

// TestLostQuorumsDoNotHoldTheLog: two of five nodes are lost for good under load. The
// groups that have lost their quorum keep entries that nobody can ever commit. The others
// go on for an hour. Their leaders stay, and every log stays within twice its target.
func TestLostQuorumsDoNotHoldTheLog(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const target, lost, alive, inflight = 256 << 10, 5, 5, 24 << 10
		r := newRig(t, 5, func(c *Config) {
			c.MaxGroupInflightBytes, c.MaxWALBytes = inflight, target*3/2
			c.TickInterval = 300 * time.Millisecond // an hour has many
		})
		r.walopt = func(o *wal.Options) { o.SegmentBytes, o.TargetBytes = 32<<10, target }
		r.startAll()
		defer r.close()
		on := func(nodes ...keyspace.NodeID) (rs []keyspace.Replica) {
			for i, n := range nodes {
				rs = append(rs, keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: n})
			}
			return rs
		}
		r.bootstrap(1, lost, on(1, 2, 3))
		r.bootstrap(lost+1, 2, on(3, 4, 5))
		r.bootstrap(lost+3, 2, on(1, 4, 3))
		r.bootstrap(lost+5, 1, on(1, 2, 3, 4, 5))
		pad := strings.Repeat("p", 4<<10)
		for g := keyspace.GroupID(1); g <= lost+alive; g++ {
			r.write(g, "before")
			if l := r.leader(g); g <= lost && l.id != 3 {
				r.must(l.host.Group(g).Transfer(t.Context(), 3))
				r.eventually("node 3 leads", 5*time.Second, func() bool { return r.leader(g).id == 3 })
			}
			r.write(g, "still")
		}
		r.nodes[1].crash(0)
		r.nodes[2].crash(0)
		survivors := []*testNode{r.nodes[3], r.nodes[4], r.nodes[5]}
		for g := keyspace.GroupID(1); g <= lost; g++ {
			for range inflight / len(pad) {
				_ = r.nodes[3].propose(g, pad)
			}
		}
		time.Sleep(30 * time.Second) // the others elect leaders
		terms := map[keyspace.GroupID]uint64{}
		for g := keyspace.GroupID(1); g <= lost+alive; g++ {
			s := r.nodes[3].host.Group(g).Status()
			if terms[g] = s.Term; g <= lost && (s.Last-s.Commit)*uint64(len(pad)) < inflight/2 {
				t.Fatalf("group %s has only %d entries that are not committed", g, s.Last-s.Commit)
			}
		}
		longest := int64(0)
		for i := range fewer(1800, 300) { // two seconds each
			g := keyspace.GroupID(lost + 1 + i%alive)
			l := r.leader(g)
			if err := l.propose(g, fmt.Sprint(i, pad)); err != nil {
				t.Fatalf("write %d, group %s: %v\n%s", i, g, err, r.dump())
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if s := l.host.Group(g).Status(); s.Term != terms[g] || s.Applied != s.Last {
				t.Fatalf("write %d: %+v, elected in term %d", i, s, terms[g])
			}
			for _, n := range survivors {
				longest = max(longest, n.wal.LiveBytes())
				if n.wal.LiveBytes() > 2*target || n.host.DiskStalled() {
					t.Fatalf("write %d, node %d: a log of %d bytes, target %d", i, n.id, n.wal.LiveBytes(), target)
				}
			}
		}
		t.Logf("the longest log had %d bytes", longest)
		r.nodes[3].crash(0)
		r.nodes[3].start()
		for g := keyspace.GroupID(1); g <= lost; g++ {
			if s := r.nodes[3].host.Group(g).Status(); (s.Last-s.Commit)*uint64(len(pad)) < inflight/2 {
				t.Errorf("after a crash group %s has %d entries that are not committed", g, s.Last-s.Commit)
			}
		}
		for g := keyspace.GroupID(lost + 1); g <= lost+alive; g++ {
			r.equal(g)
		}
	})
}
