package operate

import (
	"context"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
)

// Ranges implements adminapi.Backend.
func (a *Admin) Ranges(ctx context.Context, q *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error) {
	v, err := a.completeView(ctx)
	if err != nil {
		return nil, err
	}
	var on keyspace.NodeID
	if q.GetNode() != "" {
		if on, err = nodeNamed(v.nodes, q.GetNode()); err != nil {
			return nil, err
		}
	}
	out := &adminpb.RangeListResponse{Stale: v.stale}
	for _, m := range v.missing {
		if q.Key == nil || m.Contains(q.Key) {
			out.Missing = append(out.Missing, &adminpb.KeySpan{Start: m.Start, End: m.End})
		}
	}
	for i := range v.ranges {
		d := &v.ranges[i]
		_, there := d.ReplicaOn(on)
		if (on == 0 || there) && (q.Key == nil || d.Span.Contains(q.Key)) {
			row := v.rangeRow(d)
			row.Kept = a.kept(d.Span.Start)
			out.Ranges = append(out.Ranges, row)
		}
	}
	return out, nil
}

// Nodes implements adminapi.Backend.
func (a *Admin) Nodes(ctx context.Context) (*adminpb.NodeListResponse, error) {
	v, err := a.view(ctx)
	if err != nil {
		return nil, err
	}
	out := &adminpb.NodeListResponse{Stale: v.stale}
	for i := range v.nodes {
		out.Nodes = append(out.Nodes, v.row(&v.nodes[i]))
	}
	return out, nil
}
