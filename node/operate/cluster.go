package operate

import (
	"context"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// Upgrades raises the cluster version.
type Upgrades interface {
	RaiseVersion(ctx context.Context, to keyspace.Version) error
	// SetUpgradeHeld has it be raised by command alone.
	SetUpgradeHeld(ctx context.Context, held bool) error
}

// ClusterVersion implements adminapi.ClusterBackend.
func (a *Admin) ClusterVersion(ctx context.Context) (*adminpb.ClusterShowResponse, error) {
	nodes, stale, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	m, err := a.o.Placement.Map(ctx)
	if err != nil {
		return nil, err
	}
	settings, _ := a.settings(ctx, stale) // the version is to be seen without them
	return versionRows(m.ClusterVersion, nodes, settings, stale), nil
}

// versionRows says in which version the cluster writes, and what the nodes read.
func versionRows(version keyspace.Version, nodes []fsm.Node, settings []fsm.Setting, stale bool) *adminpb.ClusterShowResponse {
	resp := &adminpb.ClusterShowResponse{Version: uint32(version), Stale: stale}
	for _, s := range settings {
		resp.Held = resp.Held || s.Name == fsm.SettingUpgradeHeld && len(s.Value) > 0
	}
	for i := range nodes {
		n := &nodes[i]
		if !n.State.Started() {
			continue
		}
		if next := version + 1; version != 0 && n.Reads.Newest >= next {
			resp.Next = uint32(next)
		}
		resp.Nodes = append(resp.Nodes, &adminpb.NodeVersions{
			Name: n.Name, Build: n.Build, Oldest: uint32(n.Reads.Oldest), Newest: uint32(n.Reads.Newest), SinceUnixMs: int64(n.ReadsSince),
		})
	}
	return resp
}

// Upgrade implements adminapi.ClusterBackend.
func (a *Admin) Upgrade(ctx context.Context) (_ uint32, err error) {
	defer a.explain(ctx, &err)
	m, err := a.o.Placement.Map(ctx)
	if err != nil {
		return 0, err
	}
	to := m.NextVersion()
	if to == 0 {
		return 0, &adminapi.Refusal{
			Reason:   "the cluster is new, and has no version yet: not all of its nodes have said what they read",
			NextStep: "skein cluster show lists them; it gets its first version once they all have",
		}
	}
	err = a.o.Placement.RaiseVersion(ctx, to)
	if e := kverror.Of(err); err != nil && e.Kind == kverror.BadRequest {
		return 0, &adminapi.Refusal{Reason: e.Detail, NextStep: "skein cluster show says what each node reads"}
	}
	return uint32(to), err
}

// HoldUpgrade implements adminapi.ClusterBackend.
func (a *Admin) HoldUpgrade(ctx context.Context, hold bool) (err error) {
	defer a.explain(ctx, &err)
	return a.o.Placement.SetUpgradeHeld(ctx, hold)
}
