package watch

import (
	"slices"
	"time"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// addPendingLocked gives a live group an event, unless it has had it.
func (h *Hub) addPendingLocked(g *group, e *event) {
	if e.rev <= g.pos {
		return
	}
	if twin := g.pending.insert(e); twin != nil {
		if twin.whole == nil {
			twin.whole = e.whole // the event came again with the version before
		}
		return
	}
	g.bytes += e.bytes
	h.pendingBytes += e.bytes
	h.waiting[g] = struct{}{}
}

// Each further member of a group costs a release one message, which takes a few microseconds on
// both sides however many events it has. So a group pauses after a release for ten times as long as
// its messages take. Under load events leave in few messages, and the processors are free for the
// writes. The first event after a pause leaves at once. Few members need no pause.
const (
	pauseEach  = 30 * time.Microsecond
	pauseLeast = time.Millisecond
	pauseMost  = 25 * time.Millisecond
)

// pace returns the pause of a group with so many members.
func pace(members int) time.Duration {
	if pause := time.Duration(members) * pauseEach; pause >= pauseLeast {
		return min(pause, pauseMost)
	}
	return 0
}

// pausesLocked says whether the group's next release has to wait, and schedules it then. Otherwise
// the next pause begins.
func (h *Hub) pausesLocked(g *group) bool {
	pause := pace(len(g.members))
	if pause == 0 {
		return false
	}
	now := h.cfg.Clock.Now()
	if now < g.paused {
		h.resumeLocked(g.paused)
		return true
	}
	g.paused = now.Add(pause)
	return false
}

// releaseLocked delivers the events up to the frontier.
func (h *Hub) releaseLocked(g *group) {
	frontier := h.frontierLocked(g.span)
	if mutation.Is(mutation.ReleasedTooEarly) && g.pending.len() > 0 {
		frontier = max(frontier, g.pending.last().rev)
	}
	if g.pending.len() == 0 || g.pending.first().rev > frontier || h.pausesLocked(g) {
		return
	}
	batch := g.pending.takeUpTo(frontier)
	for _, e := range batch {
		g.bytes -= e.bytes
		h.pendingBytes -= e.bytes
	}
	if g.pending.len() == 0 {
		delete(h.waiting, g)
	}
	pos := g.pos
	g.pos = frontier
	h.deliverLocked(g, batch, frontier, pos)
}

// deliverLocked queues a batch for all members of a group, whose position goes from before to pos.
// A member whose client is too slow leaves the group at the revision below the batch: what was not
// delivered below it is void.
func (h *Hub) deliverLocked(g *group, batch []*event, pos, before keyspace.Revision) {
	before = max(before, batch[0].rev-1)
	shared := h.newDelivery(batch, g.prev, pos)
	if len(g.members) > 1 {
		shared.of.share(shared.events)
	}
	for _, w := range slices.Clone(g.members) {
		if !w.offerLocked(batch, shared) {
			h.cfg.Metrics.Slow.Inc()
			w.past = true
			h.leaveLocked(w)
			h.lagLocked(h.lagBehindLocked(w, before))
		}
	}
}

// cutLocked sends the groups with the most pending bytes to history, until the others fit.
func (h *Hub) cutLocked() {
	for h.pendingBytes > h.cfg.PendingBytes {
		var most *group
		for g := range h.waiting {
			if most == nil || g.bytes > most.bytes {
				most = g
			}
		}
		if most == nil {
			return
		}
		h.cfg.Metrics.Cut.Inc()
		// The group may have been idle for long, and must not ask for what is compacted by now.
		most.pos = max(most.pos, min(h.frontierLocked(most.span), most.pending.first().rev-1))
		h.groups.remove(most)
		h.dropPendingLocked(most)
		most.live = false
		h.lagGroups[most] = struct{}{}
		h.lagLocked(most)
	}
}

// failLocked cancels the members of a group that want compacted events. The others begin later and
// go on behind them.
func (h *Hub) failLocked(g *group, at keyspace.Revision) {
	for _, w := range slices.Clone(g.members) {
		if w.from < at {
			h.leaveLocked(w)
			w.cancelLocked(at)
		}
	}
	g.pos = max(g.pos, at-1)
}

// tooLargeLocked cancels the members of a group that want a revision beyond the bound. The others
// begin later and go on behind it.
func (h *Hub) tooLargeLocked(g *group, rev keyspace.Revision) {
	for _, w := range slices.Clone(g.members) {
		if w.from <= rev {
			h.leaveLocked(w)
			w.tooLarge = rev
			w.readyLocked()
		}
	}
	g.pos = max(g.pos, rev)
}
