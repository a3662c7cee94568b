package pipeline

import (
	"time"

	"github.com/skeindb/skein/rangeapi/stages"
)

// propose notes that the call's batch is about to be proposed.
func (c *Call) propose(b *batch, now time.Duration) {
	c.enter(stages.Quorum, now)
	c.seen = &b.Batch
}

// Record says where the time of a call went that took so long. Its caller has the answer, or has given up. It is called
// without mu.
func (p *Pipeline) Record(c *Call, took time.Duration) *stages.Record {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := &stages.Record{Range: p.id, Turns: uint32(c.waits)}
	for s, m := range c.times.micros {
		r.Spent[s] = time.Duration(m) * time.Microsecond
		r.Took += r.Spent[s]
	}
	if rest := took - r.Took; rest > 0 {
		r.Spent[c.stage] += rest
		r.Took = took
	}
	if c.met != nil {
		r.Lock = c.met.Name.String()
	}
	if b := batchOf(c.seen); c.stage == stages.Quorum && b != nil && b.Applied() {
		r.Last = b.commit.By
		r.Split(stages.Quorum, stages.Apply, b.commit.Apply)
		r.Split(stages.Quorum, stages.Disk, b.commit.Disk)
	}
	return r
}
