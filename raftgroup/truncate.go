package raftgroup

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// truncState is the worker's side of a group's log truncation.
type truncState struct {
	// need is the highest index that no follower needs any more. The leader computes it
	// from its followers' positions. Followers learn it from its heartbeats, so the next
	// leader has kept what the others need. told is what the leader's last heartbeat has stated.
	need, told uint64
	// marks record how many bytes were appended up to some indexes, oldest first.
	marks []logMark
	bytes int64
	// pins belong to snapshots being sent, whose receivers will need the entries behind
	// them.
	pins []pin
}

type logMark struct {
	index uint64
	bytes int64
}

// pin keeps the log behind a snapshot that is being sent. It expires, so that a dead
// sender does not keep the log for ever.
type pin struct {
	to    keyspace.ReplicaID
	index uint64
	until clock.Time
}

// marksMax bounds the marks of one group; they are MaxLagBytes/marksMax apart.
const marksMax = 64

// appended accounts for new entries.
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

// floor is the index up to which the log may be cut even if a follower needs it.
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

// learnNeed records what the followers need, and truncates if that frees entries: they
// may have become durable earlier, and an idle group learns the need only once.
func (g *Group) learnNeed(need uint64) {
	less := need > g.trunc.need
	g.trunc.need = need
	if base, _ := g.log.Base(); less && min(g.public.durable.Load(), need) > base {
		g.truncate(false)
	}
}

// followerNeed computes need from this leader's knowledge of its followers.
func (g *Group) followerNeed() uint64 {
	need := g.applied
	g.rn.WithProgress(func(id uint64, _ raft.ProgressType, pr tracker.Progress) {
		if id == uint64(g.self) {
			return
		}
		n := pr.Match
		if pr.State == tracker.StateSnapshot {
			n = max(n, pr.PendingSnapshot) // pinned while the snapshot is being sent
		}
		need = min(need, n)
	})
	return need
}

// truncate cuts off the part of the log that nobody needs. It never cuts past the durably
// applied index, or past a snapshot being sent. It cuts past a follower only if that lags
// by more than the bound, or if cutOff says that the whole wal is too long. Then snapshots
// that wait for their turn yield, and what must stay may be moved.
func (g *Group) truncate(cutOff bool) {
	if cutOff {
		for _, to := range g.h.snaps.yield(g) {
			g.trunc.pins = slices.DeleteFunc(g.trunc.pins, func(p pin) bool { return p.to == to })
		}
		defer g.log.Move()
	}
	base, _ := g.log.Base()
	durable := g.public.durable.Load()
	if g.isLeader {
		// A heartbeat tells the followers. Otherwise entries that fell asleep with the group would stay in their wals.
		if g.trunc.need = g.followerNeed(); g.sleep.asleep && g.trunc.need > g.trunc.told && len(g.conf.replicas) > 1 {
			g.wake()
		}
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
		g.zap.Info("lagging followers are cut off from the log", zap.Uint64("index", target))
	}
	n := 0
	for n < len(g.trunc.marks) && g.trunc.marks[n].index <= target {
		n++
	}
	g.trunc.marks = append(g.trunc.marks[:0], g.trunc.marks[n:]...)
}

// pinned lowers an index to what the snapshots being sent allow.
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

// flushAge is how long applied entries may wait for a memtable to fill before the engine
// is flushed for them. Until then the wal keeps them, and a restart applies them again. A
// small flush costs a small table and two fsyncs. If flushes are too frequent, an almost
// idle node writes more for them than for its clients. If they are too rare, a node that
// was busy once keeps a long wal.
const flushAge = 30 * time.Second

// truncator hears from the engine what has become durable, tells the groups, and keeps
// the whole wal within its bound.
type truncator struct {
	h    *Host
	wake wake.Signal // something has become durable
	over wake.Signal // the wal is too long
	// flushed says that the engine was flushed since the wal became too long.
	flushed atomic.Bool
	flush   wake.Signal // flush now what is applied

	full bool // a disk had no room at the last tick; owned by the ticker

	mu struct {
		sync.Mutex
		dirty []*Group // applied beyond the durable index at the last check; each group once
		// since is when dirty ceased to be empty.
		since clock.Time
	}
}

func (t *truncator) init(h *Host) {
	t.h = h
	t.wake, t.over, t.flush = wake.New(), wake.New(), wake.New()
}

// wakeUp is the engine's listener.
func (t *truncator) wakeUp() { t.wake.Set() }

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

// tick periodically checks the length of the wal, the age of what is not durable, and the
// free space of the disks.
func (t *truncator) tick(now clock.Time, n uint64) {
	if n%10 != 0 {
		return
	}
	if t.h.cfg.WAL.LiveBytes() > t.h.cfg.MaxWALBytes {
		t.over.Set()
	} else {
		t.flushed.Store(false)
	}
	// Flush while there is still space. Later nothing could be flushed, and full
	// memtables would stall the deletes that are to free space.
	full := t.h.cfg.WAL.Space() == wal.SpaceFull || t.h.cfg.Engine.Space() == engine.SpaceFull
	if t.flushDue(now) || full && !t.full {
		t.flush.Set()
	}
	t.full = full
}

// flushDue reports whether applied entries have waited long enough for a flush.
func (t *truncator) flushDue(now clock.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.mu.dirty) > 0 && now.Sub(t.mu.since) >= flushAge
}

// loop is the truncator's goroutine. It may wait for the disk; nobody waits for it.
func (t *truncator) loop() {
	for {
		select {
		case <-t.h.ctx.Done():
			return
		case <-t.wake:
			t.readDurable()
		case <-t.over:
			ok := t.shorten(t.flushed.Load())
			if t.flushed.Store(ok); ok {
				t.readDurable()
			}
		case <-t.flush:
			if t.flushNow("flush of old memtables failed") {
				t.readDurable()
			}
		}
	}
}

// flushNow makes applied entries durable. The engine waits while the disk is full.
func (t *truncator) flushNow(why string) bool {
	t.h.m.forcedFlushes.Inc()
	err := t.h.cfg.Engine.Flush(t.h.ctx)
	if err != nil && t.h.ctx.Err() == nil {
		t.h.log.Warn(why, zap.Error(err))
	}
	return err == nil
}

// pinningMax is how many groups are cut off at a time.
const pinningMax = 4096

// shorten takes the next step against a wal that is too long: first a flush, after which
// all groups can truncate, then cutting off lagging followers. The wal moves what remains
// then. A group that has lost its quorum keeps entries that nobody can commit.
func (t *truncator) shorten(flushed bool) bool {
	if !flushed {
		return t.flushNow("flush for a long wal failed")
	}
	for _, p := range t.h.cfg.WAL.Pinning(pinningMax) {
		if g := t.h.Group(p.Group); g != nil {
			g.w.flag(g, flagCutOff)
		} else {
			t.h.cfg.WAL.Group(p.Group).Move() // a replica that could not be opened
		}
	}
	return false
}

// durableTo records how far the group is durably applied, and reports whether that is
// new: the truncator and an install may both report, in either order.
func (g *Group) durableTo(index uint64) (isNew bool) {
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

// readDurable reads how far the groups in dirty are durable.
func (t *truncator) readDurable() {
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
		t.h.log.Warn("reading durable applied records failed", zap.Error(err))
	}
	for _, g := range groups {
		t.applied(g)
	}
}

// renewPin keeps the log pinned while there is progress.
func (x *outgoingSnapshot) renewPin() {
	now := x.g.h.cfg.Clock.Now()
	if now.Sub(x.renewed) < pinTTL/4 {
		return
	}
	x.renewed = now
	x.g.w.call(x.g, func() {
		for i := range x.g.trunc.pins {
			if p := &x.g.trunc.pins[i]; p.to == x.to {
				p.until = x.g.w.now.Add(pinTTL)
			}
		}
	})
}
