package watch

import (
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// group are watchers of one span at one position. A live group gets every event of its
// span that comes, and holds it until all lower ones have been delivered or declared
// void. A group that lags reads history instead.
type group struct {
	span keyspace.Span
	prev bool
	live bool
	// pos: everything at or below it was queued for the members.
	pos     keyspace.Revision
	members []*Watcher
	// paused is until when the next release may be, see pace.
	paused clock.Time
	// pending are a live group's events above pos.
	pending eventList
	bytes   int64

	// indexed says that the group is in the index, inTree that it is in its tree.
	indexed, inTree bool

	// A lagging group is queued for a reader, read by one, parked, or waits until its
	// watcher's queue is empty.
	state lagState
	// least is what the frontier must have reached before a lagging group goes on: the
	// revision that was current when its watcher came.
	least keyspace.Revision
	// largest says that its next revision waits until no other large one is being read.
	largest bool
}

// join takes a watcher in.
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

// leaveLocked takes a watcher out of its group, which goes with its last one.
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

// endLagLocked forgets a group that lags: it is live, or has no members.
func (h *Hub) endLagLocked(g *group) {
	delete(h.lagGroups, g)
	delete(h.parked, g)
	h.unqueueLocked(g)
	g.state = lagIdle
}

// unqueueLocked notes that others cannot join a group any more before it reads.
func (h *Hub) unqueueLocked(g *group) {
	if k := keyOf(g); h.sharing[k] == g {
		delete(h.sharing, k)
	}
}

// dropPendingLocked forgets what waits in a group.
func (h *Hub) dropPendingLocked(g *group) {
	h.pendingBytes -= g.bytes
	g.pending, g.bytes = eventList{}, 0
	delete(h.waiting, g)
}
