package node

import (
	"context"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/compactor"
	"github.com/skeindb/skein/keyspace"
)

// removal waits for what compaction takes away on all nodes.
type removal struct{ c *Core }

// AwaitRemoval implements router.Removal.
func (r removal) AwaitRemoval(ctx context.Context, compacted keyspace.Revision) error {
	return r.c.shards.Admin().AwaitRemoval(ctx, r, compacted)
}

// Nodes implements shard/removal.Cluster.
func (r removal) Nodes(ctx context.Context) ([]keyspace.NodeID, error) {
	// A node that was removed may still read.
	members, err := r.c.client.NodeTable(ctx, false)
	if err != nil {
		return nil, err
	}
	ids := make([]keyspace.NodeID, len(members))
	for i := range members {
		ids[i] = members[i].ID
	}
	return ids, nil
}

// Alive implements shard/removal.Cluster.
func (r removal) Alive(n keyspace.NodeID) bool { return r.c.alive(n) }

// compacting is the cluster for automatic compaction. Each call takes etcd's request
// timeout at most.
type compacting struct{ c *Core }

// Current implements compactor.Cluster.
func (a compacting) Current(ctx context.Context) (keyspace.Revision, error) {
	ctx, cancel := clock.WithTimeout(ctx, a.c.o.Clock, a.c.o.RequestTimeout)
	defer cancel()
	got := make(chan keyspace.SequenceAnswer, 1)
	a.c.client.Sequence(keyspace.SequenceRequest{}, func(s keyspace.SequenceAnswer) { got <- s })
	s, err := clock.Await(ctx, got)
	if err != nil {
		return 0, err
	}
	return s.Current, s.Err
}

// Compact implements compactor.Cluster.
func (a compacting) Compact(ctx context.Context, at keyspace.Revision) error {
	ctx, cancel := clock.WithTimeout(ctx, a.c.o.Clock, a.c.o.RequestTimeout)
	defer cancel()
	_, err := a.c.client.Compact(ctx, at)
	return err
}

// Leads implements compactor.Cluster.
func (a compacting) Leads() bool { return a.c.client.Leader() == a.c.o.Self }

// compact compacts by itself, if it is to.
func (c *Core) compact() {
	o := &c.o
	if o.KeepPeriod > 0 || o.KeepRevisions > 0 {
		c.wait.Go(func() {
			compactor.Run(c.ctx, compactor.Options{
				Clock: o.Clock, Cluster: compacting{c}, Period: o.KeepPeriod, Revisions: o.KeepRevisions, Logger: c.log,
			})
		})
	}
}
