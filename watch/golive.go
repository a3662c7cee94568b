package watch

import (
	"github.com/skeindb/skein/keyspace"
)

// goLiveLocked makes a group live if all events above its position are still in memory.
func (h *Hub) goLiveLocked(g *group) bool {
	lo, hi := h.window(g.span)
	floor := h.recent.floor
	for _, sub := range h.subs[lo:hi] {
		floor = max(floor, sub.opened)
		if g.prev {
			if !sub.prev {
				return false
			}
			floor = max(floor, sub.prevFrom)
		}
	}
	if g.pos < floor {
		return false
	}
	twin := h.groups.bySpan[keyOf(g)]
	if twin == nil {
		return h.goLiveAloneLocked(g)
	}
	// Events that the twin has delivered and this group has not go first.
	if to := min(twin.pos, h.frontierLocked(g.span)); g.pos < to && !h.catchUpLocked(g, to) {
		return false
	}
	if g.pos < twin.pos {
		// The twin begins above the frontier. It may as well begin here, if each of its watchers
		// notes where it begins itself.
		events, _ := h.recentOf(g.span, g.pos, twin.pos)
		for _, w := range twin.members {
			w.from = max(w.from, twin.pos+1)
		}
		twin.pos = g.pos
		for _, e := range events {
			h.addPendingLocked(twin, e)
		}
	}
	h.endLagLocked(g)
	for _, w := range g.members {
		w.from = max(w.from, g.pos+1)
		twin.join(w)
	}
	g.members = nil
	return true
}

// goLiveAloneLocked makes a group the live one of its span, unless too many bytes are pending.
func (h *Hub) goLiveAloneLocked(g *group) bool {
	events, bytes := h.recentOf(g.span, g.pos, keyspace.MaxRevision)
	if h.pendingBytes+bytes > h.cfg.PendingBytes && h.pendingBytes > 0 {
		return false
	}
	h.endLagLocked(g)
	g.live = true
	h.groups.add(g)
	for _, e := range events {
		h.addPendingLocked(g, e)
	}
	h.releaseLocked(g)
	return true
}

// recentOf returns the recent events of the span with revisions in (after, to].
func (h *Hub) recentOf(span keyspace.Span, after, to keyspace.Revision) (events []*event, bytes int64) {
	for e := range h.recent.between(after, to) {
		if span.Contains(e.key()) {
			events, bytes = append(events, e), bytes+e.bytes
		}
	}
	return events, bytes
}

// catchUpLocked delivers recent events up to a revision to a group. Slow members leave a group of
// several; a single one refuses.
func (h *Hub) catchUpLocked(g *group, to keyspace.Revision) bool {
	batch, _ := h.recentOf(g.span, g.pos, to)
	if len(batch) > 0 {
		d := h.newDelivery(batch, g.prev, to)
		if len(g.members) == 1 && !g.members[0].offerLocked(batch, d) {
			return false
		}
		if len(g.members) > 1 {
			h.deliverLocked(g, batch, to, g.pos)
		}
	}
	g.pos = to
	return true
}
