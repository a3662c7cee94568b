package node

import (
	"context"
	"errors"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
)

// members answers etcd's questions about the cluster, and changes it on behalf of etcd's
// clients: a member is a row of the node table.
type members struct {
	c *Core
	// maxLearners is etcd's flag.
	maxLearners int
}

// MemberList implements etcdapi.Cluster.
func (m members) MemberList(ctx context.Context, linearizable bool) ([]*pb.Member, error) {
	nodes, err := m.c.client.Members(ctx, linearizable)
	if err != nil {
		return nil, err
	}
	out := make([]*pb.Member, len(nodes))
	for i := range nodes {
		out[i] = memberOf(&nodes[i])
	}
	return out, nil
}

// memberOf is the node as etcd's clients see it. One that has not started has no name
// there, whatever it will be called.
func memberOf(n *placement.Node) *pb.Member {
	m := &pb.Member{ID: uint64(n.ID), Name: n.Name, PeerURLs: n.PeerURLs, ClientURLs: n.ClientURLs, IsLearner: n.State.Learner()}
	if !n.State.Started() {
		m.Name = ""
	}
	return m
}

// row returns the row of a member, and all others.
func (m members) row(ctx context.Context, id keyspace.NodeID) (*placement.Node, []placement.Node, error) {
	nodes, err := m.c.client.Members(ctx, true)
	if err != nil {
		return nil, nil, err
	}
	i := slices.IndexFunc(nodes, func(n placement.Node) bool { return n.ID == id })
	if i < 0 {
		return nil, nil, kverror.New(kverror.NodeNotFound, "there is no node %s", id)
	}
	return &nodes[i], slices.Delete(slices.Clone(nodes), i, i+1), nil
}

// MemberAdd implements etcdapi.Cluster. etcd asks whether a quorum would be left if the new
// member never came; here a new one is none of any quorum until it has started and holds
// something, so that none is refused for that.
func (m members) MemberAdd(ctx context.Context, peerURLs []string, learner bool) (*pb.Member, []*pb.Member, error) {
	nodes, err := m.c.client.NodeTable(ctx, true)
	if err != nil {
		return nil, nil, err
	}
	n := placement.Node{ID: nodeIDAt(peerURLs, m.c.o.Clock.Wall().Unix()), PeerURLs: peerURLs}
	learners := 0
	for i := range nodes {
		o := &nodes[i]
		switch {
		case o.ID == n.ID:
			// Asked for in the same second: the row is somebody else's.
			return nil, nil, kverror.New(kverror.NodeExists, "node %s is there already", n.ID)
		case o.State == placement.NodeRemoved:
		case slices.ContainsFunc(peerURLs, func(u string) bool { return slices.Contains(o.PeerURLs, u) }):
			return nil, nil, kverror.New(kverror.PeerURLExists, "node %s has one of the peer URLs %v", o.ID, peerURLs)
		case o.State.Learner():
			learners++
		}
	}
	if learner {
		if learners >= m.maxLearners {
			return nil, nil, rpctypes.ErrGRPCTooManyLearners
		}
		n.State = placement.NodeUnstartedLearner
	}
	if err := m.c.client.AddNode(ctx, n); err != nil {
		return nil, nil, err
	}
	all, err := m.MemberList(ctx, true)
	return memberOf(&n), all, err
}

// MemberUpdate implements etcdapi.Cluster.
func (m members) MemberUpdate(ctx context.Context, id keyspace.NodeID, peerURLs []string) ([]*pb.Member, error) {
	if err := m.c.client.SetPeerURLs(ctx, id, peerURLs); err != nil {
		return nil, err
	}
	return m.MemberList(ctx, true)
}

// MemberPromote implements etcdapi.Cluster. In etcd a learner is ready when it has nearly
// all that its leader has; here it holds nothing before it is promoted, and is ready when
// it lives.
func (m members) MemberPromote(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error) {
	n, _, err := m.row(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case !n.State.Learner():
		return nil, rpctypes.ErrGRPCMemberNotLearner
	case !n.State.Started() || !m.c.alive(id):
		return nil, rpctypes.ErrGRPCLearnerNotReady
	}
	if err := m.c.client.SetNodeState(ctx, id, placement.NodeLearner, placement.NodeServing); err != nil {
		return nil, err
	}
	return m.MemberList(ctx, true)
}

// removePause lies between two looks at what a node that is removed still holds.
const removePause = 50 * time.Millisecond

// MemberRemove implements etcdapi.Cluster. Placement moves what the node holds to others, or, where
// each of them has a replica of a range already, the range has one less from then on, as a
// group of etcd's has. Where it takes longer than the client waits, the node is
// decommissioned meanwhile and removed once it holds nothing: who asks again waits for that.
func (m members) MemberRemove(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error) {
	if err := m.leave(ctx, id); err != nil {
		return nil, err
	}
	for {
		err := m.c.client.RemoveNode(ctx, id)
		if err == nil || errors.Is(err, kverror.NodeNotFound) {
			// Or by itself, or for somebody else, since this began: it was there then.
			return m.MemberList(ctx, true)
		}
		if errors.Is(err, kverror.BadRequest) {
			err = m.stays(ctx, id)
		}
		if err != nil && ctx.Err() == nil {
			return nil, err
		}
		if clock.Sleep(ctx, m.c.o.Clock, removePause) != nil {
			m.c.log.Info("a member that is removed still holds something", zap.Stringer("member", id), zap.Error(err))
			return nil, errStillRemoving
		}
	}
}

// leave has a member begin to leave, if it may and has not. Where others begin to as well while it
// is looked at, it is looked at anew.
func (m members) leave(ctx context.Context, id keyspace.NodeID) error {
	for attempt := 1; ; attempt++ {
		n, others, err := m.row(ctx, id)
		if err != nil || !n.State.Started() || n.Leaves {
			return err
		}
		if n.State != placement.NodeDecommissioned {
			if err := m.mayRemove(ctx, id, others); err != nil {
				return err
			}
		}
		err = m.c.client.LeaveNode(ctx, id, n.State, leaving(others)...)
		if attempt == changeAttempts || !errors.Is(err, kverror.BadRequest) {
			return err
		}
	}
}

// errStillRemoving is etcd's answer to a request that takes too long, of which etcd has several
// that say in their second half why: of this kind clients know the code and the first half.
var errStillRemoving = status.Error(codes.Unavailable, rpctypes.ErrorDesc(rpctypes.ErrGRPCTimeout)+
	", the member is decommissioned, goes on giving up what it holds, and is removed then: the same request again waits for that")

// errNotEnoughStarted is etcd's answer, which leaves its server without a code: its clients
// know it by its text.
var errNotEnoughStarted = status.Error(codes.Unknown, rpctypes.ErrMemberNotEnoughStarted.Error())

// mayRemove refuses as etcd does: what the node holds cannot leave it without a quorum of
// those who hold it too, nor without one of those that are left where nobody can take its place,
// and the last node that serves stays.
func (m members) mayRemove(ctx context.Context, id keyspace.NodeID, others []placement.Node) error {
	if !slices.ContainsFunc(others, func(o placement.Node) bool { return o.State == placement.NodeServing }) {
		return errNotEnoughStarted
	}
	groups, err := m.groups(ctx)
	if err != nil {
		return err
	}
	holdsAny := false
	for i := range groups {
		d := &groups[i]
		if _, holds := d.ReplicaOn(id); !holds {
			continue
		}
		holdsAny = true
		left := slices.DeleteFunc(slices.Clone(d.Replicas), func(r keyspace.Replica) bool { return r.Node == id })
		if !m.quorumLives(d.Replicas) || !m.quorumLives(left) && !m.another(d, others) {
			return rpctypes.ErrGRPCUnhealthy
		}
	}
	settings, _, err := m.c.client.Settings(ctx)
	if err == nil && holdsAny && placement.Paused(settings) {
		return errRemovePaused
	}
	return err
}

// errRemovePaused refuses what would never come to its end. etcd has nothing like it.
var errRemovePaused = status.Error(codes.FailedPrecondition,
	"skein: placement is paused, so that nothing would leave the member: have it go on with skein placement resume")

// groups returns the placement group and all ranges, as this node knows them.
func (m members) groups(ctx context.Context) ([]keyspace.Descriptor, error) {
	mp, err := m.c.client.Map(ctx)
	if err != nil {
		return nil, err
	}
	return append([]keyspace.Descriptor{mp.PlacementGroup()}, mp.Descriptors()...), nil
}

func (m members) quorumLives(replicas []keyspace.Replica) bool {
	voters, live := 0, 0
	for _, r := range replicas {
		if r.Role != keyspace.RoleLearner {
			voters++
			if m.c.alive(r.Node) {
				live++
			}
		}
	}
	return live > voters/2
}

// stays says why the node is not removed after all: it has started meanwhile, or somebody has
// taken it back.
func (m members) stays(ctx context.Context, id keyspace.NodeID) error {
	nodes, err := m.c.client.Members(ctx, true)
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(nodes, func(n placement.Node) bool { return n.ID == id }); i >= 0 && nodes[i].State != placement.NodeDecommissioned {
		return kverror.New(kverror.BadRequest, "member %s is %s by now, and keeps what it has: ask again to have it removed", id, nodes[i].State)
	}
	return nil
}

// another says whether one of the nodes could have a replica of the group: it serves, lives and
// has none.
func (m members) another(d *keyspace.Descriptor, nodes []placement.Node) bool {
	return slices.ContainsFunc(nodes, func(n placement.Node) bool {
		_, has := d.ReplicaOn(n.ID)
		return !has && n.State == placement.NodeServing && m.c.alive(n.ID)
	})
}

// errTransferTook is etcd's answer where another member does not lead in time.
var errTransferTook = status.Error(codes.Unknown, "etcdserver: request timed out, leader transfer took too long")

// MoveLeader implements etcdapi.Node. The leaders of ranges stay where they are: they are
// spread over the nodes for the load, and move when a node is drained or stopped.
func (s self) MoveLeader(ctx context.Context, to keyspace.NodeID) error {
	st, err := s.c.client.Status(ctx)
	if err != nil {
		return err
	}
	// To etcd, whose members are all of the one group, every other is a bad one too. So is one
	// that would hand the lead back at once, as for operators' commands.
	if !slices.ContainsFunc(st.Replicas, func(r keyspace.Replica) bool { return r.Node == to && r.Role == keyspace.RoleVoter }) {
		return rpctypes.ErrGRPCBadLeaderTransferee
	}
	if to != s.c.client.Leader() && s.c.alive(to) { // of one that is not, raft says that it has not caught up
		a := admin(s)
		nodes, _, err := a.members(ctx)
		if err != nil {
			return err
		}
		own := keyspace.Descriptor{Replicas: st.Replicas}
		if err := a.leads(nodes, &own, to, names(nodes)[to]); err != nil {
			// etcd's answer has no place for the reason.
			s.c.log.Warn("the placement group is not handed over as etcd's clients ask", zap.Stringer("to", to), zap.Error(err))
			return rpctypes.ErrGRPCBadLeaderTransferee
		}
	}
	err = s.c.client.TransferLeader(ctx, to)
	switch kind := kverror.Of(err); {
	case err != nil && kind.Kind == kverror.BadRequest:
		return rpctypes.ErrGRPCBadLeaderTransferee
	case err != nil:
		return err
	}
	for s.c.client.Leader() != to {
		if clock.Sleep(ctx, s.c.o.Clock, s.c.o.Heartbeat) != nil {
			return errTransferTook
		}
	}
	return nil
}
