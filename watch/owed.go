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
type entry struct {
	first, last keyspace.Revision
	// at is when they became known, the start of what overdue counts.
	at clock.Time
	// one owes, or all of several do.
	one     *leg
	several map[*leg]struct{}
	// record is the hand-out as the log told it, the zero value where several are one entry or
	// nobody tells of whom the revisions are.
	record placement.Allocation

	prev, next *entry
	listed     bool
}

// owers calls f with each leg that owes.
func (e *entry) owers(f func(*leg)) {
	if e.one != nil {
		f(e.one)
	}
	for l := range e.several {
		f(l)
	}
}

func (e *entry) owes(l *leg) bool {
	_, ok := e.several[l]
	return ok || e.one == l
}

func (e *entry) empty() bool { return e.one == nil && len(e.several) == 0 }

func (e *entry) add(l *leg) {
	switch {
	case e.empty():
		e.one = l
	case e.one == l:
	default:
		if e.several == nil {
			e.several = map[*leg]struct{}{}
		}
		if e.one != nil {
			e.several[e.one] = struct{}{}
			e.one = nil
		}
		e.several[l] = struct{}{}
	}
}

func (e *entry) remove(l *leg) {
	if e.one == l {
		e.one = nil
	}
	delete(e.several, l)
}

// owedList holds entries in the order of their first revisions.
type owedList struct{ head, tail *entry }

func (o *owedList) insert(e *entry) {
	after := o.tail
	for after != nil && after.first > e.first {
		after = after.prev
	}
	e.listed = true
	e.prev = after
	if after == nil {
		e.next, o.head = o.head, e
	} else {
		e.next, after.next = after.next, e
	}
	if e.next == nil {
		o.tail = e
	} else {
		e.next.prev = e
	}
}

func (o *owedList) remove(e *entry) {
	if !e.listed {
		return
	}
	if e.prev == nil {
		o.head = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		o.tail = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next, e.listed = nil, nil, false
}

// oweLocked has a leg owe the entry's revisions, unless it has spoken of them.
func (h *Hub) oweLocked(e *entry, l *leg) {
	if l.spoken >= e.last || e.owes(l) {
		return
	}
	if h.addToLast(e, l) {
		return
	}
	e.add(l)
	at, _ := slices.BinarySearchFunc(l.owed, e, func(a, b *entry) int { return int(a.last - b.last) })
	l.owed, l.least = slices.Insert(l.owed, at, e), 0
	if !e.listed {
		h.owed.insert(e)
	}
}

// addToLast has the last entry that the leg owes stand for another one as well, once
// there are many: what lies between is not its own, but it speaks of that all the same.
func (h *Hub) addToLast(e *entry, l *leg) bool {
	if len(l.owed) < maxOwed {
		return false
	}
	tail := l.owed[len(l.owed)-1]
	if tail.one != l || tail.first > e.first || tail.last > e.last {
		return false
	}
	tail.last, tail.record = e.last, placement.Allocation{}
	return true
}

// speakLocked notes that the leg has spoken of all revisions up to rev: whoever has
// applied its mark has them.
func (h *Hub) speakLocked(l *leg, rev keyspace.Revision) {
	l.proven = max(l.proven, rev)
	if rev <= l.spoken {
		return
	}
	l.spoken = rev
	n := 0
	for ; n < len(l.owed) && l.owed[n].last <= rev; n++ {
		e := l.owed[n]
		if e.remove(l); e.empty() {
			h.owed.remove(e)
		}
	}
	if n > 0 {
		l.owed, l.least = slices.Delete(l.owed, 0, n), 0
	}
}

// forgiveLocked takes a leg that is no more out of all entries, and returns them.
func (h *Hub) forgiveLocked(l *leg) []*entry {
	owed := l.owed
	l.owed, l.least = nil, 0
	for _, e := range owed {
		e.remove(l)
	}
	return owed
}

// settleLocked removes the entries that nobody owes any more.
func (h *Hub) settleLocked(entries []*entry) {
	for _, e := range entries {
		if e.empty() {
			h.owed.remove(e)
		}
	}
}

// frontierLocked is the release rule: up to where all that was handed to ranges of the
// span is delivered here or declared void. A leg without a range holds it up as any other
// does, by what it owes.
func (h *Hub) frontierLocked(span keyspace.Span) keyspace.Revision {
	best := h.logEnd
	if len(h.unknown) > 0 {
		best = min(best, h.unknown[0].first-1)
	}
	lo, hi := h.window(span)
	if hi-lo <= fewLegs {
		for _, l := range h.legs[lo:hi] {
			if len(l.owed) > 0 {
				best = min(best, max(l.leastOwed()-1, l.spoken))
			}
		}
		return best
	}
	for e := h.owed.head; e != nil && e.first <= best; e = e.next {
		if spoken := e.spoken(span); spoken < e.last {
			best = min(best, max(e.first-1, spoken))
		}
	}
	return best
}

// releasedLocked says whether everything up to the revision was released, to whoever wants it.
// It may have been where that is not said.
func (h *Hub) releasedLocked(rev keyspace.Revision) bool {
	if h.logEnd < rev || h.owed.head != nil && h.owed.head.first <= rev || len(h.unknown) > 0 && h.unknown[0].first <= rev {
		return false
	}
	for g := range h.waiting {
		if g.pending.len() > 0 && g.pending.first().rev <= rev {
			return false
		}
	}
	return true
}

// fewLegs is how many legs are looked at one by one for a span, instead of all that is
// owed by anybody.
const fewLegs = 16

// spoken is up to where all who overlap the span and owe the entry have spoken, at least
// where that is below the entry. Of many the first one mostly tells.
func (e *entry) spoken(span keyspace.Span) keyspace.Revision {
	if e.one != nil {
		if e.one.span.Overlaps(span) {
			return e.one.spoken
		}
		return e.last
	}
	spoken := e.last
	for l := range e.several {
		if l.spoken < spoken && l.span.Overlaps(span) {
			if spoken = l.spoken; spoken < e.first {
				break
			}
		}
	}
	return spoken
}

// leastOwed returns the first revision that the leg owes; it owes some.
func (l *leg) leastOwed() keyspace.Revision {
	if l.least == 0 {
		l.least = keyspace.MaxRevision
		for _, e := range l.owed {
			l.least = min(l.least, e.first)
		}
	}
	return l.least
}

// takeLog takes a part of the hand-out log.
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
		h.allOweLocked(&entry{first: h.logEnd + 1, last: p.After, at: now})
		h.askLocked(now)
	}
	for i := range p.Records {
		h.recordLocked(&entry{first: p.Records[i].First, last: p.Records[i].Last(), at: now, record: p.Records[i]})
	}
	h.logEnd = max(h.logEnd, p.Last)
	h.changedLocked()
}

// allOweLocked has every leg owe an entry, and asks at once.
func (h *Hub) allOweLocked(e *entry) {
	for _, l := range h.legs {
		h.oweLocked(e, l)
		if e.owes(l) {
			h.askNowLocked(l)
		}
	}
}

// recordLocked finds who owes a hand-out. Where the range is not known it waits, and
// with it everybody.
func (h *Hub) recordLocked(e *entry) {
	if !h.attributeLocked(e) {
		h.unknown = append(h.unknown, e)
		kick(h.run.wakeDescribe)
	}
}

// attributeLocked says whether the owers of the hand-out are known. They are the legs
// of all that the range was at that generation: a range that was split since has
// several heirs, and all must speak.
func (h *Hub) attributeLocked(e *entry) bool {
	l := h.byRange[e.record.Range]
	if l != nil && l.generation == e.record.Generation {
		h.oweLocked(e, l)
		return true
	}
	span, ok := h.cfg.Ranges.SpanOf(e.record.Range, e.record.Generation)
	if !ok {
		return false
	}
	lo, hi := h.window(span)
	for _, l := range h.legs[lo:hi] {
		h.oweLocked(e, l)
	}
	return true
}

// spanOfLocked is where events of the entry's revisions can be: what its range was at that
// generation, or anywhere where that is not known. A leg that stood for more than one range
// has owed what was handed to any of them; of its heirs none is to speak of another's, since
// one that has nothing to tell says so only when it is overdue.
func (h *Hub) spanOfLocked(e *entry) keyspace.Span {
	if e.record.Count > 0 {
		if span, ok := h.cfg.Ranges.SpanOf(e.record.Range, e.record.Generation); ok {
			return span
		}
	}
	return keyspace.Span{}
}

// retryUnknownLocked looks again at hand-outs to ranges that were not known.
func (h *Hub) retryUnknownLocked() {
	h.unknown = slices.DeleteFunc(h.unknown, h.attributeLocked)
}

// giveUpUnknownLocked has all legs owe what nobody can attribute in time: if the range
// is the child of one of theirs, that leg's leader knows.
func (h *Hub) giveUpUnknownLocked(now clock.Time) {
	n := 0
	for ; n < len(h.unknown) && now.Sub(h.unknown[n].at) >= h.cfg.Overdue; n++ {
		if e := h.unknown[n]; !h.attributeLocked(e) {
			h.allOweLocked(e)
		}
	}
	h.unknown = slices.Delete(h.unknown, 0, n)
}

// describe has the map of ranges refreshed while hand-outs wait for it.
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
