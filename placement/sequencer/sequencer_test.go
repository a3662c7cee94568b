package sequencer

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// heldRaft is a group whose proposals and rounds end when the test says so.
type heldRaft struct {
	mu sync.Mutex
	// All guarded by mu.
	proposals []heldProposal
	rounds    []func(uint64, error)
	lease     uint64
}

type heldProposal struct {
	term    uint64
	command fsm.Command
	dropped func(error)
}

func (r *heldRaft) Propose(term uint64, data []byte, dropped func(error)) error {
	c, err := fsm.DecodeCommand(data)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proposals = append(r.proposals, heldProposal{term, c, dropped})
	return nil
}

func (r *heldRaft) ReadIndex(done func(uint64, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rounds = append(r.rounds, done)
}

func (r *heldRaft) LeaseHeld(term uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lease == term
}

// next returns the proposal that was made since the last call; there must be one.
func (r *heldRaft) next(t *testing.T) heldProposal {
	t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.proposals) != 1 {
		t.Fatalf("%d proposals, want one", len(r.proposals))
	}
	p := r.proposals[0]
	r.proposals = nil
	return p
}

func (r *heldRaft) round(t *testing.T) func(uint64, error) {
	t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.rounds) != 1 {
		t.Fatalf("%d rounds, want one", len(r.rounds))
	}
	f := r.rounds[0]
	r.rounds = nil
	return f
}

// heldMachine is a replicated state whose entries are applied by hand.
type heldMachine struct {
	sequencer *Sequencer
	state     *fsm.State

	mu sync.Mutex
	// All guarded by mu.
	view    *fsm.View
	leader  raftgroup.LeaderState
	waiters map[uint64]func(fsm.Result)
	number  uint64
}

func (m *heldMachine) View() *fsm.View {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.view
}

func (m *heldMachine) Propose(g Proposer, term uint64, op fsm.Effect, done func(fsm.Result)) {
	m.mu.Lock()
	if !m.leader.IsLeader || m.leader.Term != term {
		m.mu.Unlock()
		done(fsm.Result{Err: kverror.NotLeader})
		return
	}
	m.number++
	number := m.number
	m.waiters[number] = done
	m.mu.Unlock()
	c := fsm.Command{Term: term, Number: number, Op: op}
	dropped := func(error) { m.take(number)(fsm.Result{Err: kverror.NotLeader}) }
	if err := g.Propose(term, c.Encode(), dropped); err != nil {
		dropped(err)
	}
}

// take returns who waits for a proposal, and forgets it.
func (m *heldMachine) take(number uint64) func(fsm.Result) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.waiters[number]
	delete(m.waiters, number)
	if w == nil {
		return func(fsm.Result) {}
	}
	return w
}

// LeaderChanged says who leads; whoever waits for a proposal of another term learns that
// its fate is unknown.
func (m *heldMachine) LeaderChanged(ls raftgroup.LeaderState) {
	m.mu.Lock()
	m.leader = ls
	var lost []func(fsm.Result)
	if !ls.IsLeader {
		lost = slices.Collect(maps.Values(m.waiters))
		clear(m.waiters)
	}
	m.mu.Unlock()
	m.sequencer.LeaderChanged(ls)
	for _, done := range lost {
		done(fsm.Result{Err: kverror.LeaderChanged})
	}
}

// sequencerRig is a sequencer whose state machine is driven by hand.
type sequencerRig struct {
	*Sequencer
	machine *heldMachine
	raft    *heldRaft
	index   uint64
}

func newSequencerRig(t *testing.T) *sequencerRig {
	t.Helper()
	m := &heldMachine{state: fsm.NewState(), waiters: map[uint64]func(fsm.Result){}}
	m.view = m.state.View(0, 0, nil)
	m.sequencer = New(clock.Virtual(), m, NewMetrics(nil), zap.NewNop())
	r := &sequencerRig{Sequencer: m.sequencer, machine: m, raft: &heldRaft{}, index: 10}
	r.Sequencer.raft = r.raft
	stop := make(chan struct{})
	go r.Run(stop)
	t.Cleanup(func() {
		close(stop)
		<-r.done
	})
	return r
}

// apply applies one entry; op nil is an empty one of raft's own.
func (r *sequencerRig) apply(t *testing.T, term uint64, c *fsm.Command) {
	t.Helper()
	r.index++
	m, res := r.machine, fsm.Result{}
	m.mu.Lock()
	if c != nil {
		res = m.state.Apply(r.index, c.Op)
	}
	m.view = m.state.View(r.index, term, m.view)
	m.mu.Unlock()
	r.Applied(m.view)
	if c != nil && c.Number > 0 {
		m.take(c.Number)(res)
	}
}

func (r *sequencerRig) lead(t *testing.T, term uint64) {
	t.Helper()
	ls := raftgroup.LeaderState{Term: term, Leader: 1, LeaderNode: 1, IsLeader: true}
	r.machine.LeaderChanged(ls)
	r.apply(t, term, nil)
	ls.Ready = true
	r.machine.LeaderChanged(ls)
}

func (r *sequencerRig) ask(number uint64, count uint32) *Pending {
	return r.Begin(2, Batch{Boot: 0xb2, Number: number, Items: []Item{{Range: 1, Generation: 1, Count: count}}})
}

// TestReadIndexOfASuccessorProvesNothing: a sequencer that was deposed without
// knowing asks for a ReadIndex; raft asks the new leader and succeeds. The new
// leader's entry is applied here by then, and gives it away.
func TestReadIndexOfASuccessorProvesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSequencerRig(t)
		r.lead(t, 6)
		p := r.ask(1, 1)
		raise := r.raft.next(t)
		r.apply(t, 6, &raise.command)
		round := r.raft.round(t)
		r.apply(t, 7, nil)
		round(r.index, nil)
		synctest.Wait()
		select {
		case a := <-p.ch:
			t.Fatalf("a deposed sequencer answered %+v", a)
		default:
		}
		r.machine.LeaderChanged(raftgroup.LeaderState{Term: 7, Leader: 3, LeaderNode: 3})
		if _, err := p.Wait(t.Context()); kverror.Of(err).Leader != 3 {
			t.Fatalf("refusal %v", err)
		}
	})
}

// TestCeilingIsProposedAgain: raft drops the ceiling's proposal; it is made again
// after a pause, and batches wait. What was wanted in a term is never proposed in
// another.
func TestCeilingIsProposedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSequencerRig(t)
		r.lead(t, 6)
		r.raft.mu.Lock()
		r.raft.lease = 6
		r.raft.mu.Unlock()
		p := r.ask(1, 3)
		r.raft.next(t).dropped(errors.New("full"))
		begin := time.Now()
		time.Sleep(retryPause)
		raise := r.raft.next(t)
		if time.Since(begin) > time.Second || raise.term != 6 {
			t.Fatalf("proposed in term %d after %v", raise.term, time.Since(begin))
		}
		r.apply(t, 6, &raise.command)
		if g, err := p.Wait(t.Context()); err != nil || g.Before != 0 {
			t.Fatalf("%+v, %v", g, err)
		}
		// The end's proposal is dropped too, and leadership is lost before its retry.
		ended := make(chan error, 1)
		go func() { ended <- r.End(context.Background(), 3) }()
		lower := r.raft.next(t)
		if to := lower.command.Op.(fsm.LowerCeiling).To; to != 3 {
			t.Fatalf("lowered to %d", to)
		}
		lower.dropped(errors.New("full"))
		r.machine.LeaderChanged(raftgroup.LeaderState{Term: 7, Leader: 3, LeaderNode: 3})
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		r.raft.mu.Lock()
		if len(r.raft.proposals) != 0 {
			t.Fatalf("proposed after the term: %+v", r.raft.proposals)
		}
		r.raft.mu.Unlock()
		// Leading again: the ceiling is where the last leader left it.
		r.apply(t, 8, &fsm.Command{Term: 8, Op: fsm.RaiseCeiling{To: 20_000}})
		r.lead(t, 9)
		p = r.ask(2, 1)
		raise = r.raft.next(t)
		if to := raise.command.Op.(fsm.RaiseCeiling).To; to != 30_000 || raise.term != 9 {
			t.Fatalf("ceiling %d proposed in term %d", to, raise.term)
		}
		r.raft.mu.Lock()
		r.raft.lease = 9
		r.raft.mu.Unlock()
		r.apply(t, 9, &raise.command)
		if g, err := p.Wait(t.Context()); err != nil || g.Before != 20_000 {
			t.Fatalf("%+v, %v", g, err)
		}
	})
}

// TestCompactIsToldBeforeItIsAnswered is P5 of placement and trap 65: from the moment at which
// the waiter of a compaction hears of it, every answer tells of it.
func TestCompactIsToldBeforeItIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSequencerRig(t)
		r.lead(t, 6)
		r.raft.mu.Lock()
		r.raft.lease = 6
		r.raft.mu.Unlock()
		p := r.ask(1, 9)
		raise := r.raft.next(t)
		r.apply(t, 6, &raise.command)
		if _, err := p.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		told := keyspace.Revision(-1)
		r.machine.Propose(r.raft, 6, fsm.Compact{At: 5}, func(res fsm.Result) {
			a := <-r.ask(2, 0).ch
			told = a.grant.Compacted
		})
		c := r.raft.next(t)
		r.apply(t, 6, &c.command)
		if told != 5 {
			t.Fatalf("an answer after the compaction at 5 says %d", told)
		}
	})
}
