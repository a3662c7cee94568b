package node

import (
	"context"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// control opens ranges for placement; the replicas are made after it.
type control struct{ c *Core }

// CreateRanges implements placement.RangeControl.
func (r control) CreateRanges(ctx context.Context, node keyspace.NodeID, ds []keyspace.Descriptor) error {
	return r.c.shards.Admin().CreateRanges(ctx, node, ds)
}

// Look implements driver.Mover.
func (r control) Look(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	return r.c.shards.Admin().Look(ctx, node, id)
}

// ChangeMembers implements driver.Mover.
func (r control) ChangeMembers(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	_, err := r.c.shards.Admin().ChangeMembers(ctx, node, id, confIndex, changes)
	return err
}

// TransferTo implements driver.Mover.
func (r control) TransferTo(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error {
	return r.c.shards.Admin().TransferTo(ctx, node, id, to)
}

// Merge implements driver.Merger.
func (r control) Merge(ctx context.Context, node keyspace.NodeID, order keyspace.MergeOrder) error {
	return r.c.shards.Admin().Merge(ctx, node, order)
}

// pusher finds out for the replicas what became of transactions; the router is made
// after them.
type pusher struct{ c *Core }

// Push implements shard.TxnPusher.
func (p pusher) Push(ctx context.Context, name rangeapi.TxnName, anchor []byte) (live bool, d *rangeapi.Decided, err error) {
	return p.c.router.Push(ctx, name, anchor)
}

// Finish implements shard.TxnPusher.
func (p pusher) Finish(ctx context.Context, name rangeapi.TxnName, d *rangeapi.Decided) (live bool, err error) {
	return p.c.router.Finish(ctx, name, d)
}

// Reads implements shard.TxnPusher.
func (p pusher) Reads(ctx context.Context, below keyspace.Revision) (bool, error) {
	nodes, err := removal(p).Nodes(ctx)
	if err != nil {
		return false, err
	}
	return p.c.router.Reads(ctx, nodes, below)
}

// disk says how the node's disks fare.
type disk struct{ c *Core }

// Full implements shard.Disk.
func (d disk) Full() bool { return d.c.full() }

// Overloaded implements shard.Disk.
func (d disk) Overloaded() bool { return d.c.wal.Overloaded() }
