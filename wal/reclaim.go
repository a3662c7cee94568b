package wal

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// reclaim is how far the old end of the log may move. A segment that no group needs is
// dead after two steps. First everything submitted so far becomes durable, because the
// groups' needs were computed from it. Then a mark with the later beginning of the log
// becomes durable; without it recovery would report the missing file as lost.
type reclaim struct {
	// wanted is the oldest segment that is needed once all records up to after are
	// durable; 0 where nothing is waiting.
	wanted uint64
	after  uint64
	// announced is the beginning of the log that marks state.
	announced uint64
}

// cycle is one pass of the rewriter through the log. It moves the tails of segments
// before until, the head when the pass began. Later segments are no older than the
// cycle, so moving their tails would free nothing.
type cycle struct {
	until uint64
	// churn is Log.churn at the start of the pass.
	churn int64
}

// cycleResult is the outcome of the last complete cycle, which leaves a log of nothing
// but tails, and what has changed since.
type cycleResult struct {
	// until is the churn before which no cycle is worth its writes.
	until int64
	// over says that the log still exceeded its target.
	over bool
}

// announced returns the beginning of the log that marks state.
func (l *Log) announced() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reclaim.announced
}

// synced moves the old end of the log after an fsync that made a mark durable. The mark
// says that the log begins at the segment oldest. It returns whether the log is so long
// that small tails are worth moving.
func (l *Log) synced(oldest uint64) (long bool) {
	l.mu.Lock()
	l.durable = l.written
	r := &l.reclaim
	freed := false
	for len(l.segs) > 1 && l.segs[0].seq < oldest {
		l.dead = append(l.dead, l.segs[0])
		l.segs[0] = nil
		l.segs = l.segs[1:]
		freed = true
	}
	if r.wanted > 0 && l.durable >= r.after {
		r.announced = max(r.announced, r.wanted)
		r.wanted = 0
	}
	if r.wanted == 0 {
		if s := l.segs[l.oldestNeededLocked()]; s.seq > r.announced {
			r.wanted, r.after = s.seq, l.submitted
		}
	}
	long = len(l.segs) > 1 && l.liveBytesLocked() > l.opts.TargetBytes/2
	l.mu.Unlock()
	if freed {
		l.gauges()
		l.prepareSignal.Set()
	}
	return long
}

func (l *Log) gauges() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.metrics.liveBytes.Set(float64(l.liveBytesLocked()))
	l.metrics.segments.WithLabelValues("live").Set(float64(len(l.segs)))
	l.metrics.segments.WithLabelValues("prepared").Set(float64(len(l.ready)))
	l.metrics.segments.WithLabelValues("dead").Set(float64(len(l.dead)))
}

// GroupPin is a group whose tail holds an old segment and is not rewritten.
type GroupPin struct {
	Group keyspace.GroupID
	// Segments is how many segments lie behind the oldest one that the group needs.
	Segments int
	// LogBytes is the length of the log from that segment on, Bytes the size of the
	// group's own records.
	LogBytes, Bytes int64
}

// Pinning returns up to n groups that hold the oldest segments with large tails, those
// at the oldest segment first. It returns groups with tails of any size when all small
// ones have been rewritten and the log still exceeds its target. To shorten the log,
// flush the engine and compact these groups; if a group stays, cut its followers off
// from the log; if it still stays, Move it.
func (l *Log) Pinning(n int) []GroupPin {
	l.mu.Lock()
	segs := slices.Clone(l.segs[l.oldestNeededLocked():])
	small := l.opts.SmallTailBytes
	if l.lastCycle.over && l.liveBytesLocked() > l.opts.TargetBytes {
		small = 0
	}
	l.mu.Unlock()
	logBytes := int64(0)
	for _, s := range segs {
		logBytes += s.end.Load()
	}
	var out []GroupPin
	for i, s := range segs[:len(segs)-1] {
		l.eachPinned(s, small, func(g *GroupLog, bytes int64, fixed bool) bool {
			if fixed {
				out = append(out, GroupPin{g.id, len(segs) - 1 - i, logBytes, bytes})
			}
			return len(out) < n
		})
		if len(out) >= n {
			break
		}
		logBytes -= s.end.Load()
	}
	return out
}

// eachPinned calls f for the groups listed at the segment, with their tail sizes, until f
// returns false. fixed says that a tail of more than small bytes is not rewritten.
func (l *Log) eachPinned(s *segment, small int64, f func(g *GroupLog, bytes int64, fixed bool) bool) {
	const atOnce = 256
	for left := l.pins.count(s); left > 0; left -= atOnce {
		for _, g := range l.pins.some(s, min(left, atOnce)) {
			g.mu.Lock()
			bytes := g.tailBytesLocked()
			fixed := bytes > small && (small == 0 || g.moveBelow <= s.seq)
			g.mu.Unlock()
			if !f(g, bytes, fixed) {
				return
			}
		}
	}
}

// rewriteBytes and rewriteGroups bound a batch of rewrites.
const (
	rewriteBytes  = 256 << 10
	rewriteGroups = 2048
)

// rewriteLoop rewrites tails in cycles while the log is too long. A cycle that was held for want of
// room goes on where it was. Behind it comes a new one, for what has changed meanwhile.
func (l *Log) rewriteLoop() {
	var c cycle
	for held := false; ; {
		select {
		case <-l.rewriteSignal:
		case <-l.stop:
			return
		case <-l.fatal:
			return
		}
		if held {
			for l.rewriteSome(c) {
			}
			if l.rewriteIsHeld() {
				continue
			}
		}
		for c = l.newCycle(); l.rewriteSome(c); {
		}
		held = l.rewriteIsHeld()
	}
}

func (l *Log) rewriteIsHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rewriteHeld
}

func (l *Log) newCycle() cycle { return cycle{l.head(), l.churn.Load()} }

// rewriteSome rewrites one batch of tails that hold the oldest segment and waits until it
// is written. It returns false when nothing is left to do now.
func (l *Log) rewriteSome(c cycle) bool {
	b := l.NewBatch()
	b.sync, b.rewrite = false, true
	groups, s := l.tailsToRewrite(c)
	for _, g := range groups {
		if err := l.rewriteInto(b, g, s); err != nil {
			l.fail(fmt.Errorf("wal: rewrite group %s: %w", g.id, err))
			return false
		}
		// The next fsync of others has no more than a step to write.
		b.sync = b.Bytes() >= rewriteBytes/2
		if b.Bytes() >= l.rewriteStep()/2 {
			break
		}
	}
	if b.Len() == 0 {
		return false
	}
	done := make(chan error, 1)
	l.Submit(b, func(err error) { done <- err })
	if err := <-done; err != nil {
		return false
	}
	moved := false
	for i := range b.ops {
		moved = moved || !b.ops[i].skip
	}
	return moved
}

// rewriteStep bounds a rewrite of one group, but for a single entry that is larger. A batch of rewrites
// is at most half a step longer, so that it fits into half of a segment.
func (l *Log) rewriteStep() int64 { return min(rewriteBytes, l.opts.unitBytes()) }

// tailsToRewrite returns the oldest needed segment and the groups there to rewrite at the
// log's current length, or none when the cycle ends or is held.
func (l *Log) tailsToRewrite(c cycle) (out []*GroupLog, oldest *segment) {
	l.mu.Lock()
	live := l.liveBytesLocked()
	oldest = l.segs[l.oldestNeededLocked()]
	if live <= l.opts.TargetBytes {
		l.lastCycle.over = false
	}
	idle := live <= l.opts.TargetBytes/2 || c.churn < l.lastCycle.until || l.err != nil || l.closing
	ends := !idle && oldest.seq >= c.until
	if ends {
		// A quarter bounds the rewritten bytes to four times their cause, whatever the
		// log's length.
		l.lastCycle = cycleResult{c.churn + max(l.opts.SegmentBytes, live/4), live > l.opts.TargetBytes}
	}
	small := int64(0)
	if live > l.opts.TargetBytes {
		small = l.opts.SmallTailBytes
	}
	// Without a further segment, the rest of this one is for hard states and commits. A rewrite that
	// no longer fits would keep all of them waiting behind it.
	l.rewriteHeld = !idle && !ends && len(l.ready) == 0
	active := l.segs[len(l.segs)-1]
	room := active.size - active.end.Load() - l.queued - l.opts.unitBytes()
	held := l.rewriteHeld
	l.mu.Unlock()
	if ends && live > l.opts.TargetBytes {
		l.nameTails(live)
	}
	if idle || ends || held && !l.freedWithin(oldest, small, room) {
		return nil, nil
	}
	l.eachPinned(oldest, small, func(g *GroupLog, _ int64, fixed bool) bool {
		if !fixed {
			out = append(out, g)
		}
		return len(out) < rewriteGroups
	})
	return out, oldest
}

// freedWithin says whether rewrites of at most that many bytes free the segment.
func (l *Log) freedWithin(s *segment, small, room int64) bool {
	frees := true
	l.eachPinned(s, small, func(g *GroupLog, _ int64, fixed bool) bool {
		g.mu.Lock()
		room -= recordLen + g.bytesInLocked(s)
		g.mu.Unlock()
		frees = !fixed && room >= 0
		return frees
	})
	return frees
}

// namedTails is how many groups a warning names.
const namedTails = 8

// nameTails warns that rewriting has not shortened the log below its target.
func (l *Log) nameTails(live int64) {
	l.mu.Lock()
	segs := slices.Clone(l.segs)
	l.mu.Unlock()
	var tails []GroupPin
	var bytes int64
	for _, s := range segs {
		l.eachPinned(s, 0, func(g *GroupLog, n int64, _ bool) bool {
			tails = append(tails, GroupPin{Group: g.id, Bytes: n})
			bytes += n
			return true
		})
	}
	slices.SortFunc(tails, func(a, b GroupPin) int { return cmp.Compare(b.Bytes, a.Bytes) })
	var names []string
	for _, p := range tails[:min(namedTails, len(tails))] {
		names = append(names, fmt.Sprintf("%s (%d bytes)", p.Group, p.Bytes))
	}
	l.logger.Warn("the log exceeds its target, and nearly all of it is needed: repair or remove the groups with the most entries",
		zap.Int64("bytes", live), zap.Int64("target", l.opts.TargetBytes), zap.Int64("needed", bytes),
		zap.Int("groups", len(tails)), zap.Strings("largest", names))
}

// rewriteInto adds a record with the group's small state and with its oldest entries in the
// segment: a step's worth of them, since nobody's fsync may wait for all. Submit checks
// whether they have been overwritten.
func (l *Log) rewriteInto(b *Batch, g *GroupLog, s *segment) error {
	g.mu.Lock()
	o := op{kind: kindRewrite, group: g.id, g: g, version: g.version}
	first, end, ok := g.runsInLocked(s)
	ok = ok || len(g.runs) == 0
	g.mu.Unlock()
	if !ok {
		return nil // a later submission has overwritten or compacted them
	}
	if first < end {
		step := l.rewriteStep()
		ents, err := g.Entries(first, end, uint64(step))
		if logChanged(err) {
			return nil
		}
		if err != nil {
			return err
		}
		size := int64(recordLen)
		for i, e := range ents {
			if size += entryLen + int64(len(e.GetData())); size > step && i > 0 {
				ents = ents[:i]
				break
			}
		}
		if len(ents) == 1 && size > l.opts.unitBytes() {
			return nil // written when segments were larger
		}
		o.ents = ents
	}
	b.add(o)
	return nil
}

// logChanged reports whether a group's log has changed under a reader.
func logChanged(err error) bool {
	return errors.Is(err, raft.ErrCompacted) || errors.Is(err, raft.ErrUnavailable)
}
