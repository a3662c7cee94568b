package watch

import (
	"slices"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
)

// allocation is consecutive revisions, up to last, that are pending at some subscriptions.
type allocation struct {
	first, last keyspace.Revision
	// at is when this node heard of it; Overdue counts from there.
	at clock.Time
	// It is pending at one, or at all of several.
	one     *subscription
	several map[*subscription]struct{}
	// record is what the log said. It is the zero value if the allocation stands for several, or if
	// nobody knows its ranges.
	record sequencer.Allocation

	prev, next *allocation
	listed     bool
}

// eachSubscription calls f with each subscription at which the allocation is pending.
func (a *allocation) eachSubscription(f func(*subscription)) {
	if a.one != nil {
		f(a.one)
	}
	for sub := range a.several {
		f(sub)
	}
}

func (a *allocation) pendingAt(sub *subscription) bool {
	_, ok := a.several[sub]
	return ok || a.one == sub
}

func (a *allocation) empty() bool { return a.one == nil && len(a.several) == 0 }

func (a *allocation) add(sub *subscription) {
	switch {
	case a.empty():
		a.one = sub
	case a.one == sub:
	default:
		if a.several == nil {
			a.several = map[*subscription]struct{}{}
		}
		if a.one != nil {
			a.several[a.one] = struct{}{}
			a.one = nil
		}
		a.several[sub] = struct{}{}
	}
}

func (a *allocation) remove(sub *subscription) {
	if a.one == sub {
		a.one = nil
	}
	delete(a.several, sub)
}

// allocationList holds allocations in the order of their first revisions.
type allocationList struct{ head, tail *allocation }

func (o *allocationList) insert(a *allocation) {
	after := o.tail
	for after != nil && after.first > a.first {
		after = after.prev
	}
	a.listed = true
	a.prev = after
	if after == nil {
		a.next, o.head = o.head, a
	} else {
		a.next, after.next = after.next, a
	}
	if a.next == nil {
		o.tail = a
	} else {
		a.next.prev = a
	}
}

func (o *allocationList) remove(a *allocation) {
	if !a.listed {
		return
	}
	if a.prev == nil {
		o.head = a.next
	} else {
		a.prev.next = a.next
	}
	if a.next == nil {
		o.tail = a.prev
	} else {
		a.next.prev = a.prev
	}
	a.prev, a.next, a.listed = nil, nil, false
}

// assignLocked makes the allocation pending at the subscription, unless that has resolved it.
func (h *Hub) assignLocked(a *allocation, sub *subscription) {
	if sub.resolved >= a.last || a.pendingAt(sub) {
		return
	}
	if h.extendLast(a, sub) {
		return
	}
	a.add(sub)
	at, _ := slices.BinarySearchFunc(sub.allocs, a, func(x, y *allocation) int { return int(x.last - y.last) })
	sub.allocs, sub.least = slices.Insert(sub.allocs, at, a), 0
	if !a.listed {
		h.allocs.insert(a)
	}
}

// extendLast has the last allocation of a subscription with very many absorb another one. The
// revisions between are not the subscription's own, but its resolved revision passes them all the
// same.
func (h *Hub) extendLast(a *allocation, sub *subscription) bool {
	if len(sub.allocs) < maxAllocations {
		return false
	}
	tail := sub.allocs[len(sub.allocs)-1]
	if tail.one != sub || tail.first > a.first || tail.last > a.last {
		return false
	}
	tail.last, tail.record = a.last, sequencer.Allocation{}
	return true
}

// resolveUpToLocked raises the subscription's resolved revision: a replica at its position has
// everything up to rev.
func (h *Hub) resolveUpToLocked(sub *subscription, rev keyspace.Revision) {
	sub.proven = max(sub.proven, rev)
	if rev <= sub.resolved {
		return
	}
	sub.resolved = rev
	n := 0
	for ; n < len(sub.allocs) && sub.allocs[n].last <= rev; n++ {
		a := sub.allocs[n]
		if a.remove(sub); a.empty() {
			h.allocs.remove(a)
		}
	}
	if n > 0 {
		sub.allocs, sub.least = slices.Delete(sub.allocs, 0, n), 0
	}
}

// unassignLocked removes an ended subscription from all its allocations, and returns them.
func (h *Hub) unassignLocked(sub *subscription) []*allocation {
	removed := sub.allocs
	sub.allocs, sub.least = nil, 0
	for _, a := range removed {
		a.remove(sub)
	}
	return removed
}

// removeResolvedLocked removes the allocations that are pending nowhere.
func (h *Hub) removeResolvedLocked(entries []*allocation) {
	for _, a := range entries {
		if a.empty() {
			h.allocs.remove(a)
		}
	}
}

// frontierLocked is the release rule. It returns the revision up to which all allocations of the
// span are delivered here or void. A subscription without a range holds it back like any other.
func (h *Hub) frontierLocked(span keyspace.Span) keyspace.Revision {
	best := h.logEnd
	if len(h.unknown) > 0 {
		best = min(best, h.unknown[0].first-1)
	}
	lo, hi := h.window(span)
	if hi-lo <= fewSubscriptions {
		for _, sub := range h.subs[lo:hi] {
			if len(sub.allocs) > 0 {
				best = min(best, max(sub.firstPending()-1, sub.resolved))
			}
		}
		return best
	}
	for a := h.allocs.head; a != nil && a.first <= best; a = a.next {
		if resolved := a.resolved(span); resolved < a.last {
			best = min(best, max(a.first-1, resolved))
		}
	}
	return best
}

// releasedLocked says whether everything up to the revision was released to all watchers. It may
// return false although it was.
func (h *Hub) releasedLocked(rev keyspace.Revision) bool {
	if h.logEnd < rev || h.allocs.head != nil && h.allocs.head.first <= rev || len(h.unknown) > 0 && h.unknown[0].first <= rev {
		return false
	}
	for g := range h.waiting {
		if g.pending.len() > 0 && g.pending.first().rev <= rev {
			return false
		}
	}
	return true
}

// fewSubscriptions is up to how many subscriptions of a span are looked at one by one, instead of
// all pending allocations.
const fewSubscriptions = 16

// resolved returns the lowest resolved revision of the subscriptions of the span at which the
// allocation is pending, but at most its last. Below its first one any will do, so mostly the first
// subscription decides.
func (a *allocation) resolved(span keyspace.Span) keyspace.Revision {
	if a.one != nil {
		if a.one.span.Overlaps(span) {
			return a.one.resolved
		}
		return a.last
	}
	resolved := a.last
	for sub := range a.several {
		if sub.resolved < resolved && sub.span.Overlaps(span) {
			if resolved = sub.resolved; resolved < a.first {
				break
			}
		}
	}
	return resolved
}

// firstPending returns the first revision that is pending at the subscription, which must have one.
func (sub *subscription) firstPending() keyspace.Revision {
	if sub.least == 0 {
		sub.least = keyspace.MaxRevision
		for _, a := range sub.allocs {
			sub.least = min(sub.least, a.first)
		}
	}
	return sub.least
}
