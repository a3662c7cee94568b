package wal

import (
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// recentFsyncs are the durations of the last fsyncs. The histogram counts since the start, and so says little of a disk that
// has become slow.
type recentFsyncs struct {
	mu   sync.Mutex
	took [512]timedFsync // a ring; guarded by mu
	n    int             // how many there were; guarded by mu
}

type timedFsync struct {
	took time.Duration
	age  clock.Stopwatch
}

const (
	// recently is how long an fsync counts.
	recently = time.Minute
	// leastFsyncs is how many must count. Of fewer, the slowest hundredth would be a single one.
	leastFsyncs = 200
)

func (r *recentFsyncs) add(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.took[r.n%len(r.took)] = timedFsync{d, clock.StartStopwatch()}
	r.n++
}

// p99 returns the 99th percentile, 0 where too few count.
func (r *recentFsyncs) p99() time.Duration {
	var took []time.Duration
	r.mu.Lock()
	for _, f := range r.took[:min(r.n, len(r.took))] {
		if f.age.Elapsed() <= recently {
			took = append(took, f.took)
		}
	}
	r.mu.Unlock()
	if len(took) < leastFsyncs {
		return 0
	}
	slices.Sort(took)
	return took[len(took)*99/100]
}

// FsyncP99 returns the 99th percentile of the durations of the fsyncs of the last minute, the last 512 at most, and 0 if
// there were less than 200.
func (l *Log) FsyncP99() time.Duration { return l.fsyncs.p99() }
