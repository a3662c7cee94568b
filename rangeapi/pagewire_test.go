package rangeapi

import (
	"bytes"
	"reflect"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

func samplePageRequest() (*Request, *Page) {
	p := &Page{RangeRequest: &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("m"), Limit: 9}, MaxBytes: 1 << 16, WithCount: true}
	return &Request{
		Range: 7, Generation: 3, ReadRevision: 300, Op: p,
		Txn: &TxnName{TxnID: TxnID{Start: 1, Node: 2, Boot: 3, Counter: 4}, Attempt: 5},
	}, p
}

func samplePageAnswer() *PageAnswer {
	v := mvcc.Version{Key: []byte("k"), Mod: 300, Create: 290, Version: 4, Lease: 9, Value: []byte("v")}
	return &PageAnswer{
		RangeResponse: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 300}, More: true, Count: 12},
		Keys:          AppendKey(nil, &v, false), N: 1, Seen: 2, Next: []byte("k\x00"),
	}
}

// TestGoldenPages fixes the formats of method 24, as TestGolden does.
func TestGoldenPages(t *testing.T) {
	q, p := samplePageRequest()
	request, err := AppendPageRequest(nil, q, p)
	if err != nil {
		t.Fatal(err)
	}
	golden.Formats(t, map[string][]byte{
		"page.v2": request, "page-answer.v2": AppendPageAnswer(nil, samplePageAnswer(), nil),
		"page-answer-error.v2": AppendPageAnswer(nil, nil, &kverror.Error{Kind: kverror.NotLeader, Leader: 2}),
	})
}

// FuzzPage: a decoded page request survives another round trip, and the checks survive it.
func FuzzPage(f *testing.F) {
	q, p := samplePageRequest()
	b, err := AppendPageRequest(nil, q, p)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var q *Request
		measure.Claims(t, b, func() { q, _ = DecodePageRequest(b) })
		q, err := DecodePageRequest(b)
		if err != nil {
			return
		}
		p := q.Op.(*Page)
		again, err := AppendPageRequest(nil, q, p)
		if err != nil {
			t.Fatal(err)
		}
		r, err := DecodePageRequest(again)
		if err != nil || r.Range != q.Range || r.Generation != q.Generation || r.ReadRevision != q.ReadRevision || !reflect.DeepEqual(r.Txn, q.Txn) {
			t.Fatalf("%+v became %+v, %v", q, r, err)
		}
		o := r.Op.(*Page)
		if o.MaxBytes != p.MaxBytes || o.WithCount != p.WithCount || !proto.Equal(o.RangeRequest, p.RangeRequest) {
			t.Fatalf("%+v became %+v", p, o)
		}
		_ = CheckRequest(p, 3<<19, 128)
		_, _ = Bounds(p)
		_, _ = CanWrite(p), ExplicitRevision(p)
	})
}

// FuzzPageAnswer: a decoded answer survives another round trip, protobuf decodes the same keys, and
// the decoder allocates no more than the input holds.
func FuzzPageAnswer(f *testing.F) {
	f.Add(AppendPageAnswer(nil, samplePageAnswer(), nil))
	f.Add(AppendPageAnswer(nil, nil, kverror.NotLeader))
	f.Fuzz(func(t *testing.T, b []byte) {
		measure.Claims(t, b, func() { _, _, _ = DecodePageAnswer(b) })
		a, failed, err := DecodePageAnswer(b)
		if err != nil {
			return
		}
		var again []byte
		if failed != nil {
			again = AppendPageAnswer(nil, nil, failed)
		} else {
			again = AppendPageAnswer(nil, a, nil)
		}
		c, other, err := DecodePageAnswer(again)
		if err != nil || !reflect.DeepEqual(failed, other) {
			t.Fatalf("%v %v, %v", failed, other, err)
		}
		if failed != nil {
			return
		}
		if !proto.Equal(a.RangeResponse, c.RangeResponse) || a.N != c.N || a.Seen != c.Seen || !bytes.Equal(a.Next, c.Next) || !bytes.Equal(a.Keys, c.Keys) {
			t.Fatalf("%+v became %+v", a, c)
		}
	})
}

// FuzzKeys: protobuf decodes accepted key values to the same.
func FuzzKeys(f *testing.F) {
	f.Add(samplePageAnswer().Keys, int64(1))
	f.Add(append(samplePageAnswer().Keys, samplePageAnswer().Keys...), int64(2))
	f.Add([]byte{0x12, 0}, int64(1))
	f.Add([]byte{}, int64(0))
	f.Fuzz(func(t *testing.T, b []byte, n int64) {
		kvs, err := DecodeKeys(b, n)
		if err != nil {
			return
		}
		var want pb.RangeResponse
		if err := proto.Unmarshal(b, &want); err != nil {
			t.Fatal(err)
		}
		if int64(len(kvs)) != n || len(want.Kvs) != len(kvs) {
			t.Fatalf("%d keys, by protobuf %d, of %d", len(kvs), len(want.Kvs), n)
		}
		for i := range kvs {
			if !proto.Equal(kvs[i], want.Kvs[i]) {
				t.Fatalf("%v, by protobuf %v", kvs[i], want.Kvs[i])
			}
		}
	})
}

// TestKeysAreProtobuf: the encoder by hand writes what protobuf writes.
func TestKeysAreProtobuf(t *testing.T) {
	for _, v := range []mvcc.Version{
		{Key: []byte("k"), Mod: 300, Create: 290, Version: 4, Lease: 9, Value: []byte("v")},
		{Key: bytes.Repeat([]byte("k"), 300), Mod: 1 << 50, Create: 1, Version: 1, Lease: -1, Value: bytes.Repeat([]byte("v"), 70_000)},
		{Key: []byte{0}, Mod: 2, Create: 2, Version: 1},
	} {
		for _, bare := range []bool{false, true} {
			kv := &mvccpb.KeyValue{Key: v.Key, Value: v.Value, ModRevision: int64(v.Mod), CreateRevision: int64(v.Create), Version: v.Version, Lease: int64(v.Lease)}
			if bare {
				kv.Lease = 0
			}
			want, err := proto.MarshalOptions{Deterministic: true}.Marshal(&pb.RangeResponse{Kvs: []*mvccpb.KeyValue{kv}})
			got := AppendKey(nil, &v, bare)
			if err != nil || !bytes.Equal(got, want) || SizeOfKey(&v, bare) != len(got) {
				t.Errorf("%x, by protobuf %x, size %d: %v", got, want, SizeOfKey(&v, bare), err)
			}
		}
	}
}

// The answer to a page is encoded in front of its keys without a copy, if its head fits there. The
// bytes are the same in any case.
func TestPageIsEncodedInPlace(t *testing.T) {
	for _, next := range []int{0, 10, 2 * PageHeadroom} {
		for _, room := range []bool{true, false} {
			a := &PageAnswer{RangeResponse: &pb.RangeResponse{Count: 9, More: true}, N: 3, Seen: 4, Next: bytes.Repeat([]byte("n"), next)}
			a.Room = append(make([]byte, PageHeadroom), bytes.Repeat([]byte("k"), 1000)...)
			a.Keys = a.Room[PageHeadroom:]
			if !room {
				a.Room = nil
			}
			want := AppendPageAnswer(nil, a, nil)
			got := EncodePage(a)
			if !bytes.Equal(got, want) {
				t.Errorf("next of %d bytes, room %v: %x, want %x", next, room, got, want)
			}
			if same := &got[len(got)-1] == &a.Keys[len(a.Keys)-1]; same != (room && next < PageHeadroom) {
				t.Errorf("next of %d bytes, room %v: in place %v", next, room, same)
			}
		}
	}
}
