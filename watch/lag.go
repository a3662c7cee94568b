package watch

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// lagState is the state of a group that is not live.
type lagState uint8

const (
	// lagIdle: it waits until its watcher's client has emptied the queue.
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

// Lagging returns how many watchers are not live: they get their events from history.
func (h *Hub) Lagging() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for g := range h.lagGroups {
		n += len(g.members)
	}
	return n
}

// lagLocked queues a group for a reader, once its watcher's queue is empty.
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
	h.run.wakeRead.Set()
}

// shareWithin is how many revisions apart two groups of one span may be to read together.
const shareWithin = 1000

// shareLocked merges a group into a queued one. Each member keeps its position and gets only later events.
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

// roomLocked says whether there is room for what history brings. If slow clients hold it, their
// events are dropped; their watchers read them again.
func (h *Hub) roomLocked() bool {
	if h.queuedBytes < h.cfg.QueuedBytes {
		return true
	}
	now := h.cfg.Clock.Now()
	if now.Sub(h.reclaimed) < tick {
		return false // it would free as little for every caller
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

// reclaimLocked drops the queues of a lagging group. Each of its watchers goes on alone when its
// client asks.
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
