package operate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// SetReplication implements adminapi.PlacementBackend.
func (a *Admin) SetReplication(ctx context.Context, factor int, dryRun bool) (_ *adminpb.PlacementSetReplicationResponse, err error) {
	defer a.explain(ctx, &err)
	if !placement.ValidReplication(factor) {
		return nil, &adminapi.Refusal{Reason: fmt.Sprintf("a range has 1, 3, 5 or 7 voters, not %d", factor), NextStep: "give one of these: an even number outlives no more losses than the odd one below it"}
	}
	v, err := a.completeView(ctx)
	switch {
	case err != nil:
		return nil, err
	case v.stale:
		return nil, kverror.NoLeader
	case len(v.missing) > 0:
		return nil, &adminapi.Refusal{Reason: unknownRanges, NextStep: lookForRanges}
	case placement.Paused(v.settings):
		return nil, &adminapi.Refusal{Reason: "placement is paused, so that no range would change", NextStep: "have it go on with skein placement resume"}
	}
	plan, err := v.decider(a.o.Clock.Now()).CanReplicate(factor)
	var refused *decide.ReplicationRefusal
	if errors.As(err, &refused) {
		words := v.words()
		return nil, &adminapi.Refusal{Reason: fmt.Sprintf("ranges cannot have %d voters: %s", factor, words.Replace(refused.Why)), NextStep: words.Replace(refused.Do)}
	}
	if err != nil {
		return nil, err
	}
	out := &adminpb.PlacementSetReplicationResponse{
		Before: int64(placement.Replication(v.settings)), After: int64(factor), Ranges: int64(plan.Ranges),
		Added: int64(plan.Added), Bytes: plan.Bytes, Removed: int64(plan.Removed), Notes: replicationNotes(factor, &plan),
	}
	if dryRun {
		return out, nil
	}
	err = a.o.Placement.SetReplication(ctx, factor)
	if e := kverror.Of(err); err != nil && e.Kind == kverror.BadRequest {
		return nil, &adminapi.Refusal{Reason: e.Detail, NextStep: "look with skein node list which nodes take replicas, and try again"}
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// SetMergeAfter implements adminapi.PlacementBackend.
func (a *Admin) SetMergeAfter(ctx context.Context, after *time.Duration) (err error) {
	defer a.explain(ctx, &err)
	if after == nil {
		return a.o.Placement.UnsetMergeAfter(ctx)
	}
	err = a.o.Placement.SetMergeAfter(ctx, *after)
	if e := kverror.Of(err); err != nil && e.Kind == kverror.BadRequest {
		return &adminapi.Refusal{Reason: e.Detail, NextStep: "give one of these, or default for what the nodes were started with"}
	}
	return err
}

// replicationNotes is what an operator should know of a change that can be done.
func replicationNotes(factor int, plan *decide.Replication) (notes []string) {
	if factor == 1 {
		notes = append(notes, "with one voter a range stands still while its node is down, and is lost with its disk")
	}
	if plan.Zones > 1 && plan.Zones < factor {
		notes = append(notes, fmt.Sprintf("nodes of %d zones take replicas: of %d voters of a range some share a zone", plan.Zones, factor))
	}
	if plan.Waiting > 0 {
		notes = append(notes, fmt.Sprintf("%d ranges have a replica on a node that does not answer: they change when it does, or counts as lost", plan.Waiting))
	}
	return notes
}

// replication returns how many voters ranges are to have, and the progress by this node's map.
// With stale it asks one replica of the placement group. It returns nil if nobody answers.
func (a *Admin) replication(ctx context.Context, nodes []fsm.Node, stale bool) *adminpb.Replication {
	settings, err := a.settings(ctx, stale)
	if err != nil {
		return nil
	}
	ops, err := a.operations(ctx, stale)
	if err != nil {
		return nil
	}
	descs, err := a.o.Placement.RangeMap(ctx)
	if err != nil {
		return nil
	}
	byRange := map[keyspace.RangeID]fsm.Operation{}
	for _, o := range ops {
		byRange[o.Range] = o
	}
	out := progress(settings, descs, byRange, a.o.Peers.Alive)
	var reports map[keyspace.NodeID]Report
	if !stale { // nothing is placed without a quorum, and nobody is to wait for a node that hangs
		reports = a.livingReports(ctx, nodes)
	}
	out.Declining = declining(nodes, reports, a.o.Peers.Reached)
	return out
}

// progress says how many ranges have not as many voters as they are to have, or not all alive.
func progress(
	settings []fsm.Setting, descs []keyspace.Descriptor, ops map[keyspace.RangeID]fsm.Operation, alive func(keyspace.NodeID) bool,
) *adminpb.Replication {
	out := &adminpb.Replication{
		Factor: int64(placement.Replication(settings)), Ranges: int64(len(descs)), Paused: placement.Paused(settings), PausedSinceUnixMs: int64(placement.PausedSince(settings)),
	}
	for i := range descs {
		voters, silent := int64(0), false
		for _, m := range descs[i].Replicas {
			if m.Role == keyspace.RoleVoter || m.Role == keyspace.RoleVoterIncoming {
				voters++
				silent = silent || !alive(m.Node)
			}
		}
		switch {
		case voters < out.Factor:
			out.Fewer++
		case voters > out.Factor:
			out.More++
		}
		if silent {
			out.Silent++
		}
	}
	for id, o := range ops {
		if o.Reason == decide.Factor && id != fsm.OwnGroup {
			out.Operations++
		}
	}
	return out
}
