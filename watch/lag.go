package watch

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// lagState is where a group that is not live is.
type lagState uint8

const (
	// lagIdle: it waits until its watcher's client has taken what is queued.
	lagIdle lagState = iota
	lagQueued
	lagReading
	lagParked
)

// lagBehindLocked gives a watcher that has everything up to pos a group of its own.
func (h *Hub) lagBehindLocked(w *Watcher, pos keyspace.Revision) *group {
	g := &group{span: w.req.Span, prev: w.req.Prev, pos: pos}
	g.join(w)
	h.lagGroups[g] = struct{}{}
	return g
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

// lagLocked queues a group for a reader, once its watcher's client has taken all.
func (h *Hub) lagLocked(g *group) {
	if _, lags := h.lagGroups[g]; !lags || g.state == lagQueued || g.state == lagReading {
		return
	}
	delete(h.parked, g)
	g.state = lagIdle
	if len(g.members) == 1 && len(g.members[0].queue) > 0 {
		return
	}
	if other := h.sharing[keyOf(g)]; other != nil && max(other.pos-g.pos, g.pos-other.pos) <= shareWithin {
		h.shareLocked(other, g)
		return
	}
	g.state = lagQueued
	h.sharing[keyOf(g)] = g
	h.lagging = append(h.lagging, g)
	kick(h.run.wakeRead)
}

// shareWithin is how many revisions a watcher waits for another one of its span, to read
// what follows only once for both.
const shareWithin = 1000

// shareLocked has the watchers of a group read with those of one that is queued. Who has
// had more gets what is above that.
func (h *Hub) shareLocked(queued, g *group) {
	for _, o := range [2]*group{queued, g} {
		for _, w := range o.members {
			w.from = max(w.from, o.pos+1)
		}
	}
	h.endLagLocked(g)
	for _, w := range g.members {
		queued.join(w)
	}
	g.members = nil
	queued.pos, queued.least = min(queued.pos, g.pos), max(queued.least, g.least)
	h.cfg.Metrics.Shared.Inc()
}

// goLiveLocked makes a group live if everything above its position that has come is
// still here.
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
	// What the twin has delivered and this group has not goes first.
	if to := min(twin.pos, h.frontierLocked(g.span)); g.pos < to && !h.catchUpLocked(g, to) {
		return false
	}
	if g.pos < twin.pos {
		// The twin begins later than what may be released: it may as well begin here, if
		// each of its watchers knows where it begins itself.
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

// goLiveAloneLocked makes a group the live one of its span, unless too much waits.
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

// catchUpLocked delivers recent events up to a revision to the members of a group. Of
// several, those whose clients are too slow leave it; one alone stays as it is.
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

// roomLocked says whether there is room for what history brings. Where clients hold it
// that take nothing, it takes their events back: whoever asks for them reads them again.
func (h *Hub) roomLocked() bool {
	if h.queuedBytes < h.cfg.QueuedBytes {
		return true
	}
	now := h.cfg.Clock.Now()
	if now.Sub(h.reclaimed) < tick {
		return false // it would find as little for each of those who wait
	}
	h.reclaimed = now
	for g := range h.lagGroups {
		if h.queuedBytes < h.cfg.QueuedBytes/2 {
			break
		}
		if g.state != lagReading {
			h.reclaimLocked(g)
		}
	}
	return h.queuedBytes < h.cfg.QueuedBytes
}

// reclaimLocked takes back what waits for the clients of a group that lags, each of whom
// goes on alone when it comes for it.
func (h *Hub) reclaimLocked(g *group) {
	for _, w := range slices.Clone(g.members) {
		if len(w.queue) == 0 {
			continue
		}
		pos := keyspace.Revision(w.queue[0].events[0].GetKv().GetModRevision()) - 1
		w.forgetLocked()
		w.from = pos + 1
		if len(g.members) == 1 && g.state == lagIdle {
			g.pos = min(g.pos, pos)
			return
		}
		h.leaveLocked(w)
		h.lagBehindLocked(w, pos)
	}
}
