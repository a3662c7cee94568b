package node

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// The largest transaction deletes as many keys as it may have operations, each with a value
// as large as a request may be. A watcher with previous versions gets all of it in one
// delivery, from a feed or from history, and on a node without a replica too.
func TestTheLargestTransactionIsWatchedWithVersionsBefore(t *testing.T) {
	// With -short all limits are smaller: 128 MiB pass through every buffer several times.
	request := fewer(1<<20, 1<<15)
	limits := func(o *Options) {
		o.WALSegmentBytes, o.MemoryBytes, o.MaxRequestBytes = 16*int64(request), 1024*int64(request), request
	}
	bubble(t, 4, nil, limits, func(r *rig) {
		const keys = 128
		size := request - 1<<10
		value := bytes.Repeat([]byte("v"), size)
		txn := &pb.TxnRequest{}
		for i := range keys {
			key := fmt.Appendf(nil, "k%03d", i)
			if _, err := r.nodes[0].core.KV().Put(r.t.Context(), &pb.PutRequest{Key: key, Value: value}); err != nil {
				r.t.Fatal(err)
			}
			txn.Success = append(txn.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: key}}})
		}
		far := r.nodes[0]
		for _, n := range r.nodes {
			if len(n.core.shards.Replicas()) == 0 {
				far = n
			}
		}
		if far == r.nodes[0] {
			r.t.Fatal("all nodes have a replica")
		}
		s := far.core.Watches().NewStream()
		defer s.Close()
		all := watch.Request{Span: keyspace.Span{Start: []byte("k"), End: []byte("l")}, Prev: true}
		if _, _, err := s.Watch(r.t.Context(), 1, all); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(time.Second)
		resp, err := r.nodes[0].core.KV().Txn(r.t.Context(), txn)
		if err != nil {
			r.t.Fatal(err)
		}
		rev := resp.Header.Revision
		r.toldWhole(s, rev, keys, size)
		all.Start = keyspace.Revision(rev)
		if _, _, err := s.Watch(r.t.Context(), 2, all); err != nil {
			r.t.Fatal(err)
		}
		r.toldWhole(s, rev, keys, size)
	})
}

// toldWhole wants all events of a revision in the next delivery, with versions before of that
// size.
func (r *rig) toldWhole(s *watch.Stream, rev int64, keys, size int) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	d, err := s.Next(ctx)
	if err != nil || len(d.Events) != keys {
		r.t.Fatalf("%d events of %d, too large %d, %v", len(d.Events), keys, d.TooLarge, err)
	}
	for _, e := range d.Events {
		if e.Kv.ModRevision != rev || len(e.PrevKv.GetValue()) != size {
			r.t.Fatalf("%s at %d, before it %d bytes", e.Kv.Key, e.Kv.ModRevision, len(e.PrevKv.GetValue()))
		}
	}
}
