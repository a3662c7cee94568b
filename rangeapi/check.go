package rangeapi

import (
	"cmp"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// MaxRequestBytes bounds shard.Limits.MaxRequestBytes. One entry has room for a put of that size,
// or for such a transaction with the operations that etcd allows by default. A transaction with
// thousands of small operations may exceed an entry and is refused by itself.
const MaxRequestBytes = 4 << 20

// MaxReadOnlyCompares bounds the compares that a gateway evaluates by one read-only transaction,
// which has a nested one for each. It holds whatever MaxTxnOps is.
const MaxReadOnlyCompares = 60

// CheckRequest refuses requests that the evaluation cannot take: empty keys, too many operations,
// too many bytes. The gateways have checked more. Only etcdapi checks which keys a transaction
// touches twice; the evaluation copes with any.
func CheckRequest(op proto.Message, maxRequestBytes, maxTxnOps int) error {
	switch o := op.(type) {
	case *pb.RangeRequest:
		return CheckRange(o)
	case *Page:
		return checkPage(o)
	case *pb.PutRequest:
		if err := CheckPut(o); err != nil {
			return err
		}
	case *pb.DeleteRangeRequest:
		if err := CheckDelete(o); err != nil {
			return err
		}
	case *pb.TxnRequest:
		ops := maxTxnOps
		if !CanWrite(o) {
			// It may be a gateway's evaluation of compares. The client's gateway has checked its
			// bound.
			ops = max(ops, MaxReadOnlyCompares+1)
		}
		if err := CheckTxn(o, ops); err != nil {
			return err
		}
	default:
		return BadRequest("no operation %T", op)
	}
	if !CanWrite(op) || SizeBound(op) <= maxRequestBytes {
		return nil
	}
	if n := proto.Size(op); n > maxRequestBytes {
		return kverror.New(kverror.RequestTooLarge, "%d bytes, at most %d", n, maxRequestBytes)
	}
	return nil
}

// CheckRange refuses a read that etcd refuses.
func CheckRange(r *pb.RangeRequest) error {
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

// CheckPut refuses a put that etcd refuses.
func CheckPut(r *pb.PutRequest) error {
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

// CheckDelete refuses a delete that etcd refuses.
func CheckDelete(r *pb.DeleteRangeRequest) error {
	if len(r.GetKey()) == 0 {
		return kverror.EmptyKey
	}
	return nil
}

// CheckTxn refuses a transaction with a bad operation, or with more than ops compares or
// operations in a branch. A nested transaction may have as many as its parent leaves, which
// bounds the depth too.
func CheckTxn(t *pb.TxnRequest, ops int) error {
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
		return CheckRange(o.RequestRange)
	case *pb.RequestOp_RequestPut:
		return CheckPut(o.RequestPut)
	case *pb.RequestOp_RequestDeleteRange:
		return CheckDelete(o.RequestDeleteRange)
	case *pb.RequestOp_RequestTxn:
		return CheckTxn(o.RequestTxn, ops)
	}
	// etcd answers an empty operation like this.
	return kverror.KeyNotFound
}

// EndsLocks says whether a command may end a lock that others wait for. Such commands have their
// own bus method and budget.
func EndsLocks(op TxnCommand) bool {
	switch op.Kind() {
	case TxnPrepare, TxnRevoke, TxnRevokeChecked, TxnLeaseKeys:
		return false
	case TxnCommit, TxnResolve, TxnDecide, TxnForget, TxnRead:
	}
	return true
}

// RevisionOf returns the highest revision that a command names as an allocated one.
func RevisionOf(op TxnCommand) keyspace.Revision {
	switch o := op.(type) {
	case *Prepare:
		return o.Name.Start
	case *Commit:
		return max(o.Name.Start, o.Revision)
	case *Resolve:
		return max(o.Name.Start, o.Revision)
	case *Decide:
		return o.Name.Start
	}
	return 0
}

// TermOf returns the term of the sequencer that has allocated a command's revision, 0 if none is
// known.
func TermOf(op TxnCommand) uint64 {
	switch o := op.(type) {
	case *Commit:
		return o.Term
	case *Resolve:
		return o.Term
	}
	return 0
}

// CheckTxnCommand refuses commands that the evaluation cannot take.
func CheckTxnCommand(op TxnCommand) error {
	p, ok := op.(*Prepare)
	if !ok {
		return checkLeaseOp(op)
	}
	if p.Revoke != 0 && len(p.Guards)+len(p.Writes) > 0 {
		return BadRequest("transaction %s revokes lease %d and has other operations", p.Name, p.Revoke)
	}
	if len(p.Anchor) == 0 || p.Name.Attempt == 0 {
		return BadRequest("transaction %s with anchor %q", p.Name, p.Anchor)
	}
	for i := range p.Guards {
		if len(p.Guards[i].Compare.GetKey()) == 0 || p.Guards[i].Want > WantFails {
			return BadRequest("malformed guard %v", p.Guards[i].Compare)
		}
	}
	for i := range p.Writes {
		var err error
		switch o := p.Writes[i].Op.(type) {
		case *pb.PutRequest:
			err = CheckPut(o)
		case *pb.DeleteRangeRequest:
			err = CheckDelete(o)
		default:
			err = BadRequest("%T is not a write", o)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// CompareAbsent says whether a compare holds for an absent key. Its numbers are 0, and no value
// compares with it.
func CompareAbsent(c *pb.Compare) bool {
	var want int64
	switch c.GetTarget() {
	case pb.Compare_VALUE:
		return false
	case pb.Compare_CREATE:
		want = c.GetCreateRevision()
	case pb.Compare_MOD:
		want = c.GetModRevision()
	case pb.Compare_VERSION:
		want = c.GetVersion()
	case pb.Compare_LEASE:
		want = c.GetLease()
	}
	return Holds(c.GetResult(), cmp.Compare(0, want))
}

// Holds says whether a comparison's result satisfies the compare. As in etcd, an unknown result
// holds.
func Holds(want pb.Compare_CompareResult, result int) bool {
	switch want {
	case pb.Compare_EQUAL:
		return result == 0
	case pb.Compare_NOT_EQUAL:
		return result != 0
	case pb.Compare_GREATER:
		return result > 0
	case pb.Compare_LESS:
		return result < 0
	}
	return true
}

func checkPage(p *Page) error {
	if p.RangeRequest == nil {
		return BadRequest("page without a request")
	}
	if err := CheckRange(p.RangeRequest); err != nil {
		return err
	}
	if Sorts(p.RangeRequest) || p.GetCountOnly() {
		return BadRequest("page in another order than key order, or without keys")
	}
	if p.MaxBytes < 1 || p.MaxBytes > MaxPageBytes {
		return BadRequest("page of %d bytes", p.MaxBytes)
	}
	return nil
}
