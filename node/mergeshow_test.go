package node

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/operate"
)

// TestShownWhileItMerges: between the commit of a merge and the absorption, the range is shown
// and listed as merging, under its leader, and never as unreachable. Of the other one it is said
// where it goes.
func TestShownWhileItMerges(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		ctx, cancel := context.WithCancel(r.t.Context())
		var looking sync.WaitGroup
		defer looking.Wait()
		defer cancel()
		var mu sync.Mutex
		states := map[string]map[string]int{"list": {}, "show": {}} // how often each was told
		told := func(by string, g *adminpb.Range) {
			mu.Lock()
			defer mu.Unlock()
			states[by][g.GetState()]++
			if g.GetLeader() == "" || g.GetState() == operate.StateMerging && g.GetKeys() >= 0 {
				r.t.Errorf("%s says of range %d: %v", by, g.GetId(), g)
			}
		}
		var right atomic.Uint64 // the range that goes
		gone := map[string]int{}
		merged := r.splitForMerge("k", &right)
		for _, n := range r.nodes {
			a := n.core.Admin()
			looking.Go(func() {
				for ctx.Err() == nil {
					s, err := a.ShowRange(r.t.Context(), 1)
					if err != nil {
						r.t.Errorf("show at node %s: %v", n.id, err)
						return
					}
					told("show", s.GetRange())
					if _, err := a.ShowRange(r.t.Context(), keyspace.RangeID(right.Load())); err != nil {
						mu.Lock()
						gone[err.Error()]++
						mu.Unlock()
					}
					l, err := a.Ranges(r.t.Context(), &adminpb.RangeListRequest{})
					if err != nil {
						r.t.Errorf("list at node %s: %v", n.id, err)
						return
					}
					told("list", l.GetRanges()[0])
					time.Sleep(100 * time.Microsecond)
				}
			})
		}
		goes := func(text string) bool { return strings.Contains(text, "is being merged into range 1") }
		// The time between commit and absorption is short: not each merge is seen in it.
		seen := func() bool {
			mu.Lock()
			defer mu.Unlock()
			return states["list"][operate.StateMerging] > 0 && states["show"][operate.StateMerging] > 0 &&
				slices.ContainsFunc(slices.Collect(maps.Keys(gone)), goes)
		}
		for n := 0; n < fewer(20, 6) || !seen() && n < 100; n++ {
			merged()
		}
		cancel()
		looking.Wait()
		if !slices.ContainsFunc(slices.Collect(maps.Keys(gone)), goes) {
			r.t.Errorf("of the other range is said %v", gone)
		}
		for by, was := range states {
			if was[operate.StateMerging] == 0 || was["unreachable"] > 0 {
				r.t.Errorf("%s says %v", by, was)
			}
		}
	})
}

// splitForMerge returns what splits the first range at the key, tells the other one's id, and
// merges them again.
func (r *rig) splitForMerge(key string, right *atomic.Uint64) func() {
	r.t.Helper()
	a := r.nodes[0].core.Admin()
	return func() {
		r.t.Helper()
		_, child, err := a.SplitRange(r.t.Context(), []byte(key))
		if err != nil {
			r.t.Fatal(err)
		}
		right.Store(child.GetId())
		r.mustPut(r.nodes[0], key, "v") // its range is led
		r.wait(time.Minute, "placement hears all nodes, and the merge begins", func() bool {
			_, err := a.MergeRange(r.t.Context(), 1)
			return err == nil
		})
		r.wait(time.Minute, "it is merged", func() bool {
			ops, err := a.Operations(r.t.Context())
			return err == nil && len(ops.GetOperations()) == 0
		})
	}
}
