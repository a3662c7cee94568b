package watch

import (
	"slices"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
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
	record placement.Allocation

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
	tail.last, tail.record = a.last, placement.Allocation{}
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

// takeLog takes a part of the allocation log.
func (h *Hub) takeLog(r *running, p *placement.LogPart) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != r {
		return
	}
	now := h.cfg.Clock.Now()
	if p.After > h.logEnd && !mutation.Is(mutation.HandOutsIgnored) {
		// Nobody tells who got these: an earlier sequencer handed them out, or the log has
		// run away. Every range is asked once (trap 80).
		h.cfg.Metrics.Gaps.Inc()
		h.assignAllLocked(&allocation{first: h.logEnd + 1, last: p.After, at: now})
		h.askLocked(now)
	}
	for i := range p.Records {
		h.addAllocationLocked(&allocation{first: p.Records[i].First, last: p.Records[i].Last(), at: now, record: p.Records[i]})
	}
	h.logEnd = max(h.logEnd, p.Last)
	h.changedLocked()
}

// assignAllLocked has every subscription owe an entry, and asks at once.
func (h *Hub) assignAllLocked(a *allocation) {
	for _, sub := range h.subs {
		h.assignLocked(a, sub)
		if a.pendingAt(sub) {
			h.askNowLocked(sub)
		}
	}
}

// addAllocationLocked finds who owes a allocation. Where the range is not known it waits, and
// with it everybody.
func (h *Hub) addAllocationLocked(a *allocation) {
	if !h.attributeLocked(a) {
		h.unknown = append(h.unknown, a)
		kick(h.run.wakeDescribe)
	}
}

// attributeLocked says whether the owers of the allocation are known. They are the subscriptions
// of all that the range was at that generation: a range that was split since has
// several heirs, and all must speak.
func (h *Hub) attributeLocked(a *allocation) bool {
	sub := h.byRange[a.record.Range]
	if sub != nil && sub.generation == a.record.Generation {
		h.assignLocked(a, sub)
		return true
	}
	span, ok := h.cfg.Ranges.SpanOf(a.record.Range, a.record.Generation)
	if !ok {
		return false
	}
	lo, hi := h.window(span)
	for _, sub := range h.subs[lo:hi] {
		h.assignLocked(a, sub)
	}
	return true
}

// allocationSpanLocked is where events of the entry's revisions can be: what its range was at that
// generation, or anywhere where that is not known. A subscription that stood for more than one range
// has owed what was handed to any of them; of its heirs none is to speak of another's, since
// one that has nothing to tell says so only when it is overdue.
func (h *Hub) allocationSpanLocked(a *allocation) keyspace.Span {
	if a.record.Count > 0 {
		if span, ok := h.cfg.Ranges.SpanOf(a.record.Range, a.record.Generation); ok {
			return span
		}
	}
	return keyspace.Span{}
}

// retryUnknownLocked looks again at allocations to ranges that were not known.
func (h *Hub) retryUnknownLocked() {
	h.unknown = slices.DeleteFunc(h.unknown, h.attributeLocked)
}

// giveUpUnknownLocked has all subscriptions owe what nobody can attribute in time: if the range
// is the child of one of theirs, that subscription's leader knows.
func (h *Hub) giveUpUnknownLocked(now clock.Time) {
	n := 0
	for ; n < len(h.unknown) && now.Sub(h.unknown[n].at) >= h.cfg.Overdue; n++ {
		if a := h.unknown[n]; !h.attributeLocked(a) {
			h.assignAllLocked(a)
		}
	}
	h.unknown = slices.Delete(h.unknown, 0, n)
}

// describe has the map of ranges refreshed while allocations wait for it.
func (h *Hub) describe(r *running) {
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-r.wakeDescribe:
		}
		for pause := tick / 10; ; pause = min(2*pause, 4*tick) {
			h.mu.Lock()
			if h.run == r {
				h.retryUnknownLocked()
				h.changedLocked()
			}
			none := len(h.unknown) == 0 || h.run != r
			h.mu.Unlock()
			if none {
				break
			}
			h.refresh(r) // what it brought is looked for next
			if clock.Sleep(r.ctx, h.cfg.Clock, pause) != nil {
				return
			}
		}
	}
}
