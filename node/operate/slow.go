package operate

import (
	"context"
	"sync"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/placement/fsm"
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
			for i := range calls {
				c := &calls[i]
				row := &adminpb.SlowCall{
					Node: uint64(n.ID), NodeName: n.Name, AtUnixNanos: c.Unix, Method: c.Method, RangeId: uint64(c.Range), Micros: c.Took.Microseconds(),
					Cause: words.Replace(c.Cause), Retries: c.Retries, RequestBytes: uint64(max(0, c.RequestBytes)), ResponseBytes: uint64(max(0, c.ResponseBytes)),
				}
				for _, p := range c.Parts {
					row.Stages = append(row.Stages, &adminpb.Stage{Name: p.Name, Micros: int64(p.Took / time.Microsecond)})
				}
				out.Calls = append(out.Calls, row)
			}
		})
	}
	wg.Wait()
	return out, nil
}
