package node

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/watch"
)

// More is read at a time than the memory budget holds: spans, spans that a node sorts, streams, and
// transactions that read and write. Each answer waits its turn, none is refused, and all memory
// comes back.
func TestReadsWaitForMemory(t *testing.T) {
	for _, nodes := range []int{1, 3} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			bubble(t, nodes, borders(4), func(o *Options) {
				o.MemoryBytes, o.WALSegmentBytes = 16<<20, 4<<20
			}, testReadLoad)
		})
	}
}

func testReadLoad(r *rig) {
	const keys, readers = 60, 24 // the transactions below put some keys more
	value := strings.Repeat("v", 48<<10)
	for i := range keys {
		r.mustPut(r.nodes[0], fmt.Sprintf("%s/%02d", keyOf(i%4), i), value)
	}
	all := func(o pb.RangeRequest_SortOrder, target pb.RangeRequest_SortTarget) *pb.RangeRequest {
		return &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, SortOrder: o, SortTarget: target}
	}
	one := func(i int) *pb.RangeRequest {
		return &pb.RangeRequest{Key: []byte(keyOf(i)), RangeEnd: []byte(keyOf(i) + "0")}
	}
	var wg sync.WaitGroup
	for i := range readers {
		n := r.nodes[i%len(r.nodes)].core.KV()
		ctx := r.t.Context()
		want := func(what string, got, want int, err error) {
			if err != nil || got < want || got > want+2*4 {
				r.t.Errorf("%s: %d keys of %d, %v", what, got, want, err)
			}
		}
		wg.Go(func() {
			resp, err := n.Range(ctx, all(pb.RangeRequest_NONE, pb.RangeRequest_KEY))
			want("a span", len(resp.GetKvs()), keys, err)
		})
		wg.Go(func() {
			resp, err := n.Range(ctx, all(pb.RangeRequest_DESCEND, pb.RangeRequest_MOD))
			want("a sorted span", len(resp.GetKvs()), keys, err)
		})
		wg.Go(func() {
			resp, err := n.Range(ctx, one(i%4))
			want("a small span", len(resp.GetKvs()), keys/4, err)
		})
		wg.Go(func() {
			got := 0
			err := n.RangeStream(ctx, all(pb.RangeRequest_NONE, pb.RangeRequest_KEY), func(keys []byte, _ *pb.RangeResponse) error {
				time.Sleep(time.Millisecond) // the client's time
				got += len(keys)
				return nil
			})
			want("a stream", got/len(value), keys, err)
		})
		wg.Go(func() { // in one range
			ops := []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: one(i % 4)}}, putOp(keyOf(i%4)+"1", "1")}
			resp, err := n.Txn(ctx, &pb.TxnRequest{Success: ops})
			got := 0
			if err == nil {
				got = len(resp.GetResponses()[0].GetResponseRange().GetKvs())
			}
			want("a transaction", got, keys/4, err)
		})
		wg.Go(func() { // over several
			ops := []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: one(1)}}, putOp(keyOf(1)+"1", "1"), putOp(keyOf(2)+"1", "1")}
			resp, err := n.Txn(ctx, &pb.TxnRequest{Success: ops})
			got := 0
			if err == nil {
				got = len(resp.GetResponses()[0].GetResponseRange().GetKvs())
			}
			want("a transaction over ranges", got, keys/4, err)
		})
	}
	wg.Wait()
}

// While reads wait, and none gets on, watchers get their events as soon as otherwise: those of now
// and those of the past. Puts, and gets of single keys, do not wait either.
func TestOnlyReadsWaitForReads(t *testing.T) {
	bubble(t, 1, borders(4), func(o *Options) { o.MemoryBytes, o.WALSegmentBytes = 16<<20, 4<<20 }, func(r *rig) {
		n := r.nodes[0]
		r.spread(n, 4, "small")
		answers := n.core.answers
		ctx, cancel := context.WithCancel(r.t.Context())
		var held [2]budget.Share
		for i := range held { // the second one leads
			held[i] = answers.Share()
			bytes := n.core.budget.Reads
			if i == 1 {
				bytes = answers.Reserve()
			}
			if err := held[i].Take(ctx, bytes); err != nil {
				r.t.Fatal(err)
			}
		}
		var waiting sync.WaitGroup
		for range 10 {
			waiting.Go(func() {
				_, err := n.core.KV().Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
				r.wantKind("a read that finds no memory, and whose client goes away", err, kverror.Canceled)
			})
		}
		time.Sleep(time.Minute)
		if got := answers.Waiting(); got < 10 {
			r.t.Errorf("%d reads wait", got)
		}
		for _, start := range []keyspace.Revision{0, 1} {
			s := n.core.Watches().NewStream()
			if _, _, err := s.Watch(ctx, 1, watch.Request{Start: start}); err != nil {
				r.t.Fatal(err)
			}
			value := fmt.Sprint("from ", start)
			began := time.Now()
			r.mustPut(n, keyOf(1), value)
			r.mustGet(n, keyOf(1), value)
			for told := false; !told; {
				d, err := s.Next(ctx)
				if err != nil {
					r.t.Fatal(err)
				}
				for _, e := range d.Events {
					told = told || string(e.Kv.Value) == value
				}
			}
			if late := time.Since(began); late > 150*time.Millisecond {
				r.t.Errorf("a watcher from %d: its event came after %v", start, late)
			}
			s.Close()
		}
		cancel()
		waiting.Wait()
		for i := range held {
			held[i].Release()
		}
		if got := answers.Held(); got != 0 {
			r.t.Errorf("%d bytes are held in the end", got)
		}
	})
}
