package watch

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
)

// refresh loads the range map from placement. After a failure its callers try again.
func (h *Hub) refresh(r *running) {
	ctx, cancel := clock.WithTimeout(r.ctx, h.cfg.Clock, locateTimeout)
	defer cancel()
	if err := h.cfg.Ranges.Refresh(ctx); err != nil {
		h.cfg.Logger.Debug("refresh the map of ranges", zap.Error(err))
	}
}

// locateTimeout bounds one request to the range map.
const locateTimeout = time.Second

// takeLog takes in a part of the allocation log.
func (h *Hub) takeLog(r *running, p *sequencer.LogPart) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != r {
		return
	}
	now := h.cfg.Clock.Now()
	if p.After > h.logEnd && !mutation.Is(mutation.AllocationsIgnored) {
		// Nobody knows the ranges of these: an earlier sequencer allocated them, or this node fell
		// behind the log. Every range is asked once (trap 80).
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

// assignAllLocked makes an allocation pending at every subscription and asks their leaders.
func (h *Hub) assignAllLocked(a *allocation) {
	for _, sub := range h.subs {
		h.assignLocked(a, sub)
		if a.pendingAt(sub) {
			h.askNowLocked(sub)
		}
	}
}

// addAllocationLocked assigns an allocation to its subscriptions. If its range is unknown, the
// allocation waits, and everybody with it.
func (h *Hub) addAllocationLocked(a *allocation) {
	if !h.attributeLocked(a) {
		h.unknown = append(h.unknown, a)
		h.run.wakeDescribe.Set()
	}
}

// attributeLocked assigns an allocation to the span of its range at that
// generation, and returns false if the span is unknown. A range that was split since has several heirs, and all must pass it.
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

// allocationSpanLocked returns the span of an allocation's events: its range's at that generation,
// or all keys if that is unknown. A subscription for several ranges has the allocations of all of
// them. An heir must not take over those of another, because a range without events declares them
// void only when it is asked.
func (h *Hub) allocationSpanLocked(a *allocation) keyspace.Span {
	if a.record.Count > 0 {
		if span, ok := h.cfg.Ranges.SpanOf(a.record.Range, a.record.Generation); ok {
			return span
		}
	}
	return keyspace.Span{}
}

// retryUnknownLocked looks again for the ranges of unknown allocations.
func (h *Hub) retryUnknownLocked() {
	h.unknown = slices.DeleteFunc(h.unknown, h.attributeLocked)
}

// giveUpUnknownLocked makes an overdue unknown allocation pending at all subscriptions. If the
// range is a child of one of theirs, that subscription's leader knows it.
func (h *Hub) giveUpUnknownLocked(now clock.Time) {
	n := 0
	for ; n < len(h.unknown) && now.Sub(h.unknown[n].at) >= h.cfg.Overdue; n++ {
		if a := h.unknown[n]; !h.attributeLocked(a) {
			h.assignAllLocked(a)
		}
	}
	h.unknown = slices.Delete(h.unknown, 0, n)
}

// describe refreshes the range map while allocations wait for it.
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
			h.refresh(r) // the next pass looks there
			if clock.Sleep(r.ctx, h.cfg.Clock, pause) != nil {
				return
			}
		}
	}
}
