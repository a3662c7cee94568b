package main

import (
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
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
	counts   *hdrhistogram.Histogram
	_        [64]byte
}

func newLatencies(groups, depth int) *latencies {
	l := &latencies{groups: make([]groupLatencies, groups)}
	for g := range l.groups {
		// No more of them are under way, even if two ends are cut.
		l.groups[g].started = make([]time.Time, depth/sampleEach+2)
		l.groups[g].counts = newCounts()
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
		took := min(now.Sub(g.started[i%int64(len(g.started))]), longest)
		_ = g.counts.RecordValue(took.Nanoseconds()) // in the range of newCounts
	}
}

// quantile is the time below which so many of a thousand lie, 0 without any. Nothing may
// be proposed or applied any more.
func (l *latencies) quantile(ofThousand int64) time.Duration {
	sum := newCounts()
	for g := range l.groups {
		sum.Merge(l.groups[g].counts)
	}
	return time.Duration(sum.ValueAtPercentile(float64(ofThousand) / 10))
}

// longest bounds a time that is counted. Dragonboat gives a proposal up long before.
const longest = 2 * time.Hour

// newCounts counts times in nanoseconds, with two significant digits.
func newCounts() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, longest.Nanoseconds(), 2)
}
