package placement

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// retryPause is how long the sequencer waits before it repeats what raft did not
// take in: a ceiling's proposal, a failed ReadIndex round.
const retryPause = 10 * time.Millisecond

// raft is what the sequencer needs of the placement group.
type raft interface {
	proposer
	// ReadIndex calls done once an index that was committed when this was called is
	// applied here.
	ReadIndex(done func(index uint64, err error))
	// LeaseHeld reads the clock and says whether this replica leads in the term and
	// holds the leader lease now.
	LeaseHeld(term uint64) bool
}

// sequencer runs a counter: it brings it lease, raft and callers. Its goroutine
// does what must not be done from a callback of raft's: proposals and rounds.
type sequencer struct {
	clock   clock.Clock
	logger  *zap.Logger
	metrics *Metrics
	machine *machine

	mu sync.Mutex
	// Guarded by mu. raft is nil until the group is open. todo is what the goroutine
	// has to do in the term todoTerm; moved is closed when the phase changes.
	c        *counter
	raft     raft
	todo     output
	todoTerm uint64
	retry    bool
	phase    phase
	moved    chan struct{}

	wake chan struct{}
	done chan struct{}
}

func newSequencer(c clock.Clock, m *machine, metrics *Metrics, logger *zap.Logger) *sequencer {
	return &sequencer{
		clock: c, logger: logger, metrics: metrics, machine: m,
		c:     newCounter(newHandoutLog(handoutLogEntries)),
		moved: make(chan struct{}),
		wake:  make(chan struct{}, 1),
		done:  make(chan struct{}),
	}
}

// run does the counter's work until stop is closed.
func (s *sequencer) run(stop <-chan struct{}) {
	defer close(s.done)
	timer := s.clock.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-stop:
			s.input(func() output { return s.c.follow(0) })
			return
		case <-s.wake:
		case <-timer.C():
			s.input(func() output { return merge(s.c.retryCeiling(), s.c.advance(s.leaseLocked())) })
		}
		s.mu.Lock()
		if s.raft == nil {
			s.mu.Unlock()
			continue
		}
		todo, term, raft := s.todo, s.todoTerm, s.raft
		s.todo = output{}
		again := s.retry
		s.retry = false
		s.mu.Unlock()
		if again {
			timer.Reset(retryPause)
		}
		s.perform(todo, term, raft)
	}
}

// perform does what the counter of the term wants done.
func (s *sequencer) perform(todo output, term uint64, r raft) {
	if todo.raise != 0 {
		s.machine.propose(r, term, fsm.RaiseCeiling{To: todo.raise}, func(res fsm.Result) { s.ceilingDone(term, todo.raise, res) })
	}
	if todo.lower != 0 {
		s.machine.propose(r, term, fsm.LowerCeiling{To: todo.lower}, func(res fsm.Result) { s.ceilingDone(term, todo.lower, res) })
	}
	if todo.readIndex != 0 {
		s.metrics.ReadIndexRounds.Inc()
		r.ReadIndex(func(_ uint64, err error) { s.roundDone(term, todo.readIndex, err) })
	}
}

// input feeds the counter, hands what it wants to the goroutine and answers.
func (s *sequencer) input(f func() output) {
	s.mu.Lock()
	out := f()
	s.takeLocked(&out)
	s.mu.Unlock()
	deliver(out.answers)
}

func (s *sequencer) takeLocked(out *output) {
	if s.todoTerm != s.c.term || s.c.phase == following {
		// What an earlier term wanted must never be proposed in this one.
		s.todo, s.todoTerm = output{}, s.c.term
	}
	if out.raise != 0 || out.lower != 0 || out.readIndex != 0 {
		s.todo = merge(s.todo, output{raise: out.raise, lower: out.lower, readIndex: out.readIndex})
		s.signal()
	}
	s.metrics.observeCounter(s.c, out)
	if s.c.phase != s.phase {
		s.logger.Info("sequencer changes",
			zap.Stringer("from", s.phase), zap.Stringer("to", s.c.phase), zap.Uint64("term", s.c.term),
			zap.Int64("revision", int64(s.c.last)), zap.Int64("ceiling", int64(s.c.ceiling)))
		s.phase = s.c.phase
		close(s.moved)
		s.moved = make(chan struct{})
	}
}

func (s *sequencer) retryLater() {
	s.mu.Lock()
	s.retry = true
	s.mu.Unlock()
	s.signal()
}

func (s *sequencer) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func deliver(answers []answered) {
	for i := range answers {
		answers[i].ask.done(answers[i].grant, answers[i].err)
	}
}

// merge puts b's work after a's. Both never hold the same kind of proposal: the
// counter has one under way at a time.
func merge(a, b output) output {
	a.answers = append(a.answers, b.answers...)
	if b.raise != 0 {
		a.raise = b.raise
	}
	if b.lower != 0 {
		a.lower = b.lower
	}
	if b.readIndex != 0 {
		a.readIndex = b.readIndex
	}
	return a
}

// leaseLocked looks at the lease. Whoever calls it has put all requests that it is
// for into the counter before.
func (s *sequencer) leaseLocked() bool {
	return s.raft != nil && (s.raft.LeaseHeld(s.c.term) || mutation.Is(mutation.HandOutWithoutLease))
}

// ceilingDone is the end of a proposal of a ceiling.
func (s *sequencer) ceilingDone(term uint64, to keyspace.Revision, res fsm.Result) {
	switch e := kverror.Of(res.Err); {
	case e == nil:
		s.input(func() output {
			out := s.c.ceilingApplied(term, to)
			return merge(out, s.c.advance(s.leaseLocked()))
		})
	case e.Fate() == kverror.NotApplied:
		s.mu.Lock()
		s.c.ceilingDropped(term)
		s.mu.Unlock()
		s.retryLater()
	}
	// Otherwise leadership is lost, and the change of the leader ends the term.
}

// roundDone is the end of a ReadIndex round that began in the term. That it
// succeeded proves nothing of this node if it has stopped leading meanwhile, since
// raft then asks the new leader; but that one answers with an index at or above
// the first entry of its own term, which is then applied here and seen.
func (s *sequencer) roundDone(term, round uint64, err error) {
	applied := s.machine.view.Load().Term
	ok := err == nil && applied == term
	s.input(func() output {
		if s.c.term != term {
			return output{}
		}
		s.c.roundDone(round, ok)
		if !ok {
			return output{}
		}
		return s.c.advance(s.leaseLocked())
	})
	if !ok {
		s.retryLater()
	}
}

// leaderChanged is called in order with applied.
func (s *sequencer) leaderChanged(ls raftgroup.LeaderState) {
	s.input(func() output {
		switch {
		case ls.Ready && ls.Term > s.c.term:
			return s.c.lead(ls.Term, s.machine.view.Load().Ceiling)
		case !ls.IsLeader || ls.Term != s.c.term:
			return s.c.follow(ls.LeaderNode)
		}
		return output{}
	})
}

// applied is called with each new View, before anybody is answered from it.
func (s *sequencer) applied(v *fsm.View) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.c.observe(v.Compacted, v.SettingsRevision())
}

// pendingAsk is a batch that the sequencer has taken.
type pendingAsk struct {
	s   *sequencer
	ask *ask
	ch  chan askAnswer
}

type askAnswer struct {
	grant grant
	err   error
}

// begin gives the sequencer a batch. Where it is answered at once, the answer is in
// the channel when begin returns.
func (s *sequencer) begin(from keyspace.NodeID, b batch) *pendingAsk {
	p := &pendingAsk{s: s, ch: make(chan askAnswer, 1)}
	p.ask = &ask{
		from: process{Node: from, Boot: b.Boot}, batch: b,
		done: func(g grant, err error) { p.ch <- askAnswer{g, err} },
	}
	s.input(func() output {
		out := s.c.arrive(p.ask)
		return merge(out, s.c.advance(s.leaseLocked()))
	})
	return p
}

// wait returns the answer, or ctx's error where the caller's patience ends first;
// numbers may have been handed out to the batch then.
func (p *pendingAsk) wait(ctx context.Context) (grant, error) {
	r, err := clock.Await(ctx, p.ch)
	if err != nil {
		p.withdraw()
		return grant{}, err
	}
	return r.grant, r.err
}

// withdraw takes the batch back. From its return on nothing is handed out for it;
// before, something may have been.
func (p *pendingAsk) withdraw() {
	p.s.mu.Lock()
	p.s.c.withdraw(p.ask)
	p.s.mu.Unlock()
}

// confirm proves that this node leads the placement group at a moment after the
// call, and returns the term and the last revision handed out.
func (s *sequencer) confirm(ctx context.Context) (term uint64, last keyspace.Revision, err error) {
	s.mu.Lock()
	term, last = s.c.term, s.c.last
	leads, leased, r, refusal := s.c.phase != following, s.leaseLocked(), s.raft, s.c.refusal()
	s.mu.Unlock()
	if !leads || r == nil {
		return 0, 0, refusal
	}
	if leased {
		return term, last, nil
	}
	ch := make(chan error, 1)
	r.ReadIndex(func(_ uint64, err error) { ch <- err })
	select {
	case err = <-ch:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return 0, 0, kverror.New(kverror.NoLeader, "confirm leadership of placement in term %d: %v", term, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.machine.view.Load().Term != term || s.c.term != term || s.c.phase == following {
		return 0, 0, s.c.refusal()
	}
	return term, s.c.last, nil
}

// end ends the hand-outs, with next as the node to ask from now on, and returns
// when the ceiling is committed at the counter or this node no longer leads.
func (s *sequencer) end(ctx context.Context, next keyspace.NodeID) error {
	s.input(func() output { return s.c.end(next) })
	for {
		s.mu.Lock()
		p, moved := s.c.phase, s.moved
		s.mu.Unlock()
		if p == following || p == ended {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// hasEnded says that hand-outs have ended and the ceiling is committed at the counter.
func (s *sequencer) hasEnded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.c.phase == ended
}

// resume starts the hand-outs again after end, if this node still leads.
func (s *sequencer) resume() { s.input(func() output { return s.c.resume() }) }
