package watch

import (
	"iter"

	"github.com/skeindb/skein/keyspace"
)

// recentEvents are the events that came last, in order, within a bound.
type recentEvents struct {
	limit, bytes int64
	list         eventList
	// Events at or below floor are gone.
	floor keyspace.Revision
}

// add takes an event in, and says whether it was new. One that comes again with the
// version before, and had come without, is completed.
func (r *recentEvents) add(e *event) bool {
	if e.rev <= r.floor {
		return true
	}
	if twin := r.list.insert(e); twin != nil {
		if twin.whole == nil {
			twin.whole = e.whole
		}
		return false
	}
	r.bytes += e.bytes
	r.trim()
	return true
}

// trim lets the oldest revisions go, whole ones.
func (r *recentEvents) trim() {
	for r.bytes > r.limit && r.list.len() > 0 {
		r.floor = r.list.first().rev
		for r.list.len() > 0 && r.list.first().rev == r.floor {
			r.bytes -= r.list.shift().bytes
		}
	}
}

// between calls for the events with revisions in (after, to].
func (r *recentEvents) between(after, to keyspace.Revision) iter.Seq[*event] {
	return r.list.between(after, to)
}
