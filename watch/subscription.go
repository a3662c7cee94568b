package watch

import (
	"bytes"
	"slices"
	"sort"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
)

// subscription is a span of which one range's feed tells. While its range is not known, or not
// known any more, it holds the place: what was handed to the span is owed by it.
type subscription struct {
	span keyspace.Span
	// desc is the range's, leader whom it was last led by; the zero desc is none.
	id         keyspace.RangeID
	generation keyspace.Generation
	replicas   []keyspace.NodeID
	leader     keyspace.NodeID
	// stale says that none of the replicas was of use.
	stale bool

	// opened: who has all up to it gets the rest from here: events above it have come, are
	// in recent unless they were trimmed, or will come. fed is up to where the feed was
	// complete; it goes on behind that, which may be below opened. resolved is up to where
	// nothing is owed: where the subscription began, or further by what feed and leaders said.
	opened, fed, resolved keyspace.Revision
	// position is up to where the feed has brought all that was applied. Whoever has applied
	// that has everything up to proven.
	position rangeapi.FeedPosition
	proven   keyspace.Revision
	// past is the generation of the last range that the subscription had, where it has none.
	past   keyspace.Generation
	allocs []*allocation
	// least is the lowest of their first revisions, 0 where it was not looked for since they
	// changed.
	least keyspace.Revision

	// prev says that events come with the version before them; those above prevFrom do.
	prev     bool
	prevFrom keyspace.Revision
	// again says that prev was wanted only after events had come: until a feed has come to
	// position once more, some may be here without, and no leader's answer counts.
	again bool

	// feed is the open feed on node, 0 while there is none; ordered from there on, again
	// at retry after tries failures, and waits for this node's replica to be there. away is a
	// node that is not asked again at first.
	feed         rangeapi.FeedID
	node         keyspace.NodeID
	away         keyspace.NodeID
	tries, waits int
	retry        clock.Time

	// The question to the leader: under way, to be asked now, again at askAt after pauses
	// of askPause, of whom of the replicas.
	asking, askNow bool
	// toAsk says that the subscription is in the hub's queue of those to be asked.
	toAsk    bool
	askAt    clock.Time
	askPause time.Duration
	askTurn  int
	askHint  keyspace.NodeID
	// proof is a leader's answer that the feed has not caught up with: who has all up to
	// position has all up to complete.
	proof struct {
		position rangeapi.FeedPosition
		resolved keyspace.Revision
		at       clock.Time
		leader   keyspace.NodeID
	}
}

// window returns which subscriptions overlap the span: subscriptions[lo:hi].
func (h *Hub) window(s keyspace.Span) (lo, hi int) {
	lo = sort.Search(len(h.subs), func(i int) bool {
		end := h.subs[i].span.End
		return len(end) == 0 || bytes.Compare(end, s.Start) > 0
	})
	hi = lo + sort.Search(len(h.subs)-lo, func(i int) bool {
		return len(s.End) != 0 && bytes.Compare(h.subs[lo+i].span.Start, s.End) >= 0
	})
	return lo, hi
}

// coverLocked makes sure that subscriptions cover the span. New ones tell what comes after the
// revision from, at or above all that the log has told. Of what came before they are
// asked only where somebody wants it: a watcher from now on needs no answer of a range
// that has no leader, and does not wake one that sleeps.
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
		kick(h.run.wakeLocate)
	}
}

// insertSubscriptionLocked puts a subscription where none is.
func (h *Hub) insertSubscriptionLocked(sub *subscription) {
	at := sort.Search(len(h.subs), func(i int) bool { return bytes.Compare(h.subs[i].span.Start, sub.span.Start) >= 0 })
	h.subs = slices.Insert(h.subs, at, sub)
	if sub.id != 0 {
		h.byRange[sub.id] = sub
	}
}

// removeSubscriptionLocked takes a subscription out, with its feed; it goes on owing.
func (h *Hub) removeSubscriptionLocked(sub *subscription) {
	if i := slices.Index(h.subs, sub); i >= 0 {
		h.subs = slices.Delete(h.subs, i, i+1)
	}
	h.detachLocked(sub)
}

// detachLocked makes the subscription one without a range: its span is to be resolved anew.
func (h *Hub) detachLocked(sub *subscription) {
	h.closeFeedLocked(sub)
	if sub.id != 0 && h.byRange[sub.id] == sub {
		delete(h.byRange, sub.id)
	}
	sub.past = max(sub.past, sub.generation)
	sub.id, sub.generation, sub.replicas, sub.leader, sub.away = 0, 0, nil, 0, 0
	sub.proof.resolved = 0
}

// install gives the ranges their subscriptions. It says whether that resolved anything: what was
// located may be older than what is known here.
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

// installLocked puts one range's subscription in the place of those that it overlaps. It inherits
// what they owe, and begins where the last of them was complete.
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

// inheritLocked has a subscription go on for those whose place it takes: who lives on one of
// them gets on from where that one was, so that the feed begins where the least of them
// was; what begins anew begins above all of them.
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
			sub.prevFrom = max(sub.prevFrom, o.fed) // what it brought came without
		}
	}
	if again || !covered || !(keyspace.Span{Start: sub.span.Start, End: end}).Covers(sub.span) {
		// Of what lay beside them nothing has come yet, nor was it owed; and what was proven
		// of a half says nothing of the other one, where a lock may be pending. Of the same
		// range again it was proven of whoever had come to a position that is gone with the subscription:
		// who has a later generation has, and others may not have.
		sub.opened, sub.proven = max(sub.opened, sub.fed, h.logEnd), 0
	}
	if mutation.Is(mutation.EventLostAtSplit) {
		sub.fed = max(sub.fed, h.logEnd)
	}
}

// remainders are what lies of the subscription beside the span, as subscriptions of their own.
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

// dropSubscriptionsLocked takes out the subscriptions that no group needs any more.
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
