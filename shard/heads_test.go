package shard

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// TestHeadsModel compares the cache with a map: what it knows is true, it stays
// within its bound, and a new reign knows nothing.
func TestHeadsModel(t *testing.T) {
	const bound = 256 << 10
	h := newHeads(bound)
	rng := rand.New(rand.NewPCG(1, 2))
	type name struct {
		r   reign
		key string
	}
	model := make(map[name]head)
	reigns := []reign{h.begin(), h.begin(), h.begin()}
	hits := 0
	for i := range 200_000 {
		k := fmt.Appendf(nil, "%0*d", 1+rng.IntN(200), rng.IntN(300))
		at := rng.IntN(len(reigns))
		n := name{reigns[at], string(k)}
		switch op := rng.IntN(1000); {
		case op == 0:
			reigns[at] = h.begin()
		case op < 400:
			v := head{alive: op%2 == 0, mod: keyspace.Revision(i), version: int64(op)}
			if v.alive {
				v.value = make([]byte, rng.IntN(2*maxHeadValueBytes))
			}
			h.put(n.r, k, v)
			model[n] = v.keep()
		default:
			got, ok := h.get(n.r, k)
			want, stored := model[n]
			if ok && (!stored || !reflect.DeepEqual(got, want)) {
				t.Fatalf("%q of reign %d is %+v, put was %+v (%v)", k, n.r, got, want, stored)
			}
			if ok {
				hits++
			}
		}
	}
	if hits == 0 {
		t.Error("nothing was ever found")
	}
	total := int64(0)
	for i := range h.parts {
		p := &h.parts[i]
		bytes := int64(0)
		for _, at := range p.index {
			bytes += p.slots[at].bytes()
		}
		if bytes != p.bytes || p.bytes > p.max {
			t.Errorf("part %d holds %d bytes, counts %d, may hold %d", i, bytes, p.bytes, p.max)
		}
		if free := len(p.slots) - len(p.index); free != len(p.free) {
			t.Errorf("part %d has %d free slots, lists %d", i, free, len(p.free))
		}
		total += bytes
	}
	if total < bound/4 {
		t.Errorf("%d bytes are used of %d", total, bound)
	}
	h.put(1, make([]byte, bound), head{})
	if _, ok := h.get(1, make([]byte, bound)); ok {
		t.Error("a key larger than the cache is in it")
	}
}

// TestHeadsEndWithTheLeadership: another leader deletes a key that this one has
// written; back in office, this one must not go by what it remembers.
func TestHeadsEndWithTheLeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		g, r := w.groups.group(1), w.node.Replica(1)
		put := func(term uint64) {
			t.Helper()
			done := make(chan error)
			go func() {
				_, err := w.node.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k")}})
				done <- err
			}()
			synctest.Wait()
			e := g.take(0)
			if err := g.apply(raftgroup.Entry{Term: term, Data: e.data}); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		version := func() int64 {
			t.Helper()
			v, ok, err := r.store.get([]byte("k"), newest)
			if err != nil || !ok {
				t.Fatal(ok, err)
			}
			return v.Version
		}
		w.serve(1, 5)
		put(5)
		put(5)
		if got := version(); got != 2 {
			t.Fatalf("version %d after two puts", got)
		}
		if _, known := w.node.heads.get(r.reigns.of([]byte("k")), []byte("k")); !known {
			t.Fatal("nothing is remembered")
		}

		g.lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		other := &leadership{term: 6, last: r.rec.Last, hash: r.rec.Hash}
		txn := &pendingTxn{}
		rev := w.seq.handOutLocked(keyspace.SequenceRequest{Count: 1}).First
		txn.revision.Store(int64(rev))
		b := &batch{lead: other, txns: 1}
		c := newCall(t.Context(), &rangeapi.Request{})
		c.place, c.at = placeBatch, b
		c.writes = []*pendingVersion{{key: []byte("k"), txn: txn, tombstone: true, lived: true}}
		b.calls = []*call{c}
		if err := g.apply(raftgroup.Entry{Term: 6, Data: b.encode(r.rec.Generation, rev)}); err != nil {
			t.Fatal(err)
		}

		w.serve(1, 7)
		put(7)
		if got := version(); got != 1 {
			t.Errorf("version %d of a key that was deleted before", got)
		}
	})
}

// TestHeadsServeReads: a read fills the cache with the newest version alone, and what
// is in it answers no question about another revision.
func TestHeadsServeReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		g, r := w.groups.group(1), w.node.Replica(1)
		put := func(value string) {
			t.Helper()
			done := make(chan error)
			go func() {
				_, err := w.node.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &pb.PutRequest{Key: []byte("k"), Value: []byte(value)}})
				done <- err
			}()
			synctest.Wait()
			if err := g.apply(raftgroup.Entry{Term: 5, Data: g.take(0).data}); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		read := func(at keyspace.Revision, want string, hit bool) {
			t.Helper()
			before := testutil.ToFloat64(w.node.metrics.headHits)
			resp, err := w.node.Do(t.Context(), &rangeapi.Request{
				Range: 1, Generation: 1, ReadRevision: w.seq.last, Op: &pb.RangeRequest{Key: []byte("k"), Revision: int64(at)},
			})
			if err != nil {
				t.Fatal(err)
			}
			got := resp.Op.(*pb.RangeResponse)
			if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != want {
				t.Errorf("read at %d: %v, want %q", at, got.Kvs, want)
			}
			if now := testutil.ToFloat64(w.node.metrics.headHits); (now > before) != hit {
				t.Errorf("read at %d: from memory %v, want %v", at, now > before, hit)
			}
		}
		w.serve(1, 5)
		put("one") // revision 2
		put("two") // revision 3
		read(0, "two", true)
		read(2, "one", false)
		read(0, "two", true)

		r.mu.Lock()
		r.reigns.end(w.node.heads)
		r.mu.Unlock()
		read(2, "one", false)
		read(0, "two", false)
		read(0, "two", true)
		large := strings.Repeat("x", maxHeadValueBytes+1)
		put(large)
		read(0, large, false)
		read(0, large, false)
	})
}

// TestHeadsTakeInWhatIsUsedNow: a cache full of what nobody uses any more, be it of an
// ended reign, gives way to what is used.
func TestHeadsTakeInWhatIsUsedNow(t *testing.T) {
	for _, ended := range []bool{false, true} {
		h := newHeads(1 << 20)
		r := h.begin()
		value := make([]byte, 256)
		for i := range 20_000 {
			h.put(r, fmt.Appendf(nil, "cold%d", i), head{alive: true, value: value})
		}
		if ended {
			r = h.begin()
		}
		hits := 0
		for i := range 10_000 {
			k := fmt.Appendf(nil, "used%d", i%500)
			if _, ok := h.get(r, k); ok {
				hits++
				continue
			}
			h.put(r, k, head{alive: true, value: value})
		}
		if hits < 9_000 {
			t.Errorf("reign ended %v: %d of 10000 lookups of 500 keys hit", ended, hits)
		}
	}
}

// Each key belongs to one reign, and those of two ranges that become one stay apart.
func TestReigns(t *testing.T) {
	h := newHeads(1 << 20)
	begin := func() (rs reigns) {
		rs.end(h)
		return rs
	}
	rs, right := begin(), begin()
	a, m := rs.of([]byte("a")), right.of([]byte("m"))
	rs.absorb(h, []byte("m"), right)
	third := begin()
	third.absorb(h, []byte("x"), nil)
	s, x := third.of([]byte("s")), third.of([]byte("x"))
	rs.absorb(h, []byte("s"), third)
	want := map[string]reign{"": a, "a": a, "lzz": a, "m": m, "rzz": m, "s": s, "wzz": s, "x": x, "zz": x}
	seen := map[reign]bool{}
	for k, w := range want {
		if got := rs.of([]byte(k)); got != w {
			t.Errorf("%q is of reign %d, want %d", k, got, w)
		}
		seen[w] = true
	}
	if len(seen) != 4 {
		t.Errorf("%d reigns, want 4", len(seen))
	}
	for i := range 2 * maxReigns {
		rs.absorb(h, fmt.Appendf(nil, "zz%02d", i), nil)
		if len(rs) > maxReigns {
			t.Fatalf("%d reigns, at most %d", len(rs), maxReigns)
		}
	}
	rs.end(h)
	if len(rs) != 1 || seen[rs.of([]byte("a"))] || rs.of([]byte("a")) != rs.of([]byte("z")) {
		t.Errorf("behind the end: %v", rs)
	}
}
