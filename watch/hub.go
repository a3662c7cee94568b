package watch

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/rangeapi"
)

// maxAsking bounds the requests to leaders that are under way.
const maxAsking = 64

// maxAllocations bounds the pending allocations of a subscription. Beyond it the last one absorbs
// further ones.
const maxAllocations = 4096

// Hub is one node's watchers, and their feeds. While nobody watches, it has no goroutine, stream or
// timer. Its methods may be called from many goroutines.
//
// One lock guards all state. It is not held over calls of Log, Feeds or Ranges; SpanOf and Learn do
// not block and are exceptions.
type Hub struct {
	cfg Config
	// largest says that a revision larger than RevisionBytes is being read.
	largest atomic.Bool

	mu sync.Mutex
	// Everything below is guarded by mu.

	// run is nil while nobody watches.
	run     *running
	stopped bool
	// wg counts all goroutines.
	wg sync.WaitGroup

	// The log tells all allocations up to logEnd. allocs lists those that are pending; unknown are
	// allocations to ranges that this node does not know yet.
	logEnd keyspace.Revision
	// compacted is the cluster's compacted revision as last heard of.
	compacted keyspace.Revision
	allocs    allocationList
	unknown   []*allocation

	// subs are in key order and do not overlap; byRange has those whose range is known.
	subs    []*subscription
	byRange map[keyspace.RangeID]*subscription
	links   map[keyspace.NodeID]*link
	feedID  rangeapi.FeedID
	// asking counts the leaders that are being asked; toAsk are the subscriptions whose leaders are
	// next.
	asking int
	toAsk  []*subscription

	groups  groupIndex
	waiting map[*group]struct{}
	// resume is when something is due that does not wait for the next tick, or 0.
	resume clock.Time
	recent recentEvents
	// pendingBytes are those of all groups; queuedBytes are those of all watchers.
	pendingBytes, queuedBytes int64
	// queuedEvents are those of all watchers' queues.
	queuedEvents int
	// idleBytes are what watchers and streams count for without events.
	idleBytes int64
	// linkWarned is when a lost link was last logged as a warning.
	linkWarned clock.Time
	// reclaimed is when queued events were last taken back.
	reclaimed clock.Time

	// lagGroups are the groups that are not live. The lagging ones are queued for a reader, and the parked ones cannot go on now. sharing has the queued group of each span, which others join.
	// reading counts the readers that wait for each node.
	lagGroups map[*group]struct{}
	lagging   []*group
	parked    map[*group]struct{}
	sharing   map[groupKey]*group
	reading   map[keyspace.NodeID]int
	// progress are streams that wait for their watchers to reach a revision.
	progress map[*Stream]struct{}
	watchers int
	// streams are all open streams.
	streams map[*Stream]struct{}
	// idleSince is when the last watcher left, unless watchers > 0. unused says that a group has
	// ended, and that some subscriptions may be unused since unusedSince.
	idleSince, unusedSince clock.Time
	unused                 bool
}

// New returns a hub without watchers.
func New(cfg Config) *Hub {
	cfg.fill()
	h := &Hub{cfg: cfg, streams: map[*Stream]struct{}{}}
	count := h.Lagging
	cfg.Metrics.lagging.Store(&count)
	return h
}

// Stop ends the hub and its streams, and waits for its goroutines.
func (h *Hub) Stop() {
	h.mu.Lock()
	h.stopped = true
	h.sleepLocked()
	for s := range h.streams {
		s.signal() // wakes callers of Next
	}
	h.mu.Unlock()
	h.wg.Wait()
}

// wakeLocked starts a hub that gets its first watcher. The log tells of allocations above the
// current revision; ranges are asked for earlier ones.
func (h *Hub) wakeLocked(current keyspace.Revision) {
	if h.run != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{
		ctx: ctx, cancel: cancel,
		wakeLocate: wake.New(), wakeDescribe: wake.New(), wakeRead: make(wake.Signal, h.cfg.Readers),
		wakeResume: wake.New(),
	}
	h.run = r
	h.logEnd, h.allocs, h.unknown = current, allocationList{}, nil
	h.subs, h.byRange, h.links = nil, map[keyspace.RangeID]*subscription{}, map[keyspace.NodeID]*link{}
	h.groups, h.waiting, h.recent = newGroupIndex(), map[*group]struct{}{}, recentEvents{limit: h.cfg.RecentBytes}
	h.lagGroups, h.parked, h.progress = map[*group]struct{}{}, map[*group]struct{}{}, map[*Stream]struct{}{}
	h.lagging, h.toAsk = nil, nil
	h.sharing, h.reading = map[groupKey]*group{}, map[keyspace.NodeID]int{}
	h.asking, h.pendingBytes, h.unused, h.resume = 0, 0, false, 0
	h.wg.Go(func() {
		h.cfg.Log.FollowLog(ctx, sequencer.LogPosition{Last: current}, func(p *sequencer.LogPart) { h.takeLog(r, p) })
	})
	h.wg.Go(func() { h.ticks(r) })
	h.wg.Go(func() { h.resumes(r) })
	h.wg.Go(func() { h.locateRanges(r) })
	h.wg.Go(func() { h.describe(r) })
	for range h.cfg.Readers {
		h.wg.Go(func() { h.read(r) })
	}
}

// sleepLocked ends what wakeLocked started.
func (h *Hub) sleepLocked() {
	if h.run == nil {
		return
	}
	h.run.cancel()
	h.run = nil
	h.subs, h.byRange, h.links, h.allocs, h.unknown = nil, nil, nil, allocationList{}, nil
	h.recent, h.lagging, h.toAsk, h.parked, h.waiting = recentEvents{}, nil, nil, nil, nil
	h.cfg.Metrics.Subscriptions.Set(0)
	h.cfg.Metrics.QueuedEvents.Set(float64(h.queuedEvents))
}

// ticks calls tickLocked until the run ends.
func (h *Hub) ticks(r *running) {
	t := h.cfg.Clock.NewTimer(tick)
	defer t.Stop()
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-t.C():
		}
		h.mu.Lock()
		if h.run == r {
			h.tickLocked(h.cfg.Clock.Now())
		}
		h.mu.Unlock()
		t.Reset(tick)
	}
}

// resumes does what is due at resume, until the run ends.
func (h *Hub) resumes(r *running) {
	t := h.cfg.Clock.NewTimer(time.Hour)
	defer t.Stop()
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-r.wakeResume:
		case <-t.C():
		}
		h.mu.Lock()
		wait := time.Hour
		if h.run == r {
			if now := h.cfg.Clock.Now(); h.resume != 0 && now >= h.resume {
				h.resume = 0
				h.askLocked(now)
				for _, sub := range h.subs {
					h.tendLocked(sub, now)
				}
				h.changedLocked()
			}
			if h.resume != 0 {
				wait = h.resume.Sub(h.cfg.Clock.Now())
			}
		}
		h.mu.Unlock()
		t.Reset(max(wait, resumeLeast))
	}
}

func (h *Hub) tickLocked(now clock.Time) {
	if h.watchers == 0 && now.Sub(h.idleSince) >= h.cfg.Linger {
		h.sleepLocked()
		return
	}
	h.giveUpUnknownLocked(now)
	h.askLocked(now)
	for _, sub := range h.subs {
		h.tendLocked(sub, now)
	}
	for g := range h.parked {
		h.lagLocked(g) // it may go live now
	}
	if h.unused && now.Sub(h.unusedSince) >= h.cfg.Linger {
		h.dropSubscriptionsLocked()
	}
	h.changedLocked()
	h.cfg.Metrics.Subscriptions.Set(float64(len(h.subs)))
	h.cfg.Metrics.PendingBytes.Set(float64(h.pendingBytes))
	h.cfg.Metrics.QueuedBytes.Set(float64(h.queuedBytes))
	h.cfg.Metrics.QueuedEvents.Set(float64(h.queuedEvents))
}
