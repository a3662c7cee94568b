package watch

import (
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// askLocked asks the leaders of subscriptions with overdue allocations, and of those to be asked at
// once. It looks at all overdue allocations, so it is too slow to call for each message.
func (h *Hub) askLocked(now clock.Time) {
	// The log is in order: none behind the first that is not overdue is overdue.
	for a := h.allocs.head; a != nil && now.Sub(a.at) >= h.cfg.Overdue; a = a.next {
		a.eachSubscription(func(sub *subscription) {
			if sub.proof.resolved < a.last {
				h.queueAskLocked(sub, now)
			}
		})
	}
	for _, sub := range h.subs {
		if sub.askNow {
			h.queueAskLocked(sub, now)
			if now < sub.askAt {
				h.resumeLocked(sub.askAt)
			}
		}
	}
	h.askNextLocked(now)
}

// askNowLocked asks the subscription's leader as soon as possible.
func (h *Hub) askNowLocked(sub *subscription) {
	sub.askNow = true
	h.queueAskLocked(sub, h.cfg.Clock.Now())
}

func (h *Hub) queueAskLocked(sub *subscription, now clock.Time) {
	if !sub.toAsk && sub.id != 0 && !sub.asking && now >= sub.askAt {
		sub.toAsk = true
		h.toAsk = append(h.toAsk, sub)
	}
}

// askNextLocked asks the next leaders, up to maxAsking at a time.
func (h *Hub) askNextLocked(now clock.Time) {
	for len(h.toAsk) > 0 && h.asking < maxAsking {
		sub := h.toAsk[0]
		h.toAsk[0] = nil
		h.toAsk = h.toAsk[1:]
		sub.toAsk = false
		n := len(sub.allocs)
		sub.askNow = sub.askNow && n > 0
		if n > 0 && sub.id != 0 && !sub.asking && now >= sub.askAt && sub.proof.resolved < sub.allocs[n-1].last {
			h.askLeaderLocked(sub)
		}
	}
}

// askPastLocked asks the leader about events before the subscription began.
func (h *Hub) askPastLocked(sub *subscription) {
	if sub.id != 0 && !sub.asking && h.cfg.Clock.Now() >= sub.askAt && h.asking < maxAsking && sub.proof.resolved < sub.opened {
		h.askLeaderLocked(sub)
	}
}

// askLeaderLocked asks the presumed leader for the feed position behind which the pending
// allocations are resolved.
func (h *Hub) askLeaderLocked(sub *subscription) {
	node := sub.leader
	if sub.askHint != 0 {
		node = sub.askHint
	} else if node == 0 || sub.askTurn > 0 {
		node = sub.replicas[sub.askTurn%len(sub.replicas)]
	}
	q := &rangeapi.ResolvedRequest{Range: sub.id, Generation: sub.generation, Revision: sub.opened}
	if n := len(sub.allocs); n > 0 {
		q.Revision = max(q.Revision, sub.allocs[n-1].last)
	}
	sub.asking, sub.askNow = true, false
	h.asking++
	h.cfg.Metrics.Questions.Inc()
	r := h.run
	h.wg.Go(func() {
		ctx, cancel := clock.WithTimeout(r.ctx, h.cfg.Clock, 2*time.Second)
		defer cancel()
		position, err := h.cfg.Feeds.AwaitResolved(ctx, node, q)
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.run != r {
			return
		}
		h.asking--
		sub.asking = false
		h.answeredLocked(sub, node, q, position, err)
		h.askNextLocked(h.cfg.Clock.Now())
		h.changedLocked()
	})
}

// answeredLocked takes in an answer, unless the subscription has changed since.
func (h *Hub) answeredLocked(sub *subscription, node keyspace.NodeID, q *rangeapi.ResolvedRequest, position rangeapi.FeedPosition, err error) {
	if h.byRange[q.Range] != sub || sub.generation != q.Generation {
		return
	}
	now := h.cfg.Clock.Now()
	if err == nil {
		sub.leader, sub.askHint, sub.askTurn, sub.askPause, sub.askAt = node, 0, 0, 0, 0
		if sub.proof.resolved <= sub.proven || sub.proof.leader != node {
			// An earlier answer stays until the feed reaches it. Otherwise a feed that is asked
			// about again and again would never reach the last answer, nor be found to lag.
			sub.proof.position, sub.proof.resolved, sub.proof.at, sub.proof.leader = position, q.Revision, now, node
		}
		h.applyProofLocked(sub)
		return
	}
	e := kverror.Of(err)
	switch {
	case e.Kind == kverror.WrongRange && hasNewer(e, q):
		h.closeFeedLocked(sub)
		h.movedLocked(sub, e)
		return
	case e.Kind == kverror.NotLeader && e.Leader != 0 && e.Leader != node && sub.askHint == 0:
		sub.askHint = e.Leader
		h.askNowLocked(sub)
		return
	}
	sub.askHint = 0
	sub.askTurn++
	if e.Kind != kverror.NotLeader {
		h.failedLocked(sub, sub.askTurn)
	} else if sub.askTurn%(len(sub.replicas)+1) != 0 {
		h.askNowLocked(sub) // the first one asked may be any replica; a pause follows a whole turn
		return
	}
	sub.askPause = max(firstWait, min(2*sub.askPause, time.Second))
	sub.askAt, sub.askNow = now.Add(sub.askPause), true
	h.resumeLocked(sub.askAt)
}

// hasNewer says whether the refusal names a later generation of the range; otherwise the replica
// lags.
func hasNewer(e *kverror.Error, q *rangeapi.ResolvedRequest) bool {
	return slices.ContainsFunc(e.Descriptors, func(d keyspace.Descriptor) bool {
		return d.Range == q.Range && d.Generation > q.Generation
	})
}

// applyProofLocked applies a leader's answer once the feed has reached its position.
func (h *Hub) applyProofLocked(sub *subscription) {
	if sub.proof.resolved > 0 && !sub.again && sub.position.Reaches(sub.proof.position) {
		h.resolveUpToLocked(sub, sub.proof.resolved)
		sub.proof.resolved = 0
	}
}

// changedLocked follows every change of the frontier: of the log, of a subscription, of pending
// allocations.
func (h *Hub) changedLocked() {
	for g := range h.waiting {
		h.releaseLocked(g)
	}
	for g := range h.parked {
		if h.readableLocked(g) {
			h.lagLocked(g)
		}
	}
	for s := range h.progress {
		s.signal()
	}
}

// readableLocked says whether the group has resolved revisions to read. For revisions before a
// subscription began, it asks the leader first.
func (h *Hub) readableLocked(g *group) bool {
	if to := h.frontierLocked(g.span); to <= g.pos || to < g.least {
		return false
	}
	known := true
	lo, hi := h.window(g.span)
	for _, sub := range h.subs[lo:hi] {
		if g.pos < sub.opened && sub.proven < sub.opened {
			known = false
			h.askPastLocked(sub)
		}
	}
	return known
}
