package placement

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// Pauses between attempts to create ranges on a node, and how many go in one call.
const (
	createPauseMin   = 20 * time.Millisecond
	createPauseMax   = 2 * time.Second
	createTimeout    = 10 * time.Second
	createBatch      = 256
	createNodesAtOne = 16
)

// createRanges has the ranges of the bootstrap created on their nodes, until every node has
// answered for all of its own, and then marks them created. It ends with the term: the next
// leader goes on.
func (s *Service) createRanges(ctx context.Context, term uint64) {
	perNode := map[keyspace.NodeID][]keyspace.Descriptor{}
	var ids []keyspace.RangeID
	s.View().All(func(g *fsm.Range) bool {
		if !g.Created {
			ids = append(ids, g.Descriptor.Range)
			for _, r := range g.Descriptor.Replicas {
				perNode[r.Node] = append(perNode[r.Node], g.Descriptor)
			}
		}
		return true
	})
	slots := make(chan struct{}, createNodesAtOne)
	var nodes sync.WaitGroup
	for node, ds := range perNode {
		nodes.Go(func() {
			for len(ds) > 0 && ctx.Err() == nil {
				n := min(createBatch, len(ds))
				s.createOn(ctx, slots, node, ds[:n:n])
				ds = ds[n:]
			}
		})
	}
	nodes.Wait()
	for len(ids) > 0 && ctx.Err() == nil {
		n := min(fsm.MaxRangeIDs, len(ids))
		res := s.propose(ctx, term, fsm.MarkCreated{Ranges: ids[:n]})
		if e := kverror.Of(res.Err); e != nil {
			s.o.Logger.Warn("mark ranges created", zap.Uint64("term", term), zap.Error(e))
			if clock.Sleep(ctx, s.o.Clock, createPauseMin) != nil {
				return
			}
			continue
		}
		s.o.Logger.Info("ranges created", zap.Uint64("term", term), zap.Int("ranges", n))
		ids = ids[n:]
	}
}

// unchanged returns the ranges that the map still has as the bootstrap wrote them, with the
// node's replica. The others were split since, by replicas that exist: to create them as they
// were would lay them over their children. Where one is missing, its group's leader sends it a
// snapshot. Or the node was lost before it had its replica, and others have it now: nobody waits
// for that node, and when it comes it gets none.
func (s *Service) unchanged(node keyspace.NodeID, ds []keyspace.Descriptor) []keyspace.Descriptor {
	v := s.View()
	kept := make([]keyspace.Descriptor, 0, len(ds))
	for i := range ds {
		row := v.Lookup(ds[i].Span.Start)
		was, _ := ds[i].ReplicaOn(node)
		is, _ := row.Descriptor.ReplicaOn(node)
		if row.Descriptor.Range == ds[i].Range && row.Descriptor.Generation == ds[i].Generation && is.ID == was.ID {
			kept = append(kept, ds[i])
		}
	}
	return kept
}

// createOn repeats one call until it succeeds or ctx ends, each time without what
// was split meanwhile. A slot bounds how many
// calls run at a time; it is given back while a node is waited for, so that dead
// nodes keep none.
func (s *Service) createOn(ctx context.Context, slots chan struct{}, node keyspace.NodeID, ds []keyspace.Descriptor) {
	pause := createPauseMin
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		if ds = s.unchanged(node, ds); len(ds) == 0 {
			<-slots
			return
		}
		callCtx, cancel := clock.WithTimeout(ctx, s.o.Clock, createTimeout)
		err := s.o.Control.CreateRanges(callCtx, node, ds)
		cancel()
		<-slots
		if err == nil {
			return
		}
		s.o.Logger.Warn("create ranges", zap.Stringer("peer", node), zap.Int("ranges", len(ds)),
			zap.Stringer("range", ds[0].Range), zap.Error(err))
		if clock.Sleep(ctx, s.o.Clock, pause) != nil {
			return
		}
		pause = min(2*pause, createPauseMax)
	}
}
