package sequencer

import (
	"context"
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// retryPause is how long the sequencer waits before it repeats what raft did not
// take in: a ceiling's proposal, a failed ReadIndex round.
const retryPause = 10 * time.Millisecond

// Raft is what the sequencer needs of the placement group.
type Raft interface {
	Proposer
	// ReadIndex calls done once an index that was committed when this was called is
	// applied here.
	ReadIndex(done func(index uint64, err error))
	// LeaseHeld reads the clock and says whether this replica leads in the term and
	// holds the leader lease now.
	LeaseHeld(term uint64) bool
}

// StateMachine is what the sequencer needs of the placement group's replicated state.
type StateMachine interface {
	// Propose proposes an effect in the term. It calls done once, perhaps before it returns.
	// done gets the result when the entry is applied. It gets an error of fate NotApplied if
	// the entry certainly was not appended, and of fate Unknown if leadership was lost.
	Propose(g Proposer, term uint64, op fsm.Effect, done func(fsm.Result))
	// View returns the newest state.
	View() *fsm.View
}

// Sequencer runs an allocator: it brings it lease, raft and callers. Its goroutine
// does what must not be done from a callback of raft's: proposals and rounds.
type Sequencer struct {
	clock   clock.Clock
	logger  *zap.Logger
	metrics *Metrics
	machine StateMachine

	mu sync.Mutex
	// Guarded by mu. raft is nil until the group is open. todo is what the goroutine
	// has to do in the term todoTerm; moved is closed when the phase changes.
	c        *allocator
	raft     Raft
	todo     output
	todoTerm uint64
	retry    bool
	phase    phase
	moved    chan struct{}

	wake wake.Signal
	done chan struct{}
}

// New returns a sequencer that follows until it is told to lead.
func New(c clock.Clock, m StateMachine, metrics *Metrics, logger *zap.Logger) *Sequencer {
	return &Sequencer{
		clock: c, logger: logger, metrics: metrics, machine: m,
		c:     newAllocator(newAllocationLog(allocationLogEntries)),
		moved: make(chan struct{}),
		wake:  wake.New(),
		done:  make(chan struct{}),
	}
}

// Run does the allocator's work until stop is closed.
func (s *Sequencer) Run(stop <-chan struct{}) {
	defer close(s.done)
	ended := make(chan struct{})
	var followed sync.WaitGroup
	followed.Go(func() { s.c.log.serve(ended, s.clock) })
	defer followed.Wait()
	defer close(ended)
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

// perform does what the last revision of the term wants done.
func (s *Sequencer) perform(todo output, term uint64, r Raft) {
	if todo.raise != 0 {
		s.machine.Propose(r, term, fsm.RaiseCeiling{To: todo.raise}, func(res fsm.Result) { s.ceilingDone(term, todo.raise, res) })
	}
	if todo.lower != 0 {
		s.machine.Propose(r, term, fsm.LowerCeiling{To: todo.lower}, func(res fsm.Result) { s.ceilingDone(term, todo.lower, res) })
	}
	if todo.readIndex != 0 {
		s.metrics.ReadIndexRounds.Inc()
		r.ReadIndex(func(_ uint64, err error) { s.roundDone(term, todo.readIndex, err) })
	}
}

// input feeds the allocator, hands what it wants to the goroutine and answers.
func (s *Sequencer) input(f func() output) {
	s.mu.Lock()
	out := f()
	s.takeLocked(&out)
	s.mu.Unlock()
	deliver(out.answers)
}

func (s *Sequencer) takeLocked(out *output) {
	if s.todoTerm != s.c.term || s.c.phase == following {
		// What an earlier term wanted must never be proposed in this one.
		s.todo, s.todoTerm = output{}, s.c.term
	}
	if out.raise != 0 || out.lower != 0 || out.readIndex != 0 {
		s.todo = merge(s.todo, output{raise: out.raise, lower: out.lower, readIndex: out.readIndex})
		s.wake.Set()
	}
	s.metrics.observe(s.c, out)
	if s.c.phase != s.phase {
		s.logger.Info("sequencer changes",
			zap.Stringer("from", s.phase), zap.Stringer("to", s.c.phase), zap.Uint64("term", s.c.term),
			zap.Int64("revision", int64(s.c.last)), zap.Int64("may-allocate-up-to", int64(s.c.ceiling)))
		s.phase = s.c.phase
		close(s.moved)
		s.moved = make(chan struct{})
	}
}

func (s *Sequencer) retryLater() {
	s.mu.Lock()
	s.retry = true
	s.mu.Unlock()
	s.wake.Set()
}

func deliver(answers []answered) {
	for i := range answers {
		answers[i].batch.done(answers[i].grant, answers[i].err)
	}
}

// merge puts b's work after a's. Both never hold the same kind of proposal: the
// allocator has one under way at a time.
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

// leaseLocked looks at the lease. Its caller has put all requests that the lease is for into
// the last input before.
func (s *Sequencer) leaseLocked() bool {
	return s.raft != nil && (s.raft.LeaseHeld(s.c.term) || mutation.Is(mutation.AllocatedWithoutLease))
}

// ceilingDone is the end of a proposal of a ceiling.
func (s *Sequencer) ceilingDone(term uint64, to keyspace.Revision, res fsm.Result) {
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

// roundDone is the end of a ReadIndex round that began in the term. A round that succeeds
// proves nothing if this node has stopped leading meanwhile, since raft then asks the new
// leader. But the new leader answers with an index at or above the first entry of its own term.
// That entry is then applied here and seen.
func (s *Sequencer) roundDone(term, round uint64, err error) {
	applied := s.machine.View().Term
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

// LeaderChanged is called in order with applied.
func (s *Sequencer) LeaderChanged(ls raftgroup.LeaderState) {
	s.input(func() output {
		switch {
		case ls.Ready && ls.Term > s.c.term:
			return s.c.lead(ls.Term, s.machine.View().Ceiling)
		case !ls.IsLeader || ls.Term != s.c.term:
			return s.c.follow(ls.LeaderNode)
		}
		return output{}
	})
}

// Applied is called with each new View, before anybody is answered from it.
func (s *Sequencer) Applied(v *fsm.View) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.c.observe(v.Compacted, v.SettingsRevision(), v.AccessIndex())
	s.c.observeLoad(v.Loading, v.Ceiling)
}

// Pending is a batch that the sequencer has taken.
type Pending struct {
	s     *Sequencer
	batch *waitingBatch
	ch    chan askAnswer
}

type askAnswer struct {
	grant Grant
	err   error
}

// Begin gives the sequencer a batch. If the batch is answered at once, the answer is in the
// channel when Begin returns.
func (s *Sequencer) Begin(from keyspace.NodeID, b Batch) *Pending {
	p := &Pending{s: s, ch: make(chan askAnswer, 1)}
	p.batch = &waitingBatch{
		from: Process{Node: from, Boot: b.Boot}, Batch: b,
		done: func(g Grant, err error) { p.ch <- askAnswer{g, err} },
	}
	s.input(func() output {
		out := s.c.arrive(p.batch)
		return merge(out, s.c.advance(s.leaseLocked()))
	})
	return p
}

// Wait returns the answer, or ctx's error where the caller's patience ends first;
// numbers may have been allocated to the batch then.
func (p *Pending) Wait(ctx context.Context) (Grant, error) {
	r, err := clock.Await(ctx, p.ch)
	if err != nil {
		p.Withdraw()
		return Grant{}, err
	}
	return r.grant, r.err
}

// Answered returns the answer if it is there already. It is then taken: Wait would not
// return.
func (p *Pending) Answered() (g Grant, ok bool, err error) {
	select {
	case r := <-p.ch:
		return r.grant, true, r.err
	default:
		return Grant{}, false, nil
	}
}

// Withdraw takes the batch back. From its return on nothing is allocated for it. It returns false if
// something may have been before: the answer comes.
func (p *Pending) Withdraw() bool {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return p.s.c.withdraw(p.batch)
}

// Confirm proves that this node leads the placement group at a moment after the
// call, and returns the term and the last revision allocated.
func (s *Sequencer) Confirm(ctx context.Context) (term uint64, last keyspace.Revision, err error) {
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
	if s.machine.View().Term != term || s.c.term != term || s.c.phase == following {
		return 0, 0, s.c.refusal()
	}
	return term, s.c.last, nil
}

// End ends the allocations, with next as the node to ask from now on, and returns
// when the ceiling is committed at the last revision or this node no longer leads.
func (s *Sequencer) End(ctx context.Context, next keyspace.NodeID) error {
	s.input(func() output { return s.c.end(next) })
	return s.awaitEnd(ctx)
}

// Close is End for good: this node allocates no more, whatever it leads or comes to lead.
func (s *Sequencer) Close(ctx context.Context) error {
	s.input(s.c.close)
	return s.awaitEnd(ctx)
}

func (s *Sequencer) awaitEnd(ctx context.Context) error {
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

// SetGroup gives the sequencer the opened placement group, or takes it away with nil.
func (s *Sequencer) SetGroup(g Raft) {
	s.mu.Lock()
	s.raft = g
	s.mu.Unlock()
	if g != nil {
		s.wake.Set()
	}
}

// Last returns the last revision allocated, while this node is the sequencer of the term.
func (s *Sequencer) Last(term uint64) (keyspace.Revision, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c.term != term {
		return 0, kverror.LeaderChanged
	}
	return s.c.last, nil
}

// Asked returns how many revisions each node has got, while this node is the sequencer of the term. The
// caller keeps the map.
func (s *Sequencer) Asked(term uint64) map[keyspace.NodeID]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c.term != term {
		return nil
	}
	return maps.Clone(s.c.asked)
}

// Waiting returns how many batches wait for their answer.
func (s *Sequencer) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.c.waiting)
}

// Log returns the list of what was allocated.
func (s *Sequencer) Log() *AllocationLog { return s.c.log }

// Resume starts the allocations again after End, if this node still leads. After Close it does
// nothing.
func (s *Sequencer) Resume() { s.input(func() output { return s.c.resume() }) }

// Proposer is the part of the raft group that takes entries.
type Proposer interface {
	// Propose appends data if the group leads here in the term. If the group certainly does not
	// append it, Propose returns an error or calls dropped, never both.
	Propose(term uint64, data []byte, dropped func(error)) error
}
