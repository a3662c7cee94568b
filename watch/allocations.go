package watch

import (
	"slices"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// entry are consecutive revisions of which its owers must still speak: all of them, up
// to last.
type allocation struct {
	first, last keyspace.Revision
	// at is when they became known, the start of what overdue counts.
	at clock.Time
	// one owes, or all of several do.
	one     *subscription
	several map[*subscription]struct{}
	// record is the allocation as the log told it, the zero value where several are one entry or
	// nobody tells of whom the revisions are.
	record placement.Handout

	prev, next *allocation
	listed     bool
}

// owers calls f with each subscription that owes.
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

// allocationList holds entries in the order of their first revisions.
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

// assignLocked has a subscription owe the entry's revisions, unless it has resolved of them.
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

// extendLast has the last entry that the subscription owes stand for another one as well, once
// there are many: what lies between is not its own, but it speaks of that all the same.
func (h *Hub) extendLast(a *allocation, sub *subscription) bool {
	if len(sub.allocs) < maxAllocations {
		return false
	}
	tail := sub.allocs[len(sub.allocs)-1]
	if tail.one != sub || tail.first > a.first || tail.last > a.last {
		return false
	}
	tail.last, tail.record = a.last, placement.Handout{}
	return true
}

// resolveUpToLocked notes that the subscription has resolved of all revisions up to rev: whoever has
// applied its mark has them.
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

// unassignLocked takes a subscription that is no more out of all entries, and returns them.
func (h *Hub) unassignLocked(sub *subscription) []*allocation {
	removed := sub.allocs
	sub.allocs, sub.least = nil, 0
	for _, a := range removed {
		a.remove(sub)
	}
	return removed
}

// removeResolvedLocked removes the entries that nobody owes any more.
func (h *Hub) removeResolvedLocked(entries []*allocation) {
	for _, a := range entries {
		if a.empty() {
			h.allocs.remove(a)
		}
	}
}

// frontierLocked is the release rule: up to where all that was handed to ranges of the
// span is delivered here or declared void. A subscription without a range holds it up as any other
// does, by what it owes.
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

// releasedLocked says whether everything up to the revision was released, to whoever wants it.
// It may have been where that is not said.
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

// fewSubscriptions is how many subscriptions are looked at one by one for a span, instead of all that is
// owed by anybody.
const fewSubscriptions = 16

// resolved is up to where all who overlap the span and owe the entry have resolved, at least
// where that is below the entry. Of many the first one mostly tells.
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

// firstPending returns the first revision that the subscription owes; it owes some.
func (sub *subscription) firstPending() keyspace.Revision {
	if sub.least == 0 {
		sub.least = keyspace.MaxRevision
		for _, a := range sub.allocs {
			sub.least = min(sub.least, a.first)
		}
	}
	return sub.least
}
