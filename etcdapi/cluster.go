package etcdapi

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// clusterServer is etcd's Cluster service.
type clusterServer struct {
	s *Server
	pb.UnsafeClusterServer
}

// MemberList lists the nodes. Its header has no revision, as etcd's has none.
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

const noChange = ": the members are those that --initial-cluster named"

// MemberAdd is not there yet.
func (c *clusterServer) MemberAdd(context.Context, *pb.MemberAddRequest) (*pb.MemberAddResponse, error) {
	return nil, notYet("MemberAdd", noChange)
}

// MemberRemove is not there yet.
func (c *clusterServer) MemberRemove(context.Context, *pb.MemberRemoveRequest) (*pb.MemberRemoveResponse, error) {
	return nil, notYet("MemberRemove", noChange)
}

// MemberUpdate is not there yet.
func (c *clusterServer) MemberUpdate(context.Context, *pb.MemberUpdateRequest) (*pb.MemberUpdateResponse, error) {
	return nil, notYet("MemberUpdate", noChange)
}

// MemberPromote is not there yet.
func (c *clusterServer) MemberPromote(context.Context, *pb.MemberPromoteRequest) (*pb.MemberPromoteResponse, error) {
	return nil, notYet("MemberPromote", noChange)
}
