package node

import (
	"errors"
	"fmt"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
)

// trap 65: once Compact was answered at one node, a Get, or one within a transaction, of
// an older revision is refused at every node and in every range, at once: nobody's
// knowledge may lag. At the compacted revision and above all nodes go on answering.
func TestCompactedIsKnownEverywhereAtOnce(t *testing.T) {
	const ranges = 4
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		ctx := r.t.Context()
		for round := range 12 {
			gateway := r.nodes[round%3]
			for i := range ranges {
				r.mustPut(gateway, keyOf(i), "old")
			}
			at := r.mustPut(gateway, keyOf(round%ranges), fmt.Sprint("new ", round))
			if round%4 == 3 {
				time.Sleep(30 * time.Second) // ranges may be asleep
			}
			if _, err := gateway.core.KV().Compact(ctx, &pb.CompactionRequest{Revision: at}); err != nil {
				r.t.Fatalf("compact at %d: %v", at, err)
			}
			for i := range ranges {
				for _, n := range r.nodes {
					for rev, want := range map[int64]error{at - 1: kverror.Compacted, at: nil} {
						get := &pb.RangeRequest{Key: []byte(keyOf(i)), Revision: rev}
						_, err := n.core.KV().Range(ctx, get)
						if !errors.Is(err, want) {
							r.t.Errorf("round %d: node %s reads %s at %d, compacted at %d: %v", round, n.id, get.Key, rev, at, err)
						}
						ops := []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: get}}}
						if _, err = n.core.KV().Txn(ctx, &pb.TxnRequest{Success: ops}); !errors.Is(err, want) {
							r.t.Errorf("round %d: node %s reads %s in a txn at %d, compacted at %d: %v", round, n.id, get.Key, rev, at, err)
						}
						put := &pb.PutRequest{Key: []byte(keyOf(i) + "/beside")}
						ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: put}})
						if _, err = n.core.KV().Txn(ctx, &pb.TxnRequest{Success: ops}); !errors.Is(err, want) {
							r.t.Errorf("round %d: node %s reads %s in a txn that writes at %d, compacted at %d: %v", round, n.id, get.Key, rev, at, err)
						}
					}
				}
			}
		}
		r.stop(r.nodes...)
	})
}
