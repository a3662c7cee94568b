package operate

import (
	"context"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// atLeader asks the supposed leader of a range. If another replica knows of another leader, it
// gives up and returns that one: a silent node never answers, nor does a leader that is cut off,
// though it accepts the order. A timeout would not do, since a leader may wait for slow followers.
func (a *Admin) atLeader(ctx context.Context, node keyspace.NodeID, d *keyspace.Descriptor, ask func(context.Context) error) (heir keyspace.NodeID, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	found := make(chan keyspace.NodeID, 1)
	go func() {
		found <- a.leaderBeside(ctx, node, d)
		cancel()
	}()
	err = ask(ctx)
	cancel()
	return <-found, err
}

// leaderBeside looks twice in an election timeout, until ctx ends, for another leader than the
// node, and returns it. A replica that lags may name a former leader, so the leader itself must
// confirm.
func (a *Admin) leaderBeside(ctx context.Context, node keyspace.NodeID, d *keyspace.Descriptor) keyspace.NodeID {
	for clock.Sleep(ctx, a.o.Clock, a.o.Election/2) == nil {
		for _, m := range d.Replicas {
			if m.Node == node {
				continue
			}
			asked, cancel := clock.WithTimeout(ctx, a.o.Clock, a.o.Election)
			_, leader, err := a.o.Replicas.Look(asked, m.Node, d.Range)
			if err == nil && leader != 0 && leader != node && leader != m.Node {
				m.Node = leader
				_, leader, err = a.o.Replicas.Look(asked, leader, d.Range)
			}
			cancel()
			if err == nil && leader == m.Node {
				return leader
			}
		}
	}
	return 0
}

// TransferLeader implements adminapi.Backend. It is repeated where another node than was
// thought leads the range.
func (a *Admin) TransferLeader(ctx context.Context, id keyspace.RangeID, to string) (err error) {
	if err := a.needs(ctx, id); err != nil {
		return err
	}
	defer a.explain(ctx, &err, id)
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

func (a *Admin) transferTo(ctx context.Context, d *keyspace.Descriptor, to keyspace.NodeID) error {
	var heir keyspace.NodeID
	for turn := 0; ; turn++ {
		node := heir
		if node == 0 {
			node = d.Replicas[turn%len(d.Replicas)].Node
		}
		var err error
		heir, err = a.atLeader(ctx, node, d, func(ctx context.Context) error {
			return a.o.Replicas.TransferTo(ctx, node, d.Range, to)
		})
		if err == nil {
			a.o.Routes.Led(d.Range, to)
			return nil
		}
		// To ask again is harmless: who leads already says so.
		e := kverror.Of(err)
		unsure := heir != 0 || e.Kind != kverror.Internal && e.Fate() == kverror.Unknown
		if ctx.Err() != nil || !unsure && e.Retry() != kverror.RetryRouter {
			return err
		}
		if clock.Sleep(ctx, a.o.Clock, splitPause) != nil {
			return err
		}
	}
}

// leads refuses a node as leader that takes nothing, or would hand the lead back: an isolated node
// does so if another voter is not isolated.
func (a *Admin) leads(nodes []fsm.Node, d *keyspace.Descriptor, node keyspace.NodeID, name string) error {
	if err := a.takes(nodes, node, name); err != nil || a.o.Peers.Central(node) {
		return err
	}
	heir := func(m keyspace.Replica) bool { return m.Role == keyspace.RoleVoter && a.o.Peers.Central(m.Node) }
	if !slices.ContainsFunc(d.Replicas, heir) {
		return nil
	}
	return &adminapi.Refusal{
		Reason:   fmt.Sprintf("node %s hears hardly any other node, and would hand the lead back", name),
		NextStep: "let it hear the others, or choose another one (skein node list)",
	}
}

// errTransferTook is etcd's answer where another member does not lead in time.
var errTransferTook = status.Error(codes.Unknown, "etcdserver: request timed out, leader transfer took too long")

// MoveLeader implements etcdapi.Node. The leaders of ranges stay where they are: they are
// spread over the nodes for the load, and move when a node is drained or stopped.
func (a *Admin) MoveLeader(ctx context.Context, to keyspace.NodeID) error {
	st, err := a.o.Placement.Status(ctx)
	if err != nil {
		return err
	}
	// etcd has one group, and refuses every node outside it. A node that would hand the lead back
	// at once is refused as for operators' commands.
	if !slices.ContainsFunc(st.Replicas, func(r keyspace.Replica) bool { return r.Node == to && r.Role == keyspace.RoleVoter }) {
		return rpctypes.ErrGRPCBadLeaderTransferee
	}
	if to != a.o.Placement.Leader() && a.o.Peers.Alive(to) { // of one that is not, raft says that it has not caught up
		nodes, _, err := a.members(ctx)
		if err != nil {
			return err
		}
		own := keyspace.Descriptor{Replicas: st.Replicas}
		if err := a.leads(nodes, &own, to, names(nodes)[to]); err != nil {
			// etcd's answer has no place for the reason.
			a.o.Logger.Warn("the placement group is not handed over as etcd's clients ask", zap.Stringer("to", to), zap.Error(err))
			return rpctypes.ErrGRPCBadLeaderTransferee
		}
	}
	err = a.o.Placement.TransferLeader(ctx, to)
	switch kind := kverror.Of(err); {
	case err != nil && kind.Kind == kverror.BadRequest:
		return rpctypes.ErrGRPCBadLeaderTransferee
	case err != nil:
		return err
	}
	for a.o.Placement.Leader() != to {
		if clock.Sleep(ctx, a.o.Clock, a.o.Heartbeat) != nil {
			return errTransferTook
		}
	}
	return nil
}
