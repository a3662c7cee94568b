package watch

import (
	"bytes"
	"context"
	"slices"
	"sort"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
)

// leg is a span of which one range's feed tells. While its range is not known, or not
// known any more, it holds the place: what was handed to the span is owed by it.
type leg struct {
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
	// complete; it goes on behind that, which may be below opened. spoken is up to where
	// nothing is owed: where the leg began, or further by what feed and leaders said.
	opened, fed, spoken keyspace.Revision
	// mark is up to where the feed has brought all that was applied. Whoever has applied
	// that has everything up to proven.
	mark   rangeapi.FeedPosition
	proven keyspace.Revision
	// past is the generation of the last range that the leg had, where it has none.
	past keyspace.Generation
	owed []*entry
	// least is the lowest of their first revisions, 0 where it was not looked for since they
	// changed.
	least keyspace.Revision

	// prev says that events come with the version before them; those above prevFrom do.
	prev     bool
	prevFrom keyspace.Revision
	// again says that prev was wanted only after events had come: until a feed has come to
	// mark once more, some may be here without, and no leader's answer counts.
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
	// toAsk says that the leg is in the hub's queue of those to be asked.
	toAsk    bool
	askAt    clock.Time
	askPause time.Duration
	askTurn  int
	askHint  keyspace.NodeID
	// proof is a leader's answer that the feed has not caught up with: who has all up to
	// mark has all up to complete.
	proof struct {
		mark     rangeapi.FeedPosition
		complete keyspace.Revision
		at       clock.Time
		leader   keyspace.NodeID
	}
}

// window returns which legs overlap the span: legs[lo:hi].
func (h *Hub) window(s keyspace.Span) (lo, hi int) {
	lo = sort.Search(len(h.legs), func(i int) bool {
		end := h.legs[i].span.End
		return len(end) == 0 || bytes.Compare(end, s.Start) > 0
	})
	hi = lo + sort.Search(len(h.legs)-lo, func(i int) bool {
		return len(s.End) != 0 && bytes.Compare(h.legs[lo+i].span.Start, s.End) >= 0
	})
	return lo, hi
}

// coverLocked makes sure that legs cover the span. New ones tell what comes after the
// revision from, at or above all that the log has told. Of what came before they are
// asked only where somebody wants it: a watcher from now on needs no answer of a range
// that has no leader, and does not wake one that sleeps.
func (h *Hub) coverLocked(span keyspace.Span, from keyspace.Revision) {
	lo, hi := h.window(span)
	at, open := span.Start, true
	var holes []keyspace.Span
	for _, l := range h.legs[lo:hi] {
		if bytes.Compare(at, l.span.Start) < 0 {
			holes = append(holes, keyspace.Span{Start: at, End: l.span.Start})
		}
		if at, open = l.span.End, len(l.span.End) != 0; !open {
			break
		}
	}
	if open && (len(span.End) == 0 || bytes.Compare(at, span.End) < 0) {
		holes = append(holes, keyspace.Span{Start: at, End: span.End})
	}
	for _, hole := range holes {
		h.placeLocked(&leg{span: hole, opened: from, fed: from, spoken: from})
	}
	if len(holes) > 0 {
		kick(h.run.wakeResolve)
	}
}

// placeLocked puts a leg where none is.
func (h *Hub) placeLocked(l *leg) {
	at := sort.Search(len(h.legs), func(i int) bool { return bytes.Compare(h.legs[i].span.Start, l.span.Start) >= 0 })
	h.legs = slices.Insert(h.legs, at, l)
	if l.id != 0 {
		h.byRange[l.id] = l
	}
}

// takeOutLocked takes a leg out, with its feed; it goes on owing.
func (h *Hub) takeOutLocked(l *leg) {
	if i := slices.Index(h.legs, l); i >= 0 {
		h.legs = slices.Delete(h.legs, i, i+1)
	}
	h.looseLocked(l)
}

// looseLocked makes the leg one without a range: its span is to be resolved anew.
func (h *Hub) looseLocked(l *leg) {
	h.closeFeedLocked(l)
	if l.id != 0 && h.byRange[l.id] == l {
		delete(h.byRange, l.id)
	}
	l.past = max(l.past, l.generation)
	l.id, l.generation, l.replicas, l.leader, l.away = 0, 0, nil, 0, 0
	l.proof.complete = 0
}

// install gives the ranges their legs. It says whether that resolved anything: what was
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

// installLocked puts one range's leg in the place of those that it overlaps. It inherits
// what they owe, and begins where the last of them was complete.
func (h *Hub) installLocked(at *router.Located) bool {
	d := &at.Descriptor
	lo, hi := h.window(d.Span)
	old := slices.Clone(h.legs[lo:hi])
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
	l := &leg{
		span: d.Span, id: d.Range, generation: d.Generation, replicas: nodesOf(d), leader: at.Leader,
	}
	h.inheritLocked(l, old)
	parts := []*leg{l}
	var owed []*entry
	for _, o := range old {
		parts = append(parts, remainders(o, d.Span)...)
		h.takeOutLocked(o)
		owed = append(owed, h.forgiveLocked(o)...)
	}
	for _, p := range parts {
		h.placeLocked(p)
	}
	for _, e := range owed {
		span := h.spanOfLocked(e)
		for _, p := range parts {
			if p.span.Overlaps(span) {
				h.oweLocked(e, p)
			}
		}
	}
	h.settleLocked(owed)
	h.openFeedLocked(l)
	return true
}

// inheritLocked has a leg go on for those whose place it takes: who lives on one of
// them gets on from where that one was, so that the feed begins where the least of them
// was; what begins anew begins above all of them.
func (h *Hub) inheritLocked(l *leg, old []*leg) {
	covered, again := true, false
	end := l.span.Start
	l.fed, l.spoken, l.proven = keyspace.MaxRevision, keyspace.MaxRevision, keyspace.MaxRevision
	for _, o := range old {
		l.opened, l.prevFrom = max(l.opened, o.opened), max(l.prevFrom, o.prevFrom)
		l.fed, l.spoken, l.proven = min(l.fed, o.fed), min(l.spoken, o.spoken), min(l.proven, o.proven)
		again = again || l.generation <= o.past
		l.prev, l.askNow = l.prev || o.prev, l.askNow || o.askNow
		covered = covered && bytes.Compare(o.span.Start, end) <= 0
		end = o.span.End
	}
	for _, o := range old {
		if l.prev && !o.prev {
			l.prevFrom = max(l.prevFrom, o.fed) // what it brought came without
		}
	}
	if again || !covered || !(keyspace.Span{Start: l.span.Start, End: end}).Covers(l.span) {
		// Of what lay beside them nothing has come yet, nor was it owed; and what was proven
		// of a half says nothing of the other one, where a lock may be pending. Of the same
		// range again it was proven of whoever had come to a mark that is gone with the leg:
		// who has a later generation has, and others may not have.
		l.opened, l.proven = max(l.opened, l.fed, h.logEnd), 0
	}
	if mutation.Is(mutation.EventLostAtSplit) {
		l.fed = max(l.fed, h.logEnd)
	}
}

// remainders are what lies of the leg beside the span, as legs of their own.
func remainders(o *leg, s keyspace.Span) (parts []*leg) {
	part := func(span keyspace.Span) {
		parts = append(parts, &leg{
			span: span, opened: o.opened, fed: o.fed, spoken: o.spoken, proven: o.proven, past: max(o.past, o.generation),
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

// dropLegsLocked takes out the legs that no group needs any more.
func (h *Hub) dropLegsLocked() {
	used := map[*leg]bool{}
	h.eachGroupLocked(func(g *group) {
		lo, hi := h.window(g.span)
		for _, l := range h.legs[lo:hi] {
			used[l] = true
		}
	})
	for _, l := range slices.Clone(h.legs) {
		if !used[l] {
			h.takeOutLocked(l)
			h.settleLocked(h.forgiveLocked(l))
		}
	}
	h.unused = false
}

// chooseLocked returns the node that is to feed the leg: this one where it has a
// replica, since that costs nothing, else the leader, else one after the other.
func (h *Hub) chooseLocked(l *leg) keyspace.NodeID {
	first := slices.Index(l.replicas, h.cfg.Self)
	near := first >= 0 && l.away != h.cfg.Self
	switch {
	case l.tries == 0 && near:
		return h.cfg.Self
	case l.leader != 0 && (l.tries == 0 || l.tries == 1 && near && l.leader != h.cfg.Self):
		return l.leader
	}
	return l.replicas[(first+1+l.tries)%len(l.replicas)]
}

// openFeedLocked orders the leg's feed from where it was complete.
func (h *Hub) openFeedLocked(l *leg) {
	node := h.chooseLocked(l)
	h.feedID++
	l.feed, l.node = h.feedID, node
	k := h.linkLocked(node)
	k.legs[l.feed] = l
	k.order(rangeapi.FeedOrder{ID: l.feed, Range: l.id, Generation: l.generation, From: l.fed + 1, Prev: l.prev})
	h.cfg.Metrics.FeedsOpened.Inc()
}

func (h *Hub) closeFeedLocked(l *leg) {
	if l.feed == 0 {
		return
	}
	if k := h.links[l.node]; k != nil {
		delete(k.legs, l.feed)
		k.order(rangeapi.FeedOrder{ID: l.feed, Close: true})
	}
	l.feed, l.node = 0, 0
}

// lostFeedLocked is called when the leg's feed has ended: another one is opened, after
// a pause.
func (h *Hub) lostFeedLocked(l *leg, why *kverror.Error) {
	if k := h.links[l.node]; k != nil {
		delete(k.legs, l.feed)
	}
	l.feed, l.node = 0, 0
	h.cfg.Metrics.FeedsLost.Inc()
	switch why.Kind {
	case kverror.WrongRange:
		h.movedLocked(l, why)
	case kverror.Compacted:
		h.compactedLocked(l, why.CompactRevision)
	case kverror.Busy, kverror.RangeNotHere:
		if l.tries == 0 && l.away != h.cfg.Self && slices.Contains(l.replicas, h.cfg.Self) && l.waits < maxWaits {
			// A split that its leader has applied is applied here too in a moment.
			h.retryLocked(l, firstWait<<l.waits)
			l.waits++
			return
		}
		h.failedFeedLocked(l)
	default:
		h.failedFeedLocked(l)
	}
}

// The first of the pauses before this node's replica is tried again, or a leader is asked,
// of which each is twice the one before.
const (
	firstWait = 2 * time.Millisecond
	maxWaits  = 4
)

// failedFeedLocked has the leg fed elsewhere, the first time at once.
func (h *Hub) failedFeedLocked(l *leg) {
	l.tries++
	h.failedLocked(l, l.tries)
	if l.tries == 1 {
		h.retryLocked(l, 0)
		return
	}
	h.retryLocked(l, min(tick<<min(l.tries-2, 6), time.Second))
}

// retryLocked has the leg's feed opened after a pause.
func (h *Hub) retryLocked(l *leg, pause time.Duration) {
	l.retry = h.cfg.Clock.Now().Add(pause)
	h.resumeLocked(l.retry)
}

// movedLocked looks for the ranges that the leg's has become.
func (h *Hub) movedLocked(l *leg, why *kverror.Error) {
	h.cfg.Ranges.Learn(why.Descriptors...)
	h.looseLocked(l)
	kick(h.run.wakeResolve)
}

// compactedLocked deals with a leg that was away for so long that events it has not
// brought are compacted: whoever has not got them another way is told. The leg goes on
// behind them.
func (h *Hub) compactedLocked(l *leg, at keyspace.Revision) {
	h.eachGroupLocked(func(g *group) {
		pos := g.pos
		if g.live {
			pos = max(pos, h.frontierLocked(g.span))
		}
		if g.span.Overlaps(l.span) && pos < at-1 {
			h.failLocked(g, at)
		}
	})
	l.opened, l.fed = max(l.opened, at-1), max(l.fed, at-1)
	h.openFeedLocked(l)
}

// tendLocked does what is due at a leg.
func (h *Hub) tendLocked(l *leg, now clock.Time) {
	switch {
	case l.id == 0:
	case l.feed == 0:
		if now < l.retry {
			h.resumeLocked(l.retry)
			return
		}
		h.openFeedLocked(l)
	case l.proof.complete > l.proven && now.Sub(l.proof.at) >= h.cfg.Overdue && l.node != l.proof.leader:
		// The replica that feeds lags behind what its leader says.
		l.away, l.leader, l.tries, l.proof.at = l.node, l.proof.leader, 0, now
		h.closeFeedLocked(l)
		h.openFeedLocked(l)
	}
}

// askLocked asks the leaders of legs that have not spoken for too long, or are to be asked
// at once. It looks at all that is overdue, so that it is not for every message.
func (h *Hub) askLocked(now clock.Time) {
	// The log comes in order: behind the first that is not overdue none is.
	for e := h.owed.head; e != nil && now.Sub(e.at) >= h.cfg.Overdue; e = e.next {
		e.owers(func(l *leg) {
			if l.proof.complete < e.last {
				h.queueAskLocked(l, now)
			}
		})
	}
	for _, l := range h.legs {
		if l.askNow {
			h.queueAskLocked(l, now)
			if now < l.askAt {
				h.resumeLocked(l.askAt)
			}
		}
	}
	h.askNextLocked(now)
}

// askNowLocked has a leg asked as soon as may be.
func (h *Hub) askNowLocked(l *leg) {
	l.askNow = true
	h.queueAskLocked(l, h.cfg.Clock.Now())
}

func (h *Hub) queueAskLocked(l *leg, now clock.Time) {
	if !l.toAsk && l.id != 0 && !l.asking && now >= l.askAt {
		l.toAsk = true
		h.toAsk = append(h.toAsk, l)
	}
}

// askNextLocked asks those whose turn it is, as many as may be asked at a time.
func (h *Hub) askNextLocked(now clock.Time) {
	for len(h.toAsk) > 0 && h.asking < maxAsking {
		l := h.toAsk[0]
		h.toAsk[0] = nil
		h.toAsk = h.toAsk[1:]
		l.toAsk = false
		n := len(l.owed)
		l.askNow = l.askNow && n > 0
		if n > 0 && l.id != 0 && !l.asking && now >= l.askAt && l.proof.complete < l.owed[n-1].last {
			h.askLegLocked(l)
		}
	}
}

// askPastLocked asks the leader of a leg for what was before it began.
func (h *Hub) askPastLocked(l *leg) {
	if l.id != 0 && !l.asking && h.cfg.Clock.Now() >= l.askAt && h.asking < maxAsking && l.proof.complete < l.opened {
		h.askLegLocked(l)
	}
}

// askLegLocked asks whoever may lead the leg's range up to where it is complete.
func (h *Hub) askLegLocked(l *leg) {
	node := l.leader
	if l.askHint != 0 {
		node = l.askHint
	} else if node == 0 || l.askTurn > 0 {
		node = l.replicas[l.askTurn%len(l.replicas)]
	}
	q := &rangeapi.CompleteRequest{Range: l.id, Generation: l.generation, Revision: l.opened}
	if n := len(l.owed); n > 0 {
		q.Revision = max(q.Revision, l.owed[n-1].last)
	}
	l.asking, l.askNow = true, false
	h.asking++
	h.cfg.Metrics.Questions.Inc()
	r := h.run
	h.wg.Go(func() {
		ctx, cancel := clock.WithTimeout(r.ctx, h.cfg.Clock, 2*time.Second)
		defer cancel()
		mark, err := h.cfg.Feeds.Complete(ctx, node, q)
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.run != r {
			return
		}
		h.asking--
		l.asking = false
		h.answeredLocked(l, node, q, mark, err)
		h.askNextLocked(h.cfg.Clock.Now())
		h.changedLocked()
	})
}

// answeredLocked takes the answer to a question, unless the leg has changed since.
func (h *Hub) answeredLocked(l *leg, node keyspace.NodeID, q *rangeapi.CompleteRequest, mark rangeapi.FeedPosition, err error) {
	if h.byRange[q.Range] != l || l.generation != q.Generation {
		return
	}
	now := h.cfg.Clock.Now()
	if err == nil {
		l.leader, l.askHint, l.askTurn, l.askPause, l.askAt = node, 0, 0, 0, 0
		if l.proof.complete <= l.proven || l.proof.leader != node {
			// An earlier answer that the feed has not come to yet stays: one that is asked
			// again and again would never come to the last one, nor be found to lag.
			l.proof.mark, l.proof.complete, l.proof.at, l.proof.leader = mark, q.Revision, now, node
		}
		h.provedLocked(l)
		return
	}
	e := kverror.Of(err)
	switch {
	case e.Kind == kverror.WrongRange && hasNewer(e, q):
		h.closeFeedLocked(l)
		h.movedLocked(l, e)
		return
	case e.Kind == kverror.NotLeader && e.Leader != 0 && e.Leader != node && l.askHint == 0:
		l.askHint = e.Leader
		h.askNowLocked(l)
		return
	}
	l.askHint = 0
	l.askTurn++
	if e.Kind != kverror.NotLeader {
		h.failedLocked(l, l.askTurn)
	} else if l.askTurn%(len(l.replicas)+1) != 0 {
		h.askNowLocked(l) // who is asked first may be anyone; a pause follows a whole turn
		return
	}
	l.askPause = max(firstWait, min(2*l.askPause, time.Second))
	l.askAt, l.askNow = now.Add(l.askPause), true
	h.resumeLocked(l.askAt)
}

// hasNewer says whether the refusal tells of a later generation of the range: a replica
// may as well lag behind.
func hasNewer(e *kverror.Error, q *rangeapi.CompleteRequest) bool {
	return slices.ContainsFunc(e.Descriptors, func(d keyspace.Descriptor) bool {
		return d.Range == q.Range && d.Generation > q.Generation
	})
}

// provedLocked lets a leader's answer count, once the feed has brought what it is about.
func (h *Hub) provedLocked(l *leg) {
	if l.proof.complete > 0 && !l.again && l.mark.Reaches(l.proof.mark) {
		h.speakLocked(l, l.proof.complete)
		l.proof.complete = 0
	}
}

// takePart takes what a feed says.
func (h *Hub) takePartLocked(l *leg, p *rangeapi.FeedPart) {
	if p.Err != nil {
		h.lostFeedLocked(l, p.Err)
		return
	}
	l.tries, l.waits = 0, 0
	for i := range p.Events {
		h.arriveLocked(&p.Events[i])
	}
	l.again = l.again && (p.Position == (rangeapi.FeedPosition{}) || !p.Position.Reaches(l.mark))
	if !l.mark.Reaches(p.Position) {
		l.mark = p.Position
	}
	l.fed = max(l.fed, p.Complete)
	if p.Position != (rangeapi.FeedPosition{}) {
		// Without a mark nobody could tell which other replica has applied as much, and
		// history is read wherever the feed has moved to.
		h.speakLocked(l, p.Complete)
	}
	h.provedLocked(l)
}

// link is the stream of feeds from one node.
type link struct {
	node keyspace.NodeID
	// Guarded by the hub's mu.
	legs   map[rangeapi.FeedID]*leg
	orders []rangeapi.FeedOrder
	wake   chan struct{}
}

// order queues an order.
func (k *link) order(o rangeapi.FeedOrder) {
	k.orders = append(k.orders, o)
	kick(k.wake)
}

// linkLocked returns the link with the node, which it begins where there is none.
func (h *Hub) linkLocked(node keyspace.NodeID) *link {
	if k := h.links[node]; k != nil {
		return k
	}
	k := &link{node: node, legs: map[rangeapi.FeedID]*leg{}, wake: make(chan struct{}, 1)}
	h.links[node] = k
	r := h.run
	h.wg.Go(func() { h.runLink(r, k) })
	return k
}

// runLink is a link's life: it ends with its stream, and its legs are fed anew.
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
	for _, l := range k.legs {
		l.node = 0
		h.lostFeedLocked(l, kverror.New(kverror.Unreachable, "feeds of node %s: %v", k.node, err))
	}
	h.changedLocked()
}

// linkWarnEvery is how often the end of a link is a warning at most.
const linkWarnEvery = 10 * time.Second

func (h *Hub) linkLostLocked(k *link, err error) {
	h.cfg.Metrics.LinksLost.Inc()
	level := zap.DebugLevel
	if now := h.cfg.Clock.Now(); h.linkWarned == 0 || now.Sub(h.linkWarned) >= linkWarnEvery {
		h.linkWarned, level = now, zap.WarnLevel
	}
	h.cfg.Logger.Log(level, "feeds ended", zap.Stringer("peer", k.node), zap.Int("feeds", len(k.legs)), zap.Error(err))
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
			if l := k.legs[ps[i].ID]; l != nil && l.feed == ps[i].ID {
				h.takePartLocked(l, &ps[i])
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
