package placement

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/lifecycle"
)

// maxProposals bounds the proposals of one node whose outcome it waits for.
const maxProposals = 4096

// machine is the placement group's replicated state machine. It implements
// raftgroup.StateMachine and raftgroup.Snapshotter; the methods of those are
// called one at a time, all others from anywhere.
type machine struct {
	engine *engine.Engine
	// self is the node, which notes that its replica has left; 0 is nobody.
	self   keyspace.NodeID
	boot   keyspace.BootID
	logger *zap.Logger
	// onApplied gets each new View before anybody is answered from it; onLeader each
	// change of the leader. Both are called in order and must not block.
	onApplied func(*fsm.View)
	onLeader  func(raftgroup.LeaderState)
	// onLeases gets the changes of leases before onApplied gets the View with them.
	onLeases func([]fsm.LeaseChange)
	// onMembers is told that the group has other members in the View that onApplied got.
	onMembers func()

	// state, index, term and outcomes belong to whoever applies.
	state       *fsm.State
	index, term uint64
	outcomes    []outcome

	view atomic.Pointer[fsm.View]

	mu sync.Mutex
	// Guarded by mu: the proposals with a waiter, by number, and the last number. Then the
	// leader as last told, and a channel that is closed when the next View with another map is
	// published.
	waiters map[uint64]*waiter
	number  uint64
	leader  raftgroup.LeaderState
	changed chan struct{}
}

// outcome is the result of an applied entry that this process proposed.
type outcome struct {
	number uint64
	result fsm.Result
}

// waiter is told once what became of a proposal.
type waiter struct {
	term uint64
	done func(fsm.Result)
}

// newMachine returns a machine with the state that the engine holds; without any
// it is an empty replica that waits for a snapshot.
func newMachine(e *engine.Engine, boot keyspace.BootID, logger *zap.Logger) (*machine, error) {
	m := &machine{
		engine: e, boot: boot, logger: logger,
		onApplied: func(*fsm.View) {}, onLeader: func(raftgroup.LeaderState) {}, onLeases: func([]fsm.LeaseChange) {}, onMembers: func() {},
		waiters: map[uint64]*waiter{}, changed: make(chan struct{}),
	}
	return m, m.reload()
}

// reload takes the state from the engine's records.
func (m *machine) reload() error {
	applied, ok, err := m.engine.Applied(keyspace.PlacementGroup)
	if err != nil {
		return fmt.Errorf("load placement state: %w", err)
	}
	m.state, m.index, m.term = fsm.NewState(), applied.Index, applied.Term
	if !ok {
		m.view.Store(m.state.View(0, 0, nil))
		return nil
	}
	m.state.SetMembers(applied.ConfIndex, applied.Replicas)
	if err := loadRecords(m.engine, m.state); err != nil {
		return fmt.Errorf("load placement state at index %d: %w", applied.Index, err)
	}
	if err := m.state.Check(); err != nil {
		return fmt.Errorf("load placement state at index %d: %w", applied.Index, err)
	}
	m.view.Store(m.state.View(m.index, m.term, nil))
	return nil
}

// loadRecords reads all records of the group into an empty state.
func loadRecords(r engine.Reader, s *fsm.State) error {
	span := engine.GroupLocalSpan(keyspace.PlacementGroup)
	it, err := r.NewIter(engine.IterOptions{Lower: span.Lower, Upper: span.Upper})
	if err != nil {
		return err
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		_, name, err := engine.DecodeGroupLocalKey(it.Key())
		if err != nil {
			return err
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		if err := s.Load(name, value); err != nil {
			return err
		}
	}
	return it.Error()
}

// groupWriter writes records into the group's own space.
type groupWriter struct{ w engine.Writer }

func (g groupWriter) Set(name, value []byte) error {
	return g.w.Set(engine.GroupLocalKey(keyspace.PlacementGroup, name), value)
}

func (g groupWriter) Delete(name []byte) error {
	return g.w.Delete(engine.GroupLocalKey(keyspace.PlacementGroup, name))
}

// Apply implements raftgroup.StateMachine.
func (m *machine) Apply(b *engine.Batch, ents []raftgroup.Entry) error {
	for i := range ents {
		e := &ents[i]
		m.index, m.term = e.Index, e.Term
		if e.Replicas != nil {
			if err := tombstones(nil).SetDeparted(b, keyspace.PlacementGroup, m.self, m.state.Members(), e.Replicas); err != nil {
				return fmt.Errorf("note that this node's replica of placement has left at index %d: %w", e.Index, err)
			}
			m.state.ApplyMembers(e.Index, e.Replicas)
			continue
		}
		if len(e.Data) == 0 {
			continue
		}
		c, err := fsm.DecodeCommand(e.Data)
		if keyspace.IsVersionError(err) {
			return fmt.Errorf("apply placement entry %d of term %d: %w", e.Index, e.Term, err)
		}
		if err != nil {
			e.Refused = err
			continue
		}
		var res fsm.Result
		if c.Term == e.Term {
			res = m.state.Apply(e.Index, c.Op)
		} else {
			res.Err = kverror.New(kverror.Dropped, "proposed in term %d, in the log with term %d", c.Term, e.Term)
		}
		if c.Boot == m.boot {
			m.outcomes = append(m.outcomes, outcome{number: c.Number, result: res})
		}
	}
	if err := m.state.Flush(groupWriter{b}); err != nil {
		return fmt.Errorf("write placement records at index %d: %w", m.index, err)
	}
	return nil
}

// Applied implements raftgroup.StateMachine: publish first, then answer.
func (m *machine) Applied(raftgroup.Position) {
	prev := m.view.Load()
	v := m.state.View(m.index, m.term, prev)
	m.view.Store(v)
	if changes := m.state.TakeLeaseChanges(); len(changes) > 0 {
		m.onLeases(changes)
	}
	m.onApplied(v)
	if v.PlacementGroup().ConfIndex != prev.PlacementGroup().ConfIndex {
		m.onMembers()
	}
	m.mu.Lock()
	if v.Version != prev.Version {
		close(m.changed)
		m.changed = make(chan struct{})
	}
	ready := make([]func(), 0, len(m.outcomes))
	for _, o := range m.outcomes {
		if w, ok := m.waiters[o.number]; ok {
			delete(m.waiters, o.number)
			ready = append(ready, func() { w.done(o.result) })
		}
	}
	m.mu.Unlock()
	m.outcomes = m.outcomes[:0]
	for _, f := range ready {
		f()
	}
}

// LeaderChanged implements raftgroup.StateMachine. Proposals of a term that is
// over here may yet be committed: their waiters learn that the fate is unknown.
func (m *machine) LeaderChanged(ls raftgroup.LeaderState) {
	m.mu.Lock()
	m.leader = ls
	var lost []*waiter
	for number, w := range m.waiters {
		if !ls.IsLeader || ls.Term != w.term {
			delete(m.waiters, number)
			lost = append(lost, w)
		}
	}
	m.mu.Unlock()
	m.onLeader(ls)
	for _, w := range lost {
		w.done(fsm.Result{Err: kverror.LeaderChanged})
	}
}

// SnapshotSpans implements raftgroup.Snapshotter.
func (m *machine) SnapshotSpans(engine.Applied) []engine.KeySpan {
	return []engine.KeySpan{engine.GroupLocalSpan(keyspace.PlacementGroup)}
}

// AcceptSnapshot implements raftgroup.Snapshotter: nobody else uses the span.
func (m *machine) AcceptSnapshot(engine.Applied) error { return nil }

// SnapshotDone implements raftgroup.Snapshotter.
func (m *machine) SnapshotDone(applied engine.Applied, err error) {
	if err != nil {
		return
	}
	prev := m.view.Load()
	if err := m.reload(); err != nil {
		// The snapshot was verified before it was installed.
		panic(fmt.Sprintf("placement: snapshot at index %d: %v", applied.Index, err))
	}
	v := m.view.Load()
	m.onApplied(v)
	m.onMembers()
	m.mu.Lock()
	defer m.mu.Unlock()
	if v.Version != prev.Version {
		close(m.changed)
		m.changed = make(chan struct{})
	}
}

// View returns the newest View.
func (m *machine) View() *fsm.View { return m.view.Load() }

// current returns the newest View and a channel that is closed when one with
// another map is published.
func (m *machine) current() (*fsm.View, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.view.Load(), m.changed
}

// leaderState returns what was last told about the leader.
func (m *machine) leaderState() raftgroup.LeaderState {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.leader
}

// Propose proposes an effect in the term. It calls done once, perhaps before it returns, from a
// goroutine that done must not block. done gets the result when the entry is applied. It gets
// an error of fate NotApplied if the entry certainly was not appended, and of fate Unknown if
// leadership was lost.
func (m *machine) Propose(g sequencer.Proposer, term uint64, op fsm.Effect, done func(fsm.Result)) {
	m.mu.Lock()
	if !m.leader.IsLeader || m.leader.Term != term {
		leader := m.leader.LeaderNode
		m.mu.Unlock()
		done(fsm.Result{Err: &kverror.Error{Kind: kverror.NotLeader, Leader: leader}})
		return
	}
	if len(m.waiters) >= maxProposals {
		m.mu.Unlock()
		done(fsm.Result{Err: kverror.New(kverror.TooManyRequests, "%d proposals to placement under way", maxProposals)})
		return
	}
	m.number++
	number := m.number
	m.waiters[number] = &waiter{term: term, done: done}
	m.mu.Unlock()
	c := fsm.Command{Term: term, Boot: m.boot, Number: number, Op: op}
	if err := g.Propose(term, c.Encode(), func(err error) { m.dropped(number, err) }); err != nil {
		m.dropped(number, err)
	}
}

// dropped ends the wait for a proposal that was certainly not appended.
func (m *machine) dropped(number uint64, err error) {
	m.mu.Lock()
	w, ok := m.waiters[number]
	delete(m.waiters, number)
	leader := m.leader.LeaderNode
	m.mu.Unlock()
	if ok {
		w.done(fsm.Result{Err: &kverror.Error{Kind: kverror.NotLeader, Detail: err.Error(), Leader: leader}})
	}
}

// tombstones has the note of the newest replica of the placement group that has left this node.
func tombstones(e *engine.Engine) lifecycle.Tombstones {
	key := engine.NodeLocalKey([]byte("placement/left"))
	return lifecycle.Tombstones{Engine: e, Key: func(keyspace.GroupID) []byte { return key }}
}

// storeLeft makes it durable that a replica of the placement group has left this node.
func storeLeft(ctx context.Context, e *engine.Engine, id keyspace.ReplicaID) error {
	return tombstones(e).Store(ctx, map[keyspace.GroupID]keyspace.ReplicaID{keyspace.PlacementGroup: id})
}
