package node

import (
	"context"
	"fmt"
	"slices"
	"strings"

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
	if err := a.takes(nodes, o.To, to); err != nil {
		return nil, err
	}
	begun, err := a.c.client.BeginOperation(ctx, o)
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
func (a admin) takes(nodes []placement.Node, node keyspace.NodeID, name string) error {
	for i := range nodes {
		n, next := &nodes[i], ""
		switch {
		case n.ID != node:
			continue
		case n.State == placement.NodeDraining:
			next = "skein node undrain " + name + " takes it back"
		case n.State == placement.NodeDecommissioned:
			next = "skein node recommission " + name + " takes it back"
		case n.State == placement.NodeLearner:
			next = "etcdctl member promote " + n.ID.String() + " has it serve"
		case !n.State.Started():
			next = "start it"
		}
		if next != "" {
			return &adminapi.Refusal{Reason: fmt.Sprintf("node %s is %s", name, n.State), NextStep: next + ", or choose another one (skein node list)"}
		}
	}
	if a.c.alive(node) {
		return nil
	}
	return &adminapi.Refusal{Reason: fmt.Sprintf("node %s does not answer", name), NextStep: "start it, or choose another one (skein node list)"}
}

// leads refuses to have a node lead that takes nothing, or would hand the lead back: one that hears
// hardly any other does, where another voter hears more.
func (a admin) leads(nodes []placement.Node, d *keyspace.Descriptor, node keyspace.NodeID, name string) error {
	if err := a.takes(nodes, node, name); err != nil || a.c.host.Connected(node) {
		return err
	}
	heir := func(m keyspace.Replica) bool { return m.Role == keyspace.RoleVoter && a.c.host.Connected(m.Node) }
	if !slices.ContainsFunc(d.Replicas, heir) {
		return nil
	}
	return &adminapi.Refusal{
		Reason:   fmt.Sprintf("node %s hears hardly any other node, and would hand the lead back", name),
		NextStep: "let it hear the others, or choose another one (skein node list)",
	}
}

// notBegun words for an operator why an operation is refused: nodes have names, and what was
// asked for is in front of it anyway.
func notBegun(e *kverror.Error, nodes []placement.Node, look string) error {
	reason := nodeWords(nodes).Replace(e.Detail)
	for _, kind := range []placement.OperationKind{placement.OperationMove, placement.OperationMerge} {
		if rest, ok := strings.CutPrefix(reason, kind.String()+" "); ok {
			_, reason, _ = strings.Cut(rest, ": ")
		}
	}
	return &adminapi.Refusal{Reason: reason, NextStep: look}
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
		return nil, notBegun(e, nodes, "skein range list shows the ranges in their order and who holds them, skein placement operations what is under way")
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
		if err := a.leads(nodes, &descs[i], node, to); err != nil {
			return err
		}
		return a.transferTo(ctx, &descs[i], node)
	}
	return &adminapi.Refusal{Reason: fmt.Sprintf("there is no range %s", id), NextStep: "skein range list shows the ranges"}
}

func (a admin) transferTo(ctx context.Context, d *keyspace.Descriptor, to keyspace.NodeID) error {
	var heir keyspace.NodeID
	for turn := 0; ; turn++ {
		node := heir
		if node == 0 {
			node = d.Replicas[turn%len(d.Replicas)].Node
		}
		var err error
		heir, err = a.atLeader(ctx, node, d, func(ctx context.Context) error {
			return a.c.shards.Admin().TransferTo(ctx, node, d.Range, to)
		})
		if err == nil {
			a.c.router.Led(d.Range, to)
			return nil
		}
		// To ask again is harmless: who leads already says so.
		e := kverror.Of(err)
		unsure := heir != 0 || e.Kind != kverror.Internal && e.Fate() == kverror.Unknown
		if ctx.Err() != nil || !unsure && e.Retry() != kverror.RetryRouter {
			return err
		}
		if clock.Sleep(ctx, a.c.o.Clock, splitPause) != nil {
			return err
		}
	}
}

// Operations implements adminapi.Backend.
func (a admin) Operations(ctx context.Context) (*adminpb.OperationListResponse, error) {
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
func (a admin) Pause(ctx context.Context, paused bool) error {
	return a.c.client.SetPaused(ctx, paused)
}
