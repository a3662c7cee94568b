package shard

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// message takes the next message of the node, which is no larger than limit.
func (g *gateway) message(limit int) []rangeapi.FeedPart {
	g.t.Helper()
	synctest.Wait()
	select {
	case b := <-g.end.in:
		if len(b) > limit {
			g.t.Errorf("a message of %d bytes, allowed are %d", len(b), limit)
		}
		ps, err := rangeapi.DecodeParts(b)
		if err != nil {
			g.t.Fatal(err)
		}
		return ps
	default:
		return nil
	}
}

// wholes checks that complete only goes to where all n events of revision rev have been
// sent, with the versions before them, and returns how many events came.
func (g *gateway) wholes(limit int, rev keyspace.Revision, n int, prev bool) (events int) {
	g.t.Helper()
	seen := map[string]bool{}
	for ps := g.message(limit); ps != nil; ps = g.message(limit) {
		for _, p := range ps {
			for _, e := range p.Events {
				events++
				if e.Mod == rev {
					seen[string(e.Key)] = true
				}
				if prev && e.Mod == rev && e.Prev == nil {
					g.t.Errorf("%s@%d came without the version before", e.Key, e.Mod)
				}
			}
			if p.Resolved >= rev && len(seen) < n {
				g.t.Fatalf("complete up to %d behind %d of %d events of revision %d", p.Resolved, len(seen), n, rev)
			}
		}
	}
	if len(seen) != n {
		g.t.Errorf("%d of %d events of revision %d came", len(seen), n, rev)
	}
	return events
}

// large writes n keys with values of size, and deletes all of them in one transaction. The
// deletion has the revision that is returned.
func (w *fakeWorld) large(t *testing.T, n, size int, before func()) keyspace.Revision {
	t.Helper()
	rev := keyspace.Revision(1)
	for i := range n {
		w.write(t, 5, fmt.Sprintf("k%03d", i), strings.Repeat("v", size))
		rev++
	}
	before()
	w.remove(t, "k", "l")
	return rev + 1
}

// However large the versions before are, messages have a bound.
func TestFeedWithVersionsBeforeHasABound(t *testing.T) {
	for _, live := range []bool{true, false} {
		fed(t, func(t *testing.T, w *fakeWorld) {
			const n, size = 40, 2000
			w.node.feedBounds.message = 10 << 10
			g := w.gateway(t)
			defer g.close()
			open := func() {
				g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: n + 2, Prev: true})
			}
			rev := w.large(t, n, size, func() {
				if live {
					open()
				}
			})
			if !live {
				open()
			}
			if events := g.wholes(10<<10, rev, n, true); events != n {
				t.Errorf("live %v: %d events of %d", live, events, n)
			}
		})
	}
}

// A revision that is larger than a message, and than a page, comes in several.
func TestFeedDividesARevision(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const n, bound = 100, 4 << 10
		w.node.feedBounds.message, w.node.feedBounds.page = bound, bound
		g := w.gateway(t)
		defer g.close()
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: n + 2})
		rev := w.large(t, n, 10, func() {})
		if events := g.wholes(bound, rev, n, false); events != 2*n {
			t.Errorf("live: %d events of %d", events, 2*n)
		}
		g.order(rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 1, From: rev - 3})
		if events := g.wholes(bound, rev, n, false); events != n+3 {
			t.Errorf("from the store: %d events of %d", events, n+3)
		}
	})
}

// A page of history counts the versions before, and divides a revision that is larger.
func TestHistoryCountsVersionsBefore(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const n, size, bound = 40, 2000, 20 << 10
		rev := w.large(t, n, size, func() {})
		q := &rangeapi.HistoryRequest{Range: 1, Generation: 1, From: rev - 2, To: rev, MaxBytes: bound, Prev: true}
		seen := map[string]bool{}
		for pages := 0; q.From <= q.To; pages++ {
			p, err := w.node.Client().History(t.Context(), 1, q)
			if err != nil || pages > n {
				t.Fatalf("page %d: %v", pages, err)
			}
			if b := p.Encode(); len(b) > bound {
				t.Errorf("a page of %d bytes, allowed are %d", len(b), bound)
			}
			if p.NextKey != nil && (p.Next != rev || len(p.Events) == 0 || p.Events[0].Mod != rev) {
				t.Errorf("a page of %d events ends within revision %d", len(p.Events), p.Next)
			}
			for _, e := range p.Events {
				if at := fmt.Sprintf("%s@%d", e.Key, e.Mod); seen[at] || e.Mod == rev && (e.Prev == nil || len(e.Prev.Value) != size) {
					t.Errorf("%s came before: %v, or without the version before: %v", at, seen[at], e.Prev)
				} else {
					seen[at] = true
				}
			}
			q.From, q.FromKey = p.Next, p.NextKey
		}
		if len(seen) != n+2 {
			t.Errorf("%d events of %d", len(seen), n+2)
		}
	})
}

// What one transaction has done to a key is not divided by pages, each of which goes on at
// a key: all of it comes, once.
func TestHistoryKeepsTheWritesOfAKeyTogether(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const n, size = 5, 1000
		rev := w.large(t, n, size, func() {}) + 1
		value := make([]byte, size)
		within := func(op *pb.RequestOp) *pb.RequestOp {
			return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Success: []*pb.RequestOp{op}}}}
		}
		all := &pb.TxnRequest{}
		for i := range n {
			key := fmt.Appendf(nil, "k%03d", i)
			w.write(t, 5, string(key), string(value))
			rev++
			del := &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: key}}}
			put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: value}}}
			all.Success = append(all.Success, within(del), within(put), within(del))
		}
		w.do(t, all)
		for bound := int64(1); bound < 12*size; bound += size / 2 {
			for _, prev := range []bool{true, false} {
				got := map[string]int{}
				q := &rangeapi.HistoryRequest{Range: 1, Generation: 1, From: rev, To: rev, MaxBytes: bound, Prev: prev}
				for pages := 0; q.From <= q.To; pages++ {
					p, err := w.node.Client().History(t.Context(), 1, q)
					if err != nil || pages > 3*n {
						t.Fatalf("page %d of %d bytes: %v", pages, bound, err)
					}
					for _, e := range p.Events {
						got[fmt.Sprintf("%s.%d", e.Key, e.Sub)]++
						if prev && (e.Prev == nil) != !e.Tombstone {
							t.Errorf("%s, operation %d: before that %v", e.Key, e.Sub, e.Prev)
						}
					}
					q.From, q.FromKey = p.Next, p.NextKey
				}
				for i := range n {
					for sub := 3 * i; sub < 3*i+3; sub++ {
						if at := fmt.Sprintf("k%03d.%d", i, sub); got[at] != 1 {
							t.Errorf("pages of %d bytes, prev %v: %s comes %d times", bound, prev, at, got[at])
						}
					}
				}
			}
		}
	})
}

// A feed that cannot keep up beside an old lock, above whose floor nothing is complete,
// does not read again and again what it has read: it comes further all the time.
func TestFeedBesideAnOldLockReadsOnce(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.node.feedBounds = feedBounds{queue: 2000, conn: 1 << 20, page: 2000, message: 2000}
		w.step(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")})
		w.seq.mu.Lock()
		w.seq.last++ // revision 2 is the transaction's
		w.seq.mu.Unlock()
		value := strings.Repeat("v", 500)
		written := 0
		put := func(n int) {
			for range n {
				w.write(t, 5, "v", value)
				written++
			}
		}
		put(50)
		g := w.gateway(t)
		defer g.close()
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
		seen := map[keyspace.Revision]bool{}
		take := func() bool {
			ps := g.message(2000)
			for _, p := range ps {
				for _, e := range p.Events {
					seen[e.Mod] = true
				}
				if !seen[2] && p.Resolved >= 2 {
					t.Fatal("revision 2 has not come")
				}
			}
			return ps != nil
		}
		for range 200 { // it takes one message while more is written than it can queue
			put(1)
			if take(); written%8 == 0 {
				put(6)
			}
		}
		if len(seen) < 150 { // of each message one event at least, but for a few
			t.Errorf("%d of %d events came beside the lock", len(seen), written)
		}
		if a := w.step(t.Context(), &rangeapi.Resolve{Name: nameAged(1), Revision: 2}); !a.done || a.err != nil {
			t.Fatalf("%+v", a)
		}
		for take() {
		}
		for rev := keyspace.Revision(2); rev < keyspace.Revision(written+3); rev++ {
			if !seen[rev] {
				t.Errorf("revision %d has not come", rev)
			}
		}
		if behind := testutil.ToFloat64(w.node.metrics.feedsBehind); behind < 5 {
			t.Errorf("the feed was cut off %v times", behind)
		}
		if read := testutil.ToFloat64(w.node.metrics.historyEvents); read > 2*float64(written) {
			t.Errorf("%v events were read of %d", read, written)
		}
	})
}

// remove deletes all keys of a span through the pipeline.
func (w *fakeWorld) remove(t *testing.T, start, end string) {
	t.Helper()
	w.do(t, &pb.DeleteRangeRequest{Key: []byte(start), RangeEnd: []byte(end)})
}

// do makes one change and applies it.
func (w *fakeWorld) do(t *testing.T, op proto.Message) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := w.node.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: op})
		done <- err
	}()
	synctest.Wait()
	g := w.groups.group(1)
	if err := g.apply(raftgroup.Entry{Term: 5, Data: g.take(0).data}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// What a transaction intends to write counts from its evaluation on: its lock may wait for
// long to be applied.
func TestPendingLockCountsItsIntents(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const size = 50_000
		writes := []rangeapi.Write{{Number: 1, Op: &pb.PutRequest{Key: []byte("k"), Value: make([]byte, size)}}}
		done := make(chan error, 1)
		go func() {
			_, err := w.node.Txn(t.Context(), 1, 1, &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writes})
			done <- err
		}()
		synctest.Wait()
		if n := w.node.locks.Bytes(); n < size {
			t.Errorf("%d bytes are counted for a pending lock", n)
		}
		w.settle()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if n := w.node.locks.Bytes(); n < size || n > 2*size {
			t.Errorf("%d bytes are counted for a lock", n)
		}
		if a := w.step(t.Context(), &rangeapi.Resolve{Name: nameAged(1)}); a.err != nil {
			t.Fatal(a.err)
		}
		if n := w.node.locks.Bytes(); n != 0 {
			t.Errorf("%d bytes are counted for no lock", n)
		}
	})
}
