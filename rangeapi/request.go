package rangeapi

import (
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Request is one request to one range.
type Request struct {
	Range keyspace.RangeID
	// Generation is the range's generation when the request was routed. A range of another
	// generation refuses with WrongRange and its descriptor.
	Generation keyspace.Generation
	// ReadRevision is the revision R that a read reports. The sequencer named it after the client's
	// request arrived. It counts for a RangeRequest and for a TxnRequest without writes in any
	// branch; 0 lets the range ask for it.
	ReadRevision keyspace.Revision
	// ReadTerm is the term of the sequencer that named ReadRevision; 0 is unknown. A range that
	// knows of a later sequencer refuses with ReadAgain.
	ReadTerm uint64
	// Permit says under which rights it was permitted. A range that asks the sequencer on its behalf passes
	// it on. It is 0 for a read that has a ReadRevision, because that was named to a permitted read.
	Permit keyspace.Permit
	// Txn, if not nil, is the committed transaction that a RangeRequest reads for. Its own locks do
	// not block the read. It may read what the cluster has compacted since, but not the range.
	Txn *TxnName
	// Traced asks for the record of where the request's time goes, also if it is fast. (package stages)
	Traced bool
	// Op is etcd's *RangeRequest, *PutRequest, *DeleteRangeRequest or *TxnRequest, or a *Page. All
	// its keys lie in the range. The range does not change it and keeps parts of it, so nobody may
	// change it any more.
	Op proto.Message
}

// Response answers a Request with etcd's response to Op. It fills header.revision and leaves the
// header's other fields to the gateway.
//
// A RangeResponse covers this range's part of the span. Count counts the part, kvs are at most
// limit keys of it, and more says that the part has others. A *PageAnswer answers a Page.
type Response struct {
	Op proto.Message
}

// opKind is the number of an operation on the wire.
type opKind uint8

const (
	opRange opKind = iota + 1
	opPut
	opDelete
	opTxn
	// The forms of plain.go.
	opPlainGet
	opPlainPut
)

// kindOf returns the number of the operation, or 0.
func kindOf(op proto.Message) opKind {
	switch op.(type) {
	case *pb.RangeRequest:
		return opRange
	case *pb.PutRequest:
		return opPut
	case *pb.DeleteRangeRequest:
		return opDelete
	case *pb.TxnRequest:
		return opTxn
	}
	return 0
}

// newRequestOp returns an empty operation of the kind, or nil.
func newRequestOp(k opKind) proto.Message {
	switch k {
	case opRange:
		return &pb.RangeRequest{}
	case opPut:
		return &pb.PutRequest{}
	case opDelete:
		return &pb.DeleteRangeRequest{}
	case opTxn:
		return &pb.TxnRequest{}
	case opPlainGet, opPlainPut: // decodePlain makes them
	}
	return nil
}

// newResponseOp returns an empty response of the kind, or nil.
func newResponseOp(k opKind) proto.Message {
	switch k {
	case opRange:
		return &pb.RangeResponse{}
	case opPut:
		return &pb.PutResponse{}
	case opDelete:
		return &pb.DeleteRangeResponse{}
	case opTxn:
		return &pb.TxnResponse{}
	case opPlainGet, opPlainPut: // decodePlainResponse makes them
	}
	return nil
}

// responseKind returns the number of the response, or 0.
func responseKind(op proto.Message) opKind {
	switch op.(type) {
	case *pb.RangeResponse:
		return opRange
	case *pb.PutResponse:
		return opPut
	case *pb.DeleteRangeResponse:
		return opDelete
	case *pb.TxnResponse:
		return opTxn
	}
	return 0
}

// CanWrite says whether the operation can change something in some branch.
func CanWrite(op proto.Message) bool {
	switch o := op.(type) {
	case *pb.PutRequest, *pb.DeleteRangeRequest:
		return true
	case *pb.TxnRequest:
		return opsCanWrite(o.GetSuccess()) || opsCanWrite(o.GetFailure())
	}
	return false
}

func opsCanWrite(ops []*pb.RequestOp) bool {
	for _, op := range ops {
		switch o := op.GetRequest().(type) {
		case *pb.RequestOp_RequestPut, *pb.RequestOp_RequestDeleteRange:
			return true
		case *pb.RequestOp_RequestTxn:
			if CanWrite(o.RequestTxn) {
				return true
			}
		}
	}
	return false
}

// ExplicitRevision says whether a transaction reads at an explicit revision in some
// branch.
func ExplicitRevision(op proto.Message) bool {
	t, ok := op.(*pb.TxnRequest)
	if !ok {
		return false
	}
	for _, ops := range [2][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		for _, o := range ops {
			if o.GetRequestRange().GetRevision() != 0 {
				return true
			}
			if n := o.GetRequestTxn(); n != nil && ExplicitRevision(n) {
				return true
			}
		}
	}
	return false
}

// Bounds returns the smallest span with every key that an operation names in any branch. Its range
// must cover that span. ok is false if it names no key.
func Bounds(op proto.Message) (s keyspace.Span, ok bool) {
	add := func(key, end []byte) {
		k, valid := keyspace.FromEtcd(key, end)
		if !valid {
			// Such a pair names no key; its start decides the range.
			k = keyspace.Single(key)
		}
		if !ok {
			s, ok = k, true
			return
		}
		s = hull(s, k)
	}
	switch o := op.(type) {
	case *pb.RangeRequest:
		add(o.GetKey(), o.GetRangeEnd())
	case *Page:
		add(o.GetKey(), o.GetRangeEnd())
	case *pb.PutRequest:
		add(o.GetKey(), nil)
	case *pb.DeleteRangeRequest:
		add(o.GetKey(), o.GetRangeEnd())
	case *pb.TxnRequest:
		txnKeys(o, add)
	}
	return s, ok
}

// txnKeys calls add with every pair (key, range_end) of the transaction.
func txnKeys(t *pb.TxnRequest, add func(key, end []byte)) {
	for _, c := range t.GetCompare() {
		add(c.GetKey(), c.GetRangeEnd())
	}
	for _, ops := range [2][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		for _, op := range ops {
			switch o := op.GetRequest().(type) {
			case *pb.RequestOp_RequestRange:
				add(o.RequestRange.GetKey(), o.RequestRange.GetRangeEnd())
			case *pb.RequestOp_RequestPut:
				add(o.RequestPut.GetKey(), nil)
			case *pb.RequestOp_RequestDeleteRange:
				add(o.RequestDeleteRange.GetKey(), o.RequestDeleteRange.GetRangeEnd())
			case *pb.RequestOp_RequestTxn:
				txnKeys(o.RequestTxn, add)
			}
		}
	}
}

// hull returns the smallest span that covers both.
func hull(a, b keyspace.Span) keyspace.Span {
	if string(b.Start) < string(a.Start) {
		a.Start = b.Start
	}
	if len(a.End) == 0 || len(b.End) == 0 {
		a.End = nil
	} else if string(b.End) > string(a.End) {
		a.End = b.End
	}
	return a
}

// HoldsOp says whether a range's span has every key of an operation. etcd has no empty key, so
// "\x00" is its first one.
func HoldsOp(span keyspace.Span, op proto.Message) bool {
	switch o := op.(type) {
	case *pb.PutRequest:
		return span.Contains(o.GetKey())
	case *pb.RangeRequest:
		if len(o.GetRangeEnd()) == 0 {
			return span.Contains(o.GetKey())
		}
	}
	bounds, ok := Bounds(op)
	if !ok {
		return true
	}
	if len(bounds.Start) == 0 {
		bounds.Start = FirstKey
	}
	return span.Covers(bounds)
}

// FirstKey is the smallest key that a client can name.
var FirstKey = []byte{0}

// BadRequest returns the error for a request that makes no sense.
func BadRequest(format string, args ...any) error {
	return &kverror.Error{Kind: kverror.BadRequest, Detail: fmt.Sprintf(format, args...)}
}
