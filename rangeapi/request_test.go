package rangeapi

import (
	"fmt"
	"math"
	"reflect"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

var sampleDescriptor = keyspace.Descriptor{
	Range: 1, Generation: 1, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2}, {ID: 3, Node: 3}},
}

func sampleRequest() *Request {
	return &Request{Range: 7, Generation: 3, ReadRevision: 300, Op: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}}
}

// permittedRequest is a user's request.
func permittedRequest() *Request {
	return &Request{Range: 7, Generation: 3, Permit: keyspace.PermitAt(299), Op: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}}
}

// TestPlainFormsHoldEverything: a message with a plain form loses nothing by it, and others are not
// plain. Each field of the messages is set in turn.
func TestPlainFormsHoldEverything(t *testing.T) {
	plain := map[bool]int{}
	for _, op := range []proto.Message{&pb.RangeRequest{}, &pb.PutRequest{}} {
		eachField(t, op, func(op proto.Message) {
			b, err := AppendRequest(nil, &Request{Range: 1, Op: op})
			if err != nil {
				t.Fatal(err)
			}
			plain[plainKind(op) != 0]++
			if q, err := DecodeRequest(b); err != nil || !proto.Equal(q.Op, op) {
				t.Errorf("%v became %v, %v", op, q, err)
			}
		})
	}
	for _, op := range []proto.Message{&pb.RangeResponse{}, &pb.PutResponse{}} {
		eachField(t, op, func(op proto.Message) {
			plain[plainResponse(op) != 0]++
			b, err := AppendAnswer(nil, &Response{Op: op}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if p, failed, err := DecodeAnswer(b); err != nil || failed != nil || !equalButHeader(p.Op, op) {
				t.Errorf("%v became %v, %v, %v", op, p, failed, err)
			}
		})
	}
	if plain[true] == 0 || plain[false] == 0 {
		t.Error(plain)
	}
}

// equalButHeader compares responses; headers come back with the revision alone.
func equalButHeader(got, want proto.Message) bool {
	strip := func(m proto.Message) proto.Message {
		m = proto.Clone(m)
		h := m.ProtoReflect().Descriptor().Fields().ByName("header")
		m.ProtoReflect().Clear(h)
		return m
	}
	type header interface{ GetHeader() *pb.ResponseHeader }
	g, gok := got.(header)
	w, wok := want.(header)
	return gok && wok && g.GetHeader().GetRevision() == w.GetHeader().GetRevision() && proto.Equal(strip(got), strip(want))
}

// eachField calls fn with the empty message, with each single field set, and with all fields set.
func eachField(t *testing.T, empty proto.Message, fn func(proto.Message)) {
	t.Helper()
	set := func(m protoreflect.Message, f protoreflect.FieldDescriptor) {
		switch {
		case f.IsList():
			l := m.Mutable(f).List()
			kv := &mvccpb.KeyValue{Key: []byte("k"), Value: []byte("v"), CreateRevision: 1, ModRevision: 1 << 40, Version: 3, Lease: -4}
			l.Append(protoreflect.ValueOfMessage(kv.ProtoReflect()))
		case f.Kind() == protoreflect.MessageKind:
			m.Mutable(f)
			if h, ok := m.Get(f).Message().Interface().(*pb.ResponseHeader); ok {
				h.Revision = 77
			}
		case f.Kind() == protoreflect.BytesKind:
			m.Set(f, protoreflect.ValueOfBytes([]byte("bytes")))
		case f.Kind() == protoreflect.BoolKind:
			m.Set(f, protoreflect.ValueOfBool(true))
		case f.Kind() == protoreflect.EnumKind:
			m.Set(f, protoreflect.ValueOfEnum(1))
		default:
			m.Set(f, protoreflect.ValueOfInt64(1))
		}
	}
	fn(proto.Clone(empty))
	all := proto.Clone(empty)
	fields := empty.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		one := proto.Clone(empty)
		set(one.ProtoReflect(), fields.Get(i))
		fn(one)
		set(all.ProtoReflect(), fields.Get(i))
	}
	fn(all)
}

func FuzzRequest(f *testing.F) {
	b, _ := AppendRequest(nil, sampleRequest())
	f.Add(b)
	b, _ = AppendRequest(nil, &Request{Range: 7, Op: &pb.RangeRequest{Key: []byte("k")}})
	f.Add(b)
	b, _ = AppendRequest(nil, &Request{Range: 7, Op: &pb.DeleteRangeRequest{Key: []byte("k")}})
	f.Add(b)
	b, _ = AppendRequest(nil, permittedRequest())
	f.Add(b)
	b, _ = AppendRequest(nil, &Request{Range: 7, Permit: keyspace.PermitAt(0), Op: &pb.TxnRequest{}})
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := DecodeRequest(b)
		if err != nil {
			return
		}
		again, err := AppendRequest(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := DecodeRequest(again); err != nil || p.Range != q.Range || p.Permit != q.Permit || !proto.Equal(p.Op, q.Op) {
			t.Fatalf("%v became %v, %v", q, p, err)
		}
		// The checks must survive what a decoder accepts.
		_ = CheckRequest(q.Op, 3<<19, 128)
		_, _ = Bounds(q.Op)
		_, _ = CanWrite(q.Op), ExplicitRevision(q.Op)
	})
}

func FuzzAnswer(f *testing.F) {
	b, _ := AppendAnswer(nil, &Response{Op: &pb.PutResponse{}}, nil)
	f.Add(b)
	b, _ = AppendAnswer(nil, &Response{Op: &pb.RangeResponse{Count: 1, Kvs: []*mvccpb.KeyValue{{Key: []byte("k"), Value: []byte("v")}}}}, nil)
	f.Add(b)
	b, _ = AppendAnswer(nil, nil, kverror.NotLeader)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, failed, err := DecodeAnswer(b)
		if err == nil && (p == nil) == (failed == nil) {
			t.Fatalf("%v and %v", p, failed)
		}
	})
}

// FuzzRequestClaims: decoders of requests and answers allocate no more than the input holds.
func FuzzRequestClaims(f *testing.F) {
	b, err := AppendRequest(nil, &Request{Range: 1, Generation: 2, Op: &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte("k"), Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_Version{Version: 1}}},
		Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}}}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{wireVersion, 1, 1, 1, 1, 0x0a, 0xff, 0xff, 0xff, 0xff, 0x07})
	f.Fuzz(func(t *testing.T, b []byte) {
		measure.Claims(t, b, func() {
			_, _ = DecodeRequest(b)
			_, _, _ = DecodeAnswer(b)
		})
	})
}

// FuzzAnswerAgain: a decoded answer survives another round trip.
func FuzzAnswerAgain(f *testing.F) {
	for _, op := range []proto.Message{
		&pb.PutResponse{Header: &pb.ResponseHeader{Revision: 300}},
		&pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 300}, Count: 1, Kvs: []*mvccpb.KeyValue{{Key: []byte("k"), Value: []byte("v"), ModRevision: 9}}},
		&pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 300}, Count: 2, More: true},
		&pb.TxnResponse{Succeeded: true, Responses: []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: &pb.DeleteRangeResponse{Deleted: 1}}}}},
	} {
		b, err := AppendAnswer(nil, &Response{Op: op}, nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	b, err := AppendAnswer(nil, nil, &kverror.Error{Kind: kverror.WrongRange, Leader: 2, Descriptors: []keyspace.Descriptor{sampleDescriptor}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, failed, err := DecodeAnswer(b)
		if err != nil {
			return
		}
		var again []byte
		if failed != nil {
			again, err = AppendAnswer(nil, nil, failed)
		} else {
			again, err = AppendAnswer(nil, p, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		q, other, err := DecodeAnswer(again)
		if err != nil || !reflect.DeepEqual(failed, other) || p != nil && !proto.Equal(p.Op, q.Op) {
			t.Fatalf("%v %v became %v %v, %v", p, failed, q, other, err)
		}
	})
}

// TestGolden fixes the wire forms: a change of one needs a new version. SKEIN_REWRITE=1 writes the
// files anew.
func TestGolden(t *testing.T) {
	req, err := AppendRequest(nil, sampleRequest())
	if err != nil {
		t.Fatal(err)
	}
	ok, err := AppendAnswer(nil, &Response{Op: &pb.PutResponse{Header: &pb.ResponseHeader{Revision: 300}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	failed, err := AppendAnswer(nil, nil, &kverror.Error{Kind: kverror.NotLeader, Leader: 2})
	if err != nil {
		t.Fatal(err)
	}
	get, err := AppendRequest(nil, &Request{Range: 7, Generation: 3, ReadRevision: 300, Op: &pb.RangeRequest{Key: []byte("k"), Serializable: true}})
	if err != nil {
		t.Fatal(err)
	}
	permitted, err := AppendRequest(nil, permittedRequest())
	if err != nil {
		t.Fatal(err)
	}
	txn, err := AppendRequest(nil, &Request{Range: 7, Generation: 3, Op: &pb.TxnRequest{
		Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k")}}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := AppendAnswer(nil, &Response{Op: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 300}, Count: 1, Kvs: []*mvccpb.KeyValue{
		{Key: []byte("k"), Value: []byte("v"), CreateRevision: 290, ModRevision: 300, Version: 4, Lease: 9},
	}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	formats := map[string][]byte{
		"request-get.v3": get, "request-txn.v3": txn, "answer-get.v3": got,
		"request.v3": req, "request-permitted.v4": permitted, "answer-ok.v3": ok, "answer-error.v3": failed,
		"feed-orders.v2": EncodeOrders(sampleOrders()), "feed-parts.v2": encodeParts(sampleParts()),
		"watch-resolved.v2": sampleResolved.encode(), "watch-history.v2": sampleHistory.encode(),
		"watch-answer.v2": EncodeResolved(FeedPosition{Term: 6, Number: 300}), "watch-page.v2": sampleHistoryPage().Encode(),
		"watch-error.v2": EncodeWatchError(&kverror.Error{Kind: kverror.NotLeader, Leader: 2}),
	}
	for _, op := range sampleTxnCommands() {
		b, err := AppendTxnCommand(nil, 7, 3, op)
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("txn-command-%d.v4", op.Kind())
		if p, ok := op.(*Prepare); ok && p.Checked.At != 0 {
			name = "txn-command-1-checked.v4"
		}
		formats[name] = b
	}
	for i, a := range sampleTxnAnswers() {
		b, err := AppendTxnAnswer(nil, a, nil)
		if err != nil {
			t.Fatal(err)
		}
		formats[fmt.Sprintf("txn-command-answer-%d.v4", i+1)] = b
	}
	golden.Formats(t, formats)
}

func TestRequestRoundTrip(t *testing.T) {
	q, err := AppendRequest(nil, sampleRequest())
	if err != nil {
		t.Fatal(err)
	}
	r, err := DecodeRequest(q)
	if err != nil || r.Range != 7 || r.Generation != 3 || r.ReadRevision != 300 || !proto.Equal(r.Op, sampleRequest().Op) {
		t.Errorf("request %+v, %v", r, err)
	}
}

// A permit crosses the bus. One that says nothing is no form of a request without a permit.
func TestPermitsCrossTheBus(t *testing.T) {
	for _, at := range []keyspace.AccessIndex{0, 1, 299, math.MaxUint64 - 1} {
		q := permittedRequest()
		q.Permit = keyspace.PermitAt(at)
		b, err := AppendRequest(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		r, err := DecodeRequest(b)
		if err != nil || r.Permit != q.Permit || !proto.Equal(r.Op, q.Op) || r.Permit.Ended(at) || !r.Permit.Ended(at+1) {
			t.Errorf("permitted at %d: %+v, %v", at, r, err)
		}
		if len(b) > requestOverheadBytes+proto.Size(q.Op)+8 {
			t.Errorf("permitted at %d: %d bytes", at, len(b))
		}
	}
	q := sampleRequest()
	b, err := AppendRequest(nil, q)
	if err != nil || b[0] != wireVersion {
		t.Fatalf("a request without a permit has version %d, %v", b[0], err)
	}
	b, err = AppendRequest(nil, &Request{Range: 7, Generation: 3, Permit: keyspace.PermitAt(0), Op: &pb.RangeRequest{Key: []byte("k")}})
	if err != nil || b[0] != wirePermit || b[6] != 1 {
		t.Fatalf("a request with a permit is %x, %v", b, err)
	}
	for n := range 7 {
		if _, err := DecodeRequest(b[:n]); err == nil {
			t.Errorf("the first %d bytes of %x are a request", n, b)
		}
	}
	b[6] = 0
	if _, err := DecodeRequest(b); err == nil {
		t.Errorf("%x has an empty permit, and is a request", b)
	}
}
