package placement

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

const (
	// ShutdownTimeout bounds Client.Shutdown.
	ShutdownTimeout = 3 * time.Second
	// leaveAfter is how long a stopping node waits for the others; what is left of
	// ShutdownTimeout is for lowering the ceiling before it leaves.
	leaveAfter = ShutdownTimeout - 750*time.Millisecond
)

// shutdownOptions joins the shutdown to the node's replica, its map and the bus.
func (s *Service) shutdownOptions() sequencer.ShutdownOptions {
	return sequencer.ShutdownOptions{
		Self: s.o.Self, Boot: s.o.Boot, Clock: s.o.Clock, Logger: s.o.Logger,
		Members: s.liveMembers, Ask: s.askStanding, HandOver: s.handOver, Go: s.wait.Go, Refusal: s.refusal,
	}
}

// liveMembers returns all nodes that live and the members of the placement group, as its
// leader.
func (s *Service) liveMembers() (live []keyspace.NodeID, replicas []keyspace.Replica, err error) {
	var st raftgroup.Status
	if g := s.replica(); g != nil {
		st = g.Status()
	}
	if !st.IsLeader {
		return nil, nil, s.refusal()
	}
	for _, n := range s.View().Nodes() {
		if n.ID == s.o.Self || s.o.Alive(n.ID) {
			live = append(live, n.ID)
		}
	}
	return live, st.Replicas, nil
}

// askStanding asks another node whether it stops.
func (s *Service) askStanding(ctx context.Context, node keyspace.NodeID) (sequencer.Standing, error) {
	q := request{Kind: requestStanding}
	p, err := s.o.Bus.Call(ctx, node, transport.MethodPlacementRequest, q.encode())
	if err != nil {
		return sequencer.Standing{}, err
	}
	a, err := decodeResponse(requestStanding, p)
	return a.Standing, err
}

// handOver transfers the leadership to a node of the group, as far as that works.
func (s *Service) handOver(ctx context.Context, next keyspace.NodeID) {
	g := s.replica()
	if g == nil {
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

// BeginStop says that this node is stopping: it closes the pipelines of its ranges
// next. From its return on no other stopping node is told to go because this one
// stays. It neither waits nor fails.
func (c *Client) BeginStop() { c.o.Service.shutdown.Stopping(sequencer.StopClosing) }

// Shutdown is called by a stopping node after all its ranges have closed their pipelines and
// before it stops to vote and store. It returns within ShutdownTimeout, when the node may go.
// If the others carry on, that is at once; a sequencer first lowers the ceiling and hands
// over. Else the node waits until all living nodes have closed their pipelines, or it may wait
// no longer, and the ceiling is committed at the last revision. So a stop of all nodes leaves
// no gap.
//
// An error says that a gap may remain; the node stops all the same.
func (c *Client) Shutdown(ctx context.Context) error {
	c.o.Service.shutdown.Stopping(sequencer.StopClosed)
	ctx, stop := c.joined(ctx)
	defer stop()
	err := c.askToGo(ctx, sequencer.StopClosed, leaveAfter)
	if err != nil {
		err = c.askToGo(ctx, sequencer.StopLeaving, ShutdownTimeout-leaveAfter)
	}
	if err != nil {
		return fmt.Errorf("shutdown: %w", err)
	}
	return nil
}

// askToGo asks whoever leads until this node may go or the patience is over.
func (c *Client) askToGo(ctx context.Context, p sequencer.StopPhase, patience time.Duration) error {
	ctx, cancel := clock.WithTimeout(ctx, c.o.Clock, patience)
	defer cancel()
	q := &request{Kind: requestStop, Boot: c.o.Boot, Phase: p}
	pause := attemptPauseMin
	for {
		node := c.target()
		attempt, cancel := context.WithCancel(ctx)
		end := c.begin(node, true, cancel)
		a, err := c.askNode(attempt, node, q)
		end()
		if err == nil && a.Verdict != sequencer.StopWait {
			return nil
		}
		if err != nil {
			_, _ = c.judge(node, err, false, true)
		}
		if clock.Sleep(ctx, c.o.Clock, pause) != nil {
			return ctxError(ctx, err)
		}
		pause = min(2*pause, attemptPauseMax)
	}
}
