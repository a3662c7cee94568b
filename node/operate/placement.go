package operate

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/driver"
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
	resp := &adminpb.PlacementShowResponse{Leader: byName[st.Leader], Term: st.Term, Replication: a.replication(ctx, nodes, stale), Stale: stale}
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

// lookAtGroup is where to look when a change of the placement group's replicas is refused.
const lookAtGroup = "skein placement show shows who holds the group, skein placement operations what is under way"

// MovePlacement implements adminapi.PlacementBackend.
func (a *Admin) MovePlacement(ctx context.Context, from, to string) (_ *adminpb.Operation, err error) {
	if err := a.needs(ctx, fsm.OwnGroup); err != nil {
		return nil, err
	}
	defer a.explain(ctx, &err)
	if from != "" && to != "" {
		return a.move(ctx, fsm.OwnGroup, from, to, lookAtGroup)
	}
	g, err := a.voters(ctx)
	if err != nil {
		return nil, err
	}
	o := fsm.Operation{Range: fsm.OwnGroup, Why: "asked for"}
	if from == "" {
		o.Kind = fsm.OperationAdd
		o.To, err = a.addsVoter(g, to)
	} else {
		o.Kind = fsm.OperationRemove
		o.From, err = a.removesVoter(g, from)
	}
	if err != nil {
		return nil, err
	}
	return a.begin(ctx, g.nodes, o, lookAtGroup)
}

// maxPlacementVoters bounds the voters of the placement group, as of a range.
const maxPlacementVoters = 7

// voterGroup is the placement group when its voters are to be changed by hand.
type voterGroup struct {
	nodes []fsm.Node
	// members counts those by which the group has its number of voters.
	members int
	voters  []keyspace.NodeID
	// replication is how many voters ranges are to have.
	replication int
}

func (a *Admin) voters(ctx context.Context) (*voterGroup, error) {
	nodes, stale, err := a.members(ctx)
	if err != nil {
		return nil, err
	}
	if stale {
		return nil, kverror.NoLeader
	}
	st, err := a.o.Placement.PlacementGroup(ctx)
	if err != nil {
		return nil, err
	}
	settings, err := a.settings(ctx, false)
	if err != nil {
		return nil, err
	}
	g := &voterGroup{nodes: nodes, replication: placement.Replication(settings)}
	for i := range nodes {
		if nodes[i].State.Member() {
			g.members++
		}
	}
	for _, m := range st.Replicas {
		if m.Role != keyspace.RoleLearner {
			g.voters = append(g.voters, m.Node)
		}
	}
	return g, nil
}

// addsVoter returns the node that is to get a voter, or a *adminapi.Refusal. It refuses what
// placement would take away again.
func (a *Admin) addsVoter(g *voterGroup, name string) (keyspace.NodeID, error) {
	node, err := nodeNamed(g.nodes, name)
	if err == nil {
		err = a.takes(g.nodes, node, name)
	}
	if err != nil {
		return 0, err
	}
	now, then := len(g.voters), len(g.voters)+1
	switch {
	case slices.Contains(g.voters, node):
		return 0, &adminapi.Refusal{Reason: fmt.Sprintf("node %s holds a voter of the placement group already", name), NextStep: "choose another one: " + lookAtGroup}
	case then > maxPlacementVoters:
		return 0, &adminapi.Refusal{Reason: fmt.Sprintf("the placement group has %d voters, which is the most", now), NextStep: "put one in the place of another with skein placement move"}
	case driver.EvenOnAll(then, g.members, g.replication):
		return 0, &adminapi.Refusal{
			Reason:   fmt.Sprintf("%d voters on %d nodes survive no more losses than %d, and placement would take one away again", then, g.members, now),
			NextStep: "add a node first, or put one in the place of another with skein placement move",
		}
	}
	return node, nil
}

// removesVoter returns the node whose voter is to go, or a *adminapi.Refusal. It refuses what
// placement would add again, and what would stop the group.
func (a *Admin) removesVoter(g *voterGroup, name string) (keyspace.NodeID, error) {
	node, err := nodeNamed(g.nodes, name)
	if err != nil {
		return 0, err
	}
	var silent []string
	for _, v := range g.voters {
		if v != node && !a.o.Peers.Alive(v) {
			silent = append(silent, names(g.nodes)[v])
		}
	}
	beside := len(g.voters) - 1
	instead := fmt.Sprintf("skein placement move --from %s --to NODE puts it on another node; skein node decommission %s takes the node out", name, name)
	switch {
	case !slices.Contains(g.voters, node):
		return 0, &adminapi.Refusal{Reason: fmt.Sprintf("node %s holds no voter of the placement group", name), NextStep: lookAtGroup}
	case beside < fsm.PlacementVotersFor(g.members):
		return 0, &adminapi.Refusal{
			Reason:   fmt.Sprintf("the placement group would have %d voters, and in a cluster of %d nodes has %d: placement would add one again", beside, g.members, fsm.PlacementVotersFor(g.members)),
			NextStep: instead,
		}
	case beside < g.replication:
		return 0, &adminapi.Refusal{
			Reason:   fmt.Sprintf("the placement group would have %d voters, and ranges are to have %d: placement would add one again", beside, g.replication),
			NextStep: instead + "; skein placement set-replication sets another number",
		}
	case 2*(beside-len(silent)) <= beside:
		slices.Sort(silent)
		return 0, &adminapi.Refusal{
			Reason:   fmt.Sprintf("without node %s the placement group has no quorum: %s do not answer", name, strings.Join(silent, ", ")),
			NextStep: "bring those back first",
		}
	}
	return node, nil
}

// TransferPlacement implements adminapi.PlacementBackend.
func (a *Admin) TransferPlacement(ctx context.Context, to string) (err error) {
	if err := a.needs(ctx, fsm.OwnGroup); err != nil {
		return err
	}
	defer a.explain(ctx, &err)
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
