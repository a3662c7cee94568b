package decide

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// The ranges of a lost node are rebuilt with as many copies at a time as their bytes allow: few
// of large ranges, and many of small ones, which one by one would mostly wait.
func TestCopiesByTheirBytes(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		each  int64
		small int
		want  int
	}{
		{100 * mib, 16, 4},
		{4 * mib, 16, 8},   // 32 MiB
		{64 << 10, 16, 16}, // as many as there may be
		{64 << 10, 0, 4},   // nothing is small
	} {
		t.Run(fmt.Sprintf("%d KiB of %d", c.each>>10, c.small), func(t *testing.T) {
			set := Defaults()
			set.NodeCopies, set.SmallCopies, set.SmallBytes = 4, c.small, 32*mib
			cl := New(set, 1, 0)
			now := clock.Time(0)
			for id := keyspace.NodeID(1); id <= 4; id++ {
				cl.PutNode(Node{ID: id, Capacity: 1 << 40})
			}
			for i := range 100 {
				d := keyspace.Descriptor{Range: keyspace.RangeID(i + 1), Generation: 1, ConfIndex: 1}
				if i > 0 {
					d.Span.Start = fmt.Appendf(nil, "%03d", i)
				}
				if i < 99 {
					d.Span.End = fmt.Appendf(nil, "%03d", i+1)
				}
				for n := range 3 {
					d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(n + 1), Node: keyspace.NodeID(n + 1)})
				}
				cl.PutRange(Range{Descriptor: d, Leader: keyspace.NodeID(1 + i%2), Bytes: c.each})
			}
			cl.PutNode(Node{ID: 3, Capacity: 1 << 40, Silent: true, SilentSince: now})
			now = now.Add(set.NodeDeadAfter + time.Second)
			ops := cl.Decide(now).Operations
			if len(ops) != c.want {
				t.Errorf("%d copies at a time, want %d: %v", len(ops), c.want, ops)
			}
			// One ends, another one begins.
			cl.Finish(ops[0].Range, now, false)
			if again := cl.Decide(now).Operations; len(again) != 1 {
				t.Errorf("%d copies in the place of one, want 1: %v", len(again), again)
			}
			if err := cl.recount(); err != nil {
				t.Error(err)
			}
		})
	}
}
