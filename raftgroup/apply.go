package raftgroup

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// appliedItem is a completion on its way back.
type appliedItem struct {
	g    *Group
	done applyDone
}

// applyDone says how far a group is applied.
type applyDone struct {
	resp *pb.Message // raft's MsgStorageApplyResp
	at   Position
	// confs are the configuration changes among the entries, in order.
	confs []appliedConf
	bytes int64
}

// applyState is the applier's side of a group.
type applyState struct {
	// Guarded by applier.mu.
	tasks  []applyTask
	queued bool
	// held says that a snapshot is being installed: no task of the group may run.
	held bool

	// Owned by the goroutine that runs the group's tasks, one at a time.
	at        Position
	replicas  []keyspace.Replica
	confIndex uint64
	payload   []byte
	leader    LeaderState
	entries   []Entry // reused
	commit    Commit  // of the entries that were applied last
}

// applier applies the committed entries of a fixed part of the groups, in order
// within a group and with one engine batch for many of them.
type applier struct {
	h  *Host
	mu struct {
		sync.Mutex
		queue   []*Group
		stopped bool
	}
	cond *sync.Cond

	// began is the clock.Time at which the round of the batch now entering the engine was begun; 0 if
	// there is none.
	began atomic.Int64

	round []*applyTurn
	turns []*applyTurn // reused
	// told is when the log was told last of a slow batch.
	told clock.Time
	done []appliedItem
}

// applyTurn is one group's part of a batch.
type applyTurn struct {
	g     *Group
	tasks []applyTask
	next  int // the first task not yet done
	first int // the first of the entry tasks in this batch
	// failed says that the batch has nothing of the group's entries.
	failed bool
	done   applyDone
}

func newApplier(h *Host) *applier {
	a := &applier{h: h}
	a.cond = sync.NewCond(&a.mu.Mutex)
	return a
}

// run is the applier's goroutine. After stop it ends once the queue is empty.
func (a *applier) run() {
	for a.take() {
		a.apply()
	}
}

// take takes groups with tasks until a batch is full.
func (a *applier) take() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.mu.queue) == 0 {
		if a.mu.stopped {
			return false
		}
		a.cond.Wait()
	}
	a.round = a.round[:0]
	bytes, n := int64(0), 0
	for n < len(a.mu.queue) && n < passGroupsMax && bytes < applyBytesMax {
		g := a.mu.queue[n]
		n++
		if n > len(a.turns) {
			a.turns = append(a.turns, new(applyTurn))
		}
		t := a.turns[n-1]
		*t = applyTurn{g: g, tasks: g.apply.tasks}
		g.apply.tasks = nil
		for i := range t.tasks {
			bytes += entriesBytes(t.tasks[i].msg.GetEntries())
		}
		a.round = append(a.round, t)
	}
	rest := copy(a.mu.queue, a.mu.queue[n:])
	clear(a.mu.queue[rest:])
	a.mu.queue = a.mu.queue[:rest]
	return true
}

// stop ends the applier once its queue is empty.
func (a *applier) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.stopped = true
	a.cond.Broadcast()
}

// apply runs the tasks of the round: first each group's tasks before its first entries,
// then the entries of all groups in one engine batch, then their completions. Tasks
// behind entries wait for the next round, since they must follow their Applied.
func (a *applier) apply() {
	start, watch := a.h.cfg.Clock.Now(), clock.StartStopwatch()
	var b *engine.Batch
	groups := 0
	for _, t := range a.round {
		t.g.runTasks(t)
		t.first = t.next
		if t.next == len(t.tasks) || t.tasks[t.next].kind != taskEntries {
			continue
		}
		if b == nil {
			b = a.h.cfg.Engine.NewBatch()
			a.began.Store(int64(start))
		}
		t.g.applyEntries(b, t)
		groups++
	}
	a.done = a.done[:0]
	committed := b != nil && a.commit(b)
	a.began.Store(0)
	if committed {
		a.h.m.applyGroups.Observe(float64(groups))
		took := watch.Elapsed()
		now := start.Add(took)
		if a.h.m.applySeconds.Observe(took.Seconds()); took > a.h.cfg.SlowApply {
			a.h.m.slowApplies.Inc()
			a.tellSlow(now, took, groups)
		}
		for _, t := range a.round {
			if t.next > t.first && !t.failed {
				t.g.apply.noteApplied(t, now)
				t.g.appliedEntries(t)
			}
		}
	}
	a.putBack()
	for _, w := range a.h.workers {
		w.appliedFrom(a)
	}
	clear(a.done)
}

// slowApplyEvery lies between two lines about slow batches of one applier.
const slowApplyEvery = 10 * time.Millisecond

// tellSlow has the log say that a batch took long, as etcd does.
func (a *applier) tellSlow(now clock.Time, took time.Duration, groups int) {
	if a.told != 0 && now.Sub(a.told) < slowApplyEvery {
		return
	}
	a.told = now
	fields := []zap.Field{zap.Duration("took", took), zap.Duration("expected-duration", a.h.cfg.SlowApply), zap.Int("groups", groups)}
	entries := 0
	for _, t := range a.round {
		for i := t.first; i < t.next; i++ {
			entries += len(t.tasks[i].msg.GetEntries())
		}
		if t.next > t.first && groups == 1 {
			fields = append(fields, zap.Stringer("group", t.g.id))
		}
	}
	a.h.log.Warn("applying entries took too long", append(fields, zap.Int("entries", entries))...)
}

// commit commits the batch. After a failure nothing is committed or published any more:
// entries that a state machine has seen may be missing in the engine.
func (a *applier) commit(b *engine.Batch) bool {
	if a.h.failed.Load() {
		b.Close()
		return false
	}
	if err := b.Commit(); err != nil {
		a.h.fail(fmt.Errorf("raftgroup: apply: %w", err))
		return false
	}
	return true
}

// putBack queues groups that have tasks left.
func (a *applier) putBack() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, t := range a.round {
		s := &t.g.apply
		s.queued = false
		if t.next < len(t.tasks) {
			s.tasks = append(t.tasks[t.next:], s.tasks...)
		} else if len(s.tasks) == 0 && cap(t.tasks) <= workKeepMax {
			clear(t.tasks)
			s.tasks = t.tasks[:0]
		}
		a.queueLocked(t.g)
		*t = applyTurn{}
	}
}

// appliedFrom takes the completions for the worker's groups.
func (w *worker) appliedFrom(a *applier) {
	mine := a.done[:0:0]
	for _, d := range a.done {
		if d.g.w == w {
			mine = append(mine, d)
		}
	}
	if len(mine) > 0 {
		w.applied(mine)
	}
}

// runTasks runs the tasks before the group's first entries.
func (g *Group) runTasks(t *applyTurn) {
	for t.next < len(t.tasks) {
		task := &t.tasks[t.next]
		switch task.kind {
		case taskEntries:
			if !g.h.failed.Load() && !g.broken.Load() {
				return
			}
		case taskLeader:
			g.apply.leader = task.leader
			g.sm.LeaderChanged(task.leader)
		case taskCall:
			task.call()
		case taskInstall:
			// No task of this group may run until the snapshot is in the engine, but
			// other groups must not wait for it.
			t.next++
			g.a.hold(g)
			g.h.snaps.startInstall(task.install)
			return
		}
		t.next++
	}
}

// applyEntries writes the entries of consecutive tasks, and the applied record that
// belongs to them, into the batch.
func (g *Group) applyEntries(b *engine.Batch, t *applyTurn) {
	s := &g.apply
	from := b.Savepoint()
	ents := s.entries[:0]
	for t.next < len(t.tasks) && t.tasks[t.next].kind == taskEntries {
		m := t.tasks[t.next].msg
		ents = slices.Grow(ents, len(m.GetEntries()))
		for _, e := range m.GetEntries() {
			ents = append(ents, g.entry(e, &t.done))
		}
		t.done.resp = mergeApplyResp(t.done.resp, m)
		t.next++
	}
	if err := g.sm.Apply(b, ents); err != nil {
		g.cannotApply(b, from, fmt.Errorf("raftgroup: group %s: apply up to %d: %w", g.id, s.at.Index, err))
		t.failed = true
		return
	}
	for i := range ents {
		if ents[i].Refused != nil {
			g.refused(&ents[i])
		}
	}
	if p, ok := g.sm.(Payloader); ok {
		s.payload = p.Payload()
	}
	t.done.at = s.at
	if err := b.SetApplied(g.id, engine.Applied{
		Index: s.at.Index, Term: s.at.Term, Replicas: s.replicas, ConfIndex: s.confIndex, Payload: s.payload,
	}); err != nil {
		g.h.fail(fmt.Errorf("raftgroup: group %s: applied record %d: %w", g.id, s.at.Index, err))
	}
	clear(ents)
	if s.entries = ents[:0]; cap(ents) > workKeepMax {
		s.entries = nil
	}
}

// mergeApplyResp merges the answers of several tasks to raft, which reads the last index
// and the bytes of the listed entries.
func mergeApplyResp(resp, m *pb.Message) *pb.Message {
	r := m.GetResponses()[0]
	if resp != nil {
		r.Entries = append(resp.Entries[:len(resp.Entries):len(resp.Entries)], r.Entries...)
	}
	return r
}

// cannotApply takes the group's part out of the batch, which the other groups need, and puts the
// replica in quarantine. An entry of a later format is no fault of the replica, and no snapshot
// would help: this build is the wrong one.
func (g *Group) cannotApply(b *engine.Batch, from engine.Savepoint, err error) {
	if keyspace.IsVersionError(err) {
		g.h.fail(err)
		return
	}
	if rerr := b.RollBack(from); rerr != nil {
		g.h.fail(rerr)
		return
	}
	g.broken.Store(true) // the state machine has seen what the engine will not have
	g.h.Quarantine(g.id, err.Error())
}

// refused reports an entry that did nothing on any replica.
func (g *Group) refused(e *Entry) {
	g.h.m.refused.Inc()
	g.zap.Error("an entry of the log is refused: it does nothing on any replica",
		zap.Uint64("index", e.Index), zap.Uint64("term", e.Term), zap.Error(e.Refused))
}

// entry turns one of raft's entries into one of the state machine's.
func (g *Group) entry(e *pb.Entry, done *applyDone) Entry {
	s := &g.apply
	// Raft begins behind the record that at is from (load), hands each entry out once, and none while it has a snapshot
	// that is not answered (installOne sets at before that). The wal refuses an append whose indexes are not consecutive
	// or leave a gap, and reads what was overwritten once, also where package offline has written a tail anew in its old terms.
	if e.GetIndex() != s.at.Index+1 {
		panic(fmt.Sprintf("raftgroup: group %s: entry %d to apply after %d", g.id, e.GetIndex(), s.at.Index))
	}
	if e.GetTerm() < s.at.Term {
		panic(fmt.Sprintf("raftgroup: group %s: entry %d of term %d after term %d", g.id, e.GetIndex(), e.GetTerm(), s.at.Term))
	}
	s.at = Position{e.GetIndex(), e.GetTerm()}
	x := Entry{Index: e.GetIndex(), Term: e.GetTerm(), Data: e.GetData()}
	done.bytes += int64(len(x.Data))
	if e.GetType() == pb.EntryNormal {
		return x
	}
	c, err := decodeConfEntry(e)
	if err != nil {
		// Raft takes a change that it is never told of for one that its user refuses.
		x.Data = nil
		if x.Refused = err; keyspace.IsVersionError(err) {
			g.h.fail(fmt.Errorf("raftgroup: group %s: entry %d: %w", g.id, x.Index, err))
		}
		return x
	}
	s.replicas, s.confIndex = c.Apply(s.replicas), x.Index
	c.after, c.index = s.replicas, x.Index
	done.confs = append(done.confs, c)
	x.Data, x.Replicas = c.Payload, s.replicas
	return x
}

// appliedEntries publishes the group's part of the committed batch.
func (g *Group) appliedEntries(t *applyTurn) {
	s := &g.apply
	g.sm.Applied(s.at)
	if l := &s.leader; l.IsLeader && !l.Ready && s.at.Term == l.Term {
		l.Ready = true
		g.sm.LeaderChanged(*l)
	}
	g.public.applying.Store(s.at.Index)
	g.h.trunc.applied(g)
	g.a.done = append(g.a.done, appliedItem{g, t.done})
}
