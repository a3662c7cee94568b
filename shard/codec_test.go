package shard

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// sampleRecord, sampleBatch and sampleSplit are in the golden files.
func sampleRecord() record {
	return record{
		rangeID: 7, generation: 3, span: keyspace.Span{Start: []byte("a"), End: []byte("m")},
		last: link{5, 9}, lastRevision: 300, compacted: 200, live: -4, counted: true, hash: 0x0102030405060708, fence: 77,
	}
}

func sampleBatch() []byte {
	b := appendHeader(nil, header{commandBatch, 5, 3})
	b = appendBatchHeader(b, &batchCommand{prev: link{4, 8}, number: 1, hash: 0xa1, first: 300, txns: 2})
	b = binary.AppendUvarint(b, 2)
	b = appendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 300, Create: 290, Version: 4, Lease: 9, Value: []byte("v")}, prior{})
	b = appendVersion(b, &mvcc.Version{Key: []byte("l"), Mod: 300, Tombstone: true}, prior{lived: true, lease: -9})
	b = binary.AppendUvarint(b, 3)
	b = appendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 301, Create: 290, Version: 5, Lease: 9, Value: []byte("w")}, prior{lived: true, lease: 9})
	b = appendVersion(b, &mvcc.Version{Key: []byte("m"), Mod: 301, Tombstone: true}, prior{replaced: true})
	return appendVersion(b, &mvcc.Version{Key: []byte("m"), Mod: 301, Create: 301, Version: 1}, prior{lived: true})
}

func sampleSplit() []byte {
	return appendSplit(appendHeader(nil, header{commandSplit, 5, 3}), &splitCommand{
		key: []byte("g"), child: 8, confIndex: 10, replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2, Role: keyspace.RoleLearner}},
	})
}

func sampleRequest() *Request {
	return &Request{Range: 7, Generation: 3, ReadRevision: 300, Op: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}}
}

// TestGolden holds the formats still: a change of one is a new version of it.
// Write the files anew with SKEIN_REWRITE=1.
func TestGolden(t *testing.T) {
	rec := sampleRecord()
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
		"request-get.v2": get, "request-txn.v2": txn, "answer-get.v2": got,
		"record.v3": appendRecord(nil, &rec), "batch.v6": sampleBatch(), "split.v6": sampleSplit(),
		"compact.v6":     binary.AppendVarint(appendHeader(nil, header{commandCompact, 5, 3}), 200),
		"count.v6":       binary.AppendVarint(appendHeader(nil, header{commandCount, 5, 3}), -4),
		"feed-orders.v2": encodeOrders(sampleOrders()), "feed-parts.v2": encodeParts(sampleParts()),
		"watch-complete.v2": sampleComplete.encode(), "watch-history.v2": sampleHistory.encode(),
		"watch-answer.v2": encodeComplete(Mark{Term: 6, Number: 300}), "watch-page.v2": samplePage().encode(),
		"watch-error.v2": encodeWatchError(&kverror.Error{Kind: kverror.NotLeader, Leader: 2}),
		"request.v2":     req, "answer-ok.v2": ok, "answer-error.v2": failed,
	}
	maps.Copy(formats, goldenTxn(t))
	maps.Copy(formats, goldenMerge())
	for name, got := range formats {
		path := filepath.Join("testdata", "format", name+".hex")
		if os.Getenv("SKEIN_REWRITE") != "" {
			if err := os.WriteFile(path, []byte(hex.EncodeToString(got)+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if hex.EncodeToString(got) != strings.TrimSpace(string(want)) {
			t.Errorf("%s: %x, in the file %s", name, got, want)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	rec := sampleRecord()
	got, err := decodeRecord(appendRecord(nil, &rec))
	if err != nil || fmt.Sprint(got) != fmt.Sprint(rec) {
		t.Errorf("record %+v, %v", got, err)
	}
	q, err := AppendRequest(nil, sampleRequest())
	if err != nil {
		t.Fatal(err)
	}
	r, err := DecodeRequest(q)
	if err != nil || r.Range != 7 || r.Generation != 3 || r.ReadRevision != 300 || !proto.Equal(r.Op, sampleRequest().Op) {
		t.Errorf("request %+v, %v", r, err)
	}
	if want := "term=5 batch 1 on 4/8 k@300=v(create=290 version=4) lease=9 l@300† was=-9 " +
		"k@301=w(create=290 version=5) lease=9 was=9 m@301† replaced m@301=(create=301 version=1)"; entryText(5, sampleBatch()) != want {
		t.Errorf("batch %s", entryText(5, sampleBatch()))
	}
	if entryText(5, sampleSplit()) != "term=5 split at g into 8" {
		t.Errorf("split %s", entryText(5, sampleSplit()))
	}
	for n := range sampleBatch() {
		if text := entryText(5, sampleBatch()[:n]); !strings.HasPrefix(text, "broken") {
			t.Errorf("a batch of %d bytes: %s", n, text)
		}
	}
}

// TestPlainFormsHoldEverything: what has a form of its own loses nothing by it, and what
// would is not plain. Each field of the messages is set in turn.
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

// equalButHeader compares responses whose headers always come back, with the revision
// alone.
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

// eachField calls fn with the empty message and with each in which one field is set,
// and with one of which all are.
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
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := DecodeRequest(b)
		if err != nil {
			return
		}
		again, err := AppendRequest(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := DecodeRequest(again); err != nil || p.Range != q.Range || !proto.Equal(p.Op, q.Op) {
			t.Fatalf("%v became %v, %v", q, p, err)
		}
		// What a decoder accepts, the checks must survive.
		l := Limits{}
		l.fill()
		_ = checkRequest(q.Op, &l)
		_, _ = Bounds(q.Op)
		_, _ = canWrite(q.Op), explicitRevision(q.Op)
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

func FuzzCommand(f *testing.F) {
	f.Add(sampleBatch())
	f.Add(sampleSplit())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, body, err := decodeHeader(b)
		if err != nil {
			return
		}
		_ = entryText(h.term, b)
		if c, err := decodeMergeCommand(h.kind, body); h.kind >= commandBind && err == nil {
			if d, err := decodeMergeCommand(h.kind, appendMergeCommand(nil, h.kind, &c)); err != nil || fmt.Sprint(c) != fmt.Sprint(d) {
				t.Fatalf("%+v became %+v, %v", c, d, err)
			}
		}
		if c, err := decodeSplit(body); h.kind == commandSplit && err == nil {
			if d, err := decodeSplit(appendSplit(nil, &c)); err != nil || !bytes.Equal(d.key, c.key) || d.child != c.child {
				t.Fatalf("%v became %v, %v", c, d, err)
			}
		}
	})
}

func FuzzRecord(f *testing.F) {
	for _, m := range sampleMerges() {
		rec := sampleRecord()
		rec.merge = m
		f.Add(appendRecord(nil, &rec))
	}
	r := sampleRecord()
	f.Add(appendRecord(nil, &r))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			return
		}
		if s, err := decodeRecord(appendRecord(nil, &r)); err != nil || fmt.Sprint(s) != fmt.Sprint(r) {
			t.Fatalf("%v became %v, %v", r, s, err)
		}
	})
}

func FuzzAdminAnswer(f *testing.F) {
	f.Add([]byte("\x01\x00{}"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = decodeAdminAnswer(b) })
}
