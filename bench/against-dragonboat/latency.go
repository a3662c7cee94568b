package main

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// sampleEach is how many proposals of a group share one that is timed: two readings of the
// clock for each proposal would cost more than some of what is measured.
const sampleEach = 16

// latencies are the times from proposals to their application. Proposals of a group are
// applied in their order.
type latencies struct {
	groups    []groupLatencies
	recording atomic.Bool
}

// groupLatencies are those of one group. One goroutine proposes and one applies at a time.
type groupLatencies struct {
	proposed int64
	started  []time.Time // of the timed proposals, by their place among them
	_        [64]byte    // the two goroutines write to different lines of the cache
	applied  int64
	counts   histogram
	_        [64]byte
}

func newLatencies(groups, depth int) *latencies {
	l := &latencies{groups: make([]groupLatencies, groups)}
	for g := range l.groups {
		// No more of them are under way, even if two ends are cut.
		l.groups[g].started = make([]time.Time, depth/sampleEach+2)
	}
	return l
}

// record turns the counting on or off.
func (l *latencies) record(on bool) { l.recording.Store(on) }

// proposed is called before each proposal of a group.
func (l *latencies) proposed(group int) {
	g := &l.groups[group]
	if g.proposed%sampleEach == 0 {
		g.started[g.proposed/sampleEach%int64(len(g.started))] = time.Now()
	}
	g.proposed++
}

// applied is called when the next n proposals of a group are applied.
func (l *latencies) applied(group, n int) {
	g := &l.groups[group]
	first := (g.applied + sampleEach - 1) / sampleEach // timed one that is applied now
	g.applied += int64(n)
	if first*sampleEach >= g.applied || !l.recording.Load() {
		return
	}
	now := time.Now()
	for i := first; i*sampleEach < g.applied; i++ {
		g.counts.add(now.Sub(g.started[i%int64(len(g.started))]))
	}
}

// quantile is the time below which so many of a thousand lie, 0 without any. Nothing may
// be proposed or applied any more.
func (l *latencies) quantile(ofThousand int64) time.Duration {
	var sum histogram
	for g := range l.groups {
		for i := range sum {
			sum[i] += l.groups[g].counts[i]
		}
	}
	return sum.quantile(ofThousand)
}

// A histogram counts times in buckets that are 1/32 wide of where they begin.
type histogram [(64 - fineBits) << fineBits]int64

const fineBits = 5

func (h *histogram) add(d time.Duration) { h[bucket(uint64(max(d, 0)))]++ }

// bucket is the place of a value: as many buckets for each power of two.
func bucket(v uint64) int {
	shift := max(bits.Len64(v)-fineBits-1, 0)
	return shift<<fineBits + int(v>>shift)
}

// begin is the least value of a bucket.
func begin(bucket int) uint64 {
	if bucket < 2<<fineBits {
		return uint64(bucket)
	}
	shift := bucket>>fineBits - 1
	return uint64(bucket-shift<<fineBits) << shift
}

// quantile is the middle of the bucket in which so many of a thousand are reached.
func (h *histogram) quantile(ofThousand int64) time.Duration {
	var all, seen int64
	for _, n := range h {
		all += n
	}
	for i, n := range h {
		if seen += n; n > 0 && seen*1000 >= all*ofThousand {
			return time.Duration(begin(i)+begin(i+1)) / 2
		}
	}
	return 0
}
