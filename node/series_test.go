package node

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/api/adminpb"
)

// Any node tells what all have measured of themselves, without those that were asked for before; of a node that does not
// answer it tells why, and without a quorum too.
func TestSeriesOfAllNodes(t *testing.T) {
	measures := func(o *Options) {
		reg := prometheus.NewRegistry()
		o.Registry, o.Gatherer = reg, reg
	}
	bubble(t, 3, nil, measures, func(r *rig) {
		time.Sleep(35 * time.Second)
		series := func(after int64) map[string]*adminpb.NodeSeries {
			s, err := r.nodes[0].core.Admin().Series(r.t.Context(), after)
			if err != nil {
				t.Fatal(err)
			}
			all := map[string]*adminpb.NodeSeries{}
			for _, n := range s.GetNodes() {
				all[n.GetNode()] = n
			}
			return all
		}
		all := series(0)
		var newest int64
		for name, n := range all {
			if n.GetError() != "" || len(n.GetUnixMs()) < 3 || len(n.GetSeries()) != 24 || len(n.GetSeries()[0].GetValues()) != len(n.GetUnixMs()) {
				t.Errorf("%s: %v", name, n)
				continue
			}
			newest = max(newest, n.GetUnixMs()[len(n.GetUnixMs())-1])
		}
		if len(all) != 3 {
			t.Fatalf("%d nodes", len(all))
		}
		for name, n := range series(newest) {
			if n.GetError() != "" || len(n.GetUnixMs()) > 0 {
				t.Errorf("%s after its newest: %v", name, n)
			}
		}
		r.crash(r.nodes[1:]...)
		time.Sleep(35 * time.Second)
		alive, silent := 0, 0
		for _, n := range series(newest) {
			switch {
			case n.GetError() != "":
				silent++
			case len(n.GetUnixMs()) >= 3:
				alive++
			}
		}
		if alive != 1 || silent != 2 {
			t.Errorf("with two nodes gone %d have new points, and %d do not answer", alive, silent)
		}
	})
}
