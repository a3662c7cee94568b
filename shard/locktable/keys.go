package locktable

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// visitKeys calls fn with every pair (key, range_end) of an operation, and whether it may
// be written.
func visitKeys(op proto.Message, fn func(key, end []byte, writes bool)) {
	switch o := op.(type) {
	case *pb.PutRequest:
		fn(o.GetKey(), nil, true)
	case *pb.DeleteRangeRequest:
		fn(o.GetKey(), o.GetRangeEnd(), true)
	case *pb.RangeRequest:
		fn(o.GetKey(), o.GetRangeEnd(), false)
	case *pb.TxnRequest:
		for _, c := range o.GetCompare() {
			fn(c.GetKey(), c.GetRangeEnd(), false)
		}
		for _, ops := range [2][]*pb.RequestOp{o.GetSuccess(), o.GetFailure()} {
			for _, op := range ops {
				visitKeys(opMessage(op), fn)
			}
		}
	}
}

// visitLeases calls fn with the leases to which an operation may attach keys.
func visitLeases(op proto.Message, fn func(lease keyspace.LeaseID)) {
	switch o := op.(type) {
	case *pb.PutRequest:
		if o.GetLease() != 0 {
			fn(keyspace.LeaseID(o.GetLease()))
		}
	case *pb.TxnRequest:
		for _, ops := range [2][]*pb.RequestOp{o.GetSuccess(), o.GetFailure()} {
			for _, op := range ops {
				visitLeases(opMessage(op), fn)
			}
		}
	}
}

// opMessage returns the request inside of an operation, nil where there is none.
func opMessage(op *pb.RequestOp) proto.Message {
	switch o := op.GetRequest().(type) {
	case *pb.RequestOp_RequestRange:
		return o.RequestRange
	case *pb.RequestOp_RequestPut:
		return o.RequestPut
	case *pb.RequestOp_RequestDeleteRange:
		return o.RequestDeleteRange
	case *pb.RequestOp_RequestTxn:
		return o.RequestTxn
	}
	return nil
}

// spanCovers is Span.Covers for keys of clients, of which "\x00" is the first.
func spanCovers(s, o keyspace.Span) bool {
	if len(o.Start) == 0 {
		o.Start = rangeapi.FirstKey
	}
	return s.Covers(o)
}
