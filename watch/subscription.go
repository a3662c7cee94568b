package watch

import (
	"bytes"
	"slices"
	"sort"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
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

func (h *Hub) closeFeedLocked(sub *subscription) {
	if sub.feed == 0 {
		return
	}
	if k := h.links[sub.node]; k != nil {
		delete(k.subs, sub.feed)
		k.order(rangeapi.FeedOrder{ID: sub.feed, Close: true})
	}
	sub.feed, sub.node = 0, 0
}

// movedLocked looks for the ranges that the subscription's has become.
func (h *Hub) movedLocked(sub *subscription, why *kverror.Error) {
	h.cfg.Ranges.Learn(why.Descriptors...)
	h.detachLocked(sub)
	kick(h.run.wakeLocate)
}

// The first of the pauses before this node's replica is tried again, or a leader is asked,
// of which each is twice the one before.
const (
	firstWait = 2 * time.Millisecond
	maxWaits  = 4
)

// failedLocked counts a failure at a subscription of which all replicas had their turn: who they
// are is asked anew.
func (h *Hub) failedLocked(sub *subscription, turns int) {
	if turns%len(sub.replicas) == 0 {
		sub.stale = true
		kick(h.run.wakeLocate)
	}
}

// nodesOf returns where the range has its replicas.
func nodesOf(d *keyspace.Descriptor) (nodes []keyspace.NodeID) {
	for _, r := range d.Replicas {
		nodes = append(nodes, r.Node)
	}
	return nodes
}

// link is the stream of feeds from one node.
type link struct {
	node keyspace.NodeID
	// Guarded by the hub's mu.
	subs   map[rangeapi.FeedID]*subscription
	orders []rangeapi.FeedOrder
	wake   chan struct{}
}

// order queues an order.
func (k *link) order(o rangeapi.FeedOrder) {
	k.orders = append(k.orders, o)
	kick(k.wake)
}
