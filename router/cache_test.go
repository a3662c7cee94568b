package router

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
)

// takeByScan is rangeCache.update for one descriptor, by a look at every route.
func takeByScan(rs []*route, d *keyspace.Descriptor) []*route {
	next := &route{desc: *d}
	var out []*route
	for _, r := range rs {
		same := r.desc.Range == d.Range
		if !same && !r.desc.Span.Overlaps(d.Span) {
			out = append(out, r)
			continue
		}
		if same && !d.Newer(&r.desc) || !same && r.desc.Generation > d.Generation {
			return rs
		}
		if _, still := d.ReplicaOn(r.leader()); still && (same || next.leader() == 0) {
			next.hint.Store(uint64(r.leader()))
		}
	}
	out = append(out, next)
	slices.SortFunc(out, func(a, b *route) int { return bytes.Compare(a.desc.Span.Start, b.desc.Span.Start) })
	return out
}

func show(rs []*route) string {
	var b bytes.Buffer
	for _, r := range rs {
		fmt.Fprintf(&b, "%s/%d %s led by %s; ", r.desc.Range, r.desc.Generation, r.desc.Span, r.leader())
	}
	return b.String()
}

// The cache finds by search what a scan over all routes finds.
func TestCacheEqualsAScan(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	c, want := newRangeCache(), []*route(nil)
	for step := range 20000 {
		if rng.IntN(200) == 0 {
			c, want = newRangeCache(), nil
		}
		var ds []keyspace.Descriptor
		for range 1 + rng.IntN(4) {
			a, b := rng.IntN(20), 1+rng.IntN(20)
			d := keyspace.Descriptor{
				Range: keyspace.RangeID(1 + rng.IntN(8)), Generation: keyspace.Generation(1 + step/100 + rng.IntN(6)),
				Span:     keyspace.Span{Start: []byte{byte('a' + a)}, End: []byte{byte('a' + a + b)}},
				Replicas: []keyspace.Replica{{ID: 1, Node: keyspace.NodeID(1 + rng.IntN(3))}, {ID: 2, Node: 4}},
			}
			if rng.IntN(8) == 0 {
				d.Span.Start = nil
			}
			if rng.IntN(8) == 0 {
				d.Span.End = nil
			}
			ds = append(ds, d)
		}
		before := show(want)
		old, oldText := c.all(), show(c.all())
		changed := c.update(ds...)
		for i := range ds {
			want = takeByScan(want, &ds[i])
		}
		id, leader := keyspace.RangeID(1+rng.IntN(8)), keyspace.NodeID(1+rng.IntN(4))
		if got := show(c.all()); got != show(want) || got != before && !changed {
			t.Fatalf("step %d: %v after %s\ngot  %s\nwant %s", step, ds, before, got, show(want))
		}
		if show(old) != oldText {
			t.Fatal("what readers have was changed")
		}
		c.setLeader(id, leader, 0)
		for i, r := range want {
			if r.desc.Range == id {
				want[i] = &route{desc: r.desc}
				want[i].hint.Store(uint64(leader))
			}
		}
		if len(c.byID) != len(want) {
			t.Fatalf("%d ranges by their ids, %d in order", len(c.byID), len(want))
		}
	}
}

// A whole map of 10,000 ranges is loaded again whenever one of them has changed.
func BenchmarkLearnAgain(b *testing.B) {
	var ds []keyspace.Descriptor
	for i := range 10000 {
		d := keyspace.Descriptor{Range: keyspace.RangeID(i + 1), Generation: 1, Span: keyspace.Span{Start: fmt.Appendf(nil, "%05d", i)}}
		if i < 9999 {
			d.Span.End = fmt.Appendf(nil, "%05d", i+1)
		}
		ds = append(ds, d)
	}
	c := newRangeCache()
	c.update(ds...)
	b.ReportAllocs()
	for b.Loop() {
		ds[5000].Generation++
		c.update(ds...)
	}
}

// A serializable read may be answered when only one heir of a split is known. It counts for the
// other heir as well.
func TestWhatIsToldOfAnHeirBeforeItIsKnown(t *testing.T) {
	r := &Router{cache: newRangeCache()}
	r.Learn(keyspace.Descriptor{Range: 1, Generation: 1})
	r.Learn(keyspace.Descriptor{Range: 2, Generation: 2, Span: keyspace.Span{Start: []byte("m")}})
	r.noteServed(&pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")}, 9)
	r.Learn(keyspace.Descriptor{Range: 1, Generation: 2, Span: keyspace.Span{End: []byte("m")}})
	for _, key := range []string{"a", "m"} {
		if rt := r.cache.find([]byte(key)); rt == nil || rt.served.Load() != 9 {
			t.Errorf("%s: %+v", key, rt)
		}
	}
}
