package operate

import (
	"context"
	"slices"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
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
			row := v.rangeRow(i)
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
		out.Nodes = append(out.Nodes, v.listed(&v.nodes[i]))
	}
	return out, nil
}

// listed is row for lists: what has no quorum is led by nobody. A drain waits for such leaders all the same: they go on
// when the others are back.
func (v *clusterView) listed(n *fsm.Node) *adminpb.Node {
	r := v.row(n)
	if len(v.stopped) > 0 {
		for id := range v.ledBy(n.ID) {
			if v.stopped[id] {
				r.Leaders--
			}
		}
	}
	r.PlacementLeader = r.PlacementLeader && v.placementStands()
	return r
}

// row is the node as operators see it.
func (v *clusterView) row(n *fsm.Node) *adminpb.Node {
	r := &adminpb.Node{
		Id: n.ID.String(), Name: n.Name, PeerUrls: n.PeerURLs, ClientUrls: n.ClientURLs,
		Alive: v.alive(n.ID), Bytes: v.reports[n.ID].Bytes, State: n.State.String(), SinceUnixMs: int64(n.Since), Leaves: n.Leaves,
		Ranges: v.holds(n.ID), Leaders: v.leads(n.ID), PlacementLeader: v.placement.Leader == n.ID,
		Quarantined: int64(len(v.reports[n.ID].Quarantined)),
	}
	if v.dead(n) {
		r.State, r.SinceUnixMs = adminapi.StateDead, int64(v.silentSince[n.ID])
	}
	for _, a := range n.Attributes {
		r.Attributes = append(r.Attributes, &adminpb.Attribute{Key: a.Key, Value: a.Value})
	}
	r.Placement = slices.ContainsFunc(v.placement.Replicas, func(m keyspace.Replica) bool { return m.Node == n.ID })
	return r
}

// rangeRow is the i-th range as operators see it.
func (v *clusterView) rangeRow(i int) *adminpb.Range {
	d, s := &v.ranges[i], v.led[i].says
	leader, state, keys, bytes := "", "unreachable", int64(-1), int64(0)
	if s != nil {
		leader, state, keys, bytes = v.byName[v.led[i].by], "awake", s.Keys, s.Bytes
		switch {
		case half(d, &s.Descriptor, s.Merge):
			state, keys = StateMerging, -1
		case s.Asleep:
			state = "asleep"
		}
	}
	stopped := v.stopped[d.Range]
	if stopped {
		leader, state = "", adminapi.StateNoQuorum
	}
	r := rangeRow(d, v.byName, leader, keys, bytes, state)
	if stopped {
		r.WaitsFor = waitsFor(d, v.byName, v.alive)
	}
	if s != nil && !stopped {
		r.WritesPerSecond, r.ReadsPerSecond, r.WriteBytesPerSecond = s.WritesPerSecond, s.ReadsPerSecond, s.BytesPerSecond
	}
	markQuarantined(r, closedOf(d, v.reports))
	if o, ok := v.operations[d.Range]; ok {
		r.Operation = operationRow(&o, v.byName)
	}
	return r
}
