package placement

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Bounds of a clean stop.
const (
	// QuiesceTimeout bounds Client.Quiesce.
	QuiesceTimeout = 3 * time.Second
	// sealAfter is how long the stopping leader waits for the others; what is left
	// of QuiesceTimeout is for lowering the ceiling and for the answers.
	sealAfter = QuiesceTimeout - 750*time.Millisecond
	// stopPoll is how often a waiting stop looks again at who lives.
	stopPoll = 100 * time.Millisecond
	// stopGrace is how long the leader stays after the seal, so that the answers of
	// the others leave before its bus does.
	stopGrace = 100 * time.Millisecond
)

// serveStop takes over how far a stopping node has come. A node that has closed
// its pipelines is answered when it may go.
func (s *Service) serveStop(ctx context.Context, from process, p stopPhase) (response, error) {
	s.mu.Lock()
	s.stops.note(from, p)
	s.movedLocked()
	s.mu.Unlock()
	if p != stopClosed {
		return response{Verdict: stopWait}, nil
	}
	deadline := s.o.Clock.Now().Add(sealAfter)
	timer := s.o.Clock.NewTimer(stopPoll)
	defer timer.Stop()
	for {
		v, next, moved, err := s.judge()
		own := from.Node == s.o.Self
		switch {
		case err != nil:
			return response{}, err
		case v == stopGo && own:
			s.handOver(ctx, next)
			return response{Verdict: v}, nil
		case v == stopGo:
			return response{Verdict: v}, nil
		case v == stopSealed, own && s.o.Clock.Now() >= deadline:
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

// judge decides for all stopping nodes by what is known now; next is who takes the
// leadership over if this node goes.
func (s *Service) judge() (v verdict, next keyspace.NodeID, moved <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.group == nil {
		return 0, 0, nil, s.refusal()
	}
	if s.sealed {
		return stopSealed, 0, s.stopsMoved, nil
	}
	st := s.group.Status()
	if !st.IsLeader {
		return 0, 0, nil, &kverror.Error{Kind: kverror.NotLeader, Leader: st.LeaderNode}
	}
	var voters, live []keyspace.NodeID
	for _, r := range st.Replicas {
		if r.Role != keyspace.RoleLearner {
			voters = append(voters, r.Node)
		}
	}
	for _, n := range s.View().Nodes() {
		if n.ID == s.o.Self || s.o.Alive(n.ID) {
			live = append(live, n.ID)
		}
	}
	return s.stops.decide(live, voters), s.stops.successor(live, voters), s.stopsMoved, nil
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
	if err := s.sequencer.end(ctx, 0); err != nil {
		return response{}, kverror.New(kverror.NoLeader, "lower the ceiling: %v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.sealed {
		s.sealed = true
		s.movedLocked()
		s.o.Logger.Info("all nodes have closed their pipelines: the ceiling is lowered to the last revision")
	}
	return response{Verdict: stopSealed}, nil
}

// handOver gives the leadership to a node that stays. Where that fails the node
// goes all the same: the ceiling is lowered, and the others elect a leader.
func (s *Service) handOver(ctx context.Context, next keyspace.NodeID) {
	s.mu.Lock()
	g := s.group
	s.mu.Unlock()
	if err := s.sequencer.end(ctx, next); err != nil {
		s.o.Logger.Warn("stop without lowering the ceiling", zap.Error(err))
		return
	}
	for _, r := range g.Status().Replicas {
		if r.Node != next {
			continue
		}
		if err := g.Transfer(ctx, r.ID); err != nil {
			s.o.Logger.Warn("stop without handing placement over", zap.Stringer("peer", next), zap.Error(err))
		}
	}
}
