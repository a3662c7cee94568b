package operate

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// PlacementGroup implements adminapi.PlacementBackend.
func (a *Admin) PlacementGroup(ctx context.Context) (*adminpb.PlacementShowResponse, error) {
	nodes, stale, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	st, stale, err := a.placementGroup(ctx, stale)
	if err != nil {
		return nil, err
	}
	byName := names(nodes)
	resp := &adminpb.PlacementShowResponse{Leader: byName[st.Leader], Term: st.Term, Replication: a.replication(ctx, stale), Stale: stale}
	if settings, err := a.settings(ctx, stale); err == nil { // who holds the group is to be seen without it
		if after, set := placement.MergeAfter(settings); set {
			resp.MergeAfterMs = new(after.Milliseconds())
		}
	}
	for _, r := range st.Replicas {
		resp.Replicas = append(resp.Replicas, &adminpb.PlacementReplica{Node: byName[r.Node], ReplicaId: uint64(r.ID), Role: roleName(r.Role)})
	}
	return resp, nil
}

// placementGroup returns who holds the placement group, by a quorum, or else by the last state of
// one replica or of this node, which is old. With stale it does not ask a quorum.
func (a *Admin) placementGroup(ctx context.Context, stale bool) (st placement.Status, old bool, err error) {
	if !stale {
		asked, cancel := context.WithTimeout(ctx, quorumTimeout)
		defer cancel()
		if st, err = a.o.Placement.PlacementGroup(asked); err == nil || ctx.Err() != nil {
			return st, false, err
		}
	}
	asked, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	if st, err = a.o.Placement.Status(asked); err == nil {
		return st, true, nil
	}
	if m, _ := a.o.Placement.WatchMap(); m != nil {
		own := m.PlacementGroup()
		return placement.Status{Replicas: own.Replicas, ConfIndex: own.ConfIndex}, true, nil
	}
	return st, false, err
}

// MovePlacement implements adminapi.PlacementBackend.
func (a *Admin) MovePlacement(ctx context.Context, from, to string) (*adminpb.Operation, error) {
	return a.move(ctx, fsm.OwnGroup, from, to, "skein placement show shows who holds the group, skein placement operations what is under way")
}

// TransferPlacement implements adminapi.PlacementBackend.
func (a *Admin) TransferPlacement(ctx context.Context, to string) error {
	nodes, _, err := a.members(ctx)
	if err != nil {
		return err
	}
	node, err := nodeNamed(nodes, to)
	if err != nil {
		return err
	}
	st, err := a.o.Placement.PlacementGroup(ctx)
	if err != nil {
		return err
	}
	own := keyspace.Descriptor{Replicas: st.Replicas}
	if r, ok := own.ReplicaOn(node); !ok || r.Role != keyspace.RoleVoter {
		return &adminapi.Refusal{Reason: fmt.Sprintf("node %s holds no voter of the placement group", to), NextStep: "move a replica there first (skein placement move), or choose a node that has one (skein placement show)"}
	}
	if err := a.leads(nodes, &own, node, to); err != nil {
		return err
	}
	err = a.o.Placement.TransferLeader(ctx, node)
	if e := kverror.Of(err); err != nil && e.Kind == kverror.Internal {
		// Nobody can take the lead who has not all that the leader has.
		return &adminapi.Refusal{
			Reason:   nodeWords(nodes).Replace(e.Detail),
			NextStep: "try again in a moment, when it has caught up, or choose another one (skein placement show)",
		}
	}
	return err
}
