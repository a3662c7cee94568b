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
func idleRig(t *testing.T, groups int) *rig {
	t.Helper()
	r := newRig(t, 3, nil)
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
		r := idleRig(t, groups)
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

// TestIdleWALShrinksAfterRestart: the same after a clean stop, which makes everything
// durable and truncates nothing. It happens as soon as the followers have reported their
// positions, without another flush.
func TestIdleWALShrinksAfterRestart(t *testing.T) {
	long(t, "lasts virtual minutes")
	inBubble(t, func(t *testing.T) {
		const groups = 3
		r := idleRig(t, groups)
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
		r := idleRig(t, groups)
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
