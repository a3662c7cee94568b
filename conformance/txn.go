package conformance

import (
	"maps"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
)

// txnRequest returns a transaction whose keys are of the group.
func (s *source) txnRequest(g int) *pb.TxnRequest {
	switch s.IntN(150) {
	case 0, 1:
		return s.longTxn(g)
	case 2:
		return s.deepTxn(g)
	case 3:
		if s.chance(4) {
			return s.largeTxn(g)
		}
	case 4, 5, 6, 7:
		t := s.twiceTxn(g)
		spareEtcd(t)
		return t
	}
	t := s.txn(g, 0, s.chance(5))
	spareEtcd(t)
	return t
}

// twiceTxn returns a transaction that writes keys more than once, in the ways that etcd
// accepts. One nested transaction puts a key and the next one deletes it, or deletes up
// to the end of all keys stand beside the puts.
func (s *source) twiceTxn(g int) *pb.TxnRequest {
	var puts, dels []*pb.RequestOp
	taken := map[string]bool{}
	for range 1 + s.IntN(3) {
		p := s.txnPut(g)
		if key := string(p.GetRequestPut().GetKey()); !taken[key] {
			taken[key] = true
			puts = append(puts, p)
		}
	}
	t := &pb.TxnRequest{}
	if s.chance(3) {
		// They lie above the deleted key, or all do.
		d := &pb.DeleteRangeRequest{Key: puts[0].GetRequestPut().GetKey(), RangeEnd: []byte{0}, PrevKv: s.chance(3)}
		if s.chance(4) || len(d.Key) == 0 {
			d.Key = []byte{0}
		}
		all := &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: d}}
		switch s.IntN(3) {
		case 0:
			t.Success = append(puts, all)
		case 1:
			t.Success = append([]*pb.RequestOp{all}, puts...)
		default:
			t.Success = append(append([]*pb.RequestOp{all}, puts...), all)
		}
		return t
	}
	for _, key := range slices.Sorted(maps.Keys(taken)) {
		d := &pb.DeleteRangeRequest{Key: []byte(key), PrevKv: s.chance(3)}
		switch s.IntN(4) {
		case 0:
			d.RangeEnd = []byte(key + "\x00")
		case 1:
			d.Key, d.RangeEnd = s.writeSpan(g)
		}
		dels = append(dels, &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: d}})
	}
	t.Success = []*pb.RequestOp{nested(&pb.TxnRequest{Success: puts})}
	if s.chance(2) {
		t.Success = append(t.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: s.txnRange(g)}})
	}
	t.Success = append(t.Success, nested(&pb.TxnRequest{Success: dels}))
	return t
}

// writesTwice says whether a transaction may write a key more than once: with a put and
// with a delete. etcd accepts that if the delete extends to the end of all keys or is
// in another nested transaction than the put.
func writesTwice(t *pb.TxnRequest) bool {
	for _, branch := range [2][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		puts, deletes := writes(branch, nil, nil)
		for _, p := range puts {
			if slices.ContainsFunc(deletes, func(s keyspace.Span) bool { return s.Contains(p) }) {
				return true
			}
		}
	}
	return false
}

// writes adds the keys that the operations put and the spans that they delete, in both
// branches of nested transactions.
func writes(ops []*pb.RequestOp, puts [][]byte, deletes []keyspace.Span) ([][]byte, []keyspace.Span) {
	for _, op := range ops {
		if p := op.GetRequestPut(); p != nil {
			puts = append(puts, p.GetKey())
		}
		if d := op.GetRequestDeleteRange(); d != nil {
			if s, ok := keyspace.FromEtcd(d.GetKey(), d.GetRangeEnd()); ok {
				deletes = append(deletes, s)
			}
		}
		puts, deletes = writes(op.GetRequestTxn().GetSuccess(), puts, deletes)
		puts, deletes = writes(op.GetRequestTxn().GetFailure(), puts, deletes)
	}
	return puts, deletes
}

// spareEtcd removes operations that etcd 3.7.3 does not survive. Such a put keeps the value
// or the lease of a key, and the same transaction has deleted the key before. etcd refuses
// the pair, except if the delete extends to the end of all keys.
func spareEtcd(t *pb.TxnRequest) {
	puts, open := rewrites(t)
	for _, p := range puts {
		if open {
			p.IgnoreValue, p.IgnoreLease = false, false
		}
	}
}

// rewrites returns the puts of a transaction, in all its branches. It also says whether
// one of its deletes extends to the end of all keys.
func rewrites(t *pb.TxnRequest) (puts []*pb.PutRequest, open bool) {
	for _, ops := range [2][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		for _, op := range ops {
			if p := op.GetRequestPut(); p != nil {
				puts = append(puts, p)
			}
			open = open || string(op.GetRequestDeleteRange().GetRangeEnd()) == "\x00"
			if n := op.GetRequestTxn(); n != nil {
				inner, too := rewrites(n)
				puts, open = append(puts, inner...), open || too
			}
		}
	}
	return puts, open
}

// txnDepth is how deep ordinary transactions nest.
const txnDepth = 3

// txn returns a transaction at the given depth. A read-only one has only reads in both
// branches.
func (s *source) txn(g, depth int, reads bool) *pb.TxnRequest {
	t := &pb.TxnRequest{}
	for range s.IntN(4) {
		t.Compare = append(t.Compare, s.compare(g))
	}
	t.Success, t.Failure = s.ops(g, depth, reads), s.ops(g, depth, reads)
	return t
}

// ops returns a branch. Most branches put each key once, because other branches are
// refused; the rest is random.
func (s *source) ops(g, depth int, reads bool) []*pb.RequestOp {
	var ops []*pb.RequestOp
	careful := !s.chance(6)
	taken := map[string]bool{}
	for range s.IntN(5) {
		op := s.op(g, depth, reads)
		if p := op.GetRequestPut(); p != nil && careful {
			if taken[string(p.GetKey())] {
				continue
			}
			taken[string(p.GetKey())] = true
		}
		ops = append(ops, op)
	}
	return ops
}

func (s *source) op(g, depth int, reads bool) *pb.RequestOp {
	n := s.IntN(100)
	switch {
	case n == 0:
		return &pb.RequestOp{}
	case reads || n < 35:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: s.txnRange(g)}}
	case n < 70:
		return s.txnPut(g)
	case n < 85 || depth == txnDepth:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: s.deleteRequest(g)}}
	}
	return nested(s.txn(g, depth+1, s.chance(5)))
}

func (s *source) txnPut(g int) *pb.RequestOp {
	p := s.putRequest(g)
	if s.steady && !slices.Contains(s.leases, p.Lease) {
		p.Lease = 0 // refused in one branch and not in the other
	}
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: p}}
}

func nested(t *pb.TxnRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: t}}
}

// compare returns a condition that is true about half of the time.
func (s *source) compare(g int) *pb.Compare {
	c := &pb.Compare{
		Target: pb.Compare_CompareTarget(s.IntN(5)),
		Result: pick(s, []pb.Compare_CompareResult{
			pb.Compare_EQUAL, pb.Compare_EQUAL, pb.Compare_EQUAL, pb.Compare_GREATER, pb.Compare_LESS, pb.Compare_NOT_EQUAL,
		}),
	}
	if s.chance(4) {
		c.Key, c.RangeEnd = s.writeSpan(g)
	} else {
		c.Key = s.writeKey(g)
	}
	kv := s.known[string(c.Key)]
	if kv == nil || s.chance(6) {
		kv = s.aKnown(g)
	}
	union := c.Target
	if s.chance(30) {
		union = pb.Compare_CompareTarget(s.IntN(5)) // one that does not belong to the target
	}
	switch union {
	case pb.Compare_VERSION:
		c.TargetUnion = &pb.Compare_Version{Version: s.near(kv.GetVersion())}
	case pb.Compare_CREATE:
		c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: s.near(kv.GetCreateRevision())}
	case pb.Compare_MOD:
		c.TargetUnion = &pb.Compare_ModRevision{ModRevision: s.near(kv.GetModRevision())}
	case pb.Compare_LEASE:
		c.TargetUnion = &pb.Compare_Lease{Lease: s.near(kv.GetLease())}
	default:
		v := kv.GetValue()
		if s.chance(2) {
			v = s.value()
		}
		c.TargetUnion = &pb.Compare_Value{Value: v}
	}
	switch s.IntN(120) {
	case 0:
		c.TargetUnion = nil
	case 1:
		c.Target = pb.Compare_CompareTarget(pick(s, []int32{5, -1, 100}))
	case 2:
		c.Result = pb.Compare_CompareResult(pick(s, []int32{4, -1, 100}))
	case 3:
		c.Key = nil
	}
	return c
}

// longTxn returns a transaction with about the largest number of operations, some of
// them nested.
func (s *source) longTxn(g int) *pb.TxnRequest {
	outer := maxTxnOps + 2 - s.IntN(4)
	inner := 0
	if s.chance(2) {
		outer = 1 + s.IntN(maxTxnOps-1)
		inner = maxTxnOps - outer + 2 - s.IntN(4)
	}
	list := func(n int) (ops []*pb.RequestOp) {
		for range n {
			r := &pb.DeleteRangeRequest{Key: s.writeKey(g)}
			ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: r}})
		}
		return ops
	}
	t := &pb.TxnRequest{}
	switch s.IntN(3) {
	case 0:
		t.Success = list(outer)
	case 1:
		t.Failure = list(outer)
	default:
		for range outer {
			t.Compare = append(t.Compare, &pb.Compare{Key: s.writeKey(g), Result: pb.Compare_NOT_EQUAL, TargetUnion: &pb.Compare_Version{Version: -1}})
		}
	}
	if inner > 0 {
		n := nested(&pb.TxnRequest{Success: list(inner)})
		if len(t.Success) > 0 {
			t.Success[s.IntN(len(t.Success))] = n
		} else {
			t.Success = append(t.Success, n)
		}
	}
	return t
}

// deepTxn returns nested transactions of about the largest depth.
func (s *source) deepTxn(g int) *pb.TxnRequest {
	t := s.txn(g, txnDepth, false)
	for range maxTxnOps - s.IntN(12) {
		outer := &pb.TxnRequest{}
		if s.chance(2) {
			outer.Success = []*pb.RequestOp{nested(t)}
		} else {
			outer.Compare = []*pb.Compare{{Key: s.writeKey(g), Result: pb.Compare_LESS, TargetUnion: &pb.Compare_Version{}}}
			outer.Failure = []*pb.RequestOp{nested(t)}
		}
		t = outer
	}
	return t
}

// largeTxn returns a transaction of about the largest size in bytes.
func (s *source) largeTxn(g int) *pb.TxnRequest {
	p := &pb.PutRequest{Key: s.writeKey(g)}
	t := &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: p}}}}
	if s.chance(3) {
		// A read-only one has no size limit.
		r := &pb.RangeRequest{Key: []byte(groups[g].prefix)}
		t.Success[0].Request = &pb.RequestOp_RequestRange{RequestRange: r}
		s.fill(t, func(n int) { r.Key = append([]byte(groups[g].prefix), slices.Repeat([]byte{'K'}, n)...) })
		return t
	}
	s.fill(t, func(n int) { p.Value = slices.Repeat([]byte{'B'}, n) })
	return t
}
