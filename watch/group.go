package watch

import (
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// group is the watchers of one span at one position. A live group gets each event of its span, and
// holds it until all lower ones are delivered or void. A group that lags reads history instead.
type group struct {
	span keyspace.Span
	prev bool
	live bool
	// Everything at or below pos was queued for the members.
	pos     keyspace.Revision
	members []*Watcher
	// No release happens before paused, see pace.
	paused clock.Time
	// pending are a live group's events above pos.
	pending eventList
	bytes   int64

	// indexed says that the group is in the index, inTree that it is in the index's tree.
	indexed, inTree bool

	// state is that of a lagging group: queued for a reader, being read, parked, or waiting for an
	// empty queue.
	state lagState
	// A lagging group does not read before the frontier has reached least, the revision that was
	// current when its watcher came.
	least keyspace.Revision
	// largest says that the next revision waits until no other large one is being read.
	largest bool
}

// join adds a watcher.
func (g *group) join(w *Watcher) {
	w.group, w.at = g, len(g.members)
	g.members = append(g.members, w)
}

// eachGroupLocked calls f with all groups, live or not.
func (h *Hub) eachGroupLocked(f func(*group)) {
	var all []*group
	for _, g := range h.groups.bySpan {
		all = append(all, g)
	}
	for g := range h.lagGroups {
		all = append(all, g)
	}
	for _, g := range all {
		f(g)
	}
}

// leaveLocked takes a watcher out of its group. A group ends with its last watcher.
func (h *Hub) leaveLocked(w *Watcher) {
	g := w.group
	last := len(g.members) - 1
	g.members[w.at], g.members[last].at = g.members[last], w.at
	g.members[last] = nil
	g.members, w.group = g.members[:last], nil
	if last > 0 {
		return
	}
	if g.live {
		h.groups.remove(g)
		h.dropPendingLocked(g)
		g.live = false
	} else {
		h.endLagLocked(g)
	}
	if !h.unused {
		h.unused, h.unusedSince = true, h.cfg.Clock.Now()
	}
}

// endLagLocked forgets a lagging group that is live now, or empty.
func (h *Hub) endLagLocked(g *group) {
	delete(h.lagGroups, g)
	delete(h.parked, g)
	h.unqueueLocked(g)
	g.state = lagIdle
}

// unqueueLocked notes that no other group can join this one before it reads.
func (h *Hub) unqueueLocked(g *group) {
	if k := keyOf(g); h.sharing[k] == g {
		delete(h.sharing, k)
	}
}

// dropPendingLocked drops the events that wait in a group.
func (h *Hub) dropPendingLocked(g *group) {
	h.pendingBytes -= g.bytes
	g.pending, g.bytes = eventList{}, 0
	delete(h.waiting, g)
}
