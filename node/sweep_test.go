package node

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// sweepKeys is how many keys the tests of large deletes have in each range: more than
// fit into an entry.
const sweepKeys = 1400

// longLog has wal segments that hold entries of the usual size.
func longLog(o *Options) { o.WALSegmentBytes = 16 << 20 }

// fillSweep puts n keys into each of the ranges of borders(ranges), and returns the last
// revision.
func (r *rig) fillSweep(ranges, n int) int64 {
	r.t.Helper()
	var rev int64
	for i := range ranges {
		for from := 0; from < n; from += 100 {
			t := &pb.TxnRequest{}
			for k := from; k < min(from+100, n); k++ {
				t.Success = append(t.Success, putOp(sweepKey(i, k), "v"))
			}
			resp, err := r.nodes[0].core.KV().Txn(r.t.Context(), t)
			if err != nil {
				r.t.Fatal(err)
			}
			rev = resp.Header.Revision
		}
	}
	return rev
}

func sweepKey(i, k int) string { return keyOf(i) + strings.Repeat("s", 1000) + fmt.Sprintf("%06d", k) }

// count counts all keys at a revision, 0 for the present one.
func (r *rig) count(rev int64) int64 {
	r.t.Helper()
	resp, err := r.nodes[1].core.KV().Range(r.t.Context(), &pb.RangeRequest{
		Key: []byte("k"), RangeEnd: []byte("l"), CountOnly: true, Revision: rev,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.Count
}

// A delete of more keys than fit into one entry, in one range and in several, has one
// revision and an exact count, and is seen wholly or not at all.
func TestLargeDeletes(t *testing.T) {
	bubble(t, 3, borders(3), longLog, func(r *rig) {
		ctx := r.t.Context()
		kv := r.nodes[2].core.KV()
		before := r.fillSweep(3, sweepKeys)
		within := &pb.DeleteRangeRequest{Key: []byte(sweepKey(1, 10)), RangeEnd: []byte(sweepKey(1, sweepKeys-10))}
		del, err := kv.DeleteRange(ctx, within)
		if err != nil || del.Deleted != sweepKeys-20 || del.Header.Revision != before+1 {
			r.t.Fatalf("%d deleted at %d, %v", del.GetDeleted(), del.GetHeader().GetRevision(), err)
		}
		if got := r.count(0); got != 2*sweepKeys+20 || r.count(before) != 3*sweepKeys {
			r.t.Fatalf("%d keys are left, %d were there", got, r.count(before))
		}
		// In a transaction, beside what is put into the span before it is deleted and after.
		kept, fresh := sweepKey(0, 5), sweepKey(2, 1)+"/new"
		whole := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), CountOnly: true}
		txn, err := kv.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{
			{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Success: []*pb.RequestOp{putOp(fresh, "gone")}}}},
			{Request: &pb.RequestOp_RequestRange{RequestRange: whole}},
			{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte{0}}}},
			{Request: &pb.RequestOp_RequestRange{RequestRange: whole}},
			putOp(kept, "kept"),
			{Request: &pb.RequestOp_RequestRange{RequestRange: whole}},
		}})
		if err != nil || txn.Header.Revision != before+2 {
			r.t.Fatalf("%v, %v", txn.GetHeader(), err)
		}
		op := func(i int) *pb.ResponseOp { return txn.Responses[i] }
		if n := op(2).GetResponseDeleteRange().Deleted; n != 2*sweepKeys+21 || op(1).GetResponseRange().Count != n {
			r.t.Errorf("%d deleted of %d", n, op(1).GetResponseRange().Count)
		}
		if op(3).GetResponseRange().Count != 0 || op(5).GetResponseRange().Count != 1 || r.count(0) != 1 || r.count(before+1) != 2*sweepKeys+20 {
			r.t.Errorf("%v %v, %d left", op(3), op(5), r.count(0))
		}
		got, err := kv.Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})
		if err != nil || len(got.Kvs) != 1 || got.Kvs[0].Version != 1 || got.Kvs[0].CreateRevision != before+2 || string(got.Kvs[0].Value) != "kept" {
			r.t.Errorf("%v, %v", got.GetKvs(), err)
		}
		(&bank{r: r}).unlocked()
	})
}

// Previous keys come with a large delete too. A power cut in the middle of a sweep stops
// nothing: who leads next goes on, and the coordinator is not needed.
func TestLargeDeleteThroughCrash(t *testing.T) {
	bubble(t, 3, borders(2), longLog, func(r *rig) {
		before := r.fillSweep(2, sweepKeys)
		leader := r.nodes[0]
		for _, n := range r.nodes {
			for _, p := range n.core.shards.Replicas() {
				if p.Leader().IsLeader && p.Descriptor().Span.Contains([]byte(sweepKey(1, 0))) {
					leader = n
				}
			}
		}
		done := make(chan error)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			_, err := leader.core.KV().DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), PrevKv: true})
			done <- err
		}()
		// Until something is swept, and not all is.
		var left int64
		for range 20000 {
			time.Sleep(50 * time.Microsecond)
			if left = r.sweeping(leader); left > 0 && left < sweepKeys {
				break
			}
		}
		if left == 0 || left == sweepKeys {
			r.t.Errorf("the power goes with %d keys left", left)
		}
		r.crash(leader)
		err := <-done
		r.start(leader)
		(&bank{r: r}).unlocked()
		if left = r.count(0); left != 0 && left != 2*sweepKeys {
			r.t.Errorf("%d keys are left (%v)", left, err)
		}
		if n := r.count(before); n != 2*sweepKeys {
			r.t.Errorf("%d keys were there", n)
		}
		del, err := r.nodes[0].core.KV().DeleteRange(r.t.Context(), &pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), PrevKv: true})
		if err != nil || del.Deleted != int64(len(del.PrevKvs)) {
			r.t.Errorf("%d deleted, %d were there, %v", del.GetDeleted(), len(del.GetPrevKvs()), err)
		}
	})
}

// sweeping returns how many keys the node counts in the second range.
func (r *rig) sweeping(n *rigNode) int64 {
	for _, p := range n.core.shards.Replicas() {
		if p.Descriptor().Span.Contains([]byte(sweepKey(1, 0))) {
			return p.Show().Keys
		}
	}
	return 0
}
