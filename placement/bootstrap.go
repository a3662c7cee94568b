package placement

import (
	"context"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// WriteBootstrap writes the bootstrap state and makes it durable, if the node is a founder
// of the placement group and its engine does not hold the group yet. All founders
// write the same bytes. It comes before NewService.
func WriteBootstrap(ctx context.Context, e *engine.Engine, h *raftgroup.Host, bootstrap *fsm.Bootstrap, self keyspace.NodeID) error {
	if err := bootstrap.Validate(); err != nil {
		return err
	}
	voters := bootstrap.PlacementVoters()
	if !slices.ContainsFunc(voters, func(r keyspace.Replica) bool { return r.Node == self }) {
		return nil
	}
	if _, exists, err := e.Applied(keyspace.PlacementGroup); err != nil || exists {
		return err
	}
	b := e.NewBatch()
	defer b.Close()
	if err := bootstrap.FirstState(raftgroup.InitIndex).Flush(groupWriter{b}); err != nil {
		return fmt.Errorf("bootstrap cluster %s: %w", bootstrap.Cluster, err)
	}
	if err := h.Bootstrap(b, keyspace.PlacementGroup, voters, nil); err != nil {
		return fmt.Errorf("bootstrap cluster %s: %w", bootstrap.Cluster, err)
	}
	if err := b.Commit(); err != nil {
		return fmt.Errorf("bootstrap cluster %s: %w", bootstrap.Cluster, err)
	}
	if err := e.Flush(ctx); err != nil {
		return fmt.Errorf("bootstrap cluster %s: %w", bootstrap.Cluster, err)
	}
	return nil
}
