package adminapi

import (
	"context"

	"github.com/skeindb/skein/api/adminpb"
)

// Joiner is what the service asks of the node on behalf of one that joins the cluster.
type Joiner interface {
	// JoinNode admits a node, or says what has become of one that was admitted before. A node
	// that has not started yet is admitted again under its name and peer URLs.
	JoinNode(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error)
}

func (s *server) NodeJoin(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	a, err := s.backend.JoinNode(ctx, q)
	if err != nil {
		return nil, grpcError("admit node "+q.GetName(), err, readAgain)
	}
	return a, nil
}

// NodeJoin asks a cluster to admit a node. Until that node has started, a repeated request gets
// the same answer.
func (c *Client) NodeJoin(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	return call(ctx, c, q, adminpb.AdminClient.NodeJoin)
}
