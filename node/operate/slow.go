package operate

import (
	"context"
	"sync"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi/stages"
)

// Slow implements adminapi.Backend. It needs no quorum: without one the node table is the newest that this node knows.
func (a *Admin) Slow(ctx context.Context) (*adminpb.SlowResponse, error) {
	table, _, err := a.nodeTable(ctx)
	if err != nil {
		return nil, err
	}
	out := &adminpb.SlowResponse{}
	words := nodeWords(table)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range table {
		if n.State == fsm.NodeRemoved {
			continue
		}
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, a.askFor(ctx, n.ID))
			defer cancel()
			calls, err := a.o.Served.Slow(ctx, n.ID)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Missing = append(out.Missing, &adminpb.SlowMissing{Node: n.Name, Reason: words.Replace(err.Error())})
				return
			}
			for _, row := range SlowCalls(n.ID, n.Name, calls) {
				row.Cause = words.Replace(row.Cause)
				out.Calls = append(out.Calls, row)
			}
		})
	}
	wg.Wait()
	return out, nil
}

// SlowCalls are the rows of a node's slow requests.
func SlowCalls(node keyspace.NodeID, name string, calls []stages.Slow) (rows []*adminpb.SlowCall) {
	for i := range calls {
		c := &calls[i]
		row := &adminpb.SlowCall{
			Node: uint64(node), NodeName: name, AtUnixNanos: c.Unix, Method: c.Method, RangeId: uint64(c.Range), Micros: c.Took.Microseconds(),
			Cause: c.Cause, Retries: c.Retries, RequestBytes: uint64(max(0, c.RequestBytes)), ResponseBytes: uint64(max(0, c.ResponseBytes)),
		}
		for _, p := range c.Parts {
			row.Stages = append(row.Stages, &adminpb.Stage{Name: p.Name, Micros: int64(p.Took / time.Microsecond)})
		}
		rows = append(rows, row)
	}
	return rows
}
