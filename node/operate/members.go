package operate

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
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// Members answers etcd's questions about the cluster, and changes it on behalf of etcd's
// clients: a member is a row of the node table.
type Members struct {
	o Options
	// maxLearners and strict are etcd's flags --max-learners and --strict-reconfig-check.
	maxLearners int
	strict      bool
}

// Members returns the access of etcd's clients to the members. There are at most maxLearners
// learners. strict refuses a removal without a living quorum that could carry it out.
func (a *Admin) Members(maxLearners int, strict bool) *Members {
	return &Members{o: a.o, maxLearners: maxLearners, strict: strict}
}

// MemberList implements etcdapi.Cluster.
func (m *Members) MemberList(ctx context.Context, linearizable bool) ([]*pb.Member, error) {
	nodes, err := m.o.Placement.Members(ctx, linearizable)
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
func memberOf(n *fsm.Node) *pb.Member {
	m := &pb.Member{ID: uint64(n.ID), Name: n.Name, PeerURLs: n.PeerURLs, ClientURLs: n.ClientURLs, IsLearner: n.State.Learner()}
	if !n.State.Started() {
		m.Name = ""
	}
	return m
}

// row returns the row of a member, and all others.
func (m *Members) row(ctx context.Context, id keyspace.NodeID) (*fsm.Node, []fsm.Node, error) {
	nodes, err := m.o.Placement.Members(ctx, true)
	if err != nil {
		return nil, nil, err
	}
	i := slices.IndexFunc(nodes, func(n fsm.Node) bool { return n.ID == id })
	if i < 0 {
		return nil, nil, kverror.New(kverror.NodeNotFound, "there is no node %s", id)
	}
	return &nodes[i], slices.Delete(slices.Clone(nodes), i, i+1), nil
}

// MemberAdd implements etcdapi.Cluster. etcd refuses a new member without which no quorum would be
// left. Here a new node belongs to no quorum until it has started and holds something, so none is
// refused for that.
func (m *Members) MemberAdd(ctx context.Context, peerURLs []string, learner bool) (*pb.Member, []*pb.Member, error) {
	nodes, err := m.o.Placement.NodeTable(ctx, true)
	if err != nil {
		return nil, nil, err
	}
	n := fsm.Node{ID: join.NodeID(peerURLs, m.o.Clock.Wall().Unix()), PeerURLs: peerURLs}
	learners := 0
	for i := range nodes {
		o := &nodes[i]
		switch {
		case o.ID == n.ID:
			// Asked for in the same second: the row is somebody else's.
			return nil, nil, kverror.New(kverror.NodeExists, "node %s is there already", n.ID)
		case o.State == fsm.NodeRemoved:
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
		n.State = fsm.NodeUnstartedLearner
	}
	if err := m.o.Placement.AddNode(ctx, n); err != nil {
		return nil, nil, err
	}
	all, err := m.MemberList(ctx, true)
	return memberOf(&n), all, err
}

// MemberUpdate implements etcdapi.Cluster.
func (m *Members) MemberUpdate(ctx context.Context, id keyspace.NodeID, peerURLs []string) ([]*pb.Member, error) {
	if err := m.o.Placement.SetPeerURLs(ctx, id, peerURLs); err != nil {
		return nil, err
	}
	return m.MemberList(ctx, true)
}

// MemberPromote implements etcdapi.Cluster. In etcd a learner is ready when it has nearly
// all that its leader has; here it holds nothing before it is promoted, and is ready when
// it lives.
func (m *Members) MemberPromote(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error) {
	n, _, err := m.row(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case !n.State.Learner():
		return nil, rpctypes.ErrGRPCMemberNotLearner
	case !n.State.Started() || !m.o.Peers.Alive(id):
		return nil, rpctypes.ErrGRPCLearnerNotReady
	}
	if err := m.o.Placement.SetNodeState(ctx, id, fsm.NodeLearner, fsm.NodeServing); err != nil {
		return nil, err
	}
	return m.MemberList(ctx, true)
}

// removePause lies between two looks at what a node that is removed still holds.
const removePause = 50 * time.Millisecond

// MemberRemove implements etcdapi.Cluster. Placement moves the node's replicas to others. If each
// other node has a replica of a range already, the range has one less from then on, like a group
// of etcd. If this takes longer than the client waits, the node stays decommissioned and is removed
// once it holds nothing. A repeated request waits for that.
func (m *Members) MemberRemove(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error) {
	if err := m.leave(ctx, id); err != nil {
		return nil, err
	}
	for {
		err := m.o.Placement.RemoveNode(ctx, id)
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
		if clock.Sleep(ctx, m.o.Clock, removePause) != nil {
			m.o.Logger.Info("a member that is removed still holds something", zap.Stringer("member", id), zap.Error(err))
			return nil, ErrStillRemoving
		}
	}
}

// leave has a member begin to leave, if it may and has not. If others begin to leave meanwhile, it
// decides anew.
func (m *Members) leave(ctx context.Context, id keyspace.NodeID) error {
	for attempt := 1; ; attempt++ {
		n, others, err := m.row(ctx, id)
		if err != nil || !n.State.Started() || n.Leaves {
			return err
		}
		if n.State != fsm.NodeDecommissioned {
			if err := m.mayRemove(ctx, id, others); err != nil {
				return err
			}
		}
		err = m.o.Placement.LeaveNode(ctx, id, n.State, leaving(others)...)
		if attempt == changeAttempts || !errors.Is(err, kverror.BadRequest) {
			return err
		}
	}
}

// ErrStillRemoving is etcd's answer to a request that takes too long. etcd has several, and their
// second half says why: clients know the code and the first half.
var ErrStillRemoving = status.Error(codes.Unavailable, rpctypes.ErrorDesc(rpctypes.ErrGRPCTimeout)+

	", the member is decommissioned, goes on giving up what it holds, and is removed then: the same request again waits for that")

// errNotEnoughStarted is etcd's answer, which leaves its server without a code: its clients
// know it by its text.
var errNotEnoughStarted = status.Error(codes.Unknown, rpctypes.ErrMemberNotEnoughStarted.Error())

// mayRemove refuses as etcd does. The last serving node stays. Each group of the node needs a
// living quorum to change its members. The rest of the group must have one too, unless another
// node can take the place. This node may not have heard the others yet, as right after its start:
// then it takes them for dead, as etcd does.
//
// Without the strict check, etcd removes the member at once, even if the rest has no quorum and stands
// still from then on. Here the check is only a forecast. Data are protected in any case: each group
// gives the replica up by a change of its own members, which needs its quorum, and placement begins
// none that would leave too few. So without the check a removal that cannot be carried out yet begins
// all the same, and waits. Two refusals stay, because such a removal would never end. The last serving
// node has all the data. While placement is paused, nothing leaves a node.
func (m *Members) mayRemove(ctx context.Context, id keyspace.NodeID, others []fsm.Node) error {
	if !slices.ContainsFunc(others, func(o fsm.Node) bool { return o.State == fsm.NodeServing }) {
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
		if !m.strict {
			break
		}
		left := slices.DeleteFunc(slices.Clone(d.Replicas), func(r keyspace.Replica) bool { return r.Node == id })
		if !m.quorumLives(d.Replicas) || !m.quorumLives(left) && !m.another(d, others) {
			return rpctypes.ErrGRPCUnhealthy
		}
	}
	settings, _, err := m.o.Placement.Settings(ctx)
	if err == nil && holdsAny && placement.Paused(settings) {
		return ErrRemovePaused
	}
	return err
}

// ErrRemovePaused refuses what would never come to its end. etcd has nothing like it.
var ErrRemovePaused = status.Error(codes.FailedPrecondition,

	"skein: placement is paused, so that nothing would leave the member: have it go on with skein placement resume")

// groups returns the placement group and all ranges, as this node knows them.
func (m *Members) groups(ctx context.Context) ([]keyspace.Descriptor, error) {
	mp, err := m.o.Placement.Map(ctx)
	if err != nil {
		return nil, err
	}
	return append([]keyspace.Descriptor{mp.PlacementGroup()}, mp.Descriptors()...), nil
}

func (m *Members) quorumLives(replicas []keyspace.Replica) bool {
	voters, live := 0, 0
	for _, r := range replicas {
		if r.Role != keyspace.RoleLearner {
			voters++
			if m.o.Peers.Alive(r.Node) {
				live++
			}
		}
	}
	return live > voters/2
}

// stays says why the node is not removed after all: it has started meanwhile, or somebody has
// taken it back.
func (m *Members) stays(ctx context.Context, id keyspace.NodeID) error {
	nodes, err := m.o.Placement.Members(ctx, true)
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(nodes, func(n fsm.Node) bool { return n.ID == id }); i >= 0 && nodes[i].State != fsm.NodeDecommissioned {
		return kverror.New(kverror.BadRequest, "member %s is %s by now, and keeps what it has: ask again to have it removed", id, nodes[i].State)
	}
	return nil
}

// another says whether one of the nodes could have a replica of the group: it serves, lives and
// has none.
func (m *Members) another(d *keyspace.Descriptor, nodes []fsm.Node) bool {
	return slices.ContainsFunc(nodes, func(n fsm.Node) bool {
		_, has := d.ReplicaOn(n.ID)
		return !has && n.State == fsm.NodeServing && m.o.Peers.Alive(n.ID)
	})
}
