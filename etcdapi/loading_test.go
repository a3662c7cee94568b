package etcdapi

import (
	"errors"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// TestWhileLoading: a cluster that is loaded shows what it has once it follows its source, to linearizable reads and
// to transactions of nothing else.
func TestWhileLoading(t *testing.T) {
	read := func(serializable bool) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("a"), Serializable: serializable}}}
	}
	put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("a")}}}
	nested := &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Success: []*pb.RequestOp{put}}}}
	const kv = "/etcdserverpb.KV/"
	for _, c := range []struct {
		name, method string
		req          any
		follows      bool
	}{
		{"a read", kv + "Range", &pb.RangeRequest{}, true},
		{"a serializable read", kv + "Range", &pb.RangeRequest{Serializable: true}, false},
		{"reads", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false), read(false)}}, true},
		{"reads, one serializable", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false), read(true)}}, false},
		{"a put", kv + "Put", &pb.PutRequest{}, false},
		{"a put in a transaction", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false), put}}, false},
		{"a put in a transaction's other branch", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false)}, Failure: []*pb.RequestOp{put}}, false},
		{"a put in a nested transaction", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{nested}}, false},
		{"a comparison", kv + "Txn", &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("a")}}}, false},
		{"a grant", "/etcdserverpb.Lease/LeaseGrant", &pb.LeaseGrantRequest{}, false},
		{"a watch", "/etcdserverpb.Watch/Watch", nil, false},
	} {
		for _, follows := range []bool{false, true} {
			s := &Server{}
			s.opts.Loading = func() (bool, error) { return follows, errors.New("it is loaded") }
			if err := s.whileLoading(c.method, c.req); (err == nil) != (follows && c.follows) {
				t.Errorf("%s, follows %t: %v", c.name, follows, err)
			}
			s.opts.Loading = func() (bool, error) { return false, nil }
			if err := s.whileLoading(c.method, c.req); err != nil {
				t.Errorf("%s of a cluster that serves: %v", c.name, err)
			}
		}
	}
}
