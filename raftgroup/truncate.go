package raftgroup

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// truncState is the worker's side of a group's truncation.
type truncState struct {
	// need is the highest index that no follower needs any more. A leader computes it
	// from what the followers have; they learn it from its heartbeats, so that whoever
	// leads next has kept what the others need.
	need uint64
	// marks note how many bytes were appended up to some indexes, oldest first.
	marks []logMark
	bytes int64
	// pins are snapshots under way, whose receivers will need what follows them.
	pins []pin
}

type logMark struct {
	index uint64
	bytes int64
}

// pin keeps the log behind a snapshot that is being sent, until it expires: a
// sender that died must not keep the log for ever.
type pin struct {
	to    keyspace.ReplicaID
	index uint64
	until clock.Time
}

// marksMax bounds the marks of one group, so they are MaxLagBytes/marksMax apart.
const marksMax = 64

// appended counts new entries of g.
func (t *truncState) appended(ents []*pb.Entry, lagBytes int64) {
	t.bytes += entriesBytes(ents)
	n := len(t.marks)
	if n > 0 && t.bytes-t.marks[n-1].bytes < lagBytes/marksMax {
		return
	}
	t.marks = append(t.marks, logMark{ents[len(ents)-1].GetIndex(), t.bytes})
	if n+1 > 2*marksMax {
		t.marks = append(t.marks[:0], t.marks[marksMax:]...)
	}
}

// floor is the index up to which the log may go although a follower needs it.
func (t *truncState) floor(lagBytes int64) (index uint64) {
	for _, m := range t.marks {
		if t.bytes-m.bytes < lagBytes {
			break
		}
		index = m.index
	}
	return index
}

// takeNeed learns from a heartbeat what the other followers need.
func (g *Group) takeNeed(m *message) {
	if m.term >= g.term {
		g.learnNeed(m.raft.GetIndex())
	}
}

// learnNeed takes what the followers need, and truncates where that lets go of
// something: durability may have come first, and an idle group hears of it once.
func (g *Group) learnNeed(need uint64) {
	less := need > g.trunc.need
	g.trunc.need = need
	if base, _ := g.log.Base(); less && min(g.public.durable.Load(), need) > base {
		g.truncate(false)
	}
}

// followerNeed is what this leader knows about its followers' needs.
func (g *Group) followerNeed() uint64 {
	need := g.applied
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if id == uint64(g.self) {
			return
		}
		n := pr.Match
		if pr.State == tracker.StateSnapshot {
			n = max(n, pr.PendingSnapshot) // pinned while the snapshot is under way
		}
		need = min(need, n)
	})
	return need
}

// truncate cuts the log off as far as nobody needs it: never past what a crash
// leaves applied in the engine, never past a snapshot on its way, and past a
// follower only if that lags by more than the bound, or if cutOff says that the
// whole wal is too long.
func (g *Group) truncate(cutOff bool) {
	base, _ := g.log.Base()
	durable := g.public.durable.Load()
	if g.isLeader {
		g.trunc.need = g.followerNeed()
	}
	need := g.trunc.need
	target := min(durable, g.applied)
	if !cutOff {
		target = min(target, max(need, g.trunc.floor(g.h.cfg.MaxLagBytes)))
	}
	target = g.pinned(target)
	if target <= base || g.installing != nil {
		return
	}
	if target > durable {
		panic(fmt.Sprintf("raftgroup: group %s: truncation at %d, durably applied %d", g.id, target, durable))
	}
	g.w.walBatch().Compact(g.id, target)
	g.h.m.truncations.Inc()
	if target > need {
		g.h.m.cutOffs.Inc()
		g.zap.Info("followers that lag are cut off from the log", zap.Uint64("index", target))
	}
	n := 0
	for n < len(g.trunc.marks) && g.trunc.marks[n].index <= target {
		n++
	}
	g.trunc.marks = append(g.trunc.marks[:0], g.trunc.marks[n:]...)
}

// pinned lowers an index to what the snapshots under way allow.
func (g *Group) pinned(index uint64) uint64 {
	keep := g.trunc.pins[:0]
	for _, p := range g.trunc.pins {
		if p.until > g.w.now {
			keep = append(keep, p)
			index = min(index, p.index)
		}
	}
	g.trunc.pins = keep
	return index
}

// flushAge is how long what is applied may wait for a memtable to fill before the
// engine is flushed for it. Until then the wal keeps it, and a restart applies it
// again. A flush of little costs a small table and two fsyncs: too often, and an
// almost idle node writes more for them than for its clients; too seldom, and a node
// that was busy once keeps a long wal.
const flushAge = 30 * time.Second

// truncator hears from the engine what has become durable, tells the groups, and
// keeps the wal as a whole within its bound.
type truncator struct {
	h    *Host
	wake chan struct{} // something has become durable
	over chan struct{} // the wal is too long
	// flushed says that the engine was flushed since the wal became too long.
	flushed atomic.Bool
	flush   chan struct{} // what is applied is to become durable now

	full bool // a disk had no room at the last tick; the ticker's

	mu struct {
		sync.Mutex
		dirty []*Group // applied beyond what was durable at the last look; once each
		// since is when dirty ceased to be empty.
		since clock.Time
	}
}

func (t *truncator) init(h *Host) {
	t.h = h
	t.wake, t.over, t.flush = make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{}, 1)
}

// kick is the engine's listener.
func (t *truncator) kick() { notice(t.wake) }

// applied notes that the group's applied index has moved.
func (t *truncator) applied(g *Group) {
	if g.public.dirty.Swap(true) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.dirty) == 0 {
		t.mu.since = t.h.cfg.Clock.Now()
	}
	t.mu.dirty = append(t.mu.dirty, g)
}

// tick looks, now and then, at the length of the wal, the age of what is not durable,
// and the room on the disks.
func (t *truncator) tick(now clock.Time, n uint64) {
	if n%10 != 0 {
		return
	}
	if t.h.cfg.WAL.LiveBytes() > t.h.cfg.MaxWALBytes {
		notice(t.over)
	} else {
		t.flushed.Store(false)
	}
	// While there is still room: later nothing can be flushed, and then full memtables
	// would hold up the deletes that are to make room.
	full := t.h.cfg.WAL.Space() == wal.SpaceFull || t.h.cfg.Engine.Space() == engine.SpaceFull
	if t.aged(now) || full && !t.full {
		notice(t.flush)
	}
	t.full = full
}

// aged says whether something has waited long enough for a flush.
func (t *truncator) aged(now clock.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.mu.dirty) > 0 && now.Sub(t.mu.since) >= flushAge
}

func notice(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// loop is the truncator's goroutine. It may wait for the disk; nobody waits for it.
func (t *truncator) loop() {
	for {
		select {
		case <-t.h.ctx.Done():
			return
		case <-t.wake:
			t.look()
		case <-t.over:
			ok := t.shorten(t.flushed.Load())
			if t.flushed.Store(ok); ok {
				t.look()
			}
		case <-t.flush:
			if t.flushNow("flush for what is not durable") {
				t.look()
			}
		}
	}
}

// flushNow makes durable what is applied. The engine waits while the disk is full.
func (t *truncator) flushNow(why string) bool {
	t.h.m.forcedFlushes.Inc()
	err := t.h.cfg.Engine.Flush(t.h.ctx)
	if err != nil && t.h.ctx.Err() == nil {
		t.h.log.Warn(why, zap.Error(err))
	}
	return err == nil
}

// shorten takes the next step against a wal that is too long: a flush, which lets
// all groups truncate, and if that was not enough, cutting off laggards. Small
// tails the wal itself writes again.
func (t *truncator) shorten(flushed bool) bool {
	if !flushed {
		return t.flushNow("flush for a long wal")
	}
	for _, p := range t.h.cfg.WAL.Pinning(passGroupsMax) {
		if g := t.h.Group(p.Group); g != nil {
			g.w.flag(g, flagCutOff)
		}
	}
	return false
}

// durableTo notes how far the group is durably applied, and says whether that is news: the
// truncator and an install may both tell, in either order.
func (g *Group) durableTo(index uint64) (news bool) {
	for {
		old := g.public.durable.Load()
		if index <= old {
			return false
		}
		if g.public.durable.CompareAndSwap(old, index) {
			return true
		}
	}
}

// look reads how far the groups that have applied something are durable.
func (t *truncator) look() {
	t.mu.Lock()
	dirty := t.mu.dirty
	t.mu.dirty = nil
	t.mu.Unlock()
	groups := make(map[keyspace.GroupID]*Group, len(dirty))
	ids := make([]keyspace.GroupID, 0, len(dirty))
	for _, g := range dirty {
		g.public.dirty.Store(false)
		if t.h.Group(g.id) == g {
			groups[g.id] = g
			ids = append(ids, g.id)
		}
	}
	err := t.h.cfg.Engine.VisitDurableApplied(ids, func(id keyspace.GroupID, a engine.Applied) error {
		g := groups[id]
		if g.durableTo(a.Index) {
			g.w.flag(g, flagTruncate)
		}
		if a.Index >= g.public.applying.Load() {
			delete(groups, id)
		}
		return nil
	})
	if err != nil && t.h.ctx.Err() == nil {
		t.h.log.Warn("durable applied records", zap.Error(err))
	}
	for _, g := range groups {
		t.applied(g)
	}
}
