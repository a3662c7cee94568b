package shard

import (
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/pipeline"
)

// LeaderChanged implements raftgroup.StateMachine.
func (r *Replica) LeaderChanged(s raftgroup.LeaderState) {
	var out pipeline.Answers
	r.mu.Lock()
	old := r.leader
	r.leader = s
	if r.pipe.Leads() && (!s.IsLeader || s.Term != r.pipe.Term()) {
		r.loseLocked(&out)
	}
	if s.IsLeader && s.Ready && !r.pipe.Leads() && !r.stopped && r.group != nil {
		r.becomeLocked(s.Term)
	}
	if !s.IsLeader {
		r.pipe.Refuse(&out, r.errorLocked(kverror.NotLeader, "the leader changed"))
	}
	r.notifyLocked()
	leads, gained := r.pipe.Leads(), r.leader.IsLeader && !old.IsLeader
	r.mu.Unlock()
	r.pipe.Send(&out)

	if gained {
		r.store.metrics.leaders.Inc()
		r.store.moves.note(true, r.id)
	} else if old.IsLeader && !s.IsLeader {
		r.store.metrics.leaders.Dec()
		r.store.moves.note(false, r.id)
	}
	if leads {
		r.leads()
	}
}

// Moves are the leaderships that this node has gained and lost in some time.
type Moves struct{ Gained, Lost Moved }

// Moved counts ranges, and has the first of them.
type Moved struct {
	Count int
	First []keyspace.RangeID
}

// maxMoved bounds the ranges of Moved.
const maxMoved = 8

// moves are those since they were last taken.
type moves struct {
	mu sync.Mutex
	m  Moves // guarded by mu
}

func (m *moves) note(gained bool, id keyspace.RangeID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := &m.m.Lost
	if gained {
		w = &m.m.Gained
	}
	if w.Count++; len(w.First) < maxMoved {
		w.First = append(w.First, id)
	}
}

// TakeMoves returns the leaderships that have come and gone since it was last called.
func (s *Store) TakeMoves() (m Moves) {
	s.moves.mu.Lock()
	defer s.moves.mu.Unlock()
	m, s.moves.m = s.moves.m, Moves{}
	return m
}

// becomeLocked starts a leadership: everything that earlier leaders committed is
// applied here, so that the last applied batch is the one to build on.
func (r *Replica) becomeLocked(term uint64) {
	r.pipe.Become(term)
	r.fence = r.rec.Fence
}

// leads begins a leader's work. A new leader reports the range's descriptor: a report may have
// died with the leader before it.
func (r *Replica) leads() {
	r.mu.Lock()
	care, watched := r.needsCareLocked() || r.heldBackLocked(), !r.locks.Empty()
	r.awaitCommitLocked()
	d := r.descriptorLocked()
	r.load.Measure() // it may have been too large under another leader
	r.mu.Unlock()
	r.pipe.Schedule()
	if watched {
		r.store.pushes.note(r)
	}
	r.store.cfg.Reporter.ReportDescriptors(d)
	if care {
		r.store.maintenance.note(r)
	}
}

// opened gives the replica its group, whose first words it may have heard already.
func (r *Replica) opened(g group) {
	r.mu.Lock()
	r.group = g
	if r.leader.IsLeader && r.leader.Ready && !r.pipe.Leads() && !r.stopped {
		r.becomeLocked(r.leader.Term)
	}
	leads := r.pipe.Leads()
	r.notifyLocked()
	r.mu.Unlock()
	if leads {
		r.leads()
	}
}

// loseLocked ends the leadership, and what it has under way beside the pipeline.
func (r *Replica) loseLocked(out *pipeline.Answers) {
	r.wokenLocked(r.locks.DropPending())
	r.dropRegistrationsLocked()
	r.pipe.Lose(out)
	r.upkeep.lose()
	r.altering = 0
	// Whether the change happened, the log says; this replica answers nothing for
	// anybody until it leads again, by when it has applied it.
	r.endChangeLocked(kverror.New(kverror.LeaderChanged, "the leadership ended"))
}

// stop ends the replica with its node.
func (r *Replica) stop() { r.end(kverror.New(kverror.Stopped, "node %s stops", r.store.cfg.Self)) }

// end ends the replica: every caller gets an answer, and who comes later the same.
func (r *Replica) end(why *kverror.Error) {
	var out pipeline.Answers
	r.mu.Lock()
	if !r.absorbed || r.ended == nil {
		r.ended = why // else whoever comes learns where the keys are
	}
	r.stopped = true
	r.endDoubtLocked()
	if r.pipe.Leads() {
		r.loseLocked(&out)
	}
	r.pipe.Refuse(&out, why)
	r.pipe.Abandon(&out)
	r.feeds.End(why)
	r.notifyLocked()
	r.mu.Unlock()
	r.pipe.Send(&out)
}
