package shard

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
)

// MaxRequestBytes is the most that Limits.MaxRequestBytes may be: what one entry holds of a
// put, or of a transaction of as many operations as etcd allows by default. One that has
// thousands of small operations may write more than an entry holds and is refused itself.
const MaxRequestBytes = 4 << 20

// MaxLookCompares is how many compares a gateway may have evaluated by one transaction that
// only reads and has a nested one for each, whatever MaxTxnOps is.
const MaxLookCompares = 60

// checkRequest refuses what the evaluation relies on not to get: no empty key, a
// bounded number of operations, a bounded size. The gateways have asked for more:
// which keys a transaction may touch twice is etcdapi's matter alone, and the
// evaluation copes with any.
func checkRequest(op proto.Message, l *Limits) error {
	switch o := op.(type) {
	case *pb.RangeRequest:
		return checkRange(o)
	case *Piece:
		return checkPiece(o)
	case *pb.PutRequest:
		if err := checkPut(o); err != nil {
			return err
		}
	case *pb.DeleteRangeRequest:
		if err := checkDelete(o); err != nil {
			return err
		}
	case *pb.TxnRequest:
		ops := l.MaxTxnOps
		if !canWrite(o) {
			// It may be a gateway's look. What a client may ask for, its gateway has checked.
			ops = max(ops, MaxLookCompares+1)
		}
		if err := checkTxn(o, ops); err != nil {
			return err
		}
	default:
		return badRequest("no operation %T", op)
	}
	if !canWrite(op) || sizeBound(op) <= l.MaxRequestBytes {
		return nil
	}
	if n := proto.Size(op); n > l.MaxRequestBytes {
		return kverror.New(kverror.RequestTooLarge, "%d bytes, at most %d", n, l.MaxRequestBytes)
	}
	return nil
}

func checkRange(r *pb.RangeRequest) error {
	if len(r.GetKey()) == 0 {
		return kverror.EmptyKey
	}
	if _, ok := pb.RangeRequest_SortOrder_name[int32(r.GetSortOrder())]; !ok {
		return kverror.InvalidSort
	}
	if _, ok := pb.RangeRequest_SortTarget_name[int32(r.GetSortTarget())]; !ok {
		return kverror.InvalidSort
	}
	return nil
}

func checkPut(r *pb.PutRequest) error {
	switch {
	case len(r.GetKey()) == 0:
		return kverror.EmptyKey
	case r.GetIgnoreValue() && len(r.GetValue()) != 0:
		return kverror.ValueProvided
	case r.GetIgnoreLease() && r.GetLease() != 0:
		return kverror.LeaseProvided
	}
	return nil
}

func checkDelete(r *pb.DeleteRangeRequest) error {
	if len(r.GetKey()) == 0 {
		return kverror.EmptyKey
	}
	return nil
}

// checkTxn checks a transaction with ops operations left. A nested transaction
// gets what its parent does not use.
func checkTxn(t *pb.TxnRequest, ops int) error {
	used := max(len(t.GetCompare()), len(t.GetSuccess()), len(t.GetFailure()))
	if used > ops {
		return kverror.TooManyOps
	}
	for _, c := range t.GetCompare() {
		if len(c.GetKey()) == 0 {
			return kverror.EmptyKey
		}
	}
	for _, branch := range [2][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		for _, op := range branch {
			if err := checkOp(op, ops-used); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkOp(op *pb.RequestOp, ops int) error {
	switch o := op.GetRequest().(type) {
	case *pb.RequestOp_RequestRange:
		return checkRange(o.RequestRange)
	case *pb.RequestOp_RequestPut:
		return checkPut(o.RequestPut)
	case *pb.RequestOp_RequestDeleteRange:
		return checkDelete(o.RequestDeleteRange)
	case *pb.RequestOp_RequestTxn:
		return checkTxn(o.RequestTxn, ops)
	}
	// So does etcd answer an empty operation.
	return kverror.KeyNotFound
}
