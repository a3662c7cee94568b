package watch

import (
	"iter"

	"github.com/skeindb/skein/keyspace"
)

// recentEvents are the last events, in order, within a bound.
type recentEvents struct {
	limit, bytes int64
	list         eventList
	// Events at or below floor are gone.
	floor keyspace.Revision
}

// add adds an event and says whether it is new. An event that came without the version before is
// completed when it comes again with it.
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

// trim drops the oldest events, whole revisions at a time.
func (r *recentEvents) trim() {
	for r.bytes > r.limit && r.list.len() > 0 {
		r.floor = r.list.first().rev
		for r.list.len() > 0 && r.list.first().rev == r.floor {
			r.bytes -= r.list.shift().bytes
		}
	}
}

// between returns the events with revisions in (after, to].
func (r *recentEvents) between(after, to keyspace.Revision) iter.Seq[*event] {
	return r.list.between(after, to)
}
