package eval

import (
	"runtime"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// An answer shows the revision of a predecessor that gets it at the moment the answer
// is drafted: the draft has it at once, or remembers to fill it in.
func TestDraftKeepsARevisionThatArrivesMeanwhile(t *testing.T) {
	for range 2000 {
		txn := &PendingTxn{Floor: 6}
		it := &item{key: []byte("k"), mod: Ref{txn: txn}, create: Ref{rev: 3}}
		d := Draft{top: &pb.ResponseHeader{}}
		var kvs []*mvccpb.KeyValue
		go txn.SetRevision(7)
		for known := false; !known; {
			_, known = it.mod.known()
			kvs = append(kvs, d.keep(it))
			if len(kvs) > 100 {
				runtime.Gosched() // busy processors do not run the other goroutine for long
			}
		}
		d.Settle(8, true)
		for i, kv := range kvs {
			if kv.GetModRevision() != 7 || kv.GetCreateRevision() != 3 {
				t.Fatalf("answer %d of %d has mod %d and create %d, want 7 and 3", i, len(kvs), kv.GetModRevision(), kv.GetCreateRevision())
			}
		}
	}
}
