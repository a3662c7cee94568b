package judge

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
)

// checkRealTime checks the revisions against real time: a change has a greater revision
// than everything that returned before it began, reads never go back, and no two
// changes share a revision.
func checkRealTime(ops []*Op) (bad []string) {
	before := highestBefore(ops)
	owner := map[int64]*Op{}
	for _, o := range ops {
		if o.Outcome != Answered {
			continue
		}
		rev, known := o.Revision(), before(o.Call)
		if rev < known || o.Changes() && rev <= known {
			bad = append(bad, fmt.Sprintf("real time: revision %d was known before this began: %s", known, o))
		}
		if !o.Changes() {
			continue
		}
		if other := owner[rev]; other != nil {
			bad = append(bad, fmt.Sprintf("real time: one revision for two changes: %s; %s", other, o))
		}
		owner[rev] = o
	}
	return bad
}

// highestBefore returns a function that gives the highest revision among the answers
// that had returned at a tick.
func highestBefore(ops []*Op) func(tick int64) int64 {
	type point struct{ tick, rev int64 }
	var ps []point
	for _, o := range ops {
		if o.Outcome == Answered {
			ps = append(ps, point{o.Return, o.Revision()})
		}
	}
	slices.SortFunc(ps, func(a, b point) int { return cmp.Compare(a.tick, b.tick) })
	for i := 1; i < len(ps); i++ {
		ps[i].rev = max(ps[i].rev, ps[i-1].rev)
	}
	return func(tick int64) int64 {
		i, _ := slices.BinarySearchFunc(ps, tick, func(p point, t int64) int { return cmp.Compare(p.tick, t) })
		if i == 0 {
			return 0
		}
		return ps[i-1].rev
	}
}

// Known returns the highest revision that an answer has told.
func Known(ops []*Op) int64 {
	last := int64(1)
	for _, o := range ops {
		if o.Outcome == Answered {
			last = max(last, o.Revision())
		}
	}
	return last
}

// checkCompactions checks reads at explicit revisions. None is answered below a
// compaction that was answered before the read began. None is refused as compacted
// without a compaction that covers it.
func checkCompactions(ops []*Op) (bad []string) {
	type compaction struct{ call, ret, rev int64 }
	var cs []compaction
	for _, o := range ops {
		if r, ok := o.Request.(*pb.CompactionRequest); ok && o.Outcome != Refused {
			c := compaction{o.Call, o.Return, r.GetRevision()}
			if o.Outcome == Unknown {
				c.ret = 0
			}
			cs = append(cs, c)
		}
	}
	slices.SortFunc(cs, func(a, b compaction) int { return cmp.Compare(a.rev, b.rev) })
	for _, o := range ops {
		r, ok := o.Request.(*pb.RangeRequest)
		if !ok || r.GetRevision() <= 0 {
			continue
		}
		refused := o.Outcome == Refused && errors.Is(o.Err, kverror.Compacted)
		allowed := false
		for _, c := range cs {
			if c.rev <= r.GetRevision() {
				continue
			}
			if c.call < o.Return {
				allowed = true
			}
			if o.Outcome == Answered && c.ret > 0 && c.ret < o.Call {
				bad = append(bad, fmt.Sprintf("compaction: revision %d was compacted before this began: %s", c.rev, o))
				break
			}
		}
		if refused && !allowed {
			bad = append(bad, fmt.Sprintf("compaction: nobody has compacted: %s", o))
		}
	}
	return bad
}

// firstSeen returns a function that gives the first operation whose answer shows a
// revision or a later one.
func firstSeen(ops []*Op) func(rev int64) *Op {
	var as []*Op
	for _, o := range ops {
		if o.Outcome == Answered {
			as = append(as, o)
		}
	}
	slices.SortFunc(as, func(a, b *Op) int { return cmp.Compare(a.Return, b.Return) })
	var highest []*Op
	for _, o := range as {
		if n := len(highest); n == 0 || o.Revision() > highest[n-1].Revision() {
			highest = append(highest, o)
		}
	}
	return func(rev int64) *Op {
		i, _ := slices.BinarySearchFunc(highest, rev, func(o *Op, rev int64) int { return cmp.Compare(o.Revision(), rev) })
		if i == len(highest) {
			return nil
		}
		return highest[i]
	}
}
