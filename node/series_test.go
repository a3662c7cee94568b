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

// A node that starts without a quorum may have no map: it shows itself, and that the others do not answer.
func TestSeriesWithoutAMap(t *testing.T) {
	measures := func(o *Options) {
		reg := prometheus.NewRegistry()
		o.Registry, o.Gatherer = reg, reg
	}
	bubble(t, 4, nil, measures, func(r *rig) {
		time.Sleep(35 * time.Second)
		r.crash(r.nodes...)
		without := 0
		for _, n := range r.nodes { // one of them has no replica of the placement group
			r.start(n)
			time.Sleep(35 * time.Second)
			if known, _ := n.core.client.WatchMap(); known == nil {
				without++
			}
			s, err := n.core.Admin().Series(r.t.Context(), 0)
			if err != nil {
				r.t.Fatal(err)
			}
			own := 0
			for _, row := range s.GetNodes() {
				if row.GetError() == "" && len(row.GetUnixMs()) >= 3 {
					own++
				}
			}
			if own != 1 || len(s.GetNodes()) != 4 {
				r.t.Errorf("%d of %d nodes have points", own, len(s.GetNodes()))
			}
			r.crash(n)
		}
		if without != 1 {
			r.t.Errorf("%d nodes have no map", without)
		}
	})
}
