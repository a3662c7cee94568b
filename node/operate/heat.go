package operate

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard/load/heat"
)

const (
	// heatTimeout bounds what one node may take to make its map.
	heatTimeout = 5 * time.Second
	// heatAtOnce bounds how many nodes make a map at the same time: each map takes some MiB here.
	heatAtOnce = 8
)

// Heat implements adminapi.Backend. It asks no quorum: the nodes are those that this one knew last.
func (a *Admin) Heat(ctx context.Context, r *adminpb.HeatRequest) (*adminpb.HeatResponse, error) {
	nodes, err := a.o.Placement.NodeTable(ctx, false)
	if err != nil {
		return nil, err
	}
	now := a.o.Clock.Wall()
	q, err := heat.NewQuery(now, heat.Time{From: r.GetFromUnixSeconds(), To: r.GetToUnixSeconds(), Last: r.GetLastSeconds()},
		int(r.GetMaxRows()), int(r.GetMaxColumns()), keyspace.Span{Start: r.GetStart(), End: r.GetEnd()})
	if err != nil {
		return nil, &adminapi.Refusal{Reason: err.Error(), NextStep: "give an end that lies behind the beginning, of the time and of the keys"}
	}
	m := heatMap{q: q, now: now, grid: &heat.Grid{}}
	var all errgroup.Group
	all.SetLimit(heatAtOnce)
	for _, n := range nodes {
		if n.State == fsm.NodeRemoved || !n.State.Started() {
			continue
		}
		all.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, heatTimeout)
			defer cancel()
			if !a.o.Peers.Alive(n.ID) {
				m.misses(&n, "it is not heard")
				return nil
			}
			g, err := a.o.Served.Heat(ctx, n.ID, q)
			if err != nil {
				m.misses(&n, err.Error())
				return nil
			}
			m.takes(g)
			return nil
		})
	}
	_ = all.Wait()
	return m.response(), nil
}

// heatMap puts the maps of nodes together as they come.
type heatMap struct {
	q   heat.Query
	now time.Time

	mu sync.Mutex
	// Guarded by mu.
	grid    *heat.Grid
	missing []*adminpb.HeatMissing
}

func (m *heatMap) misses(n *fsm.Node, why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.missing = append(m.missing, &adminpb.HeatMissing{Node: cmp.Or(n.Name, n.ID.String()), Reason: why})
}

func (m *heatMap) takes(g *heat.Grid) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.grid = m.q.Merge(m.grid, g)
}

func (m *heatMap) response() *adminpb.HeatResponse {
	slices.SortFunc(m.missing, func(a, b *adminpb.HeatMissing) int { return cmp.Compare(a.GetNode(), b.GetNode()) })
	out := &adminpb.HeatResponse{Starts: m.grid.Starts, End: m.grid.End, Missing: m.missing, UnixMs: m.now.UnixMilli()}
	for i := range m.q.Columns {
		out.Columns = append(out.Columns, &adminpb.HeatColumn{StartUnixSeconds: m.q.From + int64(i)*m.q.Width, Seconds: uint32(m.q.Width)})
	}
	for _, c := range m.grid.Counts {
		out.Writes, out.Reads, out.Bytes = append(out.Writes, c.Writes), append(out.Reads, c.Reads), append(out.Bytes, c.Bytes)
	}
	return out
}
