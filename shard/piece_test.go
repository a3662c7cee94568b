package shard

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
)

// filled applies entries of one term to the range of a world and makes it lead there.
func (w *fakeWorld) filled(ents ...raftgroup.Entry) *fakeGroup {
	w.t.Helper()
	g := w.groups.group(1)
	g.lead(raftgroup.LeaderState{Term: 5, Leader: 1, LeaderNode: 1, IsLeader: true})
	for _, e := range append([]raftgroup.Entry{{Term: 5}}, ents...) {
		if err := g.apply(e); err != nil {
			w.t.Fatal(err)
		}
	}
	g.lead(raftgroup.LeaderState{Term: 5, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true})
	return g
}

// pieces reads a request piece by piece through the wire's forms and puts it together.
func (w *fakeWorld) pieces(at keyspace.Revision, req *pb.RangeRequest, maxBytes int) (*pb.RangeResponse, int, error) {
	w.t.Helper()
	out := &pb.RangeResponse{}
	req = proto.CloneOf(req)
	limited := req.Limit > 0
	for n := 1; ; n++ {
		b, err := appendPieceRequest(nil, &Request{Range: 1, Generation: 1, ReadRevision: at}, &Piece{RangeRequest: req, MaxBytes: maxBytes, WithCount: true})
		if err != nil {
			w.t.Fatal(err)
		}
		if b, err = w.node.handlePiece(context.Background(), 2, b); err != nil {
			w.t.Fatal(err)
		}
		a, failed, err := decodePieceAnswer(b)
		if err != nil {
			w.t.Fatal(err)
		}
		if failed != nil {
			return nil, n, failed
		}
		if int64(len(a.Keys)) > int64(maxBytes) && a.N > 1 {
			w.t.Fatalf("%d keys of %d bytes in a piece of %d", a.N, len(a.Keys), maxBytes)
		}
		kvs, err := DecodeKeys(a.Keys, a.N)
		if err != nil {
			w.t.Fatal(err)
		}
		var plain pb.RangeResponse
		if err := proto.Unmarshal(a.Keys, &plain); err != nil || !proto.Equal(&pb.RangeResponse{Kvs: kvs}, &plain) {
			w.t.Fatalf("decoded as %v, by protobuf as %v, %v", kvs, &plain, err)
		}
		if n == 1 {
			out.Count, out.Header = a.Count, a.Header
		}
		out.Kvs = append(out.Kvs, kvs...)
		if req.Limit > 0 {
			req.Limit -= a.N
		}
		if out.More = a.More; len(a.Next) == 0 || limited && req.Limit == 0 {
			return out, n, nil
		}
		req.Key = a.Next
	}
}

// Whatever the size of the pieces, together they are the answer of the range: with
// filters, limits, at old revisions, with the count of all.
func TestPiecesAreTheRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		rng := rand.New(rand.NewPCG(1, 1))
		var ents []raftgroup.Entry
		lives := map[string]bool{}
		for range 60 {
			keys := make([]string, 1+rng.IntN(4))
			for i := range keys {
				// A key lives or does not: the log's writer counts no key twice.
				k := strings.Repeat(string(rune('a'+rng.IntN(20))), 1+rng.IntN(3))
				if keys[i] = k; lives[k] {
					keys[i] = "-" + k
				}
				lives[k] = !lives[k]
			}
			ents = append(ents, l.batch(5, 1, keys...))
		}
		w.filled(ents...)
		w.seq.last = l.rev
		for range 400 {
			req := &pb.RangeRequest{Key: []byte{byte('a' + rng.IntN(20))}, RangeEnd: []byte{byte('a' + rng.IntN(22))}, KeysOnly: rng.IntN(3) == 0}
			if rng.IntN(3) == 0 {
				req.Key, req.RangeEnd = []byte{0}, []byte{0}
			}
			if rng.IntN(2) == 0 {
				req.Revision = 1 + rng.Int64N(int64(l.rev))
			}
			if rng.IntN(2) == 0 {
				req.Limit = 1 + rng.Int64N(12)
			}
			if rng.IntN(3) == 0 {
				req.MinModRevision, req.MaxCreateRevision = rng.Int64N(int64(l.rev)), rng.Int64N(int64(l.rev))
			}
			p, err := w.node.Do(t.Context(), &Request{Range: 1, Generation: 1, ReadRevision: l.rev, Op: proto.CloneOf(req)})
			if err != nil {
				t.Fatal(err)
			}
			want := p.Op.(*pb.RangeResponse)
			got, n, err := w.pieces(l.rev, req, 1+rng.IntN(200))
			if err != nil || !proto.Equal(got, want) {
				t.Fatalf("%v in %d pieces: %v\n got %v\nwant %v", req, n, err, got, want)
			}
		}
		if _, _, err := w.pieces(l.rev, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), Revision: int64(l.rev) + 1}, 10); !errors.Is(err, kverror.FutureRevision) {
			t.Errorf("in the future: %v", err)
		}
		for _, p := range []*Piece{
			{MaxBytes: 1},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b")}},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b")}, MaxBytes: MaxPieceBytes + 1},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b"), SortOrder: pb.RangeRequest_DESCEND}, MaxBytes: 1},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b"), CountOnly: true}, MaxBytes: 1},
		} {
			if _, err := w.node.Do(t.Context(), &Request{Range: 1, Generation: 1, ReadRevision: l.rev, Op: p}); !errors.Is(err, kverror.BadRequest) {
				t.Errorf("%+v: %v", p, err)
			}
		}
	})
}

// Paging at an old revision counts once, whether the client's pages are read whole or in
// pieces: what is behind each page is what was known less its keys.
func TestPagesInPiecesAreCountedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		var ents []raftgroup.Entry
		for i := range 100 {
			ents = append(ents, l.batch(5, 1, fmt.Sprintf("k%03d", i)))
		}
		old := l.rev
		for range 2 * maxDeltas {
			ents = append(ents, l.batch(5, 1, "z", "-z"))
		}
		w.filled(ents...)
		w.seq.last = l.rev
		req := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), Limit: 7, Revision: int64(old)}
		for left := int64(100); left > 0; left -= 7 {
			got, _, err := w.pieces(l.rev, req, 90)
			if err != nil || got.Count != left || got.More != (left > 7) {
				t.Fatalf("%d keys are left: %v, %v", left, got, err)
			}
			req.Key = keyspace.Next(got.Kvs[len(got.Kvs)-1].Key)
		}
		if n := testutil.ToFloat64(w.node.metrics.countScans); n != 1 {
			t.Errorf("%v counts, want 1", n)
		}
	})
}

// A piece with filters that nothing passes ends after so many keys.
func TestAPieceEndsWithoutAMatch(t *testing.T) {
	c := pieceScan{p: &Piece{RangeRequest: &pb.RangeRequest{MinModRevision: 5}, MaxBytes: 10}, filtered: true, budget: &readBudget{}}
	c.answer.RangeResponse = &pb.RangeResponse{}
	v := &mvcc.Version{Key: []byte("k"), Mod: 4, Create: 4, Version: 1}
	for range maxPieceSeen {
		if err := c.add(v); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.add(v); !errors.Is(err, errStop) || c.answer.More || string(c.answer.Next) != "k" || c.answer.Seen != maxPieceSeen {
		t.Errorf("%v, %+v", err, &c.answer)
	}
}

// An answer that is better read in pieces is refused as such; the last keys of many are
// no such answer, and cost no more than they are.
func TestLargeAnswersAreReadInPieces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorldWith(t, Limits{AnswerBytes: 100, ScanBytes: 20 * (kvOverheadBytes + 5), ReadBytes: 1 << 20})
		defer w.stop()
		var l logWriter
		l.rev = 1
		var ents []raftgroup.Entry
		for i := range 200 {
			ents = append(ents, l.batch(5, 1, fmt.Sprintf("k%03d", i)))
		}
		w.filled(ents...)
		read := func(req *pb.RangeRequest) (*pb.RangeResponse, error) {
			req.Key, req.RangeEnd = []byte{0}, []byte{0}
			p, err := w.node.Do(t.Context(), &Request{Range: 1, Generation: 1, ReadRevision: l.rev, Op: req})
			if err != nil {
				return nil, err
			}
			return p.Op.(*pb.RangeResponse), nil
		}
		for _, req := range []*pb.RangeRequest{{}, {Limit: 30}, {SortOrder: pb.RangeRequest_DESCEND}, {SortTarget: pb.RangeRequest_MOD, SortOrder: pb.RangeRequest_ASCEND, Limit: 1}} {
			if _, err := read(req); !errors.Is(err, kverror.ReadInPieces) {
				t.Errorf("%v: %v", req, err)
			}
		}
		resp, err := read(&pb.RangeRequest{SortOrder: pb.RangeRequest_DESCEND, Limit: 3})
		if err != nil || len(resp.Kvs) != 3 || string(resp.Kvs[0].Key) != "k199" || string(resp.Kvs[2].Key) != "k197" || !resp.More || resp.Count != 200 {
			t.Errorf("the last three: %v, %v", resp, err)
		}
		resp, err = read(&pb.RangeRequest{MinModRevision: int64(l.rev) - 1})
		if err != nil || len(resp.Kvs) != 2 || resp.More || resp.Count != 200 {
			t.Errorf("by a filter: %v, %v", resp, err)
		}
		if got := w.node.reading.Load(); got != 0 {
			t.Errorf("%d bytes are held", got)
		}
	})
}

// One request alone may read more than all together may; small ones hold little.
func TestReadBudget(t *testing.T) {
	n := &Node{}
	n.cfg.Limits = Limits{ScanBytes: 1 << 20, ReadBytes: 64 << 10}
	alone := n.readBudget()
	if err := alone.take(512 << 10); err != nil {
		t.Error(err)
	}
	if err := alone.take(100 << 10); err != nil {
		t.Error(err)
	}
	other := n.readBudget()
	if err := other.take(1); !errors.Is(err, kverror.TooManyRequests) {
		t.Errorf("beside it: %v", err)
	}
	alone.release()
	small := make([]readBudget, 16)
	for i := range small {
		small[i] = n.readBudget()
		if err := small[i].take(100); err != nil {
			t.Errorf("small read %d: %v", i, err)
		}
	}
	if err := small[0].take(2 << 20); err == nil || n.reading.Load() > 64<<10 {
		t.Errorf("%v, %d bytes", err, n.reading.Load())
	}
}

func samplePiece() (*Request, *Piece) {
	p := &Piece{RangeRequest: &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("m"), Limit: 9}, MaxBytes: 1 << 16, WithCount: true}
	return &Request{
		Range: 7, Generation: 3, ReadRevision: 300, Op: p,
		Txn: &TxnName{TxnID: TxnID{Start: 1, Node: 2, Boot: 3, Counter: 4}, Attempt: 5},
	}, p
}

func samplePieceAnswer() *PieceAnswer {
	v := mvcc.Version{Key: []byte("k"), Mod: 300, Create: 290, Version: 4, Lease: 9, Value: []byte("v")}
	return &PieceAnswer{
		RangeResponse: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 300}, More: true, Count: 12},
		Keys:          appendKey(nil, &v, false), N: 1, Seen: 2, Next: []byte("k\x00"),
	}
}

// TestGoldenPieces holds the formats of method 24 still, as TestGolden does.
func TestGoldenPieces(t *testing.T) {
	q, p := samplePiece()
	request, err := appendPieceRequest(nil, q, p)
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string][]byte{
		"piece.v1": request, "piece-answer.v1": appendPieceAnswer(nil, samplePieceAnswer(), nil),
		"piece-answer-error.v1": appendPieceAnswer(nil, nil, &kverror.Error{Kind: kverror.NotLeader, Leader: 2}),
	} {
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

// FuzzPiece: a request of a piece that decodes is the same after another trip, and the
// checks survive it.
func FuzzPiece(f *testing.F) {
	q, p := samplePiece()
	b, err := appendPieceRequest(nil, q, p)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var q *Request
		claims(t, b, func() { q, _ = decodePieceRequest(b) })
		q, err := decodePieceRequest(b)
		if err != nil {
			return
		}
		p := q.Op.(*Piece)
		again, err := appendPieceRequest(nil, q, p)
		if err != nil {
			t.Fatal(err)
		}
		r, err := decodePieceRequest(again)
		if err != nil || r.Range != q.Range || r.Generation != q.Generation || r.ReadRevision != q.ReadRevision || !reflect.DeepEqual(r.Txn, q.Txn) {
			t.Fatalf("%+v became %+v, %v", q, r, err)
		}
		o := r.Op.(*Piece)
		if o.MaxBytes != p.MaxBytes || o.WithCount != p.WithCount || !proto.Equal(o.RangeRequest, p.RangeRequest) {
			t.Fatalf("%+v became %+v", p, o)
		}
		l := Limits{}
		l.fill()
		_ = checkRequest(p, &l)
		_, _ = Bounds(p)
		_, _ = canWrite(p), explicitRevision(p)
	})
}

// FuzzPieceAnswer: an answer to a piece that decodes is the same after another trip, its
// keys are what protobuf takes them for, and no more is allocated than came.
func FuzzPieceAnswer(f *testing.F) {
	f.Add(appendPieceAnswer(nil, samplePieceAnswer(), nil))
	f.Add(appendPieceAnswer(nil, nil, kverror.NotLeader))
	f.Fuzz(func(t *testing.T, b []byte) {
		claims(t, b, func() { _, _, _ = decodePieceAnswer(b) })
		a, failed, err := decodePieceAnswer(b)
		if err != nil {
			return
		}
		var again []byte
		if failed != nil {
			again = appendPieceAnswer(nil, nil, failed)
		} else {
			again = appendPieceAnswer(nil, a, nil)
		}
		c, other, err := decodePieceAnswer(again)
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

// FuzzKeys: key values that are accepted are what protobuf takes them for.
func FuzzKeys(f *testing.F) {
	f.Add(samplePieceAnswer().Keys, int64(1))
	f.Add(append(samplePieceAnswer().Keys, samplePieceAnswer().Keys...), int64(2))
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

// TestKeysAreProtobuf: what is encoded by hand is what protobuf encodes.
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
			got := appendKey(nil, &v, bare)
			if err != nil || !bytes.Equal(got, want) || sizeOfKey(&v, bare) != len(got) {
				t.Errorf("%x, by protobuf %x, size %d: %v", got, want, sizeOfKey(&v, bare), err)
			}
		}
	}
}

// The answer to a piece is encoded in front of its keys, without memory of its own, where its
// head fits there; the bytes are the same in any case.
func TestPieceIsEncodedInPlace(t *testing.T) {
	for _, next := range []int{0, 10, 2 * pieceHeadroom} {
		for _, room := range []bool{true, false} {
			a := &PieceAnswer{RangeResponse: &pb.RangeResponse{Count: 9, More: true}, N: 3, Seen: 4, Next: bytes.Repeat([]byte("n"), next)}
			a.room = append(make([]byte, pieceHeadroom), bytes.Repeat([]byte("k"), 1000)...)
			a.Keys = a.room[pieceHeadroom:]
			if !room {
				a.room = nil
			}
			want := appendPieceAnswer(nil, a, nil)
			got := encodePiece(a)
			if !bytes.Equal(got, want) {
				t.Errorf("next of %d bytes, room %v: %x, want %x", next, room, got, want)
			}
			if same := &got[len(got)-1] == &a.Keys[len(a.Keys)-1]; same != (room && next < pieceHeadroom) {
				t.Errorf("next of %d bytes, room %v: in place %v", next, room, same)
			}
		}
	}
}
