package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
)

// ShutdownTimeout bounds Service.Shutdown.
const ShutdownTimeout = 3 * time.Second

// Shutdown is called by a node that stops, after its ranges have closed their pipelines and
// before Stop. From then on the node allocates nothing. A leader of placement lowers the ceiling
// to the last revision and hands the leadership to another node, so that no revision is skipped.
// It returns within ShutdownTimeout.
//
// An error says that the ceiling may still be high: the next sequencer then skips at most
// sequencer.MaxCeilingBlock revisions, as it does after a crash. The node stops all the same.
func (s *Service) Shutdown(ctx context.Context) error {
	ctx, cancel := clock.WithTimeout(ctx, s.o.Clock, ShutdownTimeout)
	defer cancel()
	// On every node: a follower may be elected yet, and a new leader may not have begun to
	// allocate.
	if err := s.sequencer.Close(ctx); err != nil {
		return fmt.Errorf("give back the revisions that were not used: %w", err)
	}
	g := s.replica()
	if g == nil || !g.Status().IsLeader {
		return nil
	}
	if err := s.soon(ctx, g, func() error { return g.Transfer(ctx, 0) }); err != nil {
		// The others elect a leader, and start from the lowered ceiling all the same.
		s.o.Logger.Info("stop without handing placement over", zap.Error(err))
	}
	return nil
}

// othersLive says whether another member of the placement group lives.
func (s *Service) othersLive(g Group) bool {
	return slices.ContainsFunc(g.Status().Replicas, func(r keyspace.Replica) bool {
		return r.Node != s.o.Self && s.o.Alive(r.Node)
	})
}

// TransferLeader ends the allocations, lowers the ceiling to the last revision, and hands
// the leadership of the placement group to the node. It is called on the leader's
// node; on others it refuses with NotLeader.
func (s *Service) TransferLeader(ctx context.Context, to keyspace.NodeID) error {
	s.mu.Lock()
	g := s.group
	s.mu.Unlock()
	if g == nil {
		return s.refusal()
	}
	st := g.Status()
	if !st.IsLeader {
		return s.refusal()
	}
	if to == s.o.Self {
		return nil
	}
	for _, r := range st.Replicas {
		if r.Node == to && r.Role == keyspace.RoleVoter {
			return s.soon(ctx, g, func() error { return s.transfer(ctx, g, r) })
		}
	}
	return kverror.New(kverror.BadRequest, "node %s has no voting replica of the placement group", to)
}

// catchUpPatience is how long a transfer waits for a replica that has not caught up, and
// catchUpPause lies between two looks. A leader that has just been elected has not heard from
// all its followers yet, and who is a few entries behind has them in a moment.
const (
	catchUpPatience = 2 * time.Second
	catchUpPause    = 20 * time.Millisecond
)

// soon attempts a transfer again for a while, until a replica can take the lead or no other
// member lives.
func (s *Service) soon(ctx context.Context, g Group, transfer func() error) error {
	soon, cancel := clock.WithTimeout(ctx, s.o.Clock, catchUpPatience)
	defer cancel()
	for {
		err := transfer()
		if !errors.Is(err, raftgroup.ErrNotCaughtUp) || !s.othersLive(g) || clock.Sleep(soon, s.o.Clock, catchUpPause) != nil {
			return err
		}
	}
}

// transfer ends the allocations and hands the leadership over, to any replica where to is the
// zero value. Where it fails, the allocations resume.
func (s *Service) transfer(ctx context.Context, g Group, to keyspace.Replica) error {
	// Before the allocations end: without a target they would end for nothing.
	err := g.CanTransfer(ctx, to.ID)
	if err != nil {
		return fmt.Errorf("transfer placement leadership to node %s: %w", to.Node, err)
	}
	if !mutation.Is(mutation.HandedOverInFlight) {
		err = s.sequencer.End(ctx, to.Node)
	}
	if err == nil {
		err = g.Transfer(ctx, to.ID)
	}
	if err != nil {
		s.sequencer.Resume()
		return fmt.Errorf("transfer placement leadership to node %s: %w", to.Node, err)
	}
	return nil
}
