package watch

import (
	"bytes"
	"slices"
	"sort"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// subscription is a span whose events one range's feed tells. It may have no range for a while;
// allocations of the span are pending at it all the time.
type subscription struct {
	span keyspace.Span
	// The range, and the node that led it last. id is 0 while there is no range.
	id         keyspace.RangeID
	generation keyspace.Generation
	replicas   []keyspace.NodeID
	leader     keyspace.NodeID
	// stale says that all known replicas have failed.
	stale bool

	// A watcher that has everything up to opened gets the rest from here: higher events have come
	// and are in recent unless they were trimmed, or they will come. fed is the last revision that
	// a feed resolved. The next feed begins behind it, which may be below opened. No allocation at
	// or below resolved is pending: it begins at the subscription's start, and feeds and leaders
	// raise it.
	opened, fed, resolved keyspace.Revision
	// The feed has brought everything up to position. A replica at that position has everything up
	// to proven.
	position rangeapi.FeedPosition
	proven   keyspace.Revision
	// past is the generation of the last range, if there is none now.
	past   keyspace.Generation
	allocs []*allocation
	// least is the lowest of their first revisions, or 0 if it has to be computed.
	least keyspace.Revision

	// prev says that events come with the version before; those above prevFrom have it.
	prev     bool
	prevFrom keyspace.Revision
	// again says that prev was set after events had come. Until the feed has come to position once
	// more, some events may lack the version before, and no leader's answer counts.
	again bool

	// feed is the open feed from node, or 0. The next one opens at retry, after tries failures.
	// waits counts the pauses for this node's replica. away is a node to avoid at first.
	feed         rangeapi.FeedID
	node         keyspace.NodeID
	away         keyspace.NodeID
	tries, waits int
	retry        clock.Time

	// The request to the leader: asking while it is under way; askNow if it is to be sent at once.
	// It is repeated at askAt, after a pause of askPause, to replica number askTurn or to askHint.
	asking, askNow bool
	// toAsk says that the subscription is in the hub's toAsk.
	toAsk    bool
	askAt    clock.Time
	askPause time.Duration
	askTurn  int
	askHint  keyspace.NodeID
	// proof is a leader's answer that the feed has not reached: a replica at position has
	// everything up to resolved.
	proof struct {
		position rangeapi.FeedPosition
		resolved keyspace.Revision
		at       clock.Time
		leader   keyspace.NodeID
	}
}

// window returns which subscriptions overlap the span: h.subs[lo:hi].
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

// insertSubscriptionLocked adds a subscription that overlaps no other.
func (h *Hub) insertSubscriptionLocked(sub *subscription) {
	at := sort.Search(len(h.subs), func(i int) bool { return bytes.Compare(h.subs[i].span.Start, sub.span.Start) >= 0 })
	h.subs = slices.Insert(h.subs, at, sub)
	if sub.id != 0 {
		h.byRange[sub.id] = sub
	}
}

// removeSubscriptionLocked removes a subscription and its feed. Its allocations stay pending.
func (h *Hub) removeSubscriptionLocked(sub *subscription) {
	if i := slices.Index(h.subs, sub); i >= 0 {
		h.subs = slices.Delete(h.subs, i, i+1)
	}
	h.detachLocked(sub)
}

// detachLocked takes the range from the subscription; its span has to be located anew.
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

// movedLocked has the ranges located that the subscription's range has become.
func (h *Hub) movedLocked(sub *subscription, why *kverror.Error) {
	h.cfg.Ranges.Learn(why.Descriptors...)
	h.detachLocked(sub)
	h.run.wakeLocate.Set()
}

// The first pause before this node's replica is tried again, or a leader is asked again. Each pause
// is twice the one before.
const (
	firstWait = 2 * time.Millisecond
	maxWaits  = 4
)

// failedLocked counts a failure. When all replicas have failed, they are located anew.
func (h *Hub) failedLocked(sub *subscription, turns int) {
	if turns%len(sub.replicas) == 0 {
		sub.stale = true
		h.run.wakeLocate.Set()
	}
}

// nodesOf returns the nodes of the range's replicas.
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
	wake   wake.Signal
}

// order queues an order.
func (k *link) order(o rangeapi.FeedOrder) {
	k.orders = append(k.orders, o)
	k.wake.Set()
}
