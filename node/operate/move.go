package operate

import (
	"context"
	"fmt"
	"strings"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// MoveRange implements adminapi.Backend.
func (a *Admin) MoveRange(ctx context.Context, id keyspace.RangeID, from, to string) (*adminpb.Operation, error) {
	return a.move(ctx, id, from, to, "skein range list shows who holds what, skein placement operations what is under way")
}

// move begins to move a replica of a range, or of fsm.OwnGroup; look says where to
// look if that is refused.
func (a *Admin) move(ctx context.Context, id keyspace.RangeID, from, to, look string) (_ *adminpb.Operation, err error) {
	if err := a.needs(ctx, fsm.OwnGroup); err != nil {
		return nil, err
	}
	defer a.explain(ctx, &err, id)
	nodes, _, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	o := fsm.Operation{Range: id, Kind: fsm.OperationMove, Why: "asked for"}
	if o.From, err = nodeNamed(nodes, from); err != nil {
		return nil, err
	}
	if o.To, err = nodeNamed(nodes, to); err != nil {
		return nil, err
	}
	if err := a.takes(nodes, o.To, to); err != nil {
		return nil, err
	}
	return a.begin(ctx, nodes, o, look)
}

// begin begins an operation; look says where to look if that is refused.
func (a *Admin) begin(ctx context.Context, nodes []fsm.Node, o fsm.Operation, look string) (*adminpb.Operation, error) {
	begun, err := a.o.Placement.BeginOperation(ctx, o)
	if e := kverror.Of(err); err != nil && e.Kind == kverror.BadRequest {
		return nil, notBegun(e, nodes, look)
	}
	if err != nil {
		return nil, err
	}
	return operationRow(&begun, names(nodes)), nil
}

// takes refuses to give a replica or a leader to a node that would give it up at once, never
// begins with it, or is not heard.
func (a *Admin) takes(nodes []fsm.Node, node keyspace.NodeID, name string) error {
	for i := range nodes {
		n, next := &nodes[i], ""
		switch {
		case n.ID != node:
			continue
		case n.State == fsm.NodeDraining:
			next = "skein node undrain " + name + " takes it back"
		case n.State == fsm.NodeDecommissioned:
			next = "skein node recommission " + name + " takes it back"
		case n.State == fsm.NodeLearner:
			next = "etcdctl member promote " + n.ID.String() + " has it serve"
		case !n.State.Started():
			next = "start it"
		}
		if next != "" {
			return &adminapi.Refusal{Reason: fmt.Sprintf("node %s is %s", name, n.State), NextStep: next + ", or choose another one (skein node list)"}
		}
	}
	if a.o.Peers.Alive(node) {
		return nil
	}
	return &adminapi.Refusal{Reason: fmt.Sprintf("node %s does not answer", name), NextStep: "start it, or choose another one (skein node list)"}
}

// notBegun words for an operator why an operation is refused: nodes have names, and what was
// asked for is in front of it anyway.
func notBegun(e *kverror.Error, nodes []fsm.Node, look string) error {
	reason := nodeWords(nodes).Replace(e.Detail)
	for _, kind := range []fsm.OperationKind{fsm.OperationMove, fsm.OperationAdd, fsm.OperationRemove, fsm.OperationMerge} {
		if rest, ok := strings.CutPrefix(reason, kind.String()+" "); ok {
			_, reason, _ = strings.Cut(rest, ": ")
		}
	}
	return &adminapi.Refusal{Reason: reason, NextStep: look}
}

// MergeRange implements adminapi.Backend.
func (a *Admin) MergeRange(ctx context.Context, left keyspace.RangeID) (_ *adminpb.Operation, err error) {
	if err := a.needs(ctx, fsm.OwnGroup); err != nil {
		return nil, err
	}
	defer a.explain(ctx, &err, left)
	nodes, _, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	return a.begin(ctx, nodes, fsm.Operation{Range: left, Kind: fsm.OperationMerge, Why: "asked for"},
		"skein range list shows the ranges in their order and who holds them, skein placement operations what is under way")
}

// Operations implements adminapi.Backend.
func (a *Admin) Operations(ctx context.Context) (*adminpb.OperationListResponse, error) {
	nodes, stale, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	ops, err := a.operations(ctx, stale)
	if err != nil && !stale && ctx.Err() == nil { // since the nodes were asked for
		stale = true
		ops, err = a.operations(ctx, stale)
	}
	if err != nil {
		return nil, err
	}
	settings, err := a.settings(ctx, stale)
	if err != nil {
		return nil, err
	}
	byName, out := names(nodes), &adminpb.OperationListResponse{Paused: placement.Paused(settings), Stale: stale}
	for i := range ops {
		out.Operations = append(out.Operations, operationRow(&ops[i], byName))
	}
	return out, nil
}

// Pause implements adminapi.Backend.
func (a *Admin) Pause(ctx context.Context, paused bool) (err error) {
	defer a.explain(ctx, &err)
	return a.o.Placement.SetPaused(ctx, paused)
}
