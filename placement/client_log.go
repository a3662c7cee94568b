package placement

import (
	"context"
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/transport"
)

// FollowLog calls take with the allocation log behind what is known, wherever the sequencer is and
// whichever node comes to be it, until ctx ends. The parts follow each other. If a part begins above
// the end of the one before (After > the last Last), nobody can tell any more who got the revisions
// between. An earlier sequencer allocated them, or this follower was too slow. Terms never go down.
// take is called by one goroutine and must not block for long.
func (c *Client) FollowLog(ctx context.Context, known sequencer.LogPosition, take func(*sequencer.LogPart)) {
	ctx, stop := c.joined(ctx)
	defer stop()
	pause := attemptPauseMin
	for ctx.Err() == nil {
		progress, err := c.followLogOnce(ctx, &known, take)
		if ctx.Err() != nil {
			return
		}
		c.o.Logger.Debug("the allocation log ended", zap.Error(err))
		if progress {
			pause = attemptPauseMin
		}
		if clock.Sleep(ctx, c.o.Clock, pause) != nil {
			return
		}
		pause = min(2*pause, attemptPauseMax)
	}
}

// followLogOnce follows one node's log until it ends or another node is taken for the
// leader; progress says that a part came.
func (c *Client) followLogOnce(ctx context.Context, known *sequencer.LogPosition, take func(*sequencer.LogPart)) (progress bool, err error) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	node := c.target()
	wg.Go(func() { c.whileLeads(ctx, node, cancel) })
	ended := func(err error) (bool, error) {
		if ctx.Err() == nil {
			c.streamEnded(node, err)
		}
		return progress, err
	}
	st, err := c.o.Bus.OpenStream(ctx, node, transport.MethodPlacementLog, sequencer.EncodeLogRequest(*known))
	if err != nil {
		return ended(err)
	}
	defer st.Close(nil)
	for {
		b, err := st.Recv(ctx)
		if err != nil {
			return ended(err)
		}
		p, err := sequencer.DecodeLogPart(b)
		if err != nil {
			return progress, err
		}
		if p.Term < known.Term || p.After < known.Last {
			return progress, fmt.Errorf("placement: part (%d, %d] of term %d follows revision %d of term %d",
				p.After, p.Last, p.Term, known.Last, known.Term)
		}
		progress = true
		*known = sequencer.LogPosition{Term: p.Term, Last: p.Last}
		take(&p)
	}
}

// whileLeads calls cancel once another node is taken for the leader: what stands in
// for the old one may be silent for long.
func (c *Client) whileLeads(ctx context.Context, node keyspace.NodeID, cancel func()) {
	for {
		leader, moved := c.leaderNow()
		if leader != 0 && leader != node {
			cancel()
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}
