package placement

import (
	"context"
	"errors"
	"fmt"
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
// before Stop. A leader of placement ends its allocations, lowers the ceiling to the last
// revision, and hands the leadership to another node, so that no revision is skipped. On other
// nodes Shutdown does nothing. It returns within ShutdownTimeout.
//
// An error says that the ceiling may still be high: the next sequencer then skips at most
// sequencer.CeilingBlock revisions, as it does after a crash. The node stops all the same.
func (s *Service) Shutdown(ctx context.Context) error {
	g := s.replica()
	if g == nil || !g.Status().IsLeader {
		return nil
	}
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	ctx, cancel := clock.WithTimeout(ctx, s.o.Clock, ShutdownTimeout)
	defer cancel()
	if err := s.sequencer.End(ctx, 0); err != nil {
		return fmt.Errorf("lower the ceiling of revisions: %w", err)
	}
	if err := g.Transfer(ctx, 0); err != nil {
		// The others elect a leader, and start from the lowered ceiling all the same.
		s.o.Logger.Info("stop without handing placement over", zap.Error(err))
	}
	return nil
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
			return s.transferSoon(ctx, g, r)
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

// transferSoon is transfer, made again for a while until the replica can take the lead.
func (s *Service) transferSoon(ctx context.Context, g Group, to keyspace.Replica) error {
	soon, cancel := clock.WithTimeout(ctx, s.o.Clock, catchUpPatience)
	defer cancel()
	for {
		err := s.transfer(ctx, g, to)
		if !errors.Is(err, raftgroup.ErrNotCaughtUp) || clock.Sleep(soon, s.o.Clock, catchUpPause) != nil {
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
		s.resume()
		return fmt.Errorf("transfer placement leadership to node %s: %w", to.Node, err)
	}
	return nil
}

// resume starts the allocations again, unless the node is stopping.
func (s *Service) resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopping {
		s.sequencer.Resume()
	}
}
