package shard

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/command"
)

// elasticLog is the log of a range: what is committed, all of it. The first entry's index is
// raftgroup.InitIndex+1.
type elasticLog struct {
	entries []raftgroup.Entry
	// term is the last one in which somebody led.
	term uint64
	// led says that the leader's node leads.
	led bool
	// slow is for how many steps yet its quorum takes its time: what is proposed waits.
	slow int
}

func (e *elastic) log(id keyspace.RangeID) *elasticLog {
	if e.logs[id] == nil {
		e.logs[id] = &elasticLog{term: raftgroup.InitTerm}
	}
	return e.logs[id]
}

// logged are the ranges that there were ever, in order.
func (e *elastic) logged() []keyspace.RangeID { return slices.Sorted(maps.Keys(e.logs)) }

// inOrder are a node's groups.
func (f *fakeGroups) inOrder() []*fakeGroup {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.SortedFunc(maps.Values(f.groups), func(a, b *fakeGroup) int { return cmp.Compare(a.id, b.id) })
}

// proposed is how many entries wait to be committed.
func (g *fakeGroup) proposed() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.log)
}

// commit commits entries and has the leader's node apply them, in one batch. Compacted versions
// may be removed at once, so the model looks before.
func (e *elastic) commit(g *fakeGroup, ents ...raftgroup.Entry) {
	for i := range ents {
		if h, _, err := command.DecodeHeader(ents[i].Data); err != nil || h.Kind != command.KindCompact {
			continue
		}
		if i > 0 {
			e.commit(g, ents[:i]...)
			ents = ents[i:]
		}
		e.model.observe(e)
		break
	}
	l := e.log(g.id.Range())
	l.entries = append(l.entries, slices.Clone(ents)...)
	if err := g.apply(ents...); err != nil {
		e.fatal("range %s at the leader: %v", g.id.Range(), err)
	}
}

// commitFirst commits the first n entries that are proposed, or so many as there are.
func (e *elastic) commitFirst(g *fakeGroup, n int) {
	var ents []raftgroup.Entry
	for range min(n, g.proposed()) {
		ents = append(ents, entryOf(g.take(0)))
	}
	if len(ents) > 0 {
		e.commit(g, ents...)
	}
}

// settle has the leader's node go on until nothing moves any more: what it proposes is
// committed, new ranges are led, the records of leases answer. What is slow stays as it is.
func (e *elastic) settle() {
	for synctest.Wait(); ; synctest.Wait() {
		moved := e.leases.answer()
		for _, g := range e.leader.groups.inOrder() {
			if id := g.id.Range(); e.log(id).slow == 0 && g.proposed() > 0 && e.leader.store.Replica(id) != nil {
				e.commitFirst(g, 1+e.rng.IntN(3))
				moved = true
			}
		}
		for _, r := range e.over(keyspace.Span{}) {
			if !e.log(r.id).led {
				e.lead(r.id)
				moved = true
			}
		}
		if !moved {
			break
		}
	}
	e.placed.update(e.over(keyspace.Span{}))
}

// lead has the leader's node lead a range in its next term.
func (e *elastic) lead(id keyspace.RangeID) {
	l, g := e.log(id), e.leader.groups.group(id)
	l.term++
	l.led = true
	s := raftgroup.LeaderState{Term: l.term, Leader: 1, LeaderNode: 1, IsLeader: true}
	g.lead(s)
	e.commit(g, raftgroup.Entry{Term: l.term})
	s.Ready = true
	g.lead(s)
}

// yield has somebody else lead a range, who has nothing to say.
func (e *elastic) yield(id keyspace.RangeID) {
	l := e.log(id)
	l.term++
	l.led = false
	e.leader.groups.group(id).lead(raftgroup.LeaderState{Term: l.term, Leader: 2, LeaderNode: 2})
	synctest.Wait()
}

// lose commits some of a range's proposals. Some or all of the others are dropped in a term that
// goes on, or all are lost with the leadership. Nobody reports either.
func (e *elastic) lose(id keyspace.RangeID) {
	g := e.leader.groups.group(id)
	e.commitFirst(g, e.rng.IntN(3))
	synctest.Wait()
	if !e.log(id).led {
		return
	}
	if g.proposed() > 0 && e.one(2) {
		dropped := 0
		for i := 0; i < g.proposed(); {
			if e.one(3) {
				i++
				continue
			}
			g.take(i).dropped(raftgroup.ErrDropped)
			dropped++
		}
		synctest.Wait()
		e.say("range %s: %d entries dropped", id, dropped)
		return
	}
	e.depose(id)
}

// depose loses what a range has proposed together with its leadership, which comes back.
func (e *elastic) depose(id keyspace.RangeID) {
	g := e.leader.groups.group(id)
	g.mu.Lock()
	lost := len(g.log)
	g.log = nil
	g.mu.Unlock()
	e.yield(id)
	e.lead(id)
	e.say("range %s: %d entries lost, led in term %d", id, lost, e.log(id).term)
}

func (e *elastic) changeLeader() { e.lose(e.some()) }

// slowDown has the quorum of a range, or the records of all leases, take their time.
func (e *elastic) slowDown() {
	if !e.traits.slow {
		return
	}
	steps := 3 + e.rng.IntN(20)
	if e.one(2) {
		e.leases.slow, e.leases.deaf = 2*steps, e.one(2)
		e.say("the records of the leases are slow for %d steps, deaf %t", e.leases.slow, e.leases.deaf)
		return
	}
	id := e.some()
	e.log(id).slow = steps
	e.say("range %s is slow for %d steps", id, steps)
}

// stepped counts a step of what is slow.
func (e *elastic) stepped() {
	for _, l := range e.logs {
		l.slow = max(0, l.slow-1)
	}
	e.leases.slow = max(0, e.leases.slow-1)
}

// hurry ends all slowness.
func (e *elastic) hurry() {
	for _, l := range e.logs {
		l.slow = 0
	}
	e.leases.slow = 0
	e.settle()
}

func (e *elastic) flush() {
	w := e.leader
	if e.one(2) {
		w = e.follower
	}
	if err := w.engine.Flush(e.t.Context()); err != nil {
		e.fatal("flush: %v", err)
	}
	e.say("%s flushed", e.name(w))
}

func (e *elastic) name(w *fakeWorld) string {
	if w == e.leader {
		return "leader"
	}
	return "follower"
}

// stopOrCrash ends a node and opens it again, as often as not without what it had not flushed.
func (e *elastic) stopOrCrash(w *fakeWorld) {
	w.store.Stop()
	lose := e.one(2)
	if lose {
		fs := w.fs.Crash(0, nil)
		if err := w.engine.Abort(); err != nil && !errors.Is(err, context.Canceled) {
			e.fatal("%s: %v", e.name(w), err)
		}
		w.fs = fs
	} else if err := w.engine.Close(); err != nil {
		e.fatal("%s: %v", e.name(w), err)
	}
	w.start()
	e.tellCompacted(w)
	synctest.Wait()
	e.say("%s restarted, crashed %t", e.name(w), lose)
}

// restart ends the leader's node and starts it again. Its proposals are lost. It applies committed
// entries again from the state to which a crash has taken it back.
func (e *elastic) restart() {
	e.hurry()
	e.stopOrCrash(e.leader)
	for e.catchUp(e.leader, 1+e.rng.IntN(20)) {
	}
	for _, l := range e.logs {
		l.led = false
	}
	e.settle()
}

func (e *elastic) restartFollower() { e.stopOrCrash(e.follower) }

// handOver has the follower lead, and the leader follow.
func (e *elastic) handOver() {
	if e.merge != nil && e.one(2) {
		return // most merges are to have a leader that stays
	}
	e.agree()
	for _, r := range e.over(keyspace.Span{}) {
		e.yield(r.id)
	}
	e.leader, e.follower = e.follower, e.leader
	e.say("handed over")
	e.settle()
}

// catchUp has a node apply what it lacks, some ranges' at a time and at most so many entries of
// each; it says whether there was anything.
func (e *elastic) catchUp(w *fakeWorld, most int) (moved bool) {
	ids := e.logged()
	e.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids {
		moved = e.replay(w, id, most) || moved
	}
	return moved
}

// replay has a node apply the next entries of a range, in one batch. It says whether there
// were any.
func (e *elastic) replay(w *fakeWorld, id keyspace.RangeID, most int) bool {
	r, g := w.store.Replica(id), w.groups.group(id)
	if r == nil || g == nil {
		return false
	}
	r.mu.Lock()
	stopped, empty := r.stopped, r.rec.Generation == 0
	r.mu.Unlock()
	g.mu.Lock()
	next := g.index - raftgroup.InitIndex
	g.mu.Unlock()
	l := e.log(id)
	if stopped || empty || next >= uint64(len(l.entries)) {
		return false
	}
	ents := slices.Clone(l.entries[next:min(next+uint64(most), uint64(len(l.entries)))])
	if err := g.apply(ents...); err != nil {
		e.fatal("range %s at the %s: %v", id, e.name(w), err)
	}
	synctest.Wait()
	return true
}

// pass lets time go by.
func (e *elastic) pass(d time.Duration) {
	time.Sleep(d)
	e.settle()
}
