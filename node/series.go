package node

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/series"
	"github.com/skeindb/skein/transport"
)

// seriesTimeout bounds how long a node may take to say what it has measured: it has that in memory.
const seriesTimeout = 2 * time.Second

// errNoSeries is the answer of a Core without ports, which measures nothing of itself.
var errNoSeries = errors.New("this node keeps no measures of itself")

// charted are the charts' points of all nodes, for the admin service.
type charted struct{ c *Core }

// Series implements adminapi.SeriesBackend. It needs no quorum.
func (m charted) Series(ctx context.Context, afterUnixMs int64) (*adminpb.SeriesResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, seriesTimeout)
	defer cancel()
	known, _ := m.c.client.WatchMap()
	nodes := m.c.nodesOf(known)
	out := &adminpb.SeriesResponse{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range nodes {
		if !n.State.Started() {
			continue
		}
		wg.Go(func() {
			row := &adminpb.NodeSeries{Node: n.Name}
			if p, err := m.of(ctx, n.ID, afterUnixMs); err != nil {
				row.Error = err.Error()
			} else {
				row.UnixMs = p.UnixMs
				for _, s := range p.Series {
					row.Series = append(row.Series, &adminpb.Series{Name: s.Name, Values: s.Values})
				}
			}
			mu.Lock()
			defer mu.Unlock()
			out.Nodes = append(out.Nodes, row)
		})
	}
	wg.Wait()
	return out, nil
}

func (m charted) of(ctx context.Context, node keyspace.NodeID, afterUnixMs int64) (p series.Points, err error) {
	if node == m.c.o.Self {
		if m.c.series == nil {
			return p, errNoSeries
		}
		return m.c.series.After(afterUnixMs), nil
	}
	question, err := json.Marshal(afterUnixMs)
	if err != nil {
		return p, err
	}
	b, err := m.c.bus.Call(ctx, node, transport.MethodNodeAdmin, append([]byte{questionSeries}, question...))
	if err != nil {
		return p, err
	}
	return p, json.Unmarshal(b, &p)
}

// answerSeries answers the question of another node.
func (c *Core) answerSeries(body []byte) ([]byte, error) {
	var afterUnixMs int64
	if err := json.Unmarshal(body, &afterUnixMs); err != nil {
		return nil, err
	}
	if c.series == nil {
		return nil, errNoSeries
	}
	return json.Marshal(c.series.After(afterUnixMs))
}
