package watch

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// chooseLocked returns the node that is to feed the subscription: this one if it has a replica,
// which costs nothing, else the leader, else each replica in turn.
func (h *Hub) chooseLocked(sub *subscription) keyspace.NodeID {
	first := slices.Index(sub.replicas, h.cfg.Self)
	near := first >= 0 && sub.away != h.cfg.Self
	switch {
	case sub.tries == 0 && near:
		return h.cfg.Self
	case sub.leader != 0 && (sub.tries == 0 || sub.tries == 1 && near && sub.leader != h.cfg.Self):
		return sub.leader
	}
	return sub.replicas[(first+1+sub.tries)%len(sub.replicas)]
}

// openFeedLocked opens the subscription's feed behind the last revision that a feed resolved.
func (h *Hub) openFeedLocked(sub *subscription) {
	node := h.chooseLocked(sub)
	h.feedID++
	sub.feed, sub.node = h.feedID, node
	k := h.linkLocked(node)
	k.subs[sub.feed] = sub
	k.order(rangeapi.FeedOrder{ID: sub.feed, Range: sub.id, Generation: sub.generation, From: sub.fed + 1, Prev: sub.prev})
	h.cfg.Metrics.FeedsOpened.Inc()
}

// lostFeedLocked handles the end of a feed: another one opens after a pause.
func (h *Hub) lostFeedLocked(sub *subscription, why *kverror.Error) {
	if k := h.links[sub.node]; k != nil {
		delete(k.subs, sub.feed)
	}
	sub.feed, sub.node = 0, 0
	h.cfg.Metrics.FeedsLost.Inc()
	switch why.Kind {
	case kverror.WrongRange:
		h.movedLocked(sub, why)
	case kverror.Compacted:
		h.compactedLocked(sub, why.CompactRevision)
	case kverror.Busy, kverror.RangeNotHere:
		if sub.tries == 0 && sub.away != h.cfg.Self && slices.Contains(sub.replicas, h.cfg.Self) && sub.waits < maxWaits {
			// A split that the leader has applied will be applied here in a moment.
			h.retryLocked(sub, firstWait<<sub.waits)
			sub.waits++
			return
		}
		h.failedFeedLocked(sub)
	default:
		h.failedFeedLocked(sub)
	}
}

// failedFeedLocked has another node feed the subscription, the first time at once.
func (h *Hub) failedFeedLocked(sub *subscription) {
	sub.tries++
	h.failedLocked(sub, sub.tries)
	if sub.tries == 1 {
		h.retryLocked(sub, 0)
		return
	}
	h.retryLocked(sub, min(tick<<min(sub.tries-2, 6), time.Second))
}

// retryLocked opens the subscription's feed after a pause.
func (h *Hub) retryLocked(sub *subscription, pause time.Duration) {
	sub.retry = h.cfg.Clock.Now().Add(pause)
	h.resumeLocked(sub.retry)
}

// compactedLocked handles a subscription whose next events are compacted because it was away for
// too long. It cancels the watchers that have not got them another way, and the subscription goes
// on behind them.
func (h *Hub) compactedLocked(sub *subscription, at keyspace.Revision) {
	h.eachGroupLocked(func(g *group) {
		pos := g.pos
		if g.live {
			pos = max(pos, h.frontierLocked(g.span))
		}
		if g.span.Overlaps(sub.span) && pos < at-1 {
			h.failLocked(g, at)
		}
	})
	sub.opened, sub.fed = max(sub.opened, at-1), max(sub.fed, at-1)
	h.openFeedLocked(sub)
}

// tendLocked does what is due for a subscription.
func (h *Hub) tendLocked(sub *subscription, now clock.Time) {
	switch {
	case sub.id == 0:
	case sub.feed == 0:
		if now < sub.retry {
			h.resumeLocked(sub.retry)
			return
		}
		h.openFeedLocked(sub)
	case sub.proof.resolved > sub.proven && now.Sub(sub.proof.at) >= h.cfg.Overdue && sub.node != sub.proof.leader:
		// The feeding replica lags behind its leader's answer.
		sub.away, sub.leader, sub.tries, sub.proof.at = sub.node, sub.proof.leader, 0, now
		h.closeFeedLocked(sub)
		h.openFeedLocked(sub)
	}
}

// takePartLocked takes in a part of a feed.
func (h *Hub) takePartLocked(sub *subscription, p *rangeapi.FeedPart) {
	if p.Err != nil {
		h.lostFeedLocked(sub, p.Err)
		return
	}
	sub.tries, sub.waits = 0, 0
	for i := range p.Events {
		h.arriveLocked(&p.Events[i])
	}
	sub.again = sub.again && (p.Position == (rangeapi.FeedPosition{}) || !p.Position.Reaches(sub.position))
	if !sub.position.Reaches(p.Position) {
		sub.position = p.Position
	}
	sub.fed = max(sub.fed, p.Resolved)
	if p.Position != (rangeapi.FeedPosition{}) {
		// Without a position nobody could tell which other replica has applied as much, and history
		// is read from any of them.
		h.resolveUpToLocked(sub, p.Resolved)
	}
	h.applyProofLocked(sub)
}

// wantPrevLocked has the feeds of a span bring the version before each event.
func (h *Hub) wantPrevLocked(span keyspace.Span) {
	lo, hi := h.window(span)
	for _, sub := range h.subs[lo:hi] {
		if sub.prev {
			continue
		}
		sub.prev, sub.prevFrom, sub.again = true, h.mayLackPrevLocked(sub), sub.position != (rangeapi.FeedPosition{})
		if sub.feed != 0 {
			h.closeFeedLocked(sub)
			h.openFeedLocked(sub)
		}
	}
}

// mayLackPrevLocked returns a revision of a subscription whose feeds have not brought the version
// before each event. If its feeds bring that from now on, an event above the revision is released
// only with it:
//
//   - The next feed begins behind fed. So it brings the event, perhaps once more.
//   - Until then the event's allocation is pending here, because it is above resolved. An earlier
//     subscription may have resolved further: a range has absorbed a neighbour. What that one had
//     resolved does not become pending again, if the log had told it by then.
//   - A leader's answer for a position where the feed was before does not count until the feed
//     has come there again (again).
func (h *Hub) mayLackPrevLocked(sub *subscription) keyspace.Revision {
	if mutation.Is(mutation.PrevFromFed) {
		return sub.fed
	}
	return max(sub.fed, sub.resolved, h.logEnd)
}

// arriveLocked takes in an event of a feed.
func (h *Hub) arriveLocked(s *rangeapi.Event) {
	e := newEvent(s)
	if !h.recent.add(e) {
		return
	}
	h.groups.each(e.key(), func(g *group) { h.addPendingLocked(g, e) })
	if h.pendingBytes > h.cfg.PendingBytes {
		h.cutLocked()
	}
}

// linkLocked returns the link with the node; it begins one if there is none.
func (h *Hub) linkLocked(node keyspace.NodeID) *link {
	if k := h.links[node]; k != nil {
		return k
	}
	k := &link{node: node, subs: map[rangeapi.FeedID]*subscription{}, wake: wake.New()}
	h.links[node] = k
	r := h.run
	h.wg.Go(func() { h.runLink(r, k) })
	return k
}

// runLink runs until the link's stream ends; then other nodes feed its subscriptions.
func (h *Hub) runLink(r *running, k *link) {
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	err := h.followLink(ctx, r, k)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != r {
		return
	}
	h.linkLostLocked(k, err)
	delete(h.links, k.node)
	for _, sub := range k.subs {
		sub.node = 0
		h.lostFeedLocked(sub, kverror.New(kverror.Unreachable, "feeds of node %s: %v", k.node, err))
	}
	h.changedLocked()
}

// linkWarnEvery bounds how often a lost link is logged as a warning.
const linkWarnEvery = 10 * time.Second

func (h *Hub) linkLostLocked(k *link, err error) {
	h.cfg.Metrics.LinksLost.Inc()
	level := zap.DebugLevel
	if now := h.cfg.Clock.Now(); h.linkWarned == 0 || now.Sub(h.linkWarned) >= linkWarnEvery {
		h.linkWarned, level = now, zap.WarnLevel
	}
	h.cfg.Logger.Log(level, "stream of feeds ended", zap.Stringer("peer", k.node), zap.Int("feeds", len(k.subs)), zap.Error(err))
}

func (h *Hub) followLink(ctx context.Context, r *running, k *link) error {
	s, err := h.cfg.Feeds.OpenFeeds(ctx, k.node)
	if err != nil {
		return err
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(ctx)
	var orders sync.WaitGroup
	orders.Go(func() {
		defer cancel()
		if err := h.sendOrders(ctx, k, s); ctx.Err() == nil {
			h.cfg.Logger.Debug("order feeds", zap.Stringer("peer", k.node), zap.Error(err))
		}
	})
	defer orders.Wait()
	defer cancel()
	for {
		ps, err := s.Recv(ctx)
		if err != nil {
			return err
		}
		h.mu.Lock()
		if h.run != r {
			h.mu.Unlock()
			return ctx.Err()
		}
		for i := range ps {
			if sub := k.subs[ps[i].ID]; sub != nil && sub.feed == ps[i].ID {
				h.takePartLocked(sub, &ps[i])
			}
		}
		h.changedLocked()
		h.mu.Unlock()
	}
}

func (h *Hub) sendOrders(ctx context.Context, k *link, s FeedStream) error {
	for {
		h.mu.Lock()
		orders := k.orders
		k.orders = nil
		h.mu.Unlock()
		if len(orders) > 0 {
			if err := s.Order(ctx, orders); err != nil {
				return err
			}
			continue
		}
		select {
		case <-k.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
