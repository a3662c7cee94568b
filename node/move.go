package node

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
)

// nodeNamed returns the node of a name, or of an id in etcd's form.
func nodeNamed(nodes []placement.Node, name string) (keyspace.NodeID, error) {
	var found keyspace.NodeID
	for _, n := range nodes {
		switch {
		case n.ID.String() == name:
			return n.ID, nil
		case n.Name == name && found != 0:
			return 0, &adminapi.Refusal{Reason: fmt.Sprintf("several nodes are named %s", name), NextStep: "give the node's id (skein node list)"}
		case n.Name == name:
			found = n.ID
		}
	}
	if found == 0 {
		return 0, &adminapi.Refusal{Reason: fmt.Sprintf("there is no node %q", name), NextStep: "skein node list shows the nodes"}
	}
	return found, nil
}

// MoveRange implements adminapi.Backend.
func (a admin) MoveRange(ctx context.Context, id keyspace.RangeID, from, to string) (*adminpb.Operation, error) {
	return a.move(ctx, id, from, to, "skein range list shows who holds what, skein placement operations what is under way")
}

// move begins to move a replica of a range, or of placement.OwnGroup; look says where to
// look if that is refused.
func (a admin) move(ctx context.Context, id keyspace.RangeID, from, to, look string) (*adminpb.Operation, error) {
	nodes, _, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	o := placement.Operation{Range: id, Kind: placement.OperationMove, Why: "asked for"}
	if o.From, err = nodeNamed(nodes, from); err != nil {
		return nil, err
	}
	if o.To, err = nodeNamed(nodes, to); err != nil {
		return nil, err
	}
	if !a.c.alive(o.To) {
		return nil, &adminapi.Refusal{Reason: fmt.Sprintf("node %s does not answer", to), NextStep: "start it, or choose another one (skein node list)"}
	}
	begun, err := a.c.client.BeginOperation(ctx, o)
	if e := kverror.Of(err); err != nil && e.Kind == kverror.BadRequest {
		return nil, &adminapi.Refusal{Reason: e.Detail, NextStep: look}
	}
	if err != nil {
		return nil, err
	}
	return operationRow(&begun, names(nodes)), nil
}

func operationRow(o *placement.Operation, byName map[keyspace.NodeID]string) *adminpb.Operation {
	row := &adminpb.Operation{
		Id: o.ID, Range: uint64(o.Range), Kind: o.Kind.String(), From: byName[o.From], To: byName[o.To], Reason: o.ReasonWord(), Why: o.Why, Right: uint64(o.Right),
	}
	if o.Kind == placement.OperationMerge {
		row.Phase = o.Phase.String()
	}
	return row
}

// MergeRange implements adminapi.Backend.
func (a admin) MergeRange(ctx context.Context, left keyspace.RangeID) (*adminpb.Operation, error) {
	nodes, _, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	begun, err := a.c.client.BeginOperation(ctx, placement.Operation{Range: left, Kind: placement.OperationMerge, Why: "asked for"})
	if e := kverror.Of(err); err != nil && e.Kind == kverror.BadRequest {
		return nil, &adminapi.Refusal{Reason: e.Detail, NextStep: "skein range list shows the ranges in their order and who holds them, skein placement operations what is under way"}
	}
	if err != nil {
		return nil, err
	}
	return operationRow(&begun, names(nodes)), nil
}

// TransferLeader implements adminapi.Backend. It is repeated where another node than was
// thought leads the range.
func (a admin) TransferLeader(ctx context.Context, id keyspace.RangeID, to string) error {
	ctx, cancel := context.WithTimeout(ctx, splitTimeout)
	defer cancel()
	nodes, descs, _, err := a.cluster(ctx)
	if err != nil {
		return err
	}
	node, err := nodeNamed(nodes, to)
	if err != nil {
		return err
	}
	for i := range descs {
		if descs[i].Range != id {
			continue
		}
		if m, ok := descs[i].ReplicaOn(node); !ok || m.Role != keyspace.RoleVoter {
			return &adminapi.Refusal{Reason: fmt.Sprintf("node %s holds no voter of range %s", to, id), NextStep: "move a replica there first (skein range move), or choose a node that has one (skein range list)"}
		}
		return a.transferTo(ctx, &descs[i], node)
	}
	return &adminapi.Refusal{Reason: fmt.Sprintf("there is no range %s", id), NextStep: "skein range list shows the ranges"}
}

func (a admin) transferTo(ctx context.Context, d *keyspace.Descriptor, to keyspace.NodeID) error {
	for turn := 0; ; turn++ {
		m := d.Replicas[turn%len(d.Replicas)]
		err := a.c.shards.Client().TransferTo(ctx, m.Node, d.Range, to)
		if err == nil {
			a.c.router.Led(d.Range, to)
			return nil
		}
		if e := kverror.Of(err); e.Retry() != kverror.RetryRouter || ctx.Err() != nil {
			return err
		}
		if clock.Sleep(ctx, a.c.o.Clock, splitPause) != nil {
			return err
		}
	}
}

// Operations implements adminapi.Backend.
func (a admin) Operations(ctx context.Context) (*adminpb.OperationListResponse, error) {
	nodes, _, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	ops, err := a.c.client.Operations(ctx)
	if err != nil {
		return nil, err
	}
	settings, err := a.settings(ctx)
	if err != nil {
		return nil, err
	}
	byName, out := names(nodes), &adminpb.OperationListResponse{Paused: placement.Paused(settings)}
	for i := range ops {
		out.Operations = append(out.Operations, operationRow(&ops[i], byName))
	}
	return out, nil
}

// Pause implements adminapi.Backend.
func (a admin) Pause(ctx context.Context, paused bool) error {
	return a.c.client.SetPaused(ctx, paused)
}
