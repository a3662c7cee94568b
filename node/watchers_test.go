package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// The watchers of all nodes, or of one, are there at each, and a node that is gone or serves no clients is missing.
func TestWatchersOfAllNodes(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "k", "v")
		tells := func(n *rigNode) {
			n.core.OnWatchers(func(most int) *adminpb.WatcherListResponse {
				return &adminpb.WatcherListResponse{Watchers: []*adminpb.Watcher{{Client: n.id.String(), Behind: uint64(most)}}, Total: 10}
			})
		}
		tells(r.nodes[0])
		tells(r.nodes[1])
		for _, c := range []struct {
			node, want, missing string
			total               uint64
		}{
			{"", "n1 n2", "n3", 20},
			{"n2", "n2", "", 10},
			{r.nodes[0].id.String(), "n1", "", 10},
			{"n3", "", "n3", 0},
		} {
			l, err := r.nodes[1].core.Admin().Watchers(r.t.Context(), c.node, 7)
			if err != nil {
				r.t.Fatal(err)
			}
			var all, missing []string
			for _, n := range r.nodes {
				for _, w := range l.GetWatchers() {
					if w.GetClient() != n.id.String() {
						continue
					}
					if all = append(all, w.GetNode()); w.GetBehind() != 7 {
						r.t.Errorf("%s was asked for %d", w.GetNode(), w.GetBehind())
					}
				}
			}
			for _, m := range l.GetMissing() {
				if missing = append(missing, m.GetNode()); !strings.Contains(m.GetReason(), errNoClients.Error()) {
					r.t.Errorf("%v", m)
				}
			}
			if fmt.Sprint(all) != "["+c.want+"]" || fmt.Sprint(missing) != "["+c.missing+"]" || l.GetTotal() != c.total {
				r.t.Errorf("of %q: %v", c.node, l)
			}
		}
		var refused *adminapi.Refusal
		if _, err := r.nodes[1].core.Admin().Watchers(r.t.Context(), "n9", 7); !errors.As(err, &refused) || !strings.Contains(refused.Reason, `no node "n9"`) {
			r.t.Error(err)
		}
		r.crash(r.nodes[0])
		l, err := r.nodes[1].core.Admin().Watchers(r.t.Context(), "", 7)
		if err != nil || len(l.GetWatchers()) != 1 || len(l.GetMissing()) != 2 {
			r.t.Errorf("with a node gone: %v, %v", l, err)
		}
		r.start(r.nodes[0])
	})
}

// Of all nodes' watchers there are as many as are wanted, those furthest behind. Lists are made one after the other.
func TestWatchersAreCut(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "k", "v")
		var now, highest atomic.Int64
		for _, n := range r.nodes {
			n.core.OnWatchers(func(most int) *adminpb.WatcherListResponse {
				if n == r.nodes[0] { // which is asked once for each list
					highest.Store(max(highest.Load(), now.Add(1)))
					defer now.Add(-1)
					time.Sleep(100 * time.Millisecond)
				}
				l := &adminpb.WatcherListResponse{Total: 10}
				for i := range most {
					l.Watchers = append(l.Watchers, &adminpb.Watcher{Behind: uint64(100*(most-i)) + uint64(n.id)})
				}
				return l
			})
		}
		admin := r.nodes[1].core.Admin()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				l, err := admin.Watchers(r.t.Context(), "", 4)
				var got []string
				for _, w := range l.GetWatchers() {
					got = append(got, fmt.Sprint(w.GetNode(), " ", w.GetBehind()))
				}
				if err != nil || fmt.Sprint(got) != "[n3 403 n2 402 n1 401 n3 303]" || l.GetTotal() != 30 {
					r.t.Errorf("%v of %d, %v", got, l.GetTotal(), err)
				}
			})
		}
		time.Sleep(50 * time.Millisecond)
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := admin.Watchers(ctx, "", 4); !errors.Is(err, context.DeadlineExceeded) {
			r.t.Errorf("behind three others: %v", err)
		}
		wg.Wait()
		if highest.Load() != 1 {
			r.t.Errorf("%d lists were made at once", highest.Load())
		}
	})
}

// A node that has not heard of the cluster since its start asks the nodes that it knew, and itself.
func TestNodesWithoutAMap(t *testing.T) {
	table := []fsm.Node{{ID: 1, Name: "n1", State: fsm.NodeServing}, {ID: 2, Name: "n2", State: fsm.NodeServing}}
	for _, c := range []struct {
		self keyspace.NodeID
		knew []fsm.Node
		want string
	}{
		{1, table, "[n1 n2]"},
		{3, table, "[n1 n2 own]"},
		{3, append(slices.Clone(table), fsm.Node{ID: 3, Name: "n3"}), "[n1 n2 own]"},
		{3, nil, "[own]"},
	} {
		var got []string
		for _, n := range (&Core{o: Options{Self: c.self, Name: "own"}, nodes: c.knew}).nodesOf(nil) {
			if n.State.Started() {
				got = append(got, n.Name)
			}
		}
		if fmt.Sprint(got) != c.want {
			t.Errorf("node %s knew %v, and asks %v", c.self, c.knew, got)
		}
	}
}
