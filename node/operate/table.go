package operate

import (
	"context"
	"slices"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// quorumTimeout bounds the wait for a quorum's word on who is a node. An operator who
// looks why there is no quorum must not be left without an answer.
const quorumTimeout = 3 * time.Second

// nodeTable returns the node table, with those that were removed: the quorum's, or else
// what this node knew last.
func (a *Admin) nodeTable(ctx context.Context) (nodes []fsm.Node, stale bool, err error) {
	if err = a.needs(ctx, fsm.OwnGroup); err == nil {
		asked, cancel := context.WithTimeout(ctx, quorumTimeout)
		defer cancel()
		if nodes, err = a.o.Placement.NodeTable(asked, true); err == nil || ctx.Err() != nil {
			return nodes, false, err
		}
	}
	if m, _ := a.o.Placement.WatchMap(); m != nil {
		return m.NodeTable(), true, nil
	}
	return nil, false, err
}

// members is nodeTable without those that were removed.
func (a *Admin) members(ctx context.Context) (nodes []fsm.Node, stale bool, err error) {
	nodes, stale, err = a.nodeTable(ctx)
	return slices.DeleteFunc(nodes, func(n fsm.Node) bool { return n.State == fsm.NodeRemoved }), stale, err
}

// operations returns the operations under way: a quorum's word, or with stale what a replica
// of the placement group knew last.
func (a *Admin) operations(ctx context.Context, stale bool) ([]fsm.Operation, error) {
	if stale {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return a.o.Placement.LastOperations(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	return a.o.Placement.Operations(ctx)
}

// settings returns the cluster's settings, by whose word as operations.
func (a *Admin) settings(ctx context.Context, stale bool) ([]fsm.Setting, error) {
	if stale {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return a.o.Placement.LastSettings(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	s, _, err := a.o.Placement.Settings(ctx)
	return s, err
}

// cluster returns the members and the range map, which is always what this node knew last.
func (a *Admin) cluster(ctx context.Context) (_ []fsm.Node, _ []keyspace.Descriptor, stale bool, err error) {
	nodes, stale, err := a.members(ctx)
	if err != nil {
		return nil, nil, false, err
	}
	descs, err := a.o.Placement.RangeMap(ctx)
	return nodes, descs, stale, err
}
