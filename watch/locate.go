package watch

import (
	"slices"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/router"
)

// locateRanges finds the range of each subscription that has none, and the replicas of ranges that
// have moved, until the run ends.
func (h *Hub) locateRanges(r *running) {
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-r.wakeLocate:
		}
		h.renew(r)
		pause := tick / 10
		for turn := 0; ; turn++ {
			spans := h.unlocated(r)
			if len(spans) == 0 {
				break
			}
			if h.locateSome(r, spans, turn) {
				pause = tick / 10
				continue
			}
			h.refresh(r)
			if clock.Sleep(r.ctx, h.cfg.Clock, pause) != nil {
				return
			}
			pause = min(2*pause, 4*tick)
		}
	}
}

// locateSome looks for the ranges of spans until one cannot be located. Each turn begins with
// another span, so that none blocks the others. It returns true if it found any.
func (h *Hub) locateSome(r *running, spans []keyspace.Span, turn int) (news bool) {
	for i := range spans {
		located, ok := h.locate(r, spans[(turn+i)%len(spans)])
		if !ok {
			return news
		}
		news = h.install(r, located) || news
	}
	return news
}

func (h *Hub) locate(r *running, span keyspace.Span) (located []router.Located, ok bool) {
	ctx, cancel := clock.WithTimeout(r.ctx, h.cfg.Clock, locateTimeout)
	defer cancel()
	located, err := h.cfg.Ranges.Locate(ctx, span)
	if err != nil {
		h.cfg.Logger.Debug("locate the ranges of a span", zap.Stringer("span", span), zap.Error(err))
	}
	return located, err == nil
}

func (h *Hub) unlocated(r *running) (spans []keyspace.Span) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != r {
		return nil
	}
	for _, sub := range h.subs {
		if sub.id == 0 {
			spans = append(spans, sub.span)
		}
	}
	return spans
}

// renew finds the present replicas of stale subscriptions.
func (h *Hub) renew(r *running) {
	var spans []keyspace.Span
	h.mu.Lock()
	if h.run == r {
		for _, sub := range h.subs {
			if sub.stale {
				sub.stale = false
				spans = append(spans, sub.span)
			}
		}
	}
	h.mu.Unlock()
	if len(spans) == 0 {
		return
	}
	h.refresh(r)
	for _, span := range spans {
		located, ok := h.locate(r, span)
		if !ok {
			return // the next failures ask again
		}
		h.mu.Lock()
		if h.run == r {
			for i := range located {
				h.renewLocked(&located[i])
			}
		}
		h.mu.Unlock()
	}
}

// renewLocked gives a subscription the present replicas of its range. Subscriptions in the place of
// a later range are detached.
func (h *Hub) renewLocked(at *router.Located) {
	d := &at.Descriptor
	if sub := h.byRange[d.Range]; sub != nil && sub.generation == d.Generation {
		if now := nodesOf(d); len(now) > 0 && !slices.Equal(now, sub.replicas) {
			sub.replicas, sub.leader, sub.away = now, at.Leader, 0
			sub.tries, sub.askTurn, sub.askHint = 0, 0, 0
		}
		return
	}
	lo, hi := h.window(d.Span)
	for _, sub := range h.subs[lo:hi] {
		if sub.id != 0 && sub.generation < d.Generation {
			h.detachLocked(sub)
			h.run.wakeLocate.Set()
		}
	}
}
