package watch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// read is a reader of history: it advances lagging groups until the run ends.
func (h *Hub) read(r *running) {
	for {
		g, plan := h.nextLagging(r)
		if g == nil {
			select {
			case <-r.wakeRead:
				continue
			case <-r.ctx.Done():
				return
			}
		}
		pages, err := h.readPlan(r.ctx, plan)
		if plan.largest {
			h.largest.Store(false)
		}
		h.mu.Lock()
		if h.run == r {
			h.endReadingLocked(plan)
			h.readLocked(g, plan, pages, err)
			h.changedLocked()
		}
		h.mu.Unlock()
		if r.ctx.Err() != nil {
			return
		}
		if err != nil && !errors.Is(err, kverror.Compacted) && !errors.Is(err, errLarge) {
			h.cfg.Logger.Debug("read history", zap.Stringer("span", plan.span), zap.Error(err))
			_ = clock.Sleep(r.ctx, h.cfg.Clock, 10*time.Millisecond)
		}
	}
}

// plan is one read for a group: (pos, to] from all ranges of its span.
type plan struct {
	span keyspace.Span
	pos  keyspace.Revision
	to   keyspace.Revision
	asks []planAsk
	// nodes are those that serve the pages.
	nodes map[keyspace.NodeID]bool

	mu sync.Mutex
	// Guarded by mu. whole are the bytes of the one revision that is read whole. largest says that
	// this plan may exceed RevisionBytes.
	whole   int64
	largest bool
}

type planAsk struct {
	node keyspace.NodeID
	q    rangeapi.HistoryRequest
}

// nextLagging takes the next group from the queue that can read.
func (h *Hub) nextLagging(r *running) (*group, *plan) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != r {
		return nil, nil
	}
	for len(h.lagging) > 0 {
		g := h.lagging[0]
		h.lagging[0] = nil
		h.lagging = h.lagging[1:]
		if _, lags := h.lagGroups[g]; !lags {
			continue
		}
		h.unqueueLocked(g)
		if h.goLiveLocked(g) {
			continue
		}
		room := h.roomLocked()
		if len(g.members) == 0 {
			continue // all its clients are slow
		}
		if p := h.planLocked(g); p != nil && room && !(g.largest && h.largest.Load()) && h.startReadingLocked(p) {
			g.state = lagReading
			if len(h.lagging) > 0 {
				r.wakeRead.Set()
			}
			return g, p
		}
		g.state = lagParked
		h.parked[g] = struct{}{}
	}
	return nil, nil
}

// planLocked plans the next read for a group. It returns nil if everything resolved has been read,
// or if a range is unknown.
func (h *Hub) planLocked(g *group) *plan {
	if !h.readableLocked(g) {
		return nil
	}
	p := &plan{span: g.span, pos: g.pos, to: h.frontierLocked(g.span), nodes: map[keyspace.NodeID]bool{}}
	lo, hi := h.window(g.span)
	each := max(h.cfg.HistoryBytes/int64(max(hi-lo, 1)), minHistoryBytes)
	for _, sub := range h.subs[lo:hi] {
		part, ok := sub.span.Intersect(g.span)
		if !ok || sub.id == 0 || sub.node == 0 {
			return nil
		}
		p.asks = append(p.asks, planAsk{sub.node, rangeapi.HistoryRequest{
			Range: sub.id, Generation: sub.generation, Span: part, From: g.pos + 1, To: p.to, Seen: sub.position, MaxBytes: each, Prev: g.prev, Compacted: h.compacted,
		}})
	}
	return p
}

// minHistoryBytes is the least bound of one range's page.
const minHistoryBytes = 4 << 10

// startReadingLocked says whether the plan may be read now: one silent node must not hold all
// readers.
func (h *Hub) startReadingLocked(p *plan) bool {
	for i := range p.asks {
		if node := p.asks[i].node; !p.nodes[node] {
			if h.reading[node] >= max(1, h.cfg.Readers-1) {
				return false
			}
			p.nodes[node] = true
		}
	}
	for node := range p.nodes {
		h.reading[node]++
	}
	return true
}

func (h *Hub) endReadingLocked(p *plan) {
	for node := range p.nodes {
		if h.reading[node]--; h.reading[node] == 0 {
			delete(h.reading, node)
		}
	}
}

// historyTimeout bounds the wait for one page.
const historyTimeout = 2 * time.Second

// readPlan reads the pages of a plan, several at a time. Delivery ends at the shortest page, so
// later requests ask for no more than that.
func (h *Hub) readPlan(ctx context.Context, p *plan) (pages []*rangeapi.HistoryPage, err error) {
	pages = make([]*rangeapi.HistoryPage, len(p.asks))
	errs := make([]error, len(p.asks))
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	var mu sync.Mutex
	to := p.to // guarded by mu
	for i := range p.asks {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			actx, cancel := clock.WithTimeout(ctx, h.cfg.Clock, historyTimeout)
			defer cancel()
			mu.Lock()
			p.asks[i].q.To = max(to, p.pos+1)
			mu.Unlock()
			pages[i], errs[i] = h.cfg.Feeds.History(actx, p.asks[i].node, &p.asks[i].q)
			if errs[i] == nil {
				errs[i] = h.readWhole(ctx, p, &p.asks[i], pages[i])
			}
			if errs[i] == nil {
				mu.Lock()
				to = min(to, pages[i].Next-1)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	h.cfg.Metrics.HistoryReads.Add(float64(len(p.asks)))
	return pages, decisive(errs)
}

// decisive returns what ends a plan. A refusal as compacted ends members or moves the group on, so it comes
// before errors after which the same is read again: else the group would be refused again at once, for as
// long as another range fails.
func decisive(errs []error) error {
	var compacted *kverror.Error
	for _, err := range errs {
		if err == nil {
			continue
		}
		if e := kverror.Of(err); e.Kind == kverror.Compacted && (compacted == nil || e.CompactRevision > compacted.CompactRevision) {
			compacted = e
		}
	}
	if compacted != nil {
		return compacted
	}
	return errors.Join(errs...)
}

// errLarge says that one revision exceeds the bound. errLargeLater says that it has to wait until
// no other large one is being read.
var (
	errLarge      = errors.New("watch: a revision is too large")
	errLargeLater = errors.New("watch: another large revision is being read")
)

// largestFactor is how many times RevisionBytes one revision at a time may have. The default allows
// the largest transaction: 128 operations on values of 1.5 MiB, with the versions before.
const largestFactor = 4

// holdRevision counts bytes of the one revision that the plan reads whole.
func (h *Hub) holdRevision(p *plan, events []rangeapi.Event) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range events {
		p.whole += events[i].Bytes()
	}
	switch {
	case p.whole > largestFactor*h.cfg.RevisionBytes:
		return errLarge
	case p.whole > h.cfg.RevisionBytes && !p.largest && !h.largest.CompareAndSwap(false, true):
		return errLargeLater
	}
	p.largest = p.largest || p.whole > h.cfg.RevisionBytes
	return nil
}

// readWhole continues a page that has ended within the next revision, until it has all of that
// revision. One bound covers the pages of the plan together.
func (h *Hub) readWhole(ctx context.Context, p *plan, ask *planAsk, page *rangeapi.HistoryPage) error {
	if page.NextKey == nil || page.Next != p.pos+1 {
		return nil // other revisions can be delivered before the one it ends in
	}
	if err := h.holdRevision(p, page.Events); err != nil {
		return err
	}
	q := ask.q
	q.To, q.MaxBytes = page.Next, h.cfg.HistoryBytes
	for page.Next == q.To {
		q.From, q.FromKey = page.Next, page.NextKey
		actx, cancel := clock.WithTimeout(ctx, h.cfg.Clock, historyTimeout)
		more, err := h.cfg.Feeds.History(actx, ask.node, &q)
		cancel()
		if err != nil {
			return err
		}
		h.cfg.Metrics.HistoryReads.Inc()
		if err := h.holdRevision(p, more.Events); err != nil {
			return err
		}
		page.Events = append(page.Events, more.Events...)
		page.Next, page.NextKey = more.Next, more.NextKey
	}
	return nil
}

// readLocked delivers a finished read to a group: whole revisions, as far as all ranges were read.
func (h *Hub) readLocked(g *group, p *plan, pages []*rangeapi.HistoryPage, err error) {
	if _, lags := h.lagGroups[g]; !lags {
		return
	}
	g.state = lagIdle
	if err != nil {
		if e := kverror.Of(err); e.Kind == kverror.Compacted {
			h.failLocked(g, e.CompactRevision)
			h.lagLocked(g) // members that begin later
			return
		}
		if errors.Is(err, errLarge) {
			h.cfg.Metrics.TooLarge.Inc()
			h.tooLargeLocked(g, p.pos+1)
			h.lagLocked(g) // members that begin later
			return
		}
		g.largest = errors.Is(err, errLargeLater)
		g.state = lagParked
		h.parked[g] = struct{}{}
		return
	}
	g.largest = false
	to := p.to
	for _, page := range pages {
		to = min(to, page.Next-1)
	}
	var batch []*event
	for _, page := range pages {
		for i := range page.Events {
			if page.Events[i].Mod <= to {
				batch = append(batch, newEvent(&page.Events[i]))
			}
		}
	}
	slices.SortFunc(batch, compare)
	pos := g.pos
	g.pos = max(g.pos, to)
	if len(batch) > 0 {
		h.deliverLocked(g, batch, g.pos, pos)
	}
	if len(g.members) > 0 && !h.goLiveLocked(g) {
		h.lagLocked(g)
	}
}
