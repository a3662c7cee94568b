package etcdapi

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/types"

	"github.com/skeindb/skein/keyspace"
)

// clusterServer is etcd's Cluster service.
type clusterServer struct {
	s *Server
	pb.UnsafeClusterServer
}

// MemberList lists the nodes. As in etcd, its header has no revision.
func (c *clusterServer) MemberList(ctx context.Context, r *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	inner, cancel, wording := c.s.bounded(ctx)
	defer cancel()
	members, err := c.s.opts.Members.MemberList(inner, r.GetLinearizable())
	if err != nil {
		return nil, wording(err)
	}
	resp := &pb.MemberListResponse{Header: &pb.ResponseHeader{}, Members: members}
	c.s.fill(resp.Header)
	return resp, nil
}

// MemberAdd adds a row for a node that will join.
func (c *clusterServer) MemberAdd(ctx context.Context, r *pb.MemberAddRequest) (*pb.MemberAddResponse, error) {
	urls, err := types.NewURLs(r.GetPeerURLs())
	if err != nil {
		return nil, rpctypes.ErrGRPCMemberBadURLs
	}
	inner, cancel, wording := c.s.bounded(ctx)
	defer cancel()
	member, all, err := c.s.opts.Members.MemberAdd(inner, urls.StringSlice(), r.GetIsLearner())
	if err != nil {
		return nil, wording(err)
	}
	resp := &pb.MemberAddResponse{Header: &pb.ResponseHeader{}, Member: member, Members: all}
	c.s.fill(resp.Header)
	return resp, nil
}

// MemberRemove removes a node from the cluster.
func (c *clusterServer) MemberRemove(ctx context.Context, r *pb.MemberRemoveRequest) (*pb.MemberRemoveResponse, error) {
	resp := &pb.MemberRemoveResponse{Header: &pb.ResponseHeader{}}
	var err error
	resp.Members, err = c.change(ctx, resp.Header, func(ctx context.Context) ([]*pb.Member, error) {
		return c.s.opts.Members.MemberRemove(ctx, keyspace.NodeID(r.GetID()))
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// MemberUpdate changes a node's peer URLs. It refuses URLs that no bus can use; etcd leaves that
// check to its client.
func (c *clusterServer) MemberUpdate(ctx context.Context, r *pb.MemberUpdateRequest) (*pb.MemberUpdateResponse, error) {
	urls, err := types.NewURLs(r.GetPeerURLs())
	if err != nil {
		return nil, rpctypes.ErrGRPCMemberBadURLs
	}
	resp := &pb.MemberUpdateResponse{Header: &pb.ResponseHeader{}}
	resp.Members, err = c.change(ctx, resp.Header, func(ctx context.Context) ([]*pb.Member, error) {
		return c.s.opts.Members.MemberUpdate(ctx, keyspace.NodeID(r.GetID()), urls.StringSlice())
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// MemberPromote makes a learner a voting node.
func (c *clusterServer) MemberPromote(ctx context.Context, r *pb.MemberPromoteRequest) (*pb.MemberPromoteResponse, error) {
	resp := &pb.MemberPromoteResponse{Header: &pb.ResponseHeader{}}
	var err error
	resp.Members, err = c.change(ctx, resp.Header, func(ctx context.Context) ([]*pb.Member, error) {
		return c.s.opts.Members.MemberPromote(ctx, keyspace.NodeID(r.GetID()))
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// change makes one change of the members, within the request timeout.
func (c *clusterServer) change(ctx context.Context, header *pb.ResponseHeader, do func(context.Context) ([]*pb.Member, error)) ([]*pb.Member, error) {
	inner, cancel, wording := c.s.bounded(ctx)
	defer cancel()
	members, err := do(inner)
	if err != nil {
		return nil, wording(err)
	}
	c.s.fill(header)
	return members, nil
}
