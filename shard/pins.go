package shard

import (
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// pinFor is how long at least a pin lasts: longer than a transaction's reads may take.
const pinFor = 10 * time.Second

// pins are revisions that a leader keeps readable for transactions that have locked
// nothing here. They are coarse: two windows with the lowest revision of each. They are
// lost with the leadership; whoever reads what is gone by then is told so.
type pins struct {
	// now is the window that began last, before the one that began before it.
	now, before pinWindow
}

type pinWindow struct {
	began clock.Time
	low   keyspace.Revision
}

// add keeps what is readable at the revision.
func (p *pins) add(now clock.Time, at keyspace.Revision) {
	if p.now.began == 0 || now.Sub(p.now.began) >= pinFor {
		p.before, p.now = p.now, pinWindow{now, at}
		return
	}
	p.now.low = min(p.now.low, at)
}

// lowest returns the lowest pinned revision, or no if there is none.
func (p *pins) lowest(now clock.Time, no keyspace.Revision) keyspace.Revision {
	for _, w := range []pinWindow{p.now, p.before} {
		if w.began != 0 && now.Sub(w.began) < 2*pinFor {
			no = min(no, w.low)
		}
	}
	return no
}

// pinLocked keeps the range from compacting beyond the revision, or beyond those that
// are still to come where it is 0.
func (r *Replica) pinLocked(at keyspace.Revision) {
	if at == 0 {
		at = r.node.Floor()
	}
	r.pins.add(r.node.cfg.Clock.Now(), at)
}

// keepLocked returns the highest revision to which this leader may compact now.
func (r *Replica) keepLocked(c keyspace.Revision) keyspace.Revision {
	if r.pins.now.began != 0 {
		c = r.pins.lowest(r.node.cfg.Clock.Now(), c)
	}
	if r.locks != nil {
		c = r.locks.lowestFloor(c)
	}
	// What is being sequenced may have got revisions below, and would come behind the
	// compaction in the log: what it replaces would stay until the next one.
	if b := r.sequencing; b != nil && b.txns > 0 {
		c = min(c, b.floor)
	}
	return c
}
