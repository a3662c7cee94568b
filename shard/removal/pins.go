package removal

import (
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// PinFor is how long at least a pin lasts where nobody can say that it is not needed any
// more: longer than a transaction's reads may take.
const PinFor = 10 * time.Second

// Pins are revisions that a leader keeps readable for transactions that have locked
// nothing here. They are coarse: two windows with the lowest revision of each. They are
// lost with the leadership; whoever reads what is gone by then is told so. They
// call nobody, and have no lock.
//
// No transaction says when it has read: that would be a message to each range, for the
// sake of a compaction every few minutes. Only where pins hold a compaction back the
// coordinators are asked.
type Pins struct {
	// now is the window that began last, before the one that began before it.
	now, before pinWindow
}

type pinWindow struct {
	began clock.Time
	low   keyspace.Revision
}

// Add keeps what is readable at the revision.
func (p *Pins) Add(now clock.Time, at keyspace.Revision) {
	if p.now.began == 0 || now.Sub(p.now.began) >= PinFor {
		p.before, p.now = p.now, pinWindow{now, at}
		return
	}
	p.now.low = min(p.now.low, at)
}

// Any says whether anything was ever pinned.
func (p *Pins) Any() bool { return p.now.began != 0 }

// Lowest returns the lowest pinned revision, or no if there is none. Below unpinned nobody
// reads any more.
func (p *Pins) Lowest(now clock.Time, unpinned, no keyspace.Revision) keyspace.Revision {
	for _, w := range []pinWindow{p.now, p.before} {
		if w.began != 0 && now.Sub(w.began) < 2*PinFor {
			no = min(no, max(w.low, unpinned))
		}
	}
	return no
}
