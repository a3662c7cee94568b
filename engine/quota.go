package engine

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// quotaRest is the least pause between two attempts to get below the quota. A longer attempt is followed
// by a pause of quotaRestFactor times its length, since each rewrites the store.
const (
	quotaRest       = 10 * time.Second
	quotaRestFactor = 10
)

// quota is a bound of the store's size that its operator has set. Above it the store is as on a full
// disk, but its compactions and flushes go on. While nothing else is written, what was deleted stays in
// the memtable and in high levels. So the store is flushed and compacted as long as it is above.
type quota struct {
	bytes int64 // 0: the disk is the bound
	over  atomic.Bool
}

// lookAtQuota compares the size with the quota.
func (e *Engine) lookAtQuota() {
	q := &e.quota
	if q.bytes <= 0 {
		return
	}
	total, _ := e.DiskBytes()
	if over := total > q.bytes; q.over.Swap(over) != over {
		e.logger.Warn("quota of the store", zap.Bool("exceeded", over), zap.Int64("bytes", total), zap.Int64("quota-bytes", q.bytes))
	}
}

// quotaLoop looks once a second.
func (e *Engine) quotaLoop() {
	t := e.clock.NewTimer(spacePoll)
	defer t.Stop()
	rested := e.clock.Now()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-t.C():
		}
		e.lookAtQuota()
		if began := e.clock.Now(); e.quota.over.Load() && began >= rested {
			e.shrink()
			took := e.clock.Now().Sub(began)
			rested = e.clock.Now().Add(max(quotaRest, quotaRestFactor*took))
			e.lookAtQuota()
		}
		t.Reset(spacePoll)
	}
}

// shrink frees what deleted versions take.
func (e *Engine) shrink() {
	err := e.Flush(e.ctx)
	if err == nil && e.db.Metrics().Keys.TombstoneCount > 0 {
		all := VersionedSpan(keyspace.Span{})
		err = e.db.Compact(e.ctx, all.Lower, all.Upper, false)
	}
	if err != nil && e.ctx.Err() == nil && !IsCorruption(err) {
		e.logger.Warn("the store is above its quota and cannot be compacted", zap.Error(err))
	}
}

// QuotaBytes is the size at which the store takes no more data. That is its quota. Without one it is what
// the store has and what its disk has left. It is 0 if the file system does not tell.
func (e *Engine) QuotaBytes() int64 {
	if e.quota.bytes > 0 {
		return e.quota.bytes
	}
	l := e.space.limits()
	if !l.known {
		return 0
	}
	total, _ := e.DiskBytes()
	return total + max(0, l.avail-l.low)
}
