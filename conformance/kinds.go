package conformance

import (
	"context"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// kind is one method of the API with its generator of requests. A new unary method is
// one more row. Calls on a stream can be rows too once its messages are compared: the
// row's generator chooses actions on the open streams.
type kind struct {
	name   string
	method string // gRPC's full name
	// weight is the frequency of the kind, relative to the sum of all weights.
	weight   int
	generate func(*source) proto.Message
	response func() proto.Message
	// do makes the call of a kind that is not unary.
	do func(context.Context, *grpc.ClientConn, proto.Message) answer
	// invoke makes the call; nil is a unary one.
	invoke func(ctx context.Context, conn *grpc.ClientConn, req, resp proto.Message) error
	// alone keeps the kind out of waves: its revisions do not show its effect on other
	// calls at the same time.
	alone bool
}

// kinds is the table of all generated calls.
var kinds = slices.Concat(kvKinds, leaseKinds, lockKinds, jsonKinds)

var kvKinds = []*kind{
	{
		name: "Range", method: pb.KV_Range_FullMethodName, weight: 34,
		generate: func(s *source) proto.Message { return s.rangeRequest(s.anySpan) },
		response: func() proto.Message { return &pb.RangeResponse{} },
	},
	{
		name: pageName, method: pb.KV_Range_FullMethodName, weight: 8,
		generate: func(s *source) proto.Message { return s.pageRequest() },
		response: func() proto.Message { return &pb.RangeResponse{} },
	},
	{
		name: "RangeStream", method: pb.KV_RangeStream_FullMethodName, weight: 6, do: rangeStream,
		generate: func(s *source) proto.Message { return s.streamRequest() },
	},
	{
		name: "Put", method: pb.KV_Put_FullMethodName, weight: 24,
		generate: func(s *source) proto.Message { return s.putRequest(s.group()) },
		response: func() proto.Message { return &pb.PutResponse{} },
	},
	{
		name: "DeleteRange", method: pb.KV_DeleteRange_FullMethodName, weight: 8,
		generate: func(s *source) proto.Message { return s.deleteRequest(s.group()) },
		response: func() proto.Message { return &pb.DeleteRangeResponse{} },
	},
	{
		name: "Txn", method: pb.KV_Txn_FullMethodName, weight: 31,
		generate: func(s *source) proto.Message { return s.txnRequest(s.group()) },
		response: func() proto.Message { return &pb.TxnResponse{} },
	},
	{
		name: compareAndPutName, method: pb.KV_Txn_FullMethodName, weight: 8,
		generate: func(s *source) proto.Message { return s.compareAndPut(s.group()) },
		response: func() proto.Message { return &pb.TxnResponse{} },
	},
	{
		name: "Compact", method: pb.KV_Compact_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message {
			return &pb.CompactionRequest{Revision: s.compaction(), Physical: s.chance(2)}
		},
		response: func() proto.Message { return &pb.CompactionResponse{} },
	},
}

// next returns the next call.
func (s *source) next() *call {
	sum := 0
	for _, k := range s.kinds {
		sum += k.weight
	}
	n := s.IntN(sum)
	for _, k := range s.kinds {
		if n -= k.weight; n < 0 {
			return &call{kind: k, request: k.generate(s), byPipe: s.chance(2)}
		}
	}
	panic(fmt.Sprintf("conformance: %d is beyond the weights' sum %d", n, sum))
}

// rangeRequest returns a read whose keys come from span.
func (s *source) rangeRequest(span func(g int) (key, end []byte)) *pb.RangeRequest {
	// The revision of a serializable read does not show its place among calls at the
	// same time.
	r := &pb.RangeRequest{Revision: s.explicit(), Serializable: !s.steady && s.chance(7)}
	r.Key, r.RangeEnd = span(s.group())
	r.KeysOnly, r.CountOnly = s.chance(6), s.chance(8)
	if s.chance(2) {
		r.Limit = pick(s, []int64{1, 1, 2, 2, 3, 5, 8, 20, 1000, -1, 1<<63 - 1})
	}
	if s.chance(2) {
		r.SortOrder = pb.RangeRequest_SortOrder(s.IntN(3))
		r.SortTarget = pb.RangeRequest_SortTarget(s.IntN(5))
	}
	for _, f := range []*int64{&r.MinModRevision, &r.MaxModRevision, &r.MinCreateRevision, &r.MaxCreateRevision} {
		if s.chance(10) {
			*f = s.near(s.compacted + s.Int64N(max(1, s.revision-s.compacted+1)))
		}
	}
	switch s.IntN(80) {
	case 0:
		r.SortOrder = pb.RangeRequest_SortOrder(pick(s, []int32{3, -1, 1 << 30}))
	case 1:
		r.SortTarget = pb.RangeRequest_SortTarget(pick(s, []int32{5, -1, 1 << 30}))
	case 2:
		r.Key = nil
	}
	return r
}

// pageName marks reads that read a list page by page, as kube-apiserver does: all at
// the revision of the first page, whatever is written meanwhile.
const pageName = "Page"

// pageRequest is a list's next page, or the first of another.
func (s *source) pageRequest() *pb.RangeRequest {
	if s.page == nil || s.chance(16) {
		g := s.group()
		end := pick(s, groups[g:]).end
		if end == "" {
			end = "\x00"
		}
		s.page = &pb.RangeRequest{
			Key: []byte(groups[g].prefix), RangeEnd: []byte(end), Revision: s.explicit(),
			Limit: 1 + s.Int64N(6), KeysOnly: s.chance(6),
		}
	}
	return proto.CloneOf(s.page)
}

// observePage learns from a page.
func (s *source) observePage(a answer) {
	r, ok := a.response.(*pb.RangeResponse)
	if s.page == nil || !ok || !r.GetMore() || len(r.GetKvs()) == 0 {
		s.page = nil
		return
	}
	if s.page.Revision <= 0 {
		s.page.Revision = r.GetHeader().GetRevision()
	}
	s.page.Key = append(slices.Clone(r.GetKvs()[len(r.GetKvs())-1].GetKey()), 0)
}

// streamRequest is a streamed read, mostly one that may be streamed.
func (s *source) streamRequest() *pb.RangeRequest {
	r := s.rangeRequest(s.anySpan)
	if !s.chance(8) {
		r.SortOrder, r.SortTarget = pb.RangeRequest_NONE, pb.RangeRequest_KEY
		r.MinModRevision, r.MaxModRevision, r.MinCreateRevision, r.MaxCreateRevision = 0, 0, 0, 0
	}
	return r
}

// txnRange is a read inside a transaction, within the transaction's group.
func (s *source) txnRange(g int) *pb.RangeRequest {
	r := s.rangeRequest(func(int) (key, end []byte) { return s.writeSpan(g) })
	if s.steady {
		r.Revision = 0
	}
	return r
}

func (s *source) putRequest(g int) *pb.PutRequest {
	r := &pb.PutRequest{Key: s.writeKey(g), Value: s.value(), PrevKv: s.chance(3)}
	if !s.steady && s.chance(8) {
		r.IgnoreValue = true
		if !s.chance(8) {
			r.Value = nil
		}
	}
	if !s.steady && s.chance(16) {
		r.IgnoreLease = true
	}
	if s.chance(5) {
		r.Lease = s.liveLease()
	}
	switch s.IntN(100) {
	case 0, 1:
		r.Lease = pick(s, []int64{1, -1, 1 << 62, 7587})
	case 2:
		r.Key = nil
	case 3:
		if s.chance(4) {
			s.fill(r, func(n int) { r.Value = slices.Repeat([]byte{'B'}, n) })
		}
	}
	return r
}

func (s *source) deleteRequest(g int) *pb.DeleteRangeRequest {
	r := &pb.DeleteRangeRequest{PrevKv: s.chance(3)}
	r.Key, r.RangeEnd = s.writeSpan(g)
	if s.chance(60) {
		r.Key = nil
	}
	if s.chance(1000) && len(r.Key) > 0 {
		key := r.Key
		r.RangeEnd = nil
		s.fill(r, func(n int) { r.Key = append(slices.Clone(key), slices.Repeat([]byte{'K'}, n)...) })
	}
	return r
}
