package placement

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// Bounds of a clean stop.
const (
	// QuiesceTimeout bounds Client.Quiesce.
	QuiesceTimeout = 3 * time.Second
	// leaveAfter is how long a stopping node waits for the others; what is left of
	// QuiesceTimeout is for lowering the ceiling before it leaves.
	leaveAfter = QuiesceTimeout - 750*time.Millisecond
	// stopPoll is how often a waiting stop looks again at who lives and stays.
	stopPoll = 100 * time.Millisecond
	// stayTimeout is how long a node may take to say whether it stays.
	stayTimeout = 500 * time.Millisecond
	// stopGrace is how long the leader stays after the seal, so that the answers of
	// the others leave before its bus does.
	stopGrace = 100 * time.Millisecond
)

// stopping notes how far this node's own stop has come.
func (s *Service) stopping(p stopPhase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = max(s.phase, p)
}

// standing is what this node says of itself to whoever asks.
func (s *Service) standing() standing {
	s.mu.Lock()
	defer s.mu.Unlock()
	return standing{boot: s.o.Boot, phase: s.phase}
}

// serveStop answers a node that has closed its pipelines when it may go. One that
// leaves in any case is answered when the ceiling is lowered, unless the others
// carry on: whoever takes the quorum away lets no number be handed out after it.
func (s *Service) serveStop(ctx context.Context, from process, p stopPhase) (response, error) {
	timer := s.o.Clock.NewTimer(stopPoll)
	defer timer.Stop()
	own := from.Node == s.o.Self
	for {
		v, next, moved, err := s.judge(ctx, from)
		switch {
		case err != nil:
			return response{}, err
		case v == stopGo && own:
			return response{Verdict: v}, s.handOver(ctx, next)
		case v == stopGo:
			return response{Verdict: v}, nil
		case v == stopSealed || p == stopLeaving:
			a, err := s.seal(ctx)
			if own && err == nil {
				_ = clock.Sleep(ctx, s.o.Clock, s.grace())
			}
			return a, err
		}
		select {
		case <-moved:
		case <-timer.C():
			timer.Reset(stopPoll)
		case <-ctx.Done():
			return response{}, ctx.Err()
		}
	}
}

func (s *Service) movedLocked() {
	close(s.stopsMoved)
	s.stopsMoved = make(chan struct{})
}

// judge decides for a stopping node by what is known now; next is who takes the
// leadership over if this node goes.
func (s *Service) judge(ctx context.Context, from process) (v verdict, next keyspace.NodeID, moved <-chan struct{}, err error) {
	s.mu.Lock()
	// Noted each time, since a new term begins with nothing.
	if s.stops.note(from.Node, standing{from.Boot, stopClosed}) {
		s.movedLocked()
	}
	sealed, moved := s.sealed && s.sequencer.hasEnded(), s.stopsMoved
	s.mu.Unlock()
	if sealed {
		return stopSealed, 0, moved, nil
	}
	live, voters, err := s.nodes()
	if err != nil {
		return 0, 0, nil, err
	}
	stay := s.askWhoStays(ctx, live, voters)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stops.decide(live, voters, stay), s.stops.successor(voters, stay), s.stopsMoved, nil
}

// nodes returns all nodes that live and the voters of the placement group, as its
// leader.
func (s *Service) nodes() (live []keyspace.NodeID, voters electorate, err error) {
	s.mu.Lock()
	g := s.group
	s.mu.Unlock()
	var st raftgroup.Status
	if g != nil {
		st = g.Status()
	}
	if !st.IsLeader {
		return nil, voters, s.refusal()
	}
	voters = electorateOf(st.Replicas)
	for _, n := range s.View().Nodes() {
		if n.ID == s.o.Self || s.o.Alive(n.ID) {
			live = append(live, n.ID)
		}
	}
	return live, voters, nil
}

// askWhoStays asks the voters that live, until a quorum of them stays, and returns
// those that do. Those that stop are noted, and what an earlier process of a node
// said is forgotten: a node that was started again may not have published itself yet.
func (s *Service) askWhoStays(ctx context.Context, live []keyspace.NodeID, voters electorate) (stay []keyspace.NodeID) {
	ctx, cancel := clock.WithTimeout(ctx, s.o.Clock, stayTimeout)
	defer cancel()
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, n := range voters.all() {
		if !slices.Contains(live, n) {
			continue
		}
		asked.Go(func() {
			is, err := s.askStanding(ctx, n)
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
func (s *Service) heard(node keyspace.NodeID, is standing) (stays bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if is.phase == staying {
		s.stops.started(process{Node: node, Boot: is.boot})
		return true
	}
	if s.stops.note(node, is) {
		s.movedLocked()
	}
	return false
}

// askStanding asks a node whether it stops.
func (s *Service) askStanding(ctx context.Context, node keyspace.NodeID) (standing, error) {
	if node == s.o.Self {
		return s.standing(), nil
	}
	q := request{Kind: requestStanding}
	p, err := s.o.Bus.Call(ctx, node, transport.MethodPlacementRequest, q.encode())
	if err != nil {
		return standing{}, err
	}
	a, err := decodeResponse(requestStanding, p)
	return a.Standing, err
}

// grace is how long the stopping leader stays for the others' answers.
func (s *Service) grace() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.stops.nodes) <= 1 {
		return 0
	}
	return stopGrace
}

// seal lowers the ceiling to the counter and lets all that wait go.
func (s *Service) seal(ctx context.Context) (response, error) {
	s.mu.Lock()
	if s.phase == staying && !s.reopening && s.leadCancel != nil && s.ctx.Err() == nil {
		s.reopening = true
		lead, term := s.leadCtx, s.leadTerm
		s.wait.Go(func() { s.reopen(lead, term) })
	}
	s.mu.Unlock()
	if err := s.sequencer.end(ctx, 0); err != nil {
		return response{}, kverror.New(kverror.NoLeader, "lower the ceiling: %v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.sequencer.hasEnded() {
		return response{}, s.refusal() // it leads no more, or was reopened
	}
	if !s.sealed {
		s.sealed = true
		s.movedLocked()
		s.o.Logger.Info("the ceiling is lowered to the last revision, the stopping nodes go")
	}
	return response{Verdict: stopSealed}, nil
}

// reopen starts the hand-outs again after a seal, as soon as a quorum stays without
// those that were let go. It ends with the term, or when this node stops as well.
func (s *Service) reopen(ctx context.Context, term uint64) {
	for clock.Sleep(ctx, s.o.Clock, stopPoll) == nil {
		live, voters, err := s.nodes()
		if err != nil {
			continue
		}
		stay := s.askWhoStays(ctx, live, voters)
		if s.reopened(live, voters, stay, term) {
			return
		}
	}
}

// reopened says that reopen has nothing more to do.
func (s *Service) reopened(live []keyspace.NodeID, voters electorate, stay []keyspace.NodeID, term uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leadTerm != term || s.phase != staying {
		return true
	}
	// Whoever was let go is noted since, under this lock, and does not count.
	if s.stops.decide(live, voters, stay) != stopGo {
		return false
	}
	s.sealed, s.reopening = false, false
	s.sequencer.resume()
	s.o.Logger.Info("a quorum stays: revisions are handed out again", zap.Uint64("term", term))
	return true
}

// handOver gives the leadership to a node that stays. Where that fails the node
// goes all the same: the ceiling is lowered, and the others elect a leader.
func (s *Service) handOver(ctx context.Context, next keyspace.NodeID) error {
	s.mu.Lock()
	g := s.group
	s.mu.Unlock()
	if err := s.sequencer.end(ctx, next); err != nil {
		return kverror.New(kverror.NoLeader, "lower the ceiling: %v", err)
	}
	for _, r := range g.Status().Replicas {
		if r.Node != next {
			continue
		}
		if err := g.Transfer(ctx, r.ID); err != nil {
			s.o.Logger.Warn("stop without handing placement over", zap.Stringer("peer", next), zap.Error(err))
		}
	}
	return nil
}
