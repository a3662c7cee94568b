package operate

import (
	"context"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// livingReports returns what the nodes that live say of themselves, as far as they answer.
func (a *Admin) livingReports(ctx context.Context, nodes []fsm.Node) map[keyspace.NodeID]Report {
	var mu sync.Mutex
	var wg sync.WaitGroup
	all := map[keyspace.NodeID]Report{}
	for i := range nodes {
		id := nodes[i].ID
		if !a.o.Peers.Alive(id) {
			continue
		}
		wg.Go(func() {
			if r, err := a.report(ctx, id); err == nil {
				mu.Lock()
				defer mu.Unlock()
				all[id] = r
			}
		})
	}
	wg.Wait()
	return all
}

func (a *Admin) report(ctx context.Context, node keyspace.NodeID) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return a.o.Peers.Report(ctx, node)
}
