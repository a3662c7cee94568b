package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
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
