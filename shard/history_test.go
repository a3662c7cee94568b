package shard

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// large writes n keys with values of size, and deletes all of them in one transaction. The
// deletion has the revision that is returned.
func (w *fakeWorld) large(t *testing.T, n, size int) keyspace.Revision {
	t.Helper()
	rev := keyspace.Revision(1)
	for i := range n {
		w.write(t, 5, fmt.Sprintf("k%03d", i), strings.Repeat("v", size))
		rev++
	}
	w.remove(t, "k", "l")
	return rev + 1
}

// A page of history counts the versions before, and divides a revision that is larger.
func TestHistoryCountsVersionsBefore(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const n, size, bound = 40, 2000, 20 << 10
		rev := w.large(t, n, size)
		q := &rangeapi.HistoryRequest{Range: 1, Generation: 1, From: rev - 2, To: rev, MaxBytes: bound, Prev: true}
		seen := map[string]bool{}
		for pages := 0; q.From <= q.To; pages++ {
			p, err := w.store.Client().History(t.Context(), 1, q)
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

// Pages go on at a key, so they do not divide a transaction's writes of one key: all of them
// come, once.
func TestHistoryKeepsTheWritesOfAKeyTogether(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const n, size = 5, 1000
		rev := w.large(t, n, size) + 1
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
					p, err := w.store.Client().History(t.Context(), 1, q)
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
		_, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: op})
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
