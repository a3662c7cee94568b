package eval

import (
	"bytes"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// choosePath evaluates the compares of a transaction and of the nested ones that
// it leads to, all on the state before the transaction. The path holds one answer
// per transaction, in the order in which they are met.
func choosePath(w *view, t *pb.TxnRequest, path []bool) ([]bool, error) {
	succeeded := true
	for _, c := range t.GetCompare() {
		ok, err := compareAll(w, c)
		if err != nil {
			return nil, err
		}
		if !ok {
			succeeded = false
			break
		}
	}
	path = append(path, succeeded)
	for _, op := range branch(t, succeeded) {
		if n := op.GetRequestTxn(); n != nil {
			var err error
			if path, err = choosePath(w, n, path); err != nil {
				return nil, err
			}
		}
	}
	return path, nil
}

// branch returns the operations of the branch that is taken.
func branch(t *pb.TxnRequest, succeeded bool) []*pb.RequestOp {
	if succeeded {
		return t.GetSuccess()
	}
	return t.GetFailure()
}

// compareAll says whether the compare holds for its key, or for all keys of its
// span. A key that is not there compares as one whose numbers are 0; its value
// compares with nothing.
func compareAll(w *view, c *pb.Compare) (bool, error) {
	if len(c.GetRangeEnd()) == 0 {
		get := w.getHead
		if c.GetTarget() == pb.Compare_VALUE {
			get = w.get
		}
		it, ok, err := get(c.GetKey())
		if err != nil {
			return false, err
		}
		if !ok {
			return rangeapi.CompareAbsent(c), nil
		}
		return compareItem(c, &it)
	}
	s, ok := keyspace.FromEtcd(c.GetKey(), c.GetRangeEnd())
	if !ok {
		return rangeapi.CompareAbsent(c), nil
	}
	found, holds := false, true
	err := w.scan(s, c.GetTarget() != pb.Compare_VALUE, func(it *item) error {
		found = true
		var err error
		if holds, err = compareItem(c, it); err == nil && !holds {
			err = ErrStop
		}
		return err
	})
	if err != nil {
		return false, err
	}
	if !found {
		return rangeapi.CompareAbsent(c), nil
	}
	return holds, nil
}

// compareItem evaluates the compare on one key. The error is a WaitError where the
// answer hangs on a revision that is not known.
func compareItem(c *pb.Compare, it *item) (bool, error) {
	var result int
	switch c.GetTarget() {
	case pb.Compare_VALUE:
		result = bytes.Compare(it.value, c.GetValue())
	case pb.Compare_CREATE:
		return compareRef(c.GetResult(), it.create, c.GetCreateRevision())
	case pb.Compare_MOD:
		return compareRef(c.GetResult(), it.mod, c.GetModRevision())
	case pb.Compare_VERSION:
		result = compareInt64(it.version, c.GetVersion())
	case pb.Compare_LEASE:
		result = compareInt64(int64(it.lease), c.GetLease())
	}
	return rangeapi.Holds(c.GetResult(), result), nil
}

func compareRef(want pb.Compare_CompareResult, f Ref, number int64) (bool, error) {
	result, decided := f.compare(number)
	if !decided {
		return false, WaitError{f.txn}
	}
	return rangeapi.Holds(want, result), nil
}
