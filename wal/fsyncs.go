package wal

import (
	"slices"
	"sync"
	"time"
)

// recentFsyncs are the durations of the last fsyncs. The histogram counts since the start, and so says little of a disk that
// has become slow.
type recentFsyncs struct {
	mu   sync.Mutex
	took [512]time.Duration // a ring; guarded by mu
	n    int                // how many there were; guarded by mu
}

func (r *recentFsyncs) add(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.took[r.n%len(r.took)] = d
	r.n++
}

// p99 returns the 99th percentile, 0 before the first fsync.
func (r *recentFsyncs) p99() time.Duration {
	r.mu.Lock()
	took := slices.Clone(r.took[:min(r.n, len(r.took))])
	r.mu.Unlock()
	if len(took) == 0 {
		return 0
	}
	slices.Sort(took)
	return took[len(took)*99/100]
}

// FsyncP99 returns the 99th percentile of the durations of the last 512 fsyncs, 0 before the first one.
func (l *Log) FsyncP99() time.Duration { return l.fsyncs.p99() }
