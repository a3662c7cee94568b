package watch

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// refresh takes in what placement knows now; where it does not say, who waits for it
// looks again.
func (h *Hub) refresh(r *running) {
	ctx, cancel := clock.WithTimeout(r.ctx, h.cfg.Clock, locateTimeout)
	defer cancel()
	if err := h.cfg.Ranges.Refresh(ctx); err != nil {
		h.cfg.Logger.Debug("refresh the map of ranges", zap.Error(err))
	}
}

// locateTimeout bounds one look at the map of ranges.
const locateTimeout = time.Second

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
