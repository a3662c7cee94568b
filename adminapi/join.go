package adminapi

import (
	"context"

	"github.com/skeindb/skein/api/adminpb"
)

// Joiner is what the service asks of the node on behalf of one that joins the cluster.
type Joiner interface {
	// JoinNode lets a node in, or says what has become of one that was let in before. A node
	// that has not started yet is let in again under its name and peer URLs.
	JoinNode(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error)
}

func (s *server) NodeJoin(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	a, err := s.backend.JoinNode(ctx, q)
	if err != nil {
		return nil, grpcError("let node "+q.GetName()+" in", err, readAgain)
	}
	return a, nil
}

// NodeJoin has a cluster let a node in. Asking again, before that node has started, is
// answered alike.
func (c *Client) NodeJoin(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	return call(ctx, c, q, adminpb.AdminClient.NodeJoin)
}
