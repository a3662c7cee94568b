package etcdapi

import (
	"github.com/google/btree"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// checkRangeStream checks a read that is to be streamed by its look.
func checkRangeStream(r *pb.RangeRequest) error {
	if err := rangeapi.CheckRange(r); err != nil {
		return err
	}
	byKey := r.GetSortOrder() == pb.RangeRequest_NONE || r.GetSortTarget() == pb.RangeRequest_KEY && r.GetSortOrder() == pb.RangeRequest_ASCEND
	switch {
	case !byKey:
		return errStreamOrder
	case r.GetMinModRevision() != 0 || r.GetMaxModRevision() != 0 || r.GetMinCreateRevision() != 0 || r.GetMaxCreateRevision() != 0:
		return errStreamFilter
	}
	return nil
}

// etcd has no error values for these.
var (
	errStreamOrder  = status.Error(codes.Unimplemented, "RangeStream does not support custom sort orders")
	errStreamFilter = status.Error(codes.Unimplemented, "RangeStream does not support revision filters")
)

// checkTxn checks a transaction without data: first each operation, then which keys they
// touch. The second check is dearer, and the first has bounded what it sees.
func checkTxn(r *pb.TxnRequest, maxOps int) error {
	if err := rangeapi.CheckTxn(r, maxOps); err != nil {
		return err
	}
	if _, err := checkTouched(r.GetSuccess()); err != nil {
		return err
	}
	_, err := checkTouched(r.GetFailure())
	return err
}

// touched are the keys that a list of operations puts and deletes, the operations of
// nested transactions among them.
type touched struct {
	puts    map[string]struct{}
	deletes *btree.BTreeG[interval] // disjoint
}

// interval is [start, end) of keys in byte order; end is "" for no end.
type interval struct{ start, end string }

// checkTouched refuses lists that put a key twice or put a key that they delete too.
// Deleting twice, and reading, is allowed. The two branches of one nested transaction
// never both happen and may put the same keys. As in etcd, the puts of a nested
// transaction are compared with the deletes of the list itself and of the nested
// transactions before it, not of those after it.
func checkTouched(ops []*pb.RequestOp) (touched, error) {
	t := touched{}
	for _, op := range ops {
		if d := op.GetRequestDeleteRange(); d != nil {
			t.addDelete(deleteInterval(d))
		}
	}
	for _, op := range ops {
		txn := op.GetRequestTxn()
		if txn == nil {
			continue
		}
		then, err := checkTouched(txn.GetSuccess())
		if err != nil {
			return t, err
		}
		otherwise, err := checkTouched(txn.GetFailure())
		if err != nil {
			return t, err
		}
		if err := t.addNested(then, otherwise); err != nil {
			return t, err
		}
	}
	for _, op := range ops {
		if p := op.GetRequestPut(); p != nil {
			if err := t.addPut(string(p.GetKey())); err != nil {
				return t, err
			}
		}
	}
	return t, nil
}

// addNested takes over what the two branches of a nested transaction touch.
func (t *touched) addNested(then, otherwise touched) error {
	for k := range otherwise.puts {
		if _, both := then.puts[k]; both {
			continue // checked and added with the other branch
		}
		if err := t.addPut(k); err != nil {
			return err
		}
	}
	if len(t.puts) == 0 && t.deletes == nil {
		t.puts = then.puts // nothing to compare with: chains of nested ones cost no copies
	} else {
		for k := range then.puts {
			if err := t.addPut(k); err != nil {
				return err
			}
		}
	}
	t.addDeletes(then.deletes)
	t.addDeletes(otherwise.deletes)
	return nil
}

func (t *touched) addPut(key string) error {
	if _, twice := t.puts[key]; twice || t.deleted(key) {
		return kverror.DuplicateKey
	}
	if t.puts == nil {
		t.puts = make(map[string]struct{})
	}
	t.puts[key] = struct{}{}
	return nil
}

// deleteInterval returns what a delete touches. Like etcd it takes the range_end "\x00"
// for an ordinary end here. Nothing lies between the two, so such a delete forbids no put.
func deleteInterval(d *pb.DeleteRangeRequest) interval {
	if len(d.GetRangeEnd()) == 0 {
		return interval{string(d.GetKey()), string(d.GetKey()) + "\x00"}
	}
	return interval{string(d.GetKey()), string(d.GetRangeEnd())}
}

func (t *touched) deleted(key string) (found bool) {
	if t.deletes == nil {
		return false
	}
	t.deletes.DescendLessOrEqual(interval{start: key}, func(iv interval) bool {
		found = key < iv.end
		return false
	})
	return found
}

// addDelete adds an interval and joins those that it overlaps, which keeps the tree
// disjoint and one look per key enough.
func (t *touched) addDelete(iv interval) {
	if iv.start >= iv.end {
		return
	}
	if t.deletes == nil {
		t.deletes = btree.NewG(16, func(a, b interval) bool { return a.start < b.start })
	}
	var joined []interval
	t.deletes.DescendLessOrEqual(iv, func(o interval) bool {
		if o.end >= iv.start {
			joined = append(joined, o)
		}
		return false
	})
	t.deletes.AscendGreaterOrEqual(iv, func(o interval) bool {
		if o.start > iv.end {
			return false
		}
		joined = append(joined, o)
		return true
	})
	for _, o := range joined {
		t.deletes.Delete(o)
		iv.start, iv.end = min(iv.start, o.start), max(iv.end, o.end)
	}
	t.deletes.ReplaceOrInsert(iv)
}

func (t *touched) addDeletes(o *btree.BTreeG[interval]) {
	switch {
	case o == nil:
	case t.deletes == nil:
		t.deletes = o
	default:
		o.Ascend(func(iv interval) bool { t.addDelete(iv); return true })
	}
}

// readOnly says whether no branch of the transaction can change anything. As in etcd,
// a nested transaction counts as a change.
func readOnly(r *pb.TxnRequest) bool {
	for _, branch := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
		for _, op := range branch {
			if op.GetRequestRange() == nil {
				return false
			}
		}
	}
	return true
}

// readsSpan says whether a transaction may read many keys.
func readsSpan(r *pb.TxnRequest) bool {
	for _, branch := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
		for _, op := range branch {
			q, d, n := op.GetRequestRange(), op.GetRequestDeleteRange(), op.GetRequestTxn()
			if len(q.GetRangeEnd()) > 0 && !q.GetCountOnly() || len(d.GetRangeEnd()) > 0 && d.GetPrevKv() || n != nil && readsSpan(n) {
				return true
			}
		}
	}
	return false
}

// proposedIDBytes are those of the request id in a proposal's header: ten nearly always, and a tag.
const proposedIDBytes = 1 + 10

// sizeAsProposed returns the bytes of a user's change as etcd's raft proposal. That is what etcd compares
// with max-request-bytes. Beside the change that has a header, which names the user and the auth revision of its token.
func sizeAsProposed(op proto.Message, user string, revision uint64) int {
	header := proposedIDBytes
	if user != "" {
		header += 1 + protowire.SizeBytes(len(user))
	}
	if revision != 0 {
		header += 1 + protowire.SizeVarint(revision)
	}
	return 2 + protowire.SizeBytes(header) + 1 + protowire.SizeBytes(proto.Size(op)) // tags of two bytes and of one
}

func (s *Server) checkSize(op proto.Message, c *auth.Caller) error {
	if n := sizeAsProposed(op, c.User, c.Revision); n > s.opts.MaxRequestBytes {
		return kverror.New(kverror.RequestTooLarge, "%d bytes, at most %d", n, s.opts.MaxRequestBytes)
	}
	return nil
}
