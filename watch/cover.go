package watch

import (
	"bytes"
	"slices"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/router"
)

// coverLocked makes subscriptions cover the span. New ones begin at revision from, at or above the
// log's end. Earlier events are asked for only if a watcher wants them. So a watcher from now on
// needs no answer of a range without a leader, and wakes no range that sleeps.
func (h *Hub) coverLocked(span keyspace.Span, from keyspace.Revision) {
	lo, hi := h.window(span)
	at, open := span.Start, true
	var holes []keyspace.Span
	for _, sub := range h.subs[lo:hi] {
		if bytes.Compare(at, sub.span.Start) < 0 {
			holes = append(holes, keyspace.Span{Start: at, End: sub.span.Start})
		}
		if at, open = sub.span.End, len(sub.span.End) != 0; !open {
			break
		}
	}
	if open && (len(span.End) == 0 || bytes.Compare(at, span.End) < 0) {
		holes = append(holes, keyspace.Span{Start: at, End: span.End})
	}
	for _, hole := range holes {
		h.insertSubscriptionLocked(&subscription{span: hole, opened: from, fed: from, resolved: from})
	}
	if len(holes) > 0 {
		h.run.wakeLocate.Set()
	}
}

// install gives located ranges their subscriptions. It returns true if that located any: the answer may be older than the state here.
func (h *Hub) install(r *running, located []router.Located) (news bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != r {
		return true
	}
	for i := range located {
		news = h.installLocked(&located[i]) || news
	}
	h.retryUnknownLocked()
	h.askLocked(h.cfg.Clock.Now())
	h.changedLocked()
	return news
}

// installLocked replaces the subscriptions that the range overlaps by one for the range. It
// inherits their pending allocations and begins at the lowest of their resolved revisions.
func (h *Hub) installLocked(at *router.Located) bool {
	d := &at.Descriptor
	lo, hi := h.window(d.Span)
	old := slices.Clone(h.subs[lo:hi])
	vacant := false
	for _, o := range old {
		vacant = vacant || o.id == 0
		if o.id != 0 && o.generation >= d.Generation {
			return false
		}
	}
	if !vacant || len(d.Replicas) == 0 {
		return false
	}
	sub := &subscription{
		span: d.Span, id: d.Range, generation: d.Generation, replicas: nodesOf(d), leader: at.Leader,
	}
	h.inheritLocked(sub, old)
	parts := []*subscription{sub}
	var pending []*allocation
	for _, o := range old {
		parts = append(parts, remainders(o, d.Span)...)
		h.removeSubscriptionLocked(o)
		pending = append(pending, h.unassignLocked(o)...)
	}
	for _, p := range parts {
		h.insertSubscriptionLocked(p)
	}
	for _, a := range pending {
		span := h.allocationSpanLocked(a)
		for _, p := range parts {
			if p.span.Overlaps(span) {
				h.assignLocked(a, p)
			}
		}
	}
	h.removeResolvedLocked(pending)
	h.openFeedLocked(sub)
	return true
}

// inheritLocked continues the subscriptions that sub replaces. Their watchers continue where they
// were, so the feed begins at the lowest of their positions. New watchers begin above all of them.
func (h *Hub) inheritLocked(sub *subscription, old []*subscription) {
	covered, again := true, false
	end := sub.span.Start
	sub.fed, sub.resolved, sub.proven = keyspace.MaxRevision, keyspace.MaxRevision, keyspace.MaxRevision
	for _, o := range old {
		sub.opened, sub.prevFrom = max(sub.opened, o.opened), max(sub.prevFrom, o.prevFrom)
		sub.fed, sub.resolved, sub.proven = min(sub.fed, o.fed), min(sub.resolved, o.resolved), min(sub.proven, o.proven)
		again = again || sub.generation <= o.past
		sub.prev, sub.askNow = sub.prev || o.prev, sub.askNow || o.askNow
		covered = covered && bytes.Compare(o.span.Start, end) <= 0
		end = o.span.End
	}
	for _, o := range old {
		if sub.prev && !o.prev {
			sub.prevFrom = max(sub.prevFrom, h.mayLackPrevLocked(o))
		}
	}
	if again || !covered || !(keyspace.Span{Start: sub.span.Start, End: end}).Covers(sub.span) {
		// Events of the parts beside the old subscriptions have not come yet, and no allocation was
		// pending for them. Proof for one half says nothing about the other, where a lock may be
		// pending. If the same range comes again, the proof was for replicas at a position that is
		// gone with the subscription. A later generation has reached it, but others may not have.
		sub.opened, sub.proven = max(sub.opened, sub.fed, h.logEnd), 0
	}
	if mutation.Is(mutation.EventLostAtSplit) {
		sub.fed = max(sub.fed, h.logEnd)
	}
}

// remainders returns subscriptions for the parts of o beside the span.
func remainders(o *subscription, s keyspace.Span) (parts []*subscription) {
	part := func(span keyspace.Span) {
		parts = append(parts, &subscription{
			span: span, opened: o.opened, fed: o.fed, resolved: o.resolved, proven: o.proven, past: max(o.past, o.generation),
			prev: o.prev, prevFrom: o.prevFrom, askNow: o.askNow,
		})
	}
	if bytes.Compare(o.span.Start, s.Start) < 0 {
		part(keyspace.Span{Start: o.span.Start, End: s.Start})
	}
	if len(s.End) != 0 && (len(o.span.End) == 0 || bytes.Compare(s.End, o.span.End) < 0) {
		part(keyspace.Span{Start: s.End, End: o.span.End})
	}
	return parts
}

// dropSubscriptionsLocked removes subscriptions that no group needs any more.
func (h *Hub) dropSubscriptionsLocked() {
	used := map[*subscription]bool{}
	h.eachGroupLocked(func(g *group) {
		lo, hi := h.window(g.span)
		for _, sub := range h.subs[lo:hi] {
			used[sub] = true
		}
	})
	for _, sub := range slices.Clone(h.subs) {
		if !used[sub] {
			h.removeSubscriptionLocked(sub)
			h.removeResolvedLocked(h.unassignLocked(sub))
		}
	}
	h.unused = false
}
