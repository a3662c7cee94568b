package node

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
)

// TestListsWhileRangesSplit: at each moment each node lists ranges that cover the keyspace
// exactly once.
func TestListsWhileRangesSplit(t *testing.T) {
	const splits = 8
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		ctx, cancel := context.WithCancel(r.t.Context())
		var wg sync.WaitGroup
		for _, n := range r.nodes {
			wg.Go(func() {
				for lists := 0; ctx.Err() == nil; lists++ {
					l, err := n.core.Admin().Ranges(r.t.Context(), &adminpb.RangeListRequest{})
					if err != nil {
						r.t.Errorf("list at node %s: %v", n.id, err)
						return
					}
					var ds []keyspace.Descriptor
					for _, g := range l.GetRanges() {
						ds = append(ds, keyspace.Descriptor{Range: keyspace.RangeID(g.GetId()), Span: keyspace.Span{Start: g.GetStart(), End: g.GetEnd()}})
					}
					if bad := untiled(ds); bad != "" || len(l.GetMissing()) > 0 {
						r.t.Errorf("list %d at node %s: %s; %v, missing %v", lists, n.id, bad, ds, l.GetMissing())
						return
					}
					time.Sleep(137 * time.Microsecond)
				}
			})
		}
		for i := range splits {
			if _, _, err := r.nodes[i%3].core.Admin().SplitRange(r.t.Context(), fmt.Appendf(nil, "k%d", i)); err != nil {
				r.t.Errorf("split %d: %v", i, err)
			}
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
		wg.Wait()
	})
}

// untiled says where the spans of ranges in key order do not cover each key exactly once.
func untiled(ranges []keyspace.Descriptor) string {
	var at []byte
	for i, d := range ranges {
		if !bytes.Equal(d.Span.Start, at) || (len(d.Span.End) == 0) != (i == len(ranges)-1) {
			return fmt.Sprintf("%s behind %q", d.Span, at)
		}
		at = d.Span.End
	}
	return ""
}
