package engine

import (
	"bytes"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// quotaRest is the least pause between two passes over the store that are to get it below its quota.
const quotaRest = 10 * time.Second

// quota is a bound of the store's size that its operator has set. Above it nobody may write by this node.
// Flushes, compactions and copies of ranges go on: the disk has room. While nothing else is written, what
// was deleted stays in the memtable and in high levels. So the store is flushed and compacted as long as
// it is above.
type quota struct {
	bytes int64 // 0: the disk is the bound
	over  atomic.Bool
}

// OverQuota says whether the store is above its quota. It costs one atomic load.
func (e *Engine) OverQuota() bool { return e.quota.over.Load() }

// lookAtQuota compares the size with the quota. Tables that compactions are writing do not count:
// they replace others. The state ends a little below the quota, so that it does not change with each table.
func (e *Engine) lookAtQuota() {
	q := &e.quota
	m := e.db.Metrics()
	used := int64(m.DiskSpaceUsage()) - m.Compact.InProgressBytes
	was := q.over.Load()
	if over := used > q.bytes && !mutation.Is(mutation.QuotaUnseen) || was && used > q.bytes-q.bytes/50; over != was {
		q.over.Store(over)
		e.logger.Warn("quota of the store", zap.Bool("exceeded", over), zap.Int64("bytes", used), zap.Int64("quota-bytes", q.bytes))
	}
}

// quotaLoop looks once a second.
func (e *Engine) quotaLoop() {
	rested := e.clock.Now()
	for clock.Sleep(e.ctx, e.clock, spacePoll) == nil {
		e.lookAtQuota()
		if e.OverQuota() && e.clock.Now() >= rested {
			if err := e.shrink(); err != nil && e.ctx.Err() == nil && !IsCorruption(err) {
				e.logger.Warn("the store is above its quota and cannot be compacted", zap.Error(err))
			}
			rested = e.clock.Now().Add(quotaRest)
		}
	}
}

// shrink frees what deleted versions take, until the store is below its quota. It compacts from one border
// of tables to the next. That needs little room at a time, and leaves others their turn.
func (e *Engine) shrink() error {
	if err := e.Flush(e.ctx); err != nil {
		return err
	}
	all := VersionedSpan(keyspace.Span{})
	for from := all.Lower; bytes.Compare(from, all.Upper) < 0; {
		if e.lookAtQuota(); !e.OverQuota() || e.db.Metrics().Keys.TombstoneCount == 0 {
			return nil
		}
		to := all.Upper
		if _, border, _ := e.bordered(from); border != nil && bytes.Compare(border, to) < 0 {
			to = border
		}
		began := e.clock.Now()
		if err := e.db.Compact(e.ctx, from, to, false); err != nil {
			return err
		}
		if err := clock.Sleep(e.ctx, e.clock, e.clock.Now().Sub(began)); err != nil {
			return err
		}
		from = to
	}
	e.lookAtQuota()
	return nil
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
