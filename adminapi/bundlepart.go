package adminapi

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	"github.com/skeindb/skein/api/adminpb"
)

// BundleBackend is what the service asks of the node for a debug bundle.
type BundleBackend interface {
	// Bundle sends the files of this node's part. It says of one that it does not have why, and goes on.
	Bundle(ctx context.Context, q *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error
}

func (s *server) Bundle(q *adminpb.BundleRequest, out grpc.ServerStreamingServer[adminpb.BundleResponse]) error {
	if s.bundles == nil {
		return s.UnimplementedAdminServer.Bundle(q, out)
	}
	if err := s.bundles.Bundle(out.Context(), q, out.Send); err != nil {
		return grpcError("make a part of a debug bundle", err, readAgain)
	}
	return nil
}

// Bundle asks the first endpoint that answers for its part, and calls take with each piece. Where a node goes away the
// next endpoint is asked, and begins anew.
func (c *Client) Bundle(ctx context.Context, q *adminpb.BundleRequest, take func(*adminpb.BundleResponse) error) error {
	_, err := call(ctx, c, q, func(a adminpb.AdminClient, ctx context.Context, q *adminpb.BundleRequest, opts ...grpc.CallOption) (*adminpb.BundleResponse, error) {
		stream, err := a.Bundle(ctx, q, opts...)
		if err != nil {
			return nil, err
		}
		for {
			p, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return p, nil
			}
			if err != nil {
				return nil, err
			}
			if err := take(p); err != nil {
				return nil, err
			}
		}
	})
	return err
}
