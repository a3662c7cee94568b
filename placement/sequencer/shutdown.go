package sequencer

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Bounds of a shutdown.
const (
	// stopPoll is how often a waiting shutdown looks again at who lives and stays.
	stopPoll = 100 * time.Millisecond
	// stayTimeout is how long a node may take to say whether it stays.
	stayTimeout = 500 * time.Millisecond
	// stopGrace is how long the leader stays after the seal, so that the answers of
	// the others leave before its bus does.
	stopGrace = 100 * time.Millisecond
)

// ShutdownOptions are what a Shutdown needs of the node and its group. All are required.
type ShutdownOptions struct {
	Self   keyspace.NodeID
	Boot   keyspace.BootID
	Clock  clock.Clock
	Logger *zap.Logger
	// Members returns all nodes that live and the members of the placement group. It
	// refuses where this node does not lead.
	Members func() (live []keyspace.NodeID, replicas []keyspace.Replica, err error)
	// Ask asks another node how far its shutdown has come.
	Ask func(ctx context.Context, node keyspace.NodeID) (Standing, error)
	// HandOver gives the leadership to a node, after the allocations have ended.
	HandOver func(ctx context.Context, to keyspace.NodeID)
	// Go runs a function in a goroutine that the owner waits for.
	Go func(func())
	// Refusal says that this node does not lead, and who does.
	Refusal func() error
}

// Shutdown orders the clean stop of nodes. On every node it knows how far the node's own
// shutdown has come; on the leader it decides when a stopping node may go.
type Shutdown struct {
	o         ShutdownOptions
	sequencer *Sequencer

	mu sync.Mutex
	// Guarded by mu.
	stops *stops
	// moved is closed when a stopping node has reported or all is sealed.
	moved chan struct{}
	// sealed says that stopping nodes were let go after the ceiling was lowered;
	// reopening, that the allocations of a leader that stays wait for a quorum.
	sealed, reopening bool
	// phase is how far this node's own shutdown has come.
	phase StopPhase
	// lead ends with the term in which this node leads; it is nil before the first one.
	lead context.Context
	term uint64
}

// NewShutdown returns the clean shutdown of a node that runs the sequencer.
func NewShutdown(o ShutdownOptions, s *Sequencer) *Shutdown {
	return &Shutdown{o: o, sequencer: s, stops: newStops(), moved: make(chan struct{})}
}

// Lead begins a term, which knows of no stopping node. ctx ends with it.
func (s *Shutdown) Lead(ctx context.Context, term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lead, s.term = ctx, term
	s.stops, s.sealed, s.reopening = newStops(), false, false
}

// Close returns when no goroutine begins any more for a term that has ended.
func (s *Shutdown) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lead = nil
}

// Stopping notes how far this node's own shutdown has come.
func (s *Shutdown) Stopping(p StopPhase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = max(s.phase, p)
}

// Standing is what this node says of itself to whoever asks.
func (s *Shutdown) Standing() Standing {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Standing{Boot: s.o.Boot, Phase: s.phase}
}

// Started forgets what an earlier process of the node said.
func (s *Shutdown) Started(from Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stops.started(from)
}

// Resume starts the allocations again after a transfer of the leadership that failed,
// unless stopping nodes were let go meanwhile: then reopen does.
func (s *Shutdown) Resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.sealed {
		s.sequencer.resume()
	}
}

// AnyStopping returns a node that lives and stops, 0 if there is none that is known. Those
// that have said so are asked again: they may have come back since.
func (s *Shutdown) AnyStopping(ctx context.Context, alive func(keyspace.NodeID) bool) keyspace.NodeID {
	s.mu.Lock()
	phase, noted := s.phase, slices.Collect(maps.Keys(s.stops.nodes))
	s.mu.Unlock()
	if phase != Staying {
		return s.o.Self
	}
	for _, n := range noted {
		if n == s.o.Self || !alive(n) {
			continue
		}
		if is, err := s.ask(ctx, n); err != nil || !s.heard(n, is) {
			return n
		}
	}
	return 0
}

// Serve answers a node that has closed its pipelines when it may go. One that leaves in any
// case is answered when the ceiling is lowered, unless the others carry on: whoever takes
// the quorum away lets no number be allocated after it.
func (s *Shutdown) Serve(ctx context.Context, from Process, p StopPhase) (Verdict, error) {
	timer := s.o.Clock.NewTimer(stopPoll)
	defer timer.Stop()
	own := from.Node == s.o.Self
	for {
		v, next, moved, err := s.judge(ctx, from)
		switch {
		case err != nil:
			return 0, err
		case v == StopGo && own:
			return v, s.handOver(ctx, next)
		case v == StopGo:
			return v, nil
		case v == StopSealed || p == StopLeaving:
			err := s.Seal(ctx)
			if own && err == nil {
				_ = clock.Sleep(ctx, s.o.Clock, s.grace())
			}
			return StopSealed, err
		}
		select {
		case <-moved:
		case <-timer.C():
			timer.Reset(stopPoll)
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (s *Shutdown) movedLocked() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// judge decides for a stopping node by what is known now; next is who takes the
// leadership over if this node goes.
func (s *Shutdown) judge(ctx context.Context, from Process) (v Verdict, next keyspace.NodeID, moved <-chan struct{}, err error) {
	s.mu.Lock()
	// Noted each time, since a new term begins with nothing.
	if s.stops.note(from.Node, Standing{Boot: from.Boot, Phase: StopClosed}) {
		s.movedLocked()
	}
	sealed, moved := s.sealed && s.sequencer.hasEnded(), s.moved
	s.mu.Unlock()
	if sealed {
		return StopSealed, 0, moved, nil
	}
	live, replicas, err := s.o.Members()
	if err != nil {
		return 0, 0, nil, err
	}
	voters := electorateOf(replicas)
	stay := s.askWhoStays(ctx, live, voters)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stops.decide(live, voters, stay), s.stops.successor(voters, stay), s.moved, nil
}

// askWhoStays asks the voters that live, until a quorum of them stays, and returns
// those that do. Those that stop are noted, and what an earlier process of a node
// said is forgotten: a node that was started again may not have published itself yet.
func (s *Shutdown) askWhoStays(ctx context.Context, live []keyspace.NodeID, voters electorate) (stay []keyspace.NodeID) {
	ctx, cancel := clock.WithTimeout(ctx, s.o.Clock, stayTimeout)
	defer cancel()
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, n := range voters.all() {
		if !slices.Contains(live, n) {
			continue
		}
		asked.Go(func() {
			is, err := s.ask(ctx, n)
			if err != nil {
				return // it does not count as staying
			}
			if !s.heard(n, is) {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if stay = append(stay, n); voters.agree(stay) {
				cancel()
			}
		})
	}
	asked.Wait()
	return stay
}

// heard takes over what a node says of itself, and says whether it stays.
func (s *Shutdown) heard(node keyspace.NodeID, is Standing) (stays bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if is.Phase == Staying {
		s.stops.started(Process{Node: node, Boot: is.Boot})
		return true
	}
	if s.stops.note(node, is) {
		s.movedLocked()
	}
	return false
}

// ask asks a node whether it stops.
func (s *Shutdown) ask(ctx context.Context, node keyspace.NodeID) (Standing, error) {
	if node == s.o.Self {
		return s.Standing(), nil
	}
	return s.o.Ask(ctx, node)
}

// grace is how long the stopping leader stays for the others' answers.
func (s *Shutdown) grace() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.stops.nodes) <= 1 {
		return 0
	}
	return stopGrace
}

// Seal lowers the ceiling to the last revision and lets all that wait go.
func (s *Shutdown) Seal(ctx context.Context) error {
	s.mu.Lock()
	if s.phase == Staying && !s.reopening && s.lead != nil && s.lead.Err() == nil {
		s.reopening = true
		lead, term := s.lead, s.term
		s.o.Go(func() { s.reopen(lead, term) })
	}
	s.mu.Unlock()
	if err := s.sequencer.End(ctx, 0); err != nil {
		return kverror.New(kverror.NoLeader, "lower the ceiling: %v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.sequencer.hasEnded() {
		return s.o.Refusal() // it leads no more, or was reopened
	}
	if !s.sealed {
		s.sealed = true
		s.movedLocked()
		s.o.Logger.Info("ceiling lowered to the last revision, stopping nodes may go")
	}
	return nil
}

// reopen starts the allocations again after a seal, as soon as a quorum stays without
// those that were let go. It ends with the term, or when this node stops as well.
func (s *Shutdown) reopen(ctx context.Context, term uint64) {
	for clock.Sleep(ctx, s.o.Clock, stopPoll) == nil {
		live, replicas, err := s.o.Members()
		if err != nil {
			continue
		}
		voters := electorateOf(replicas)
		stay := s.askWhoStays(ctx, live, voters)
		if s.reopened(live, voters, stay, term) {
			return
		}
	}
}

// reopened says that reopen has nothing more to do.
func (s *Shutdown) reopened(live []keyspace.NodeID, voters electorate, stay []keyspace.NodeID, term uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term != term || s.phase != Staying {
		return true
	}
	// Whoever was let go is noted since, under this lock, and does not count.
	if s.stops.decide(live, voters, stay) != StopGo {
		return false
	}
	s.sealed, s.reopening = false, false
	s.sequencer.resume()
	s.o.Logger.Info("a quorum stays: revisions are allocated again", zap.Uint64("term", term))
	return true
}

// handOver gives the leadership to a node that stays. Where that fails the node
// goes all the same: the ceiling is lowered, and the others elect a leader.
func (s *Shutdown) handOver(ctx context.Context, next keyspace.NodeID) error {
	if err := s.sequencer.End(ctx, next); err != nil {
		return kverror.New(kverror.NoLeader, "lower the ceiling: %v", err)
	}
	s.o.HandOver(ctx, next)
	return nil
}
