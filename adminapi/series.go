package adminapi

import (
	"cmp"
	"context"
	"slices"

	"github.com/skeindb/skein/api/adminpb"
)

// SeriesBackend is what the service asks of the node for charts.
type SeriesBackend interface {
	// Series returns what each node has measured of itself since then, in any order; of a node that does not answer, why.
	Series(ctx context.Context, afterUnixMs int64) (*adminpb.SeriesResponse, error)
}

func (s *server) Series(ctx context.Context, q *adminpb.SeriesRequest) (*adminpb.SeriesResponse, error) {
	r, err := s.backend.Series(ctx, q.AfterUnixMs)
	if err != nil {
		return nil, grpcError("ask the nodes what they have measured", err, readAgain)
	}
	slices.SortFunc(r.Nodes, func(a, b *adminpb.NodeSeries) int { return cmp.Compare(a.GetNode(), b.GetNode()) })
	return r, nil
}
