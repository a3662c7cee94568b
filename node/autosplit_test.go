package node

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/api/adminpb"
)

// A range that fills is split into several. Every node finds them, no write is lost, and
// the splits take no revision. No range below the bound is split.
func TestRangesSplitByThemselves(t *testing.T) {
	const most, values, size = 256 << 10, 320, 4 << 10
	bubble(t, 3, nil, func(o *Options) { o.RangeMaxBytes = most }, func(r *rig) {
		rng := rand.New(rand.NewPCG(4, 4))
		key := func(i int) string { return fmt.Sprintf("k%04d", i*7919%values) }
		var revisions []int64
		for i := range values {
			v := make([]byte, size)
			for k := range v {
				v[k] = byte(rng.Uint32())
			}
			revisions = append(revisions, r.mustPut(r.nodes[i%3], key(i), string(v)))
		}
		var ranges int
		r.wait(2*time.Minute, "no range is larger than the bound", func() bool {
			for _, n := range r.nodes {
				if len(n.core.shards.Replicas()) <= 3 {
					return false
				}
				for _, m := range n.core.shards.Measures() {
					if m.Leads && m.Bytes > most {
						return false
					}
				}
			}
			l, err := r.nodes[0].core.Admin().Ranges(r.t.Context(), &adminpb.RangeListRequest{})
			ranges = len(l.GetRanges())
			return err == nil && ranges > 3
		})
		time.Sleep(fewer(10*time.Minute, 20*time.Second))
		l, err := r.nodes[1].core.Admin().Ranges(r.t.Context(), &adminpb.RangeListRequest{})
		if err != nil || len(l.GetRanges()) != ranges || ranges > 4*values*size/most {
			r.t.Errorf("%d ranges, and later %d, %v", ranges, len(l.GetRanges()), err)
		}
		for _, n := range r.nodes {
			resp, err := n.core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, KeysOnly: true})
			if err != nil || resp.GetCount() != values {
				r.t.Errorf("node %s has %d keys, %v", n.id, resp.GetCount(), err)
			}
		}
		revisions = append(revisions, r.mustPut(r.nodes[2], "k", "last"))
		r.dense(revisions)
		r.caughtUp(5 * time.Second)
	})
}
